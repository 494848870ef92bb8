// The Python seam: checks arrays once, releases the GIL, calls the core. Knows NumPy-style arrays, not PyTorch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
#include "kernels/dispatch.h"
#include "ops/decode_attention.h"
#include "ops/experts.h"
#include "ops/latent_attention.h"
#include "ops/linear.h"
#include "ops/measure.h"
#include "ops/norm.h"
#include "ops/routing.h"
#include "packed/format_list.h"
#include "packed/layout.h"
#include "runtime/check.h"
#include "runtime/mapped_file.h"
#include "runtime/memory.h"
#include "runtime/numa.h"
#include "runtime/threads.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

PackedMatrix packed_matrix(const Array& blob) {
  blob.contiguous(1).expect<std::uint8_t>("uint8 (packed weights)");
  return open_packed(blob.data(), blob.dim(0), blob.name());
}

// The dtype of a result: that of the input, or fp32, for sums that others are added to before they are rounded.
DType result_type(const Array& out, const Array& x) {
  const DType type = out.float_type();
  CPUMOE_REQUIRE(type == DType::kF32 || out.same_type(x), out.name(), " is ", out.dtype_text(), "; that of ", x.name(),
                 " (", x.dtype_text(), ") or float32 is accepted");
  return type;
}

DType dtype_of(int number) {
  CPUMOE_REQUIRE(number >= 0 && number <= static_cast<int>(DType::kF16), "dtype ", number, "; 0 to 2 are accepted");
  return static_cast<DType>(number);
}

// `prepared_type`: -1, or the type of the tokens before they were prepared.
void moe(nb::handle x_, nb::handle ids_, nb::handle weights_, nb::handle gate_up_, nb::handle down_, nb::handle out_,
         int activation, bool gated, float alpha, float limit, bool weight_on_input, int prepared_type,
         RankExchange* slices) {
  const Array x(x_, "hidden_states"), ids(ids_, "topk_ids"), weights(weights_, "topk_weights");
  const Array gate_up(gate_up_, "gate_up"), down(down_, "down"), out(out_, "out");
  MoeCall call{};
  call.gate_up = packed_matrix(gate_up);
  call.down = packed_matrix(down);
  x.contiguous(2);
  out.writable().contiguous(2);
  const bool prepared = prepared_type >= 0;
  call.type = prepared ? dtype_of(prepared_type) : x.float_type();
  call.out_type = prepared ? out.expect<float>("float32").float_type() : result_type(out, x);
  weights.contiguous(2).expect<float>("float32");
  ids.contiguous(2);
  call.tokens = x.dim(0);
  call.topk = ids.dim(1);
  if (prepared) {
    const std::int64_t bytes = prepared_token_bytes(call.gate_up, call.type);
    CPUMOE_REQUIRE(bytes > 0 && x.expect<std::uint8_t>("uint8").dim(1) == bytes, "prepared tokens have ", x.dim(1),
                   " bytes, but those for gate_up have ", bytes);
    CPUMOE_REQUIRE(reinterpret_cast<std::uintptr_t>(x.data()) % 64 == 0,
                   "prepared tokens do not begin at a multiple of 64 bytes");
  } else {
    CPUMOE_REQUIRE(x.dim(1) == call.gate_up.spec.depth, "hidden_states have ", x.dim(1),
                   " features, but gate_up takes ", call.gate_up.spec.depth);
  }
  CPUMOE_REQUIRE(out.dim(0) == x.dim(0) && out.dim(1) == call.gate_up.spec.depth,
                 "out must have the shape of hidden_states");
  CPUMOE_REQUIRE(ids.dim(0) == call.tokens, "topk_ids ", ids.shape_text(), " do not have the ", call.tokens,
                 " rows of hidden_states");
  CPUMOE_REQUIRE(weights.dim(0) == ids.dim(0) && weights.dim(1) == ids.dim(1), "topk_weights ", weights.shape_text(),
                 " and topk_ids ", ids.shape_text(), " differ in shape");
  CPUMOE_REQUIRE(activation >= 0 && activation <= static_cast<int>(Activation::kRelu2), "activation=", activation,
                 "; 0 to 5 are accepted");
  call.activation = {static_cast<Activation>(activation), gated, alpha, limit};
  call.weight_on_input = weight_on_input;
  call.x = prepared ? nullptr : x.data();
  call.prepared = prepared ? x.data() : nullptr;
  call.slices = slices;
  call.out = out.data();
  call.weights = weights.data<float>();

  std::vector<std::int32_t> narrow;
  if (ids.is<std::int32_t>()) {
    call.ids = ids.data<std::int32_t>();
  } else {
    const auto* wide = ids.expect<std::int64_t>("int32 or int64").data<std::int64_t>();
    narrow.resize(static_cast<std::size_t>(ids.size()));
    for (std::size_t i = 0; i < narrow.size(); ++i) {
      const bool fits =
          wide[i] >= std::numeric_limits<std::int32_t>::min() && wide[i] <= std::numeric_limits<std::int32_t>::max();
      CPUMOE_REQUIRE(fits, "topk_ids holds ", wide[i], "; 0 to ", call.gate_up.spec.experts - 1,
                     " are experts and -1 means none");
      narrow[i] = static_cast<std::int32_t>(wide[i]);
    }
    call.ids = narrow.data();
  }
  const Computation computation;
  moe_forward(active_kernels(), call);
}

