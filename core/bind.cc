// The Python seam: checks arrays once, releases the GIL, calls the core. Knows NumPy-style arrays, not PyTorch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "array.h"
#include "attention.h"
#include "check.h"
#include "dispatch.h"
#include "linear.h"
#include "mapped_file.h"
#include "memory.h"
#include "moe.h"
#include "packed.h"
#include "route.h"
#include "threads.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

// Around everything that computes: other Python threads may run, and this one computes as the team does.
struct Computation {
  nb::gil_scoped_release release;
  IeeeArithmetic arithmetic;
};

PackedMatrix packed_matrix(const Array& blob) {
  blob.contiguous(1).expect<std::uint8_t>("uint8 (packed weights)");
  return open_packed(blob.data(), blob.dim(0), blob.name());
}

void moe(nb::handle x_, nb::handle ids_, nb::handle weights_, nb::handle gate_up_, nb::handle down_, nb::handle out_,
         int activation, bool gated, float alpha, float limit, bool weight_on_input) {
  const Array x(x_, "hidden_states"), ids(ids_, "topk_ids"), weights(weights_, "topk_weights");
  const Array gate_up(gate_up_, "gate_up"), down(down_, "down"), out(out_, "out");
  MoeCall call{};
  call.gate_up = packed_matrix(gate_up);
  call.down = packed_matrix(down);
  call.type = x.contiguous(2).float_type();
  require(out.writable().contiguous(2).same_type(x), "out must have the dtype of hidden_states");
  weights.contiguous(2).expect<float>("float32");
  ids.contiguous(2);
  call.tokens = x.dim(0);
  call.topk = ids.dim(1);
  require(x.dim(1) == call.gate_up.spec.depth, "hidden_states have ", x.dim(1), " features, but gate_up takes ",
          call.gate_up.spec.depth);
  require(out.dim(0) == x.dim(0) && out.dim(1) == x.dim(1), "out must have the shape of hidden_states");
  require(ids.dim(0) == call.tokens, "topk_ids ", ids.shape_text(), " do not have the ", call.tokens,
          " rows of hidden_states");
  require(weights.dim(0) == ids.dim(0) && weights.dim(1) == ids.dim(1), "topk_weights ", weights.shape_text(),
          " and topk_ids ", ids.shape_text(), " differ in shape");
  require(activation >= 0 && activation <= static_cast<int>(Activation::kRelu2), "activation=", activation,
          "; 0 to 5 are accepted");
  call.activation = {static_cast<Activation>(activation), gated, alpha, limit};
  call.weight_on_input = weight_on_input;
  call.x = x.data();
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
      require(fits, "topk_ids holds ", wide[i], "; 0 to ", call.gate_up.spec.experts - 1,
              " are experts and -1 means none");
      narrow[i] = static_cast<std::int32_t>(wide[i]);
    }
    call.ids = narrow.data();
  }
  const Computation computation;
  moe_forward(active_kernels(), call);
}

void linear(nb::handle x_, nb::handle weight_, nb::handle out_) {
  const Array x(x_, "x"), weight(weight_, "weight"), out(out_, "out");
  LinearCall call{};
  call.weight = packed_matrix(weight);
  call.type = x.contiguous(2).float_type();
  require(out.writable().contiguous(2).same_type(x), "out must have the dtype of x");
  require(x.dim(1) == call.weight.spec.depth, "x has ", x.dim(1), " features, but the weight takes ",
          call.weight.spec.depth);
  require(out.dim(0) == x.dim(0) && out.dim(1) == call.weight.spec.columns, "out must be [", x.dim(0), ", ",
          call.weight.spec.columns, "]");
  call.rows = x.dim(0);
  call.x = x.data();
  call.out = out.data();
  const Computation computation;
  linear_forward(active_kernels(), call);
}

MatrixSpec matrix_spec(int weight_bits, int scale_bytes, std::int64_t group, std::int64_t experts, std::int64_t columns,
                       std::int64_t depth, bool gated, bool has_bias) {
  MatrixSpec s;
  s.weights = static_cast<WeightType>(weight_bits);
  s.scales = static_cast<ScaleType>(scale_bytes);
  s.group = group;
  s.experts = experts;
  s.columns = columns;
  s.depth = depth;
  s.gated = gated;
  s.has_bias = has_bias;
  return s;
}

