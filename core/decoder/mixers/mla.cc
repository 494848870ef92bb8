// Multi-head latent attention (MLA) in its absorbed form.
#include <algorithm>

#include "decoder/check.h"
#include "decoder/mixer.h"
#include "decoder/mixers/attention.h"
#include "decoder/step.h"
#include "runtime/check.h"

namespace cpumoe {
namespace {

// Columns of a row of projections: queries, then the latent and the rotated part of the key.
std::int64_t width_of(const Mla& m) { return m.query_width() + m.cached_dim(); }

// The mixer's memory.
struct Arrays : HeadArrays {
  Arrays(Scratch scratch, const Mla& m, DType type, std::int64_t rows) {
    const std::int64_t at_once = std::min(rows, LatentAttention::kRowsAtOnce);
    projected = scratch.take(rows * width_of(m), type);
    query_down = scratch.take(rows * m.query_down.columns, type);
    absorbed = scratch.take(at_once * m.heads * m.cached_dim(), type);
    latent_sums = scratch.take(at_once * m.heads * m.kv_lora_rank, type);
    take(scratch, m, type, rows);
    bytes = scratch.bytes();
  }
  Arrays(const Step& step, const Mla& m) : Arrays(step.scratch(), m, step.type(), step.count()) {}

  std::uint8_t *projected, *query_down, *absorbed, *latent_sums;
  std::int64_t bytes;
};

// Norm of the latent and RoPE of the key; both are written to the cache.
void make_latent(const Step& step, const Worker& worker, const Mla& m, const LayerCache& cache, std::uint8_t* projected,
                 std::int64_t r) {
  const StepRow& row = step.row_at(r);
  std::uint8_t* x = at(projected, r * width_of(m) + m.query_width(), step.type());
  if (m.latent_norm) step.normalize_into(x, m.latent_norm, x);
  float* values = step.values_of(worker);
  step.kernels().load_row(x, step.type(), static_cast<int>(m.cached_dim()), values);
  rotate(step, m.rope, row, values + m.kv_lora_rank);
  write_cache(step, cache, cache.tokens[0], row, 0, values, m.cached_dim(), x);
}

void make_queries(Step& step, Worker& worker, const Mla& m, const Arrays& arrays) {
  if (!m.query_down) return;
  step.each_row(worker, [&](std::int64_t r) {
    std::uint8_t* row = at(arrays.query_down, r * m.query_down.columns, step.type());
    if (m.query_down_norm) step.normalize_into(row, m.query_down_norm, row);
  });
  step.compute(worker, step.stages().queries);
}

}  // namespace

void check_mixer(const Mla& m, const DecoderModel& model) {
  check_attention(m, model);
  CPUMOE_REQUIRE(m.kv_lora_rank >= 1 && m.kv_lora_rank <= kMaxRotated, "kv_lora_rank=", m.kv_lora_rank, "; 1 to ",
                 kMaxRotated, " are accepted");
  CPUMOE_REQUIRE(m.nope_dim >= 0 && m.rope_dim >= 0 && m.nope_dim <= kMaxRotated && m.rope_dim <= kMaxRotated &&
                     m.head_dim() >= 1 && m.head_dim() <= kMaxRotated,
                 "nope_dim=", m.nope_dim, " and rope_dim=", m.rope_dim, "; sums of 1 to ", kMaxRotated,
                 " are accepted");
  if (m.query_down) {
    check_matrix(m.query_down, model, m.query_down.columns, model.hidden(), "query_down");
    check_norm(m.query_down_norm, m.query_down.columns, "query_down_norm");
  }
  check_matrix(m.query, model, m.query_width(), m.query_down ? m.query_down.columns : model.hidden(), "query");
  check_matrix(m.latent, model, m.cached_dim(), model.hidden(), "latent");
  check_norm(m.latent_norm, m.kv_lora_rank, "latent_norm");
  check_tensor(m.expansion, m.heads * (m.nope_dim + m.value_dim), m.kv_lora_rank, "expansion");
  CPUMOE_REQUIRE(m.expansion.type == model.type(), "expansion has another dtype than hidden states");
  check_rope(m, model, m.rope_dim);
}

MixerSizes sizes_of(const Mla& m, DType type, std::int64_t rows) {
  const std::int64_t item = LatentAttention::thread_floats(m.head_dim(), m.kv_lora_rank, m.value_dim);
  const std::int64_t expansion = m.heads * (m.nope_dim + m.value_dim) * m.kv_lora_rank * size_of(type);
  return {Arrays(Scratch(), m, type, rows).bytes, std::max({width_of(m), gate_floats(m), item}),
          m.query_down.bytes() + m.latent.bytes() + expansion + m.query.bytes() + m.out.bytes() + m.gate.bytes()};
}

CacheLayout cache_layout(const Mla& m, DType type) {
  return {{{"latents", CachePart::kToken, {1, m.cached_dim()}, type, true}}};
}

void plan_projections(Step& step, const Mla& m) {
  const Arrays arrays(step, m);
  const DType type = step.type();
  std::vector<MatrixOut>& outs = step.stages().outs;
  const MatrixOut queries{&m.query, arrays.projected, width_of(m), type};
  outs.assign(1, {&m.latent, at(arrays.projected, m.query_width(), type), width_of(m), type});
  if (m.query_down) {
    outs.push_back({&m.query_down, arrays.query_down, m.query_down.columns, type});
    step.stages().queries.plan(step.kernels(), &queries, 1, arrays.query_down, type, step.count(), step.threads(),
                               step.model().group);
  } else {
    outs.push_back(queries);
  }
  if (m.gate) outs.push_back({&m.gate, arrays.gates, m.gate.columns, type});
  step.plan_inputs();
}

void plan_mixer(Step& step, const Mla& m, const LayerCache& cache) {
  const Arrays arrays(step, m);
  LatentAttentionCall call{};
  call.cached = attention_call(step, m, cache, cache.tokens[0], cache.tokens[0]);
  call.expansion = m.expansion.data;
  call.rank = m.kv_lora_rank;
  call.rope_dim = m.rope_dim;
  call.nope_dim = m.nope_dim;
  call.value_dim = m.value_dim;
  call.out = arrays.heads;
  call.absorbed = arrays.absorbed;
  call.latent_sums = arrays.latent_sums;
  step.stages().latent_attention.plan(step.kernels(), call, step.threads());
  step.plan_output(m.out, arrays.result(m));
}

void run_mixer(Step& step, Worker& worker, const Mla& m, std::size_t layer) {
  const Arrays arrays(step, m);
  const LayerCache& cache = step.cache(layer);
  step.project(worker);
  make_queries(step, worker, m, arrays);
  step.each_row(worker, [&](std::int64_t r) { make_latent(step, worker, m, cache, arrays.projected, r); });
  if (worker.index == 0) step.plan_layer(layer);
  step.end_stage(worker, StepPart::kRows);
  const auto load_query = [&](std::int64_t r, std::int64_t head, float* query) {
    const std::uint8_t* from = at(arrays.projected, r * width_of(m) + head * m.head_dim(), step.type());
    step.kernels().load_row(from, step.type(), static_cast<int>(m.head_dim()), query);
    rotate(step, m.rope, step.row_at(r), query + m.nope_dim);
    scale_query(m, step.row_at(r), query, m.head_dim());
  };
  step.stages().latent_attention.run(worker, step.values_of(worker), load_query,
                                     [&](Worker& w) { step.end_stage(w, StepPart::kAttention); });
  finish_heads(step, worker, m, arrays);
}

}  // namespace cpumoe
