// Multi-head latent attention (MLA) in its absorbed form.
#include <algorithm>

#include "decoder/attention.h"
#include "decoder/check.h"
#include "decoder/mixer.h"
#include "decoder/step.h"
#include "runtime/check.h"

namespace cpumoe {
namespace {

// Rows that are attended at a time, because absorbed queries take memory, and rows of one work item.
constexpr std::int64_t kRowsAtOnce = 256, kItemRows = 16;

// Columns of a row of projections: queries, then the latent and the rotated part of the key.
std::int64_t width_of(const Mla& m) { return m.query_width() + m.cached_dim(); }

// The mixer's memory.
struct Arrays : HeadArrays {
  Arrays(Scratch scratch, const Mla& m, DType type, std::int64_t rows) {
    const std::int64_t at_once = std::min(rows, kRowsAtOnce);
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

// kv_b_proj of a head: [nope_dim + value_dim, kv_lora_rank], keys first.
const std::uint8_t* expansion_of(const Mla& m, std::int64_t head, DType type) {
  return at(m.expansion.data, head * (m.nope_dim + m.value_dim) * m.kv_lora_rank, type);
}

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

// Queries of a head times kv_b_proj's key part, which then attend to latents: `count` rows from first + row on.
void absorb(const Step& step, const Worker& worker, const Mla& m, const Arrays& arrays, std::int64_t head,
            std::int64_t first, std::int64_t row, std::int64_t count) {
  const Kernels& k = step.kernels();
  const DType type = step.type();
  const std::int64_t dim = m.head_dim(), rank = m.kv_lora_rank;
  float *queries = step.values_of(worker), *absorbed = queries + count * dim + 16;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t r = first + row + i;
    float* query = queries + i * dim;
    k.load_row(at(arrays.projected, r * width_of(m) + head * dim, type), type, static_cast<int>(dim), query);
    rotate(step, m.rope, step.row_at(r), query + m.nope_dim);
    scale_query(m, step.row_at(r), query, dim);
  }
  k.sum_rows({queries, static_cast<int>(count), dim, expansion_of(m, head, type), type, rank, m.nope_dim, 0,
              static_cast<int>(rank), absorbed, rank});
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint8_t* out = at(arrays.absorbed, ((row + i) * m.heads + head) * m.cached_dim(), type);
    k.store_row(absorbed + i * rank, rank, type, out);
    k.store_row(queries + i * dim + m.nope_dim, m.rope_dim, type, at(out, rank, type));
  }
}

// Weighted sums of latents times kv_b_proj's value part.
void make_values(const Step& step, const Worker& worker, const Mla& m, const Arrays& arrays, std::int64_t head,
                 std::int64_t first, std::int64_t row, std::int64_t count) {
  const Kernels& k = step.kernels();
  const DType type = step.type();
  const std::int64_t rank = m.kv_lora_rank;
  float *sums = step.values_of(worker), *values = sums + count * rank + 16;
  for (std::int64_t i = 0; i < count; ++i) {
    k.load_row(at(arrays.latent_sums, ((row + i) * m.heads + head) * rank, type), type, static_cast<int>(rank),
               sums + i * rank);
  }
  k.dot_rows({sums, static_cast<int>(count), rank, at(expansion_of(m, head, type), m.nope_dim * rank, type), type, rank,
              0, m.value_dim, values, m.value_dim});
  for (std::int64_t i = 0; i < count; ++i) {
    k.store_row(values + i * m.value_dim, m.value_dim, type,
                at(arrays.heads, ((first + row + i) * m.heads + head) * m.value_dim, type));
  }
}

// Some of `rows` rows of one head, in shares: body(head, first row, rows).
template <class Body>
void each_item(const Worker& worker, const Mla& m, std::int64_t rows, Body&& body) {
  const std::int64_t pieces = (rows + kItemRows - 1) / kItemRows, items = m.heads * pieces;
  for (std::int64_t i = worker.share(items); i < worker.next_share(items); ++i) {
    const std::int64_t row = i % pieces * kItemRows;
    body(i / pieces, row, std::min(kItemRows, rows - row));
  }
}

// Attention of rows [first, first + rows) over latents.
void plan_attention(Step& step, const Mla& m, const Arrays& arrays, const LayerCache& cache, std::int64_t first,
                    std::int64_t rows) {
  CachedAttentionCall call = attention_call(step, m, cache, cache.tokens[0], cache.tokens[0], first, rows);
  call.kv_heads = 1;
  call.depth = m.cached_dim();
  call.value_depth = m.kv_lora_rank;
  call.query = arrays.absorbed;
  call.query_stride = m.heads * call.depth;
  call.query_head_stride = call.depth;
  call.out = arrays.latent_sums;
  call.out_stride = m.heads * call.value_depth;
  step.stages().attention.plan(step.kernels(), call, step.threads());
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
                 "heads have ", m.nope_dim, " + ", m.rope_dim, " values; 1 to ", kMaxRotated, " are accepted");
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
  const std::int64_t item = kItemRows * (m.head_dim() + m.kv_lora_rank + m.value_dim + 48);
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

void plan_mixer(Step& step, const Mla& m, const LayerCache&) { step.plan_output(m.out, Arrays(step, m).result(m)); }

void run_mixer(Step& step, Worker& worker, const Mla& m, std::size_t layer) {
  const Arrays arrays(step, m);
  const LayerCache& cache = step.cache(layer);
  step.project(worker);
  make_queries(step, worker, m, arrays);
  step.each_row(worker, [&](std::int64_t r) { make_latent(step, worker, m, cache, arrays.projected, r); });
  if (worker.index == 0) step.plan_layer(layer);
  step.end_stage(worker, StepPart::kRows);
  for (std::int64_t first = 0; first < step.count(); first += kRowsAtOnce) {
    const std::int64_t rows = std::min(kRowsAtOnce, step.count() - first);
    each_item(worker, m, rows, [&](std::int64_t head, std::int64_t row, std::int64_t count) {
      absorb(step, worker, m, arrays, head, first, row, count);
    });
    if (worker.index == 0) plan_attention(step, m, arrays, cache, first, rows);
    step.end_stage(worker, StepPart::kAttention);
    step.stages().attention.run(worker);
    step.end_stage(worker, StepPart::kAttention);
    each_item(worker, m, rows, [&](std::int64_t head, std::int64_t row, std::int64_t count) {
      make_values(step, worker, m, arrays, head, first, row, count);
    });
    step.end_stage(worker, StepPart::kAttention);
  }
  finish_heads(step, worker, m, arrays);
}

}  // namespace cpumoe