// Tokens as the first product of `gate_up` wants them.
void prepare(nb::handle x_, nb::handle gate_up_, nb::handle out_) {
  const Array x(x_, "hidden_states"), gate_up(gate_up_, "gate_up"), out(out_, "out");
  const PackedMatrix matrix = packed_matrix(gate_up);
  const DType type = x.contiguous(2).float_type();
  CPUMOE_REQUIRE(x.dim(1) == matrix.spec.depth, "hidden_states have ", x.dim(1), " features, but gate_up takes ",
                 matrix.spec.depth);
  const std::int64_t bytes = prepared_token_bytes(matrix, type);
  out.writable().contiguous(2).expect<std::uint8_t>("uint8");
  CPUMOE_REQUIRE(bytes > 0 && out.dim(0) == x.dim(0) && out.dim(1) == bytes, "out is ", out.shape_text(), "; [",
                 x.dim(0), ", ", bytes, "] is accepted");
  const Computation computation;
  prepare_tokens(active_kernels(), matrix, x.data(), type, x.dim(0), out.data());
}

void linear(nb::handle x_, nb::handle weight_, nb::handle out_) {
  const Array x(x_, "x"), weight(weight_, "weight"), out(out_, "out");
  LinearCall call{};
  call.weight = packed_matrix(weight);
  call.type = x.contiguous(2).float_type();
  call.out_type = result_type(out.writable().contiguous(2), x);
  CPUMOE_REQUIRE(x.dim(1) == call.weight.spec.depth, "x has ", x.dim(1), " features, but the weight takes ",
                 call.weight.spec.depth);
  CPUMOE_REQUIRE(out.dim(0) == x.dim(0) && out.dim(1) == call.weight.spec.columns, "out must be [", x.dim(0), ", ",
                 call.weight.spec.columns, "]");
  call.rows = x.dim(0);
  call.x = x.data();
  call.out = out.data();
  const Computation computation;
  linear_forward(active_kernels(), call);
}

// ---- packed weights ------------------------------------------------------------------------------------------------

// The value among the first `count` of a type that has this name.
template <class Value>
Value value_named(int first, int count, const std::string& name, const char* argument) {
  std::string accepted;
  for (int i = first; i < first + count; ++i) {
    const auto value = static_cast<Value>(i);
    if (name == name_of(value)) return value;
    accepted += (accepted.empty() ? "" : ", ") + std::string(name_of(value));
  }
  refuse(argument, "=", name, "; accepted are ", accepted);
}

// What Python gives to make a PackedSpec.
PackedSpec make_spec(const std::string& weights, std::optional<std::int64_t> group_size, const std::string& scales,
                     std::int64_t experts, std::int64_t out_features, std::int64_t in_features, bool gated,
                     bool has_bias, bool has_zero_points, int input_orders, int input_scales,
                     const std::string& activations) {
  PackedSpec s;
  s.input_orders = input_orders;
  s.input_scales = input_scales;
  s.group = group_size.value_or(0);
  s.experts = experts;
  s.columns = out_features;
  s.depth = in_features;
  s.gated = gated;
  s.has_bias = has_bias;
  s.weights = choose_format(weights, group_size, has_zero_points, "weights");
  s.scales = value_named<ScaleType>(1, kScaleTypeCount, scales, "scales");
  s.rows = value_named<RowFormat>(0, kStoredRowFormatCount, activations, "activations");
  layout_of(s, "weights");  // refuses what cannot be packed
  return s;
}

std::optional<std::int64_t> group_size(const PackedSpec& s) {
  return s.group == 0 ? std::nullopt : std::optional<std::int64_t>(s.group);
}

const FormatInfo& format_of(const PackedSpec& s) { return *find_format(static_cast<std::uint32_t>(s.weights)); }
bool has_zero_points(const PackedSpec& s) { return traits_of(s.weights).has_zeros(); }
const char* scale_name(const PackedSpec& s) { return name_of(s.scales); }
const char* row_name(const PackedSpec& s) { return name_of(s.rows); }

std::string spec_text(const PackedSpec& s) {
  const auto text = [](bool flag) { return flag ? "True" : "False"; };
  return concat("PackedSpec(weights='", format_of(s).element,
                "', group_size=", s.group == 0 ? std::string("None") : std::to_string(s.group), ", scales='",
                scale_name(s), "', experts=", s.experts, ", out_features=", s.columns, ", in_features=", s.depth,
                ", gated=", text(s.gated), ", has_bias=", text(s.has_bias),
                ", has_zero_points=", text(has_zero_points(s)), ", input_orders=", s.input_orders,
                ", input_scales=", s.input_scales, ", activations='", row_name(s), "')");
}

