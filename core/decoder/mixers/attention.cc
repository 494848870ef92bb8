#include "decoder/mixers/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder/check.h"
#include "runtime/check.h"

namespace cpumoe {
namespace {

std::uint8_t* cached_at(const LayerCache& cache, const CachedHeads& heads, std::int64_t offset, DType type) {
  return cache.is_int8 ? static_cast<std::uint8_t*>(heads.data) + offset : at(heads.data, offset, type);
}

// The first values of all pairs of neighbours, then the second ones.
void separate(float* x, std::int64_t width) {
  float pairs[kMaxRotated];
  std::copy_n(x, width, pairs);
  for (std::int64_t i = 0; i < width; ++i) x[i % 2 * (width / 2) + i / 2] = pairs[i];
}

// Brings the heads of all ranks together. Ends with rows in the shares of each worker.
void gather_heads(Step& step, Worker& worker, const Attention& a, const HeadArrays& arrays) {
  if (a.ranks == 1) return;
  worker.barrier->wait();  // gates are applied in shares of rows
  const std::int64_t width = a.heads * a.value_dim * size_of(step.type()), count = step.count();
  if (worker.index == 0) step.model().group->gather(arrays.heads, count * width, arrays.gathered);
  step.end_stage(worker, StepPart::kExchange);
  step.each_row(worker, [&](std::int64_t r) {
    for (int rank = 0; rank < a.ranks; ++rank) {
      std::memcpy(arrays.all_heads + (r * a.ranks + rank) * width, arrays.gathered + (rank * count + r) * width,
                  static_cast<std::size_t>(width));
    }
  });
}

}  // namespace

void rotate(const Step& step, const Rope& rope, const StepRow& row, float* x) {
  if (rope.table < 0) return;
  const RopeTable& table = step.model().rope[static_cast<std::size_t>(rope.table)];
  if (rope.separated) separate(x, table.width());
  step.kernels().rotate_head({x, table.width(), table.angles(table.cos, row.position),
                              table.angles(table.sin, row.position), rope.interleaved});
}

void scale_query(const Attention& a, const StepRow& row, float* query, std::int64_t count) {
  if (a.query_factors.empty()) return;
  const float factor = a.query_factors[static_cast<std::size_t>(row.position)];
  for (std::int64_t i = 0; i < count; ++i) query[i] *= factor;
}

void write_cache(const Step& step, const LayerCache& cache, const CachedHeads& heads, const StepRow& row,
                 std::int64_t head, float* values, std::int64_t dim, std::uint8_t* rounded) {
  const Kernels& k = step.kernels();
  const DType type = step.type();
  std::uint8_t* to = cached_at(cache, heads, cache.offset(heads, row.sequence, head, row.place), type);
  for (std::int64_t i = 0; i < dim; ++i) values[i] = std::fabs(values[i]) < kSmallestCached ? 0.0f : values[i];
  k.store_row(values, dim, type, cache.is_int8 ? rounded : to);
  if (!cache.is_int8) return;
  // Quantised from the numbers that a cache of floats would have, so that dequantising and quantising again changes
  // nothing.
  k.load_row(rounded, type, static_cast<int>(dim), values);
  k.cache_records.write(values, dim, to);
}

CachedAttentionCall attention_call(Step& step, const Attention& a, const LayerCache& cache, const CachedHeads& keys,
                                   const CachedHeads& values) {
  MixerStages& stages = step.stages();
  const std::vector<std::int64_t>& begins = step.input().seen;
  stages.sequences.resize(begins.size());
  for (std::size_t i = 0; i < begins.size(); ++i) {
    // Counted from place 0, so that parts are cut at the same places wherever a cache begins; nothing is read before
    // its first place. Pages count from the first one.
    const std::int64_t sequence = cache.page_tokens == 0 ? static_cast<std::int64_t>(i) : 0;
    stages.sequences[i] = {cached_at(cache, keys, keys.offset(sequence, 0, -cache.first_place), step.type()),
                           cached_at(cache, values, values.offset(sequence, 0, -cache.first_place), step.type())};
  }
  stages.attention_rows.resize(static_cast<std::size_t>(step.count()));
  for (std::int64_t r = 0; r < step.count(); ++r) {
    const StepRow& row = step.row_at(r);
    std::int64_t seen = begins[static_cast<std::size_t>(row.sequence)];
    if (a.window > 0) seen = std::max(seen, row.place - a.window + 1);
    seen = std::max(seen, cache.first_place);
    stages.attention_rows[static_cast<std::size_t>(r)] = {row.sequence, std::min(seen, row.place + 1), row.place + 1};
  }
  CachedAttentionCall call{};
  call.type = step.type();
  call.rows = step.count();
  call.heads = a.heads;
  call.sequences = stages.sequences.data();
  call.row = stages.attention_rows.data();
  call.key_token_stride = keys.token_stride;
  call.key_head_stride = keys.head_stride;
  call.value_token_stride = values.token_stride;
  call.value_head_stride = values.head_stride;
  call.page_tokens = cache.page_tokens;
  call.key_page_stride = keys.sequence_stride;
  call.value_page_stride = values.sequence_stride;
  call.pages = cache.pages;
  call.records = cache.is_int8;
  call.scale = a.scale;
  call.softcap = a.softcap;
  call.sinks = a.sinks.data();
  return call;
}

void HeadArrays::take(Scratch& scratch, const Attention& a, DType type, std::int64_t rows) {
  const std::int64_t width = a.heads * a.value_dim, all_width = a.ranks > 1 ? a.ranks * width : 0;
  gates = scratch.take(rows * a.gate.columns, type);
  heads = scratch.take(rows * width, type);
  gathered = scratch.take(rows * all_width, type);
  all_heads = scratch.take(rows * all_width, type);
}

void finish_heads(Step& step, Worker& worker, const Attention& a, const HeadArrays& arrays) {
  if (a.gate) {
    apply_gates(step, worker, a, a.gate.columns, arrays.heads, [&](std::int64_t r, float* factors) {
      step.kernels().load_row(at(arrays.gates, r * a.gate.columns, step.type()), step.type(),
                              static_cast<int>(a.gate.columns), factors);
    });
  }
  gather_heads(step, worker, a, arrays);
  step.finish_mixer(worker);
}

void check_attention(const Attention& a, const DecoderModel& model) {
  CPUMOE_REQUIRE(a.heads >= 1 && a.heads <= kMaxHeads, "heads=", a.heads, "; 1 to ", kMaxHeads, " are accepted");
  CPUMOE_REQUIRE(a.value_dim >= 1 && a.value_dim <= kMaxRotated, "value_dim=", a.value_dim, "; 1 to ", kMaxRotated,
                 " are accepted");
  CPUMOE_REQUIRE(a.ranks == 1 || a.ranks == model.group_ranks(), "mixer.ranks=", a.ranks, "; 1 or the ranks of group, ",
                 model.group_ranks(), ", are accepted");
  if (a.gate) {
    CPUMOE_REQUIRE(a.gate.columns == a.heads || a.gate.columns == a.heads * a.value_dim, "gate is [", a.gate.columns,
                   ", ", a.gate.depth, "]; [", a.heads, ", ", model.hidden(), "] or [", a.heads * a.value_dim, ", ",
                   model.hidden(), "] is accepted");
    check_matrix(a.gate, model, a.gate.columns, model.hidden(), "gate");
  }
  check_matrix(a.out, model, model.hidden(), a.ranks * a.heads * a.value_dim, "out");
  check_count(a.sinks.size(), a.heads, "sinks");
  CPUMOE_REQUIRE(a.window >= 0, "window=", a.window, "; 0 (none) or more is accepted");
}

void check_rope(const Attention& a, const DecoderModel& model, std::int64_t max_width) {
  const Rope& rope = a.rope;
  CPUMOE_REQUIRE(rope.table < static_cast<int>(model.rope.size()), "rope.table=", rope.table, ", but there are ",
                 model.rope.size(), " tables");
  if (rope.table < 0) return;
  const std::int64_t width = model.rope[static_cast<std::size_t>(rope.table)].width();
  CPUMOE_REQUIRE(width % 2 == 0 && width <= std::min(max_width, kMaxRotated), "rope.table is ", width, " wide for ",
                 max_width, " values");
  CPUMOE_REQUIRE(!rope.separated || !rope.interleaved, "rope.separated excludes rope.interleaved");
}

}  // namespace cpumoe
