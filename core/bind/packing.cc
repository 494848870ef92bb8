// The Python seam of packed weights: their header, packing and unpacking.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
#include "packed/format_list.h"
#include "packed/packing.h"
#include "runtime/check.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

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

// Makes a PackedSpec from Python's arguments.
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
          "__eq__", [](const PackedSpec& s, const PackedSpec& other) { return s == other; }, nb::is_operator(),
          nb::sig("def __eq__(self, other: object, /) -> bool"))
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

std::vector<std::tuple<const char*, const char*, int, int>> list_weight_formats() {
  std::vector<std::tuple<const char*, const char*, int, int>> rows;
  for (const FormatInfo& f : kWeightFormats) {
    rows.emplace_back(f.name, f.element, traits_of(f.id).bits, traits_of(f.id).subgroup);
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
  const DType wanted = dtype_of(s.weights);
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

}  // namespace

PackedMatrix packed_matrix(const Array& blob) {
  blob.contiguous(1).expect<std::uint8_t>("uint8 (packed weights)");
  return open_packed(blob.data(), blob.dim(0), blob.name());
}

void bind_packing(nb::module_& m) {
  using namespace nb::literals;
  bind_spec(m);
  m.def("read_spec", &read_spec, "blob"_a);
  m.def("write_packed_header", &write_packed_header, "blob"_a, "spec"_a);
  m.def("pack_into", &pack_into, "blob"_a, "first_expert"_a, "values"_a, "scales"_a, "zeros"_a.none(),
        "factors"_a.none(), "bias"_a.none(), "input_order"_a.none(), "input_scales"_a.none(), "order"_a, "name"_a);
  m.def("unpack_into", &unpack_into, "blob"_a, "first_expert"_a, "values"_a, "scales"_a, "zeros"_a.none(),
        "factors"_a.none(), "bias"_a.none(), "input_order"_a.none(), "input_scales"_a.none());
  m.def("weight_formats", &list_weight_formats);
}

}  // namespace cpumoe