void bind_spec(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<PackedSpec>(m, "PackedSpec")
      .def(
          "__init__",
          [](PackedSpec* self, const std::string& weights, std::optional<std::int64_t> group, const std::string& scales,
             std::int64_t experts, std::int64_t out_features, std::int64_t in_features, bool gated, bool has_bias,
             bool zero_points, const std::string& activations, int input_orders, int input_scales) {
            new (self) PackedSpec(make_spec(weights, group, scales, experts, out_features, in_features, gated, has_bias,
                                            zero_points, input_orders, input_scales, activations));
          },
          nb::kw_only(), "weights"_a, "group_size"_a.none(), "scales"_a, "experts"_a, "out_features"_a, "in_features"_a,
          "gated"_a, "has_bias"_a, "has_zero_points"_a, "activations"_a, "input_orders"_a = 0, "input_scales"_a = 0)
      .def_prop_ro("weights", [](const PackedSpec& s) { return format_of(s).element; })
      .def_prop_ro("weight_format", [](const PackedSpec& s) { return format_of(s).name; })
      .def_prop_ro("weight_bits", [](const PackedSpec& s) { return traits_of(s.weights).bits; })
      .def_prop_ro("group_size", &group_size)
      .def_prop_ro("groups", &PackedSpec::groups)
      .def_prop_ro("scales", &scale_name)
      .def_ro("experts", &PackedSpec::experts)
      .def_ro("out_features", &PackedSpec::columns)
      .def_ro("in_features", &PackedSpec::depth)
      .def_ro("gated", &PackedSpec::gated)
      .def_ro("has_bias", &PackedSpec::has_bias)
      .def_prop_ro("has_zero_points", &has_zero_points)
      .def_prop_ro("has_factors", [](const PackedSpec& s) { return traits_of(s.weights).has_factor; })
      .def_ro("input_orders", &PackedSpec::input_orders)
      .def_ro("input_scales", &PackedSpec::input_scales)
      .def_prop_ro("activations", &row_name)
      .def_prop_ro("packed_bytes", [](const PackedSpec& s) { return layout_of(s, "weights").total_bytes; })
      .def(
          "__eq__", [](const PackedSpec& s, const PackedSpec& other) { return s == other; }, nb::is_operator())
      .def("__hash__", [](const PackedSpec& s) { return std::hash<std::string>()(spec_text(s)); })
      .def("__repr__", &spec_text);
}

PackedSpec read_spec(nb::handle blob) { return packed_matrix(Array(blob, "blob")).spec; }

void write_packed_header(nb::handle blob_, const PackedSpec& spec) {
  const Array blob(blob_, "blob");
  blob.writable().contiguous(1).expect<std::uint8_t>("uint8");
  const PackedMatrix m = layout_of(spec, "weights");
  CPUMOE_REQUIRE(blob.dim(0) == m.total_bytes, "blob has ", blob.dim(0), " bytes; ", m.total_bytes, " are needed");
  write_header(m, blob.data());
}

nb::list list_weight_formats() {
  nb::list rows;
  for (const FormatInfo& f : kWeightFormats) {
    rows.append(nb::make_tuple(f.name, f.element, traits_of(f.id).bits, traits_of(f.id).subgroup));
  }
  return rows;
}

// One of the arrays that packed weights are made of: [experts, rows, width], or [experts, rows] with width 0. Absent
// exactly where the packed weights have no such part.
template <class T>
class Part {
 public:
  Part(nb::handle array, const std::string& name, bool wanted, std::int64_t experts, std::int64_t rows,
       std::int64_t width, const char* type, bool writable = false)
      : name_(name), stride_(rows * std::max<std::int64_t>(width, 1)) {
    CPUMOE_REQUIRE(array.is_none() != wanted, name, " is ", array.is_none() ? "missing" : "not expected");
    if (array.is_none()) return;
    array_.emplace(array, name_.c_str());
    if (writable) array_->writable();
    array_->contiguous(width == 0 ? 2 : 3).template expect<T>(type);
    const bool fits = array_->dim(0) == experts && array_->dim(1) == rows && (width == 0 || array_->dim(2) == width);
    CPUMOE_REQUIRE(fits, name, " is ", array_->shape_text(), "; [", experts, ", ", rows,
                   width == 0 ? std::string() : concat(", ", width), "] is accepted");
  }

  T* of(std::int64_t expert) const { return array_ ? array_->template data<T>() + expert * stride_ : nullptr; }

 private:
  std::string name_;
  std::int64_t stride_;
  std::optional<Array> array_;
};

bool has_byte_scales(const PackedSpec& s) { return size_of(s.scales) == 1; }

