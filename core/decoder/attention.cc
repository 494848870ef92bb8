#include "decoder/step.h"

#include <algorithm>
#include <cmath>

namespace cpumoe {
namespace {

// Keys and values in a cache are this or larger, or 0: ops/attention.h.
constexpr float kSmallestCached = 0x1p-60f;

}  // namespace

void Decoder::Round::plan_attention(const AttentionPart& a, const LayerCache& cache, std::int64_t first,
                                    std::int64_t count) {
  const auto sequences = static_cast<std::int64_t>(step_.seen.size());
  s_.sequences.resize(step_.seen.size());
  for (std::int64_t i = 0; i < sequences; ++i) {
    // Counted from place 0, so that parts are cut at the same places wherever a cache begins; nothing is read before
    // its first place. Pages count from the first one.
    const std::int64_t sequence = cache.page_tokens == 0 ? i : 0;
    s_.sequences[static_cast<std::size_t>(i)] = {
        cached_at(cache, cache.keys, cache.keys.offset(sequence, 0, -cache.first_place)),
        cached_at(cache, cache.values, cache.values.offset(sequence, 0, -cache.first_place))};
  }
  s_.attention_rows.resize(static_cast<std::size_t>(count));
  for (std::int64_t r = 0; r < count; ++r) {
    const StepRow& row = step_.rows[static_cast<std::size_t>(first_ + first + r)];
    std::int64_t seen = step_.seen[static_cast<std::size_t>(row.sequence)];
    if (a.window > 0) seen = std::max(seen, row.place - a.window + 1);
    seen = std::max(seen, cache.first_place);
    s_.attention_rows[static_cast<std::size_t>(r)] = {row.sequence, std::min(seen, row.place + 1), row.place + 1};
  }
  CachedAttentionCall call{};
  call.type = type_;
  call.rows = count;
  call.heads = a.heads;
  call.kv_heads = a.kv_heads;
  call.depth = a.depth;
  call.value_depth = a.value_depth;
  call.query = projected_;
  call.query_stride = width_of(a);
  call.query_head_stride = a.query_stride();
  call.out = attended_;
  if (a.latent.has_value()) {
    call.depth = a.latent->depth();
    call.value_depth = a.latent->rank;
    call.query = latent_queries_;
    call.query_stride = a.heads * call.depth;
    call.query_head_stride = call.depth;
    call.out = latent_sums_;
  }
  call.sequences = s_.sequences.data();
  call.row = s_.attention_rows.data();
  call.key_token_stride = cache.keys.token_stride;
  call.key_head_stride = cache.keys.head_stride;
  call.value_token_stride = cache.values.token_stride;
  call.value_head_stride = cache.values.head_stride;
  call.page_tokens = cache.page_tokens;
  call.key_page_stride = cache.keys.sequence_stride;
  call.value_page_stride = cache.values.sequence_stride;
  call.pages = cache.pages;
  call.records = cache.records;
  call.scale = a.scale;
  call.softcap = a.softcap;
  call.sinks = a.sinks;
  call.out_stride = a.heads * call.value_depth;
  s_.attention.plan(k_, call, threads_);
}

void Decoder::Round::make_heads(const Worker& worker, const AttentionPart& a, const LayerCache& cache) {
  const std::int64_t heads = a.heads + 2 * a.kv_heads;
  if (a.norms_whole_rows) {
    each_row(worker, [&](std::int64_t r) {
      std::uint8_t* row = at(projected_, r * width_of(a), type_);
      if (a.query_norm) normalize_into(row, a.query_norm, row);
      std::uint8_t* keys = at(row, a.query_width(), type_);
      if (a.key_norm) normalize_into(keys, a.key_norm, keys);
      for (std::int64_t head = 0; head < heads; ++head) make_head(worker, a, cache, r, head);
    });
    return;
  }
  for (std::int64_t i = worker.share(count_ * heads); i < worker.next_share(count_ * heads); ++i) {
    make_head(worker, a, cache, i / heads, i % heads);
  }
}

void Decoder::Round::make_head(const Worker& worker, const AttentionPart& a, const LayerCache& cache, std::int64_t r,
                               std::int64_t head) {
  const StepRow& row = step_.rows[static_cast<std::size_t>(first_ + r)];
  const bool is_query = head < a.heads, is_key = !is_query && head < a.heads + a.kv_heads;
  const std::int64_t depth = is_query || is_key ? a.depth : a.value_depth;
  const std::int64_t before = std::min(head, a.heads) * a.query_stride() +
                              std::clamp<std::int64_t>(head - a.heads, 0, a.kv_heads) * a.depth +
                              std::max<std::int64_t>(head - a.heads - a.kv_heads, 0) * a.value_depth;
  std::uint8_t* x = at(projected_, r * width_of(a) + before, type_);
  float* values = values_of(worker);
  if (is_query || is_key) {
    const Norm& norm = is_query ? a.query_norm : a.key_norm;
    const bool normed = norm && !a.norms_whole_rows;
    if (normed && !a.norms_after_rotary) normalize_into(x, norm, x);
    if (a.rotary >= 0) {
      k_.load_row(x, type_, static_cast<int>(depth), values);
      rotate(a, row, values);
      k_.store_row(values, depth, type_, x);
    }
    if (normed && a.norms_after_rotary) normalize_into(x, norm, x);
    if (is_query && a.query_factors != nullptr) {
      k_.load_row(x, type_, static_cast<int>(depth), values);
      scale_query(a, row, values);
      k_.store_row(values, depth, type_, x);
    }
  }
  if (is_query) return;
  k_.load_row(x, type_, static_cast<int>(depth), values);
  for (std::int64_t i = 0; !is_key && a.value_factor != 1.0f && i < depth; ++i) values[i] *= a.value_factor;
  keep(cache, is_key ? cache.keys : cache.values, row, (head - a.heads) % a.kv_heads, values, depth, x);
}

void Decoder::Round::attend_latents(Worker& worker, const AttentionPart& a, const LayerCache& cache,
                                    std::size_t index) {
  const LatentPart& l = *a.latent;
  if (l.down) {
    each_row(worker, [&](std::int64_t r) {
      std::uint8_t* row = at(down_, r * l.down.columns, type_);
      if (l.down_norm) normalize_into(row, l.down_norm, row);
    });
    s_.queries.prepare(worker);
    end_stage(worker, StepPart::kRows);
    s_.queries.multiply(worker);
    end_stage(worker, StepPart::kProducts);
    gather(worker, s_.queries);
  }
  each_row(worker, [&](std::int64_t r) { keep_latent(worker, a, cache, r); });
  if (worker.index == 0) plan_layer(index);
  end_stage(worker, StepPart::kRows);
  for (std::int64_t first = 0; first < count_; first += kLatentRows) {
    const std::int64_t rows = std::min(kLatentRows, count_ - first);
    each_latent_item(worker, a, rows, [&](std::int64_t head, std::int64_t row, std::int64_t count) {
      absorb(worker, a, head, first, row, count);
    });
    if (worker.index == 0) plan_attention(a, cache, first, rows);
    end_stage(worker, StepPart::kAttention);
    s_.attention.run(worker);
    end_stage(worker, StepPart::kAttention);
    each_latent_item(worker, a, rows, [&](std::int64_t head, std::int64_t row, std::int64_t count) {
      make_values(worker, a, head, first, row, count);
    });
    end_stage(worker, StepPart::kAttention);
  }
}

void Decoder::Round::separate(float* x, std::int64_t width) {
  float pairs[kMostRotated];
  std::copy_n(x, width, pairs);
  for (std::int64_t i = 0; i < width; ++i) x[i % 2 * (width / 2) + i / 2] = pairs[i];
}

void Decoder::Round::rotate(const AttentionPart& a, const StepRow& row, float* x) const {
  if (a.rotary < 0) return;
  const RotaryTable& table = m_.rotary[static_cast<std::size_t>(a.rotary)];
  const std::int64_t angles = row.position * table.width;
  if (a.separated) separate(x, table.width);
  k_.rotate_head({x, table.width, table.cos + angles, table.sin + angles, a.interleaved});
}

void Decoder::Round::scale_query(const AttentionPart& a, const StepRow& row, float* query) {
  if (a.query_factors == nullptr) return;
  const float factor = a.query_factors[row.position];
  for (std::int64_t i = 0; i < a.depth; ++i) query[i] *= factor;
}

void Decoder::Round::keep_latent(const Worker& worker, const AttentionPart& a, const LayerCache& cache,
                                 std::int64_t r) {
  const LatentPart& l = *a.latent;
  const StepRow& row = step_.rows[static_cast<std::size_t>(first_ + r)];
  std::uint8_t* x = at(projected_, r * width_of(a) + a.query_width(), type_);
  if (l.latent_norm) normalize_into(x, l.latent_norm, x);
  float* values = values_of(worker);
  k_.load_row(x, type_, static_cast<int>(l.depth()), values);
  rotate(a, row, values + l.rank);
  keep(cache, cache.keys, row, 0, values, l.depth(), x);
}

std::uint8_t* Decoder::Round::cached_at(const LayerCache& cache, const CachedHeads& heads, std::int64_t offset) const {
  return cache.records ? static_cast<std::uint8_t*>(heads.data) + offset : at(heads.data, offset, type_);
}

void Decoder::Round::keep(const LayerCache& cache, const CachedHeads& heads, const StepRow& row, std::int64_t head,
                          float* values, std::int64_t depth, std::uint8_t* rounded) const {
  std::uint8_t* to = cached_at(cache, heads, cache.offset(heads, row.sequence, head, row.place));
  flush(values, depth);
  k_.store_row(values, depth, type_, cache.records ? rounded : to);
  if (!cache.records) return;
  // Of numbers as a cache of floats has them: what comes back in the type gives the same record then.
  k_.load_row(rounded, type_, static_cast<int>(depth), values);
  k_.cache_records.write(values, depth, to);
}

void Decoder::Round::flush(float* values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) values[i] = std::fabs(values[i]) < kSmallestCached ? 0.0f : values[i];
}