std::int64_t packed_bytes(int weight_bits, int scale_bytes, std::int64_t group, std::int64_t experts,
                          std::int64_t columns, std::int64_t depth, bool gated, bool has_bias) {
  return layout_of(matrix_spec(weight_bits, scale_bytes, group, experts, columns, depth, gated, has_bias), "weights")
      .total_bytes;
}

void write_packed_header(nb::handle blob_, int weight_bits, int scale_bytes, std::int64_t group, std::int64_t experts,
                         std::int64_t columns, std::int64_t depth, bool gated, bool has_bias) {
  const Array blob(blob_, "blob");
  blob.writable().contiguous(1).expect<std::uint8_t>("uint8");
  const PackedMatrix m =
      layout_of(matrix_spec(weight_bits, scale_bytes, group, experts, columns, depth, gated, has_bias), "weights");
  require(blob.dim(0) == m.total_bytes, "blob has ", blob.dim(0), " bytes; ", m.total_bytes, " are needed");
  write_header(m, blob.data());
}

// values: int8 [experts, columns, depth], or uint8 nibbles [experts, columns, (depth + 1) / 2].
void pack_into(nb::handle blob_, std::int64_t first_expert, nb::handle values_, nb::handle scales_, nb::handle bias_,
               int order, const std::string& name) {
  const std::string scales_name = name + "_scale", bias_name = name + "_bias";
  const Array blob(blob_, "blob"), values(values_, name.c_str()), scales(scales_, scales_name.c_str());
  const PackedMatrix m = packed_matrix(blob.writable());
  const MatrixSpec& s = m.spec;
  const bool nibbles = values.contiguous(3).is<std::uint8_t>();
  if (!nibbles) values.expect<std::int8_t>("int8 (one value per byte) or uint8 (two nibbles per byte)");
  require(!nibbles || s.weights == WeightType::kInt4, name, " must be int8 for 8-bit weights");
  const std::int64_t width = nibbles ? (s.depth + 1) / 2 : s.depth;
  const std::int64_t groups = s.group == 0 ? 1 : s.depth / s.group, experts = values.dim(0);
  require(values.dim(1) == s.columns && values.dim(2) == width, name, " is ", values.shape_text(), "; [experts, ",
          s.columns, ", ", width, "] is accepted");
  scales.contiguous(3);
  require(scales.dim(0) == experts && scales.dim(1) == s.columns && scales.dim(2) == groups, scales_name, " is ",
          scales.shape_text(), "; [", experts, ", ", s.columns, ", ", groups, "] is accepted");
  require(order >= 0 && order <= 2, "order=", order, "; 0, 1 and 2 are accepted");
  require((order != 0) == s.gated, "the row order does not fit the packed layout");
  require(bias_.is_none() != s.has_bias, bias_name, " is ", bias_.is_none() ? "missing" : "not expected");
  const float* bias = nullptr;
  std::optional<Array> bias_array;
  if (!bias_.is_none()) {
    bias_array.emplace(bias_, bias_name.c_str());
    bias_array->contiguous(2).expect<float>("float32");
    require(bias_array->dim(0) == experts && bias_array->dim(1) == s.columns, bias_name, " is ",
            bias_array->shape_text(), "; [", experts, ", ", s.columns, "] is accepted");
    bias = bias_array->data<float>();
  }
  const DType scale_type = scales.float_type();
  const std::int64_t scale_size = scale_type == DType::kF32 ? 4 : 2;
  std::vector<PackSource> sources(static_cast<std::size_t>(experts));
  for (std::int64_t e = 0; e < experts; ++e) {
    PackSource& source = sources[static_cast<std::size_t>(e)];
    source.values = values.data() + e * s.columns * width;
    source.nibbles = nibbles;
    source.scales = scales.data() + e * s.columns * groups * scale_size;
    source.scale_type = scale_type;
    source.bias = bias == nullptr ? nullptr : bias + e * s.columns;
    source.order = static_cast<RowOrder>(order);
  }
  const Computation computation;
  pack_experts(m, blob.data(), first_expert, sources.data(), experts, name);
}