// Scales [experts, columns, groups]: floats, or bytes where the format has those. Gives the size of one.
int check_scales(const Array& scales, const std::string& name, const PackedSpec& s, std::int64_t experts) {
  scales.contiguous(3);
  CPUMOE_REQUIRE(scales.dim(0) == experts && scales.dim(1) == s.columns && scales.dim(2) == s.groups(), name, " is ",
                 scales.shape_text(), "; [", experts, ", ", s.columns, ", ", s.groups(), "] is accepted");
  if (has_byte_scales(s)) {
    scales.expect<std::uint8_t>("uint8 (codes of the scales)");
    return 1;
  }
  return size_of(scales.float_type());
}

// Checks the dtype of weights that are not nibbles, and gives the size of one.
int check_values(const Array& values, const PackedSpec& s) {
  if (traits_of(s.weights).bits <= 8) {
    values.expect<std::int8_t>(traits_of(s.weights).bits == 4
                                   ? "int8 (one value per byte) or uint8 (two nibbles per byte)"
                                   : "int8 (one value or code per byte)");
    return 1;
  }
  const DType wanted = s.weights == WeightFormat::kBF16  ? DType::kBF16
                       : s.weights == WeightFormat::kF16 ? DType::kF16
                                                         : DType::kF32;
  CPUMOE_REQUIRE(values.float_type() == wanted, values.name(), " is ", values.dtype_text(), "; that of ",
                 format_of(s).name, " is accepted");
  return size_of(wanted);
}

// values: int8 or floats [experts, columns, depth], or uint8 nibbles [experts, columns, (depth + 1) / 2]. zeros,
// factors and input scales: PackSource.
void pack_into(nb::handle blob_, std::int64_t first_expert, nb::handle values_, nb::handle scales_, nb::handle zeros_,
               nb::handle factors_, nb::handle bias_, nb::handle input_order_, nb::handle input_scales_, int order,
               const std::string& name) {
  const std::string scales_name = name + "_scale";
  const Array blob(blob_, "blob"), values(values_, name.c_str()), scales(scales_, scales_name.c_str());
  const PackedMatrix m = packed_matrix(blob.writable());
  const PackedSpec& s = m.spec;
  const bool nibbles = values.contiguous(3).is<std::uint8_t>();
  CPUMOE_REQUIRE(!nibbles || traits_of(s.weights).bits == 4, name, " must be int8 for ", traits_of(s.weights).bits,
                 "-bit weights");
  const int value_bytes = nibbles ? 1 : check_values(values, s);
  const std::int64_t width = nibbles ? (s.depth + 1) / 2 : s.depth;
  const std::int64_t groups = s.groups(), experts = values.dim(0);
  CPUMOE_REQUIRE(values.dim(1) == s.columns && values.dim(2) == width, name, " is ", values.shape_text(),
                 "; [experts, ", s.columns, ", ", width, "] is accepted");
  const int scale_bytes = check_scales(scales, scales_name, s, experts);
  CPUMOE_REQUIRE(order >= 0 && order <= 2, "order=", order, "; 0, 1 and 2 are accepted");
  CPUMOE_REQUIRE((order != 0) == s.gated, "the row order does not fit the packed layout");
  const Part<std::int8_t> zeros(zeros_, name + "_zero_point", has_zero_points(s), experts, s.columns, groups, "int8");
  const bool has_factors = traits_of(s.weights).has_factor && !factors_.is_none();
  const Part<float> factors(factors_, name + "_factor", has_factors, experts, s.columns, 0, "float32");
  const Part<float> bias(bias_, name + "_bias", s.has_bias, experts, s.columns, 0, "float32");
  const Part<std::int32_t> input_order(input_order_, name + "_input_order", s.input_orders != 0, experts,
                                       s.input_orders, s.depth, "int32");
  const Part<float> input_scales(input_scales_, name + "_input_scale", s.input_scales != 0, experts, s.input_scales, 0,
                                 "float32");
  const DType scale_type = has_byte_scales(s) ? DType::kF32 : scales.float_type();
  const DType begun = s.scales == ScaleType::kBF16  ? DType::kBF16
                      : s.scales == ScaleType::kF16 ? DType::kF16
                                                    : scale_type;
  CPUMOE_REQUIRE(scale_type == begun, scales_name, " is ", scales.dtype_text(), "; ", scale_name(s),
                 " is accepted, as these weights were begun");
  std::vector<PackSource> sources(static_cast<std::size_t>(experts));
  for (std::int64_t e = 0; e < experts; ++e) {
    PackSource& source = sources[static_cast<std::size_t>(e)];
    source.values = values.data() + e * s.columns * width * value_bytes;
    source.nibbles = nibbles;
    source.scales = scales.data() + e * s.columns * groups * scale_bytes;
    source.scale_type = scale_type;
    source.zeros = zeros.of(e);
    source.factors = factors.of(e);
    source.bias = bias.of(e);
    source.input_order = input_order.of(e);
    source.input_scales = input_scales.of(e);
    source.order = static_cast<RowOrder>(order);
  }
  const Computation computation;
  pack_experts(m, blob.data(), first_expert, sources.data(), experts, name);
}

