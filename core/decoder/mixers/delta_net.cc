// Gated delta nets and Kimi delta attention.
#include <algorithm>
#include <cstring>

#include "decoder/check.h"
#include "decoder/mixer.h"
#include "decoder/step.h"
#include "runtime/check.h"

namespace cpumoe {
namespace {

constexpr std::size_t kMaxExpansions = 64;

// Total input width of the expansions.
std::int64_t expanded_width(const DeltaNet& d) {
  std::int64_t width = 0;
  for (const Expansion& e : d.expansions) width += e.matrix.depth;
  return width;
}

// The mixer's memory.
struct Arrays {
  Arrays(Scratch scratch, const DeltaNet& d, DType type, std::int64_t rows) {
    projected = scratch.take(rows * d.width(), type);
    expanded = scratch.take(rows * expanded_width(d), type);
    heads = scratch.take(rows * d.heads * d.value_dim, type);
    bytes = scratch.bytes();
  }
  Arrays(const Step& step, const DeltaNet& d) : Arrays(step.scratch(), d, step.type(), step.count()) {}

  std::uint8_t* projected;
  std::uint8_t* expanded;  // inputs of the expansions, one matrix [rows, depth] after the other
  std::uint8_t* heads;
  std::int64_t bytes;
};

void expand(Step& step, Worker& worker, const DeltaNet& d, const Arrays& arrays) {
  if (d.expansions.empty()) return;
  const DType type = step.type();
  std::deque<RankProducts>& products = step.stages().expansions;
  std::int64_t before = 0;  // elements of `expanded`
  for (std::size_t i = 0; i < d.expansions.size(); ++i) {
    const Expansion& e = d.expansions[i];
    step.each_row(worker, [&](std::int64_t r) {
      std::memcpy(at(arrays.expanded, before + r * e.matrix.depth, type),
                  at(arrays.projected, r * d.width() + e.first, type),
                  static_cast<std::size_t>(e.matrix.depth * size_of(type)));
    });
    before += e.matrix.depth * step.count();
    products[i].prepare(worker);
  }
  step.end_stage(worker, StepPart::kRows);
  std::uint64_t split = 0;  // a bit for each, since the first thread may plan them again after the barrier
  for (std::size_t i = 0; i < d.expansions.size(); ++i) {
    split |= static_cast<std::uint64_t>(products[i].is_split()) << i;
    products[i].multiply(worker);
  }
  step.end_stage(worker, StepPart::kProducts);
  for (std::size_t i = 0; i < d.expansions.size(); ++i) {
    if ((split >> i & 1) == 0) continue;
    products[i].gather(worker);
    step.end_stage(worker, StepPart::kExchange);
  }
}

void check_columns(const DeltaNet& d, const HeadColumns& columns, std::int64_t heads, std::int64_t values,
                   const char* name) {
  constexpr std::int64_t kMost = std::int64_t{1} << 32;  // so that nothing below overflows
  CPUMOE_REQUIRE(columns.group >= 1 && columns.first >= 0 && columns.first < kMost && columns.group_stride >= 0 &&
                     columns.group_stride < kMost && columns.head_stride >= 0 && columns.head_stride < kMost,
                 name, " begin at column ", columns.first, " in groups of ", columns.group);
  const std::int64_t last = columns.first + (heads - 1) / columns.group * columns.group_stride +
                            std::min(heads - 1, columns.group - 1) * columns.head_stride + values;
  CPUMOE_REQUIRE(last <= d.width(), name, " end at column ", last, " of ", d.width());
}

}  // namespace

void check_mixer(const DeltaNet& d, const DecoderModel& model) {
  for (const std::int64_t size : {d.key_heads, d.heads, d.key_dim, d.value_dim}) {
    CPUMOE_REQUIRE(size >= 1 && size <= 4096, "heads=", d.heads, ", key_heads=", d.key_heads, ", key_dim=", d.key_dim,
                   ", value_dim=", d.value_dim, "; 1 to 4096 are accepted");
  }
  check_tensor(d.log_rates, d.heads, "log_rates");
  CPUMOE_REQUIRE(
      d.decay_bias.dims == 1 && (!d.rule().decay_of_channels || d.decay_bias.shape[0] == d.heads * d.key_dim),
      "decay_bias has ", d.decay_bias.shape[0], " values; [", d.heads, "] or [", d.heads * d.key_dim, "] is accepted");
  check_tensor(d.norm_weight, d.value_dim, "norm_weight");
  check_convolution(d.conv_weight, d.conv_bias, d.rule().channels());
  check_delta_rule(d.rule());
  std::int64_t width = 0;
  for (const Matrix& m : d.projections) {
    check_matrix(m, model, m.columns, model.hidden(), "projections");
    width += m.columns;
  }
  CPUMOE_REQUIRE(d.expansions.size() <= kMaxExpansions, "there are ", d.expansions.size(), " expansions; up to ",
                 kMaxExpansions, " are accepted");
  for (const Expansion& e : d.expansions) {
    CPUMOE_REQUIRE(e.first >= 0 && e.first <= width && e.matrix.depth >= 1 && e.matrix.depth <= width - e.first,
                   "expansions take ", e.matrix.depth, " columns from ", e.first, " on; there are ", width);
    check_matrix(e.matrix, model, e.matrix.columns, e.matrix.depth, "expansions");
  }
  check_columns(d, d.queries, d.key_heads, d.key_dim, "queries");
  check_columns(d, d.keys, d.key_heads, d.key_dim, "keys");
  check_columns(d, d.values, d.heads, d.value_dim, "values");
  check_columns(d, d.gates, d.heads, d.value_dim, "gates");
  check_columns(d, d.betas, d.heads, 1, "betas");
  check_columns(d, d.decays, d.heads, d.rule().decay_of_channels ? d.key_dim : 1, "decays");
  check_matrix(d.out, model, model.hidden(), d.heads * d.value_dim, "out");
}

MixerSizes sizes_of(const DeltaNet& d, DType type, std::int64_t rows) {
  std::int64_t bytes = d.out.bytes() + d.rule().state_size() * static_cast<std::int64_t>(sizeof(float));
  for (const Matrix& m : d.projections) bytes += m.bytes();
  for (const Expansion& e : d.expansions) bytes += e.matrix.bytes();
  return {Arrays(Scratch(), d, type, rows).bytes, 0, bytes};
}

CacheLayout cache_layout(const DeltaNet& d, DType type) {
  const DeltaRule rule = d.rule();
  return {{{"conv_state", CachePart::kSequence, {rule.channels(), rule.convolution.taps}, type, false},
           {"state", CachePart::kSequence, {d.heads, d.key_dim, d.value_dim}, DType::kF32, false}}};
}

void plan_projections(Step& step, const DeltaNet& d) {
  const Arrays arrays(step, d);
  const DType type = step.type();
  std::vector<MatrixOut>& outs = step.stages().outs;
  std::deque<RankProducts>& products = step.stages().expansions;
  std::int64_t column = 0, before = 0;
  outs.clear();
  for (const Matrix& m : d.projections) {
    outs.push_back({&m, at(arrays.projected, column, type), d.width(), type});
    column += m.columns;
  }
  while (products.size() < d.expansions.size()) products.emplace_back();
  for (std::size_t i = 0; i < d.expansions.size(); ++i) {
    const Matrix& m = d.expansions[i].matrix;
    const MatrixOut out{&m, at(arrays.projected, column, type), d.width(), type};
    products[i].plan(step.kernels(), &out, 1, at(arrays.expanded, before, type), type, step.count(), step.threads(),
                     step.model().group);
    column += m.columns;
    before += m.depth * step.count();
  }
  step.plan_inputs();
}

void plan_mixer(Step& step, const DeltaNet& d, const LayerCache& cache) {
  const Arrays arrays(step, d);
  const auto rows_of = [&](const HeadColumns& c) {
    return HeadRows{at(arrays.projected, c.first, step.type()), d.width(), c.group, c.group_stride, c.head_stride};
  };
  DeltaRuleCall call{};
  call.rule = d.rule();
  call.type = step.type();
  call.sequences = step.sequences();
  call.queries = rows_of(d.queries);
  call.keys = rows_of(d.keys);
  call.values = rows_of(d.values);
  call.gates = rows_of(d.gates);
  call.betas = rows_of(d.betas);
  call.decays = rows_of(d.decays);
  call.conv_state = cache.states[0];
  call.state = static_cast<float*>(cache.states[1]);
  call.out = arrays.heads;
  step.stages().delta.plan(step.kernels(), call, step.threads());
  step.plan_output(d.out, arrays.heads);
}

void run_mixer(Step& step, Worker& worker, const DeltaNet& d, std::size_t layer) {
  const Arrays arrays(step, d);
  step.clear_padding(worker);
  step.project(worker);
  expand(step, worker, d, arrays);
  if (worker.index == 0) step.plan_layer(layer);
  step.end_stage(worker, StepPart::kRows);
  step.stages().delta.run(worker);
  step.end_stage(worker, StepPart::kAttention);
  step.finish_mixer(worker);
}

}  // namespace cpumoe