const std::uint8_t* Decoder::Round::expansion_of(const AttentionPart& a, std::int64_t head) const {
  return at(a.latent->expansion, head * (a.latent->nope + a.value_depth) * a.latent->rank, type_);
}

void Decoder::Round::absorb(const Worker& worker, const AttentionPart& a, std::int64_t head, std::int64_t first,
                            std::int64_t row, std::int64_t count) {
  const LatentPart& l = *a.latent;
  float *queries = values_of(worker), *absorbed = queries + count * a.depth + 16;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t r = first + row + i;
    float* query = queries + i * a.depth;
    k_.load_row(at(projected_, r * width_of(a) + head * a.depth, type_), type_, static_cast<int>(a.depth), query);
    const StepRow& step_row = step_.rows[static_cast<std::size_t>(first_ + r)];
    rotate(a, step_row, query + l.nope);
    scale_query(a, step_row, query);
  }
  k_.sum_rows({queries, static_cast<int>(count), a.depth, expansion_of(a, head), type_, l.rank, l.nope, 0,
               static_cast<int>(l.rank), absorbed, l.rank});
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint8_t* out = at(latent_queries_, ((row + i) * a.heads + head) * l.depth(), type_);
    k_.store_row(absorbed + i * l.rank, l.rank, type_, out);
    k_.store_row(queries + i * a.depth + l.nope, l.rotated, type_, at(out, l.rank, type_));
  }
}