// The experts [first_expert, first_expert + n) back to values [n, columns, depth], scales [n, columns, groups] and,
// where there are any, zero points like the scales, factors and biases [n, columns].
void unpack_into(nb::handle blob_, std::int64_t first_expert, nb::handle values_, nb::handle scales_, nb::handle zeros_,
                 nb::handle factors_, nb::handle bias_, nb::handle input_order_, nb::handle input_scales_) {
  const Array blob(blob_, "blob"), values(values_, "values"), scales(scales_, "scales");
  const PackedMatrix m = packed_matrix(blob);
  const PackedSpec& s = m.spec;
  const int value_bytes = check_values(values.writable().contiguous(3), s);
  const std::int64_t experts = values.dim(0), groups = s.groups();
  CPUMOE_REQUIRE(values.dim(1) == s.columns && values.dim(2) == s.depth, "values is ", values.shape_text(),
                 "; [experts, ", s.columns, ", ", s.depth, "] is accepted");
  const int scale_bytes = check_scales(scales.writable(), "scales", s, experts);
  const Part<std::int8_t> zeros(zeros_, "zeros", has_zero_points(s), experts, s.columns, groups, "int8", true);
  const Part<float> factors(factors_, "factors", traits_of(s.weights).has_factor, experts, s.columns, 0, "float32",
                            true);
  const Part<float> bias(bias_, "bias", s.has_bias, experts, s.columns, 0, "float32", true);
  const Part<std::int32_t> input_order(input_order_, "input_order", s.input_orders != 0, experts, s.input_orders,
                                       s.depth, "int32", true);
  const Part<float> input_scales(input_scales_, "input_scales", s.input_scales != 0, experts, s.input_scales, 0,
                                 "float32", true);
  std::vector<UnpackTarget> targets(static_cast<std::size_t>(experts));
  for (std::int64_t e = 0; e < experts; ++e) {
    UnpackTarget& target = targets[static_cast<std::size_t>(e)];
    target.values = values.data() + e * s.columns * s.depth * value_bytes;
    target.scales = scales.data() + e * s.columns * groups * scale_bytes;
    target.scale_type = has_byte_scales(s) ? DType::kF32 : scales.float_type();
    target.zeros = zeros.of(e);
    target.factors = factors.of(e);
    target.bias = bias.of(e);
    target.input_order = input_order.of(e);
    target.input_scales = input_scales.of(e);
  }
  const Computation computation;
  unpack_experts(m, first_expert, targets.data(), experts, "blob");
}

// ---- routing, attention, norms -------------------------------------------------------------------------------------

void select_experts(nb::handle logits_, nb::handle weights_, nb::handle ids_, int scoring, bool score_chosen,
                    nb::handle bias_, std::int64_t groups, std::int64_t topk_groups, bool renormalize, float scale) {
  const Array logits(logits_, "router_logits"), weights(weights_, "weights"), ids(ids_, "ids");
  RouteCall call{};
  call.type = logits.contiguous(2).float_type();
  weights.writable().contiguous(2).expect<float>("float32");
  ids.writable().contiguous(2).expect<std::int32_t>("int32");
  call.tokens = logits.dim(0);
  call.experts = logits.dim(1);
  call.topk = ids.dim(1);
  CPUMOE_REQUIRE(ids.dim(0) == call.tokens && weights.dim(0) == call.tokens && weights.dim(1) == call.topk,
                 "ids and weights must be [", call.tokens, ", topk]");
  CPUMOE_REQUIRE(scoring >= 0 && scoring <= static_cast<int>(Scoring::kSqrtSoftplus), "scoring=", scoring,
                 "; 0 to 3 are accepted");
  call.scoring = static_cast<Scoring>(scoring);
  call.score_chosen = score_chosen;
  std::optional<Array> bias;
  if (!bias_.is_none()) {
    bias.emplace(bias_, "correction_bias");
    bias->contiguous(1).expect<float>("float32");
    CPUMOE_REQUIRE(bias->dim(0) == call.experts, "correction_bias has ", bias->dim(0), " values for ", call.experts,
                   " experts");
    call.bias = bias->data<float>();
  }
  call.groups = groups;
  call.topk_groups = topk_groups;
  call.renormalize = renormalize;
  call.scale = scale;
  call.logits = logits.data();
  call.ids = ids.data<std::int32_t>();
  call.weights = weights.data<float>();
  const Computation computation;
  route(active_kernels(), call);
}