nb::dict describe(nb::handle blob) {
  const MatrixSpec s = packed_matrix(Array(blob, "blob")).spec;
  nb::dict d;
  d["weight_bits"] = static_cast<int>(s.weights);
  d["scale_bytes"] = static_cast<int>(s.scales);
  d["group_size"] = s.group;
  d["experts"] = s.experts;
  d["out_features"] = s.columns;
  d["in_features"] = s.depth;
  d["gated"] = s.gated;
  d["has_bias"] = s.has_bias;
  return d;
}

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
  require(ids.dim(0) == call.tokens && weights.dim(0) == call.tokens && weights.dim(1) == call.topk,
          "ids and weights must be [", call.tokens, ", topk]");
  require(scoring >= 0 && scoring <= static_cast<int>(Scoring::kSqrtSoftplus), "scoring=", scoring,
          "; 0 to 3 are accepted");
  call.scoring = static_cast<Scoring>(scoring);
  call.score_chosen = score_chosen;
  std::optional<Array> bias;
  if (!bias_.is_none()) {
    bias.emplace(bias_, "correction_bias");
    bias->contiguous(1).expect<float>("float32");
    require(bias->dim(0) == call.experts, "correction_bias has ", bias->dim(0), " values for ", call.experts,
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
  require(weight.contiguous(2).same_type(x), "weight must have the dtype of x");
  call.tokens = x.dim(0);
  call.depth = x.dim(1);
  call.experts = weight.dim(0);
  require(weight.dim(1) == call.depth, "x has ", call.depth, " features, but the weight takes ", weight.dim(1));
  call.logits_type = logits.writable().contiguous(2).float_type();
  require(logits.dim(0) == call.tokens && logits.dim(1) == call.experts, "logits must be [", call.tokens, ", ",
          call.experts, "]");
  std::optional<Array> bias;
  if (!bias_.is_none()) {
    bias.emplace(bias_, "bias");
    bias->contiguous(1).expect<float>("float32");
    require(bias->dim(0) == call.experts, "bias has ", bias->dim(0), " values for ", call.experts, " experts");
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
  require(keys.contiguous(4).same_type(query), "keys must have the dtype of query");
  require(values.contiguous(4).same_type(query), "values must have the dtype of query");
  require(out.writable().contiguous(3).same_type(query), "out must have the dtype of query");
  call.kv_heads = keys.dim(1);
  call.tokens = keys.dim(2);
  require(keys.dim(0) == call.batch && keys.dim(3) == call.depth, "keys are ", keys.shape_text(), "; [", call.batch,
          ", heads, tokens, ", call.depth, "] is accepted");
  call.value_depth = values.dim(3);
  for (int i = 0; i < 3; ++i) {
    require(values.dim(i) == keys.dim(i), "values are ", values.shape_text(), " for keys ", keys.shape_text());
  }
  require(out.dim(0) == call.batch && out.dim(1) == call.heads && out.dim(2) == call.value_depth, "out must be [",
          call.batch, ", ", call.heads, ", ", call.value_depth, "]");
  std::optional<Array> mask;
  if (!mask_.is_none()) {
    mask.emplace(mask_, "mask");
    mask->contiguous(2).expect<float>("float32");
    require(mask->dim(0) == call.batch && mask->dim(1) == call.tokens, "mask is ", mask->shape_text(), "; [",
            call.batch, ", ", call.tokens, "] is accepted");
    call.mask = mask->data<float>();
  }
  std::optional<Array> sinks;
  if (!sinks_.is_none()) {
    sinks.emplace(sinks_, "sinks");
    sinks->contiguous(1).expect<float>("float32");
    require(sinks->dim(0) == call.heads, "sinks has ", sinks->dim(0), " values for ", call.heads, " heads");
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

// Rows are few in decode: the calling thread does them, unless there is work for several.
void rms_norm(nb::handle x_, nb::handle weight_, float epsilon, bool round_first, nb::handle out_) {
  const Array x(x_, "x"), weight(weight_, "weight"), out(out_, "out");
  const DType type = x.contiguous(2).float_type();
  require(weight.contiguous(1).same_type(x), "weight must have the dtype of x");
  require(out.writable().contiguous(2).same_type(x), "out must have the dtype of x");
  require(weight.dim(0) == x.dim(1), "weight has ", weight.dim(0), " values for rows of ", x.dim(1));
  require(out.dim(0) == x.dim(0) && out.dim(1) == x.dim(1), "out must have the shape of x");
  const std::int64_t rows = x.dim(0), count = x.dim(1), row_bytes = count * (type == DType::kF32 ? 4 : 2);
  constexpr std::int64_t kValuesForThreads = 1 << 15;
  const Kernels& kernels = active_kernels();
  const auto normalize = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t r = first; r < last; ++r) {
      kernels.normalize_row(
          {x.data() + r * row_bytes, weight.data(), type, count, epsilon, round_first, out.data() + r * row_bytes});
    }
  };
  const Computation computation;
  if (rows * count < kValuesForThreads) return normalize(0, rows);
  run_on_threads(thread_count(),
                 [&](Worker& w) { normalize(rows * w.index / w.count, rows * (w.index + 1) / w.count); });
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Bytes per second of one pass of all threads over `data`.
double read_rate(nb::handle data_) {
  const Array data(data_, "data");
  data.contiguous(1).expect<std::uint8_t>("uint8");
  const Kernels& kernels = active_kernels();
  constexpr std::int64_t kUnit = 4096;
  const std::int64_t units = data.dim(0) / kUnit;
  const std::uint8_t* bytes = data.data();
  const nb::gil_scoped_release release;
  const double start = seconds();
  std::atomic<std::uint64_t> sink{0};
  run_on_threads(thread_count(), [&](Worker& w) {
    const std::int64_t first = units * w.index / w.count, last = units * (w.index + 1) / w.count;
    sink += kernels.read_bytes(bytes + first * kUnit, (last - first) * kUnit);
  });
  return static_cast<double>(units * kUnit) / (seconds() - start);
}

// Integer operations per second of register-only int8 dot products on all threads.
double dot_rate(std::int64_t iterations) {
  const Kernels& kernels = active_kernels();
  const nb::gil_scoped_release release;
  std::atomic<double> operations{0.0};
  const double start = seconds();
  run_on_threads(thread_count(), [&](Worker&) {
    const double done = kernels.dot_peak(iterations);
    double seen = operations.load();
    while (!operations.compare_exchange_weak(seen, seen + done)) {
    }
  });
  return operations.load() / (seconds() - start);
}

nb::list list_instruction_sets() {
  nb::list rows;
  for (const IsaEntry& e : instruction_sets()) rows.append(nb::make_tuple(e.name, e.supported, e.reason));
  return rows;
}

void advise(nb::handle data_) {
  const Array data(data_, "data");
  data.contiguous(1).expect<std::uint8_t>("uint8");
  advise_huge_pages(data.data(), data.dim(0));
}

}  // namespace
}  // namespace cpumoe

NB_MODULE(_core, m) {
  using namespace nb::literals;
  using namespace cpumoe;
  m.def("moe", &moe, "x"_a, "ids"_a, "weights"_a, "gate_up"_a, "down"_a, "out"_a, "activation"_a, "gated"_a, "alpha"_a,
        "limit"_a, "weight_on_input"_a);
  m.def("linear", &linear, "x"_a, "weight"_a, "out"_a);
  m.def("packed_bytes", &packed_bytes, "weight_bits"_a, "scale_bytes"_a, "group"_a, "experts"_a, "columns"_a, "depth"_a,
        "gated"_a, "has_bias"_a);
  m.def("write_packed_header", &write_packed_header, "blob"_a, "weight_bits"_a, "scale_bytes"_a, "group"_a, "experts"_a,
        "columns"_a, "depth"_a, "gated"_a, "has_bias"_a);
  m.def("pack_into", &pack_into, "blob"_a, "first_expert"_a, "values"_a, "scales"_a, "bias"_a.none(), "order"_a,
        "name"_a);
  m.def("describe", &describe, "blob"_a);
  m.def("select_experts", &select_experts, "logits"_a, "weights"_a, "ids"_a, "scoring"_a, "score_chosen"_a,
        "bias"_a.none(), "groups"_a, "topk_groups"_a, "renormalize"_a, "scale"_a);
  m.def("router_logits", &logits_of_router, "x"_a, "weight"_a, "bias"_a.none(), "logits"_a);
  m.def("decode_attention", &decode_attention, "query"_a, "keys"_a, "values"_a, "mask"_a.none(), "sinks"_a.none(),
        "scale"_a, "out"_a);
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "epsilon"_a, "round_first"_a, "out"_a);
  m.def("read_rate", &read_rate, "data"_a);
  m.def("dot_rate", &dot_rate, "iterations"_a);
  m.def("instruction_sets", &list_instruction_sets);
  m.def("isa", [] { return active_kernels().name; });
  m.def("use_isa", &use_kernels, "name"_a);
  m.def("thread_count", &thread_count);
  m.def("set_thread_count", &set_thread_count, "threads"_a);
  m.def("thread_source", &thread_source);
  m.def("available_cpus", &available_cpus);
  m.def("amx_palette_hidden", &amx_palette_hidden);
  m.def("cpu_name", &cpu_name);
  m.def("advise_huge_pages", &advise, "data"_a);
  m.def("guard_mapping", &guard_mapping, "address"_a, "bytes"_a, "path"_a);
}