void Decoder::Round::make_values(const Worker& worker, const AttentionPart& a, std::int64_t head, std::int64_t first,
                                 std::int64_t row, std::int64_t count) {
  const LatentPart& l = *a.latent;
  float *sums = values_of(worker), *values = sums + count * l.rank + 16;
  for (std::int64_t i = 0; i < count; ++i) {
    k_.load_row(at(latent_sums_, ((row + i) * a.heads + head) * l.rank, type_), type_, static_cast<int>(l.rank),
                sums + i * l.rank);
  }
  k_.dot_rows({sums, static_cast<int>(count), l.rank, at(expansion_of(a, head), l.nope * l.rank, type_), type_, l.rank,
               0, a.value_depth, values, a.value_depth});
  for (std::int64_t i = 0; i < count; ++i) {
    k_.store_row(values + i * a.value_depth, a.value_depth, type_,
                 at(attended_, ((first + row + i) * a.heads + head) * a.value_depth, type_));
  }
}

void Decoder::Round::gate(const Worker& worker, const AttentionPart& a) {
  if (!a.gate && !a.gated_queries) return;
  const std::int64_t width = a.heads * a.value_depth, gates = a.gate ? a.gate.columns : width, each = width / gates;
  each_row(worker, [&](std::int64_t r) {
    std::uint8_t* row = at(attended_, r * width, type_);
    float *values = values_of(worker), *factors = values + (width + 15) / 16 * 16;
    if (a.gate) {
      k_.load_row(at(gates_, r * gates, type_), type_, static_cast<int>(gates), factors);
    } else {
      for (std::int64_t head = 0; head < a.heads; ++head) {
        const std::int64_t behind = r * width_of(a) + head * a.query_stride() + a.depth;
        k_.load_row(at(projected_, behind, type_), type_, static_cast<int>(a.depth), factors + head * a.depth);
      }
    }
    k_.load_row(row, type_, static_cast<int>(width), values);
    k_.score(factors, static_cast<int>(gates), Scoring::kSigmoid);
    for (std::int64_t i = 0; i < width; ++i) values[i] *= factors[i / each];
    k_.store_row(values, width, type_, row);
  });
}

}  // namespace cpumoe