void logits_of_router(nb::handle x_, nb::handle weight_, nb::handle bias_, nb::handle logits_) {
  const Array x(x_, "x"), weight(weight_, "weight"), logits(logits_, "logits");
  LogitsCall call{};
  call.type = x.contiguous(2).float_type();
  CPUMOE_REQUIRE(weight.contiguous(2).same_type(x), "weight must have the dtype of x");
  call.tokens = x.dim(0);
  call.depth = x.dim(1);
  call.experts = weight.dim(0);
  CPUMOE_REQUIRE(weight.dim(1) == call.depth, "x has ", call.depth, " features, but the weight takes ", weight.dim(1));
  call.logits_type = logits.writable().contiguous(2).float_type();
  CPUMOE_REQUIRE(logits.dim(0) == call.tokens && logits.dim(1) == call.experts, "logits must be [", call.tokens, ", ",
                 call.experts, "]");
  std::optional<Array> bias;
  if (!bias_.is_none()) {
    bias.emplace(bias_, "bias");
    bias->contiguous(1).expect<float>("float32");
    CPUMOE_REQUIRE(bias->dim(0) == call.experts, "bias has ", bias->dim(0), " values for ", call.experts, " experts");
    call.bias = bias->data<float>();
  }
  call.x = x.data();
  call.weight = weight.data();
  call.logits = logits.data();
  const Computation computation;
  router_logits(active_kernels(), call);
}

void decode_attention(nb::handle query_, nb::handle keys_, nb::handle values_, nb::handle mask_, nb::handle sinks_,
                      float scale, nb::handle out_) {
  const Array query(query_, "query"), keys(keys_, "keys"), values(values_, "values"), out(out_, "out");
  AttentionCall call{};
  call.type = query.contiguous(3).float_type();
  call.batch = query.dim(0);
  call.heads = query.dim(1);
  call.depth = query.dim(2);
  CPUMOE_REQUIRE(keys.contiguous(4).same_type(query), "keys must have the dtype of query");
  CPUMOE_REQUIRE(values.contiguous(4).same_type(query), "values must have the dtype of query");
  CPUMOE_REQUIRE(out.writable().contiguous(3).same_type(query), "out must have the dtype of query");
  call.kv_heads = keys.dim(1);
  call.tokens = keys.dim(2);
  CPUMOE_REQUIRE(keys.dim(0) == call.batch && keys.dim(3) == call.depth, "keys are ", keys.shape_text(), "; [",
                 call.batch, ", heads, tokens, ", call.depth, "] is accepted");
  call.value_depth = values.dim(3);
  for (int i = 0; i < 3; ++i) {
    CPUMOE_REQUIRE(values.dim(i) == keys.dim(i), "values are ", values.shape_text(), " for keys ", keys.shape_text());
  }
  CPUMOE_REQUIRE(out.dim(0) == call.batch && out.dim(1) == call.heads && out.dim(2) == call.value_depth,
                 "out must be [", call.batch, ", ", call.heads, ", ", call.value_depth, "]");
  std::optional<Array> mask;
  if (!mask_.is_none()) {
    mask.emplace(mask_, "mask");
    mask->contiguous(2).expect<float>("float32");
    CPUMOE_REQUIRE(mask->dim(0) == call.batch && mask->dim(1) == call.tokens, "mask is ", mask->shape_text(), "; [",
                   call.batch, ", ", call.tokens, "] is accepted");
    call.mask = mask->data<float>();
  }
  std::optional<Array> sinks;
  if (!sinks_.is_none()) {
    sinks.emplace(sinks_, "sinks");
    sinks->contiguous(1).expect<float>("float32");
    CPUMOE_REQUIRE(sinks->dim(0) == call.heads, "sinks has ", sinks->dim(0), " values for ", call.heads, " heads");
    call.sinks = sinks->data<float>();
  }
  call.scale = scale;
  call.query = query.data();
  call.keys = keys.data();
  call.values = values.data();
  call.out = out.data();
  const Computation computation;
  attend(active_kernels(), call);
}

