// Grouped-query attention.
#include <algorithm>

#include "decoder/check.h"
#include "decoder/mixer.h"
#include "decoder/mixers/attention.h"
#include "decoder/step.h"
#include "runtime/check.h"

namespace cpumoe {
namespace {

// Columns of a row of projections: queries (each with its gate, if they have gates), keys, values.
std::int64_t width_of(const Gqa& g) { return g.query_width() + g.kv_heads * (g.head_dim + g.value_dim); }

// The mixer's memory.
struct Arrays : HeadArrays {
  Arrays(Scratch scratch, const Gqa& g, DType type, std::int64_t rows) {
    projected = scratch.take(rows * width_of(g), type);
    take(scratch, g, type, rows);
    bytes = scratch.bytes();
  }
  Arrays(const Step& step, const Gqa& g) : Arrays(step.scratch(), g, step.type(), step.count()) {}

  std::uint8_t* projected;
  std::int64_t bytes;
};

// Norm and RoPE of a query or key head, scaling of a query; keys and values are written to the cache.
void make_head(const Step& step, const Worker& worker, const Gqa& g, const LayerCache& cache, std::uint8_t* projected,
               std::int64_t r, std::int64_t head) {
  const Kernels& k = step.kernels();
  const DType type = step.type();
  const StepRow& row = step.row_at(r);
  const bool is_query = head < g.heads, is_key = !is_query && head < g.heads + g.kv_heads;
  const std::int64_t dim = is_query || is_key ? g.head_dim : g.value_dim;
  const std::int64_t before = std::min(head, g.heads) * g.query_stride() +
                              std::clamp<std::int64_t>(head - g.heads, 0, g.kv_heads) * g.head_dim +
                              std::max<std::int64_t>(head - g.heads - g.kv_heads, 0) * g.value_dim;
  std::uint8_t* x = at(projected, r * width_of(g) + before, type);
  float* values = step.values_of(worker);
  if (is_query || is_key) {
    const Norm& norm = is_query ? g.query_norm : g.key_norm;
    const bool normed = norm && !g.norms_whole_rows;
    if (normed && !g.norms_after_rope) step.normalize_into(x, norm, x);
    if (g.rope.table >= 0) {
      k.load_row(x, type, static_cast<int>(dim), values);
      rotate(step, g.rope, row, values);
      k.store_row(values, dim, type, x);
    }
    if (normed && g.norms_after_rope) step.normalize_into(x, norm, x);
    if (is_query && !g.query_factors.empty()) {
      k.load_row(x, type, static_cast<int>(dim), values);
      scale_query(g, row, values, dim);
      k.store_row(values, dim, type, x);
    }
  }
  if (is_query) return;
  k.load_row(x, type, static_cast<int>(dim), values);
  for (std::int64_t i = 0; !is_key && g.value_factor != 1.0f && i < dim; ++i) values[i] *= g.value_factor;
  write_cache(step, cache, cache.tokens[is_key ? 0 : 1], row, (head - g.heads) % g.kv_heads, values, dim, x);
}

void make_heads(const Step& step, const Worker& worker, const Gqa& g, const LayerCache& cache,
                std::uint8_t* projected) {
  const std::int64_t heads = g.heads + 2 * g.kv_heads, items = step.count() * heads;
  if (!g.norms_whole_rows) {
    for (std::int64_t i = worker.share(items); i < worker.next_share(items); ++i) {
      make_head(step, worker, g, cache, projected, i / heads, i % heads);
    }
    return;
  }
  step.each_row(worker, [&](std::int64_t r) {
    std::uint8_t* row = at(projected, r * width_of(g), step.type());
    if (g.query_norm) step.normalize_into(row, g.query_norm, row);
    std::uint8_t* keys = at(row, g.query_width(), step.type());
    if (g.key_norm) step.normalize_into(keys, g.key_norm, keys);
    for (std::int64_t head = 0; head < heads; ++head) make_head(step, worker, g, cache, projected, r, head);
  });
}

// Multiplies heads by the sigmoids of the gates that follow the query heads.
void apply_query_gates(const Step& step, const Worker& worker, const Gqa& g, const Arrays& arrays) {
  apply_gates(step, worker, g, g.heads * g.value_dim, arrays.heads, [&](std::int64_t r, float* factors) {
    for (std::int64_t head = 0; head < g.heads; ++head) {
      const std::int64_t gate = r * width_of(g) + head * g.query_stride() + g.head_dim;
      step.kernels().load_row(at(arrays.projected, gate, step.type()), step.type(), static_cast<int>(g.head_dim),
                              factors + head * g.head_dim);
    }
  });
}

}  // namespace

void check_mixer(const Gqa& g, const DecoderModel& model) {
  check_attention(g, model);
  CPUMOE_REQUIRE(g.kv_heads >= 1 && g.heads % g.kv_heads == 0, "heads=", g.heads, " and kv_heads=", g.kv_heads,
                 "; a multiple is accepted");
  CPUMOE_REQUIRE(g.head_dim >= 1 && g.head_dim <= kMaxRotated, "head_dim=", g.head_dim, "; 1 to ", kMaxRotated,
                 " are accepted");
  const std::int64_t queries = g.heads * g.head_dim, keys = g.kv_heads * g.head_dim, values = g.kv_heads * g.value_dim;
  CPUMOE_REQUIRE(static_cast<bool>(g.key) == static_cast<bool>(g.value), "key and value must both be given, or none");
  check_matrix(g.query, model, g.key ? g.query_width() : queries + keys + values, model.hidden(), "query");
  CPUMOE_REQUIRE(!g.gated_queries || (g.key && !g.gate && g.value_dim == g.head_dim && !g.norms_whole_rows),
                 "gated_queries needs key, value_dim=head_dim, no gate and no norms_whole_rows");
  if (g.key) {
    check_matrix(g.key, model, keys, model.hidden(), "key");
    check_matrix(g.value, model, values, model.hidden(), "value");
  }
  check_norm(g.query_norm, g.norms_whole_rows ? queries : g.head_dim, "query_norm");
  check_norm(g.key_norm, g.norms_whole_rows ? keys : g.head_dim, "key_norm");
  CPUMOE_REQUIRE(!(g.norms_whole_rows && g.norms_after_rope), "norms_after_rope excludes norms_whole_rows");
  check_rope(g, model, g.head_dim);
}

MixerSizes sizes_of(const Gqa& g, DType type, std::int64_t rows) {
  return {Arrays(Scratch(), g, type, rows).bytes, std::max(width_of(g), gate_floats(g)),
          g.query.bytes() + g.key.bytes() + g.value.bytes() + g.out.bytes() + g.gate.bytes()};
}

CacheLayout cache_layout(const Gqa& g, DType type) {
  return {{{"keys", CachePart::kToken, {g.kv_heads, g.head_dim}, type, true},
           {"values", CachePart::kToken, {g.kv_heads, g.value_dim}, type, true}}};
}

void plan_projections(Step& step, const Gqa& g) {
  const Arrays arrays(step, g);
  const DType type = step.type();
  std::vector<MatrixOut>& outs = step.stages().outs;
  const std::int64_t width = width_of(g), keys = g.query_width(), values = keys + g.kv_heads * g.head_dim;
  outs.clear();
  if (g.key) {
    outs.push_back({&g.key, at(arrays.projected, keys, type), width, type});
    outs.push_back({&g.value, at(arrays.projected, values, type), width, type});
  }
  outs.push_back({&g.query, arrays.projected, width, type});
  if (g.gate) outs.push_back({&g.gate, arrays.gates, g.gate.columns, type});
  step.plan_inputs();
}

void plan_mixer(Step& step, const Gqa& g, const LayerCache& cache) {
  const Arrays arrays(step, g);
  CachedAttentionCall call = attention_call(step, g, cache, cache.tokens[0], cache.tokens[1]);
  call.kv_heads = g.kv_heads;
  call.depth = g.head_dim;
  call.value_depth = g.value_dim;
  call.query = arrays.projected;
  call.query_stride = width_of(g);
  call.query_head_stride = g.query_stride();
  call.out = arrays.heads;
  call.out_stride = g.heads * g.value_dim;
  step.stages().attention.plan(step.kernels(), call, step.threads());
  step.plan_output(g.out, arrays.result(g));
}

void run_mixer(Step& step, Worker& worker, const Gqa& g, std::size_t layer) {
  const Arrays arrays(step, g);
  step.project(worker);
  make_heads(step, worker, g, step.cache(layer), arrays.projected);
  if (worker.index == 0) step.plan_layer(layer);
  step.end_stage(worker, StepPart::kRows);
  step.stages().attention.run(worker);
  step.end_stage(worker, StepPart::kAttention);
  if (g.gated_queries) apply_query_gates(step, worker, g, arrays);
  finish_heads(step, worker, g, arrays);
}

}  // namespace cpumoe