// latents and rotated: [batch, 1, tokens, ..], sequences any distance apart, as in a cache that has room for more.
void latent_attention(nb::handle query_, nb::handle latents_, nb::handle rotated_, nb::handle weight_, nb::handle mask_,
                      nb::handle sinks_, float scale, nb::handle out_) {
  const Array query(query_, "query"), latents(latents_, "latents"), rotated(rotated_, "rotated");
  const Array weight(weight_, "weight"), out(out_, "out");
  LatentAttentionCall call{};
  call.type = query.contiguous(4).float_type();
  call.batch = query.dim(0);
  call.heads = query.dim(1);
  call.queries = query.dim(2);
  call.latent_stride = latents.contiguous_but_first(4);
  call.rotated_stride = rotated.contiguous_but_first(4);
  for (const Array* array : {&latents, &rotated}) {
    CPUMOE_REQUIRE(array->same_type(query), array->name(), " is ", array->dtype_text(), "; that of query, ",
                   query.dtype_text(), ", is accepted");
    CPUMOE_REQUIRE(array->dim(0) == call.batch && array->dim(1) == 1 && array->dim(2) == latents.dim(2), array->name(),
                   " is ", array->shape_text(), "; [", call.batch, ", 1, ", latents.dim(2), ", ..] is accepted");
  }
  call.tokens = latents.dim(2);
  call.rank = latents.dim(3);
  call.rotary = rotated.dim(3);
  call.nope = query.dim(3) - call.rotary;
  CPUMOE_REQUIRE(call.nope >= 0, "query has rows of ", query.dim(3), ", shorter than the ", call.rotary, " of rotated");
  CPUMOE_REQUIRE(out.writable().contiguous(4).same_type(query), "out must have the dtype of query");
  call.value_depth = out.dim(3);
  CPUMOE_REQUIRE(out.dim(0) == call.batch && out.dim(1) == call.queries && out.dim(2) == call.heads, "out is ",
                 out.shape_text(), "; [", call.batch, ", ", call.queries, ", ", call.heads, ", ..] is accepted");
  CPUMOE_REQUIRE(weight.contiguous(2).same_type(query), "weight is ", weight.dtype_text(), "; that of query, ",
                 query.dtype_text(), ", is accepted");
  const std::int64_t rows = call.heads * (call.nope + call.value_depth);
  CPUMOE_REQUIRE(weight.dim(0) == rows && weight.dim(1) == call.rank, "weight is ", weight.shape_text(), "; [", rows,
                 ", ", call.rank, "] is accepted");
  std::optional<Array> mask;
  if (!mask_.is_none()) {
    mask.emplace(mask_, "mask");
    mask->contiguous(3).expect<float>("float32");
    CPUMOE_REQUIRE(mask->dim(0) == call.batch && mask->dim(1) == call.queries && mask->dim(2) == call.tokens,
                   "mask is ", mask->shape_text(), "; [", call.batch, ", ", call.queries, ", ", call.tokens,
                   "] is accepted");
    call.mask = mask->data<float>();
  }
  std::optional<Array> sinks;
  if (!sinks_.is_none()) {
    sinks.emplace(sinks_, "sinks");
    sinks->contiguous(1).expect<float>("float32");
    CPUMOE_REQUIRE(sinks->dim(0) == call.heads, "sinks has ", sinks->dim(0), " values for ", call.heads, " heads");
    call.sinks = sinks->data<float>();
  }
  call.scale = scale;
  call.query = query.data();
  call.latents = latents.data();
  call.rotated = rotated.data();
  call.weight = weight.data();
  call.out = out.data();
  const Computation computation;
  attend_latents(active_kernels(), call);
}

// Rows are few in decode: the calling thread does them, unless there is work for several.
void normalize(nb::handle x_, nb::handle weight_, float epsilon, bool round_first, bool plus_one, nb::handle out_) {
  const Array x(x_, "x"), weight(weight_, "weight"), out(out_, "out");
  NormCall call{};
  call.type = x.contiguous(2).float_type();
  call.weight_type = weight.contiguous(1).float_type();
  CPUMOE_REQUIRE(out.writable().contiguous(2).same_type(x), "out must have the dtype of x");
  CPUMOE_REQUIRE(weight.dim(0) == x.dim(1), "weight has ", weight.dim(0), " values for rows of ", x.dim(1));
  CPUMOE_REQUIRE(out.dim(0) == x.dim(0) && out.dim(1) == x.dim(1), "out must have the shape of x");
  call.rows = x.dim(0);
  call.width = x.dim(1);
  call.x = x.data();
  call.weight = weight.data();
  call.epsilon = epsilon;
  call.round_first = round_first;
  call.plus_one = plus_one;
  call.out = out.data();
  const Computation computation;
  rms_norm(active_kernels(), call);
}

// ---- the machine ---------------------------------------------------------------------------------------------------

double measure_reading(nb::handle data_) {
  const Array data(data_, "data");
  data.contiguous(1).expect<std::uint8_t>("uint8");
  const std::uint8_t* bytes = data.data();
  const std::int64_t count = data.dim(0);
  const nb::gil_scoped_release release;
  return read_rate(active_kernels(), bytes, count);
}

double measure_dots(std::int64_t iterations, bool floats) {
  const nb::gil_scoped_release release;
  return dot_rate(active_kernels(), iterations, floats);
}

nb::list list_instruction_sets() {
  nb::list rows;
  for (const IsaEntry& e : instruction_sets()) {
    const bool portable_floats = e.kernels == nullptr || e.kernels->arithmetic.portable_floats;
    rows.append(nb::make_tuple(e.name, e.supported, e.reason, portable_floats));
  }
  return rows;
}

void advise(nb::handle data_) {
  const Array data(data_, "data");
  data.contiguous(1).expect<std::uint8_t>("uint8");
  advise_huge_pages(data.data(), data.dim(0));
}

void set_node_places(const std::vector<std::pair<std::vector<int>, int>>& places) {
  std::vector<NodePlace> wanted;
  for (const auto& [cpus, memory_node] : places) wanted.push_back({cpus, memory_node});
  set_nodes(std::move(wanted));
}

std::vector<int> node_shares(const std::vector<int>& cpus, int count) {
  CPUMOE_REQUIRE(!cpus.empty(), "there are no nodes");
  std::vector<NodePlace> places;
  int next = 0;
  for (const int own : cpus) {
    places.emplace_back();
    for (int i = 0; i < own; ++i) places.back().cpus.push_back(next++);
  }
  const Nodes nodes(std::move(places));
  std::vector<int> out;
  for (int i = 0; i < count; ++i) out.push_back(nodes.of(i, count));
  return out;
}

nb::tuple place(nb::handle data_) {
  const Array data(data_, "data");
  data.contiguous(1).expect<std::uint8_t>("uint8");
  auto* bytes = static_cast<std::uint8_t*>(data.data());
  const PackedMatrix matrix = open_packed(bytes, data.dim(0), "data");
  Placement placed;
  {
    const nb::gil_scoped_release released;
    placed = place_packed(matrix, bytes);
  }
  return nb::make_tuple(placed.pages, placed.elsewhere, placed.problem);
}

}  // namespace
}  // namespace cpumoe

NB_MODULE(_core, m) {
  using namespace nb::literals;
  using namespace cpumoe;
  bind_exchange(m);
  m.def("moe", &moe, "x"_a, "ids"_a, "weights"_a, "gate_up"_a, "down"_a, "out"_a, "activation"_a, "gated"_a, "alpha"_a,
        "limit"_a, "weight_on_input"_a, "prepared_type"_a = -1, "slices"_a.none() = nb::none());
  m.def("prepare_tokens", &prepare, "x"_a, "gate_up"_a, "out"_a);
  m.def(
      "prepared_token_bytes",
      [](nb::handle gate_up, int type) {
        return prepared_token_bytes(packed_matrix(Array(gate_up, "gate_up")), dtype_of(type));
      },
      "gate_up"_a, "type"_a);
  m.def("linear", &linear, "x"_a, "weight"_a, "out"_a);
  bind_spec(m);
  m.def("read_spec", &read_spec, "blob"_a);
  m.def("write_packed_header", &write_packed_header, "blob"_a, "spec"_a);
  m.def("pack_into", &pack_into, "blob"_a, "first_expert"_a, "values"_a, "scales"_a, "zeros"_a.none(),
        "factors"_a.none(), "bias"_a.none(), "input_order"_a.none(), "input_scales"_a.none(), "order"_a, "name"_a);
  m.def("unpack_into", &unpack_into, "blob"_a, "first_expert"_a, "values"_a, "scales"_a, "zeros"_a.none(),
        "factors"_a.none(), "bias"_a.none(), "input_order"_a.none(), "input_scales"_a.none());
  m.def("weight_formats", &list_weight_formats);
  m.def("select_experts", &select_experts, "logits"_a, "weights"_a, "ids"_a, "scoring"_a, "score_chosen"_a,
        "bias"_a.none(), "groups"_a, "topk_groups"_a, "renormalize"_a, "scale"_a);
  m.def("router_logits", &logits_of_router, "x"_a, "weight"_a, "bias"_a.none(), "logits"_a);
  m.def("decode_attention", &decode_attention, "query"_a, "keys"_a, "values"_a, "mask"_a.none(), "sinks"_a.none(),
        "scale"_a, "out"_a);
  m.def("latent_attention", &latent_attention, "query"_a, "latents"_a, "rotated"_a, "weight"_a, "mask"_a.none(),
        "sinks"_a.none(), "scale"_a, "out"_a);
  m.def("rms_norm", &normalize, "x"_a, "weight"_a, "epsilon"_a, "round_first"_a, "plus_one"_a, "out"_a);
  bind_cache_records(m);
  bind_decoder(m);
  bind_state_space(m);
  bind_delta_rule(m);
  m.def("read_rate", &measure_reading, "data"_a);
  m.def("dot_rate", &measure_dots, "iterations"_a, "floats"_a = false);
  m.def("instruction_sets", &list_instruction_sets);
  m.def("isa", [] { return active_kernels().name; });
  m.def("use_isa", &use_kernels, "name"_a);
  m.def("thread_count", &thread_count);
  m.def("set_thread_count", &set_thread_count, "threads"_a);
  m.def("thread_source", &thread_source);
  m.def("available_cpus", &available_cpus);
  m.def("set_cpu_quota", &set_cpu_quota, "cpus"_a);
  m.def("amx_palette_hidden", &amx_palette_hidden);
  m.def("cpu_name", &cpu_name);
  m.def("advise_huge_pages", &advise, "data"_a);
  m.def("set_nodes", &set_node_places, "places"_a);
  m.def("node_shares", &node_shares, "cpus"_a, "count"_a);
  m.def("place_packed", &place, "data"_a);
  m.def("guard_mapping", &guard_mapping, "address"_a, "bytes"_a, "path"_a);
  bind_read_runs(m);
}
