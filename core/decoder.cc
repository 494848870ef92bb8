#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <iterator>
#include <limits>
#include <utility>

#include "cached_attention.h"
#include "crowding.h"
#include "decoder_check.h"
#include "memory.h"
#include "moe.h"
#include "products.h"
#include "route.h"
#include "threads.h"

namespace cpumoe {
namespace {

using Clock = std::chrono::steady_clock;

// Rows for which one thread chooses the experts; more are shared out.
constexpr std::int64_t kFewRows = 16;

// Of latent attention: rows that are attended at a time, whose queries take memory, and those of one work item.
constexpr std::int64_t kLatentRows = 256, kLatentItemRows = 16;

// Keys and values in a cache are this or larger, or 0: cached_attention.h.
constexpr float kSmallestCached = 0x1p-60f;

std::uint8_t* at(void* data, std::int64_t element, DType type) {
  return static_cast<std::uint8_t*>(data) + element * size_of(type);
}
const std::uint8_t* at(const void* data, std::int64_t element, DType type) {
  return static_cast<const std::uint8_t*>(data) + element * size_of(type);
}

// Bytes that a step of so many rows reads, at most; for the number of threads.
std::int64_t work_of(const DecoderModel& model, std::int64_t rows) {
  std::int64_t bytes = model.head.bytes();
  for (const DecoderLayer& layer : model.layers) {
    const AttentionPart& a = layer.attention;
    if (a.latent.has_value()) {
      bytes += a.latent->down.bytes() + a.latent->latent.bytes() +
               a.heads * (a.latent->nope + a.value_depth) * a.latent->rank * size_of(model.type);
    }
    bytes += a.query.bytes() + a.key.bytes() + a.value.bytes() + a.out.bytes() + a.gate.bytes();
    if (layer.delta.has_value()) {
      for (const Matrix& m : layer.delta->projections) bytes += m.bytes();
      for (const DeltaPart::Expansion& e : layer.delta->expansions) bytes += e.matrix.bytes();
      bytes += layer.delta->out.bytes() + layer.delta->rule.state_size() * static_cast<std::int64_t>(sizeof(float));
    }
    if (layer.convolution.has_value()) bytes += layer.convolution->projection.bytes() + layer.convolution->out.bytes();
    if (layer.experts.has_value()) {
      const std::int64_t experts = std::min(rows * layer.experts->router.topk, layer.experts->gate_up.spec.experts);
      bytes += (layer.experts->gate_up.expert_bytes + layer.experts->down.expert_bytes) * experts;
    }
    if (layer.dense.has_value()) {
      bytes += layer.dense->gate.bytes() + layer.dense->up.bytes() + layer.dense->down.bytes();
    }
  }
  return bytes;
}

}  // namespace

RouteCall Router::call(std::int64_t tokens, const float* logits, std::int32_t* ids, float* weights) const {
  RouteCall routing{};
  routing.logits = logits;
  routing.type = DType::kF32;
  routing.tokens = tokens;
  routing.experts = weight.columns;
  routing.topk = topk;
  routing.scoring = scoring;
  routing.score_chosen = score_chosen;
  routing.bias = correction;
  routing.groups = groups;
  routing.topk_groups = topk_groups;
  routing.renormalize = renormalize;
  routing.scale = scale;
  routing.ids = ids;
  routing.weights = weights;
  return routing;
}

std::int64_t DeltaPart::width() const {
  std::int64_t width = 0;
  for (const Matrix& m : projections) width += m.columns;
  for (const Expansion& e : expansions) width += e.matrix.columns;
  return width;
}

struct Decoder::State {
  DecoderModel model;
  std::int64_t most_rows = 0;  // of a round
  Crowding crowding;
  double seconds[kStepParts] = {};

  // Of the rows of a round; hidden states are of the model's type.
  Buffer residual, normed, mixed, projected, attended, gates, latent_queries, latent_sums, down, narrow, dense_in,
      dense_hidden, dense_out, wanted_rows;
  Buffer values, share, logits, ids, weights;
  RowProducts projections, queries, output, router, dense_first, dense_second, head;
  std::deque<RowProducts> expansions;  // as many as a layer has at most
  CachedAttention attention;
  DeltaRuleStage delta;
  MoeStage experts;
  std::vector<CachedSequence> sequences;
  std::vector<AttentionRow> attention_rows;
  std::vector<SequenceRows> sequence_rows;
  std::vector<MatrixOut> outs;
};

// Rows [first, first + count) of a step through all layers. The stages of a layer, with barriers between them:
//   rows (residual, norm, preparation); query, key and value; heads (norms, rotation, cache); attention; output;
//   rows; router and the first linears of a dense block; choice of experts; its last linear; experts.
// Products are planned by the first thread while heads are made; those of experts when their choice is known.
class Decoder::Round {
 public:
  Round(const Kernels& kernels, const Step& step, State& state, std::int64_t first, std::int64_t count, int threads)
      : k_(kernels),
        step_(step),
        s_(state),
        m_(state.model),
        type_(state.model.type),
        first_(first),
        count_(count),
        hidden_(state.model.hidden),
        threads_(threads) {
    std::int64_t projected = 0, attended = 0, inner = 0, experts = 0, topk = 0, latent = 0, latent_sums = 0, down = 0;
    std::int64_t narrow = 0;
    for (const DecoderLayer& layer : m_.layers) {
      const AttentionPart& a = layer.attention;
      projected = std::max(projected, width_of(a));
      attended = std::max(attended, a.heads * a.value_depth);
      if (a.latent.has_value()) {
        latent = std::max(latent, a.heads * a.latent->depth());
        latent_sums = std::max(latent_sums, a.heads * a.latent->rank);
        down = std::max(down, a.latent->down.columns);
        latent_item_ = std::max(latent_item_, kLatentItemRows * (a.depth + a.latent->rank + a.value_depth + 48));
      }
      if (layer.delta.has_value()) {
        projected = std::max(projected, layer.delta->width());
        attended = std::max(attended, layer.delta->rule.heads * layer.delta->rule.value_depth);
        narrow = std::max(narrow, narrow_width(*layer.delta));
      }
      if (layer.convolution.has_value()) {
        projected = std::max(projected, layer.convolution->projection.columns);
        attended = std::max(attended, layer.convolution->out.depth);
      }
      if (layer.dense.has_value()) inner = std::max(inner, layer.dense->down.depth);
      if (!layer.experts.has_value()) continue;
      experts = std::max(experts, layer.experts->gate_up.spec.experts);
      topk = std::max(topk, layer.experts->router.topk);
    }
    const auto rows_of = [&](Buffer& buffer, std::int64_t width) {
      return buffer.get<std::uint8_t>(count * width * size_of(type_));
    };
    residual_ = rows_of(s_.residual, hidden_);
    normed_ = rows_of(s_.normed, hidden_);
    mixed_ = rows_of(s_.mixed, hidden_);
    projected_ = rows_of(s_.projected, projected);
    attended_ = rows_of(s_.attended, attended);
    gates_ = rows_of(s_.gates, attended);
    down_ = rows_of(s_.down, down);
    narrow_ = rows_of(s_.narrow, narrow);
    const std::int64_t latent_rows = std::min(count, kLatentRows);
    latent_queries_ = s_.latent_queries.get<std::uint8_t>(latent_rows * latent * size_of(type_));
    latent_sums_ = s_.latent_sums.get<std::uint8_t>(latent_rows * latent_sums * size_of(type_));
    dense_in_ = rows_of(s_.dense_in, 2 * inner);
    dense_hidden_ = rows_of(s_.dense_hidden, inner);
    dense_out_ = rows_of(s_.dense_out, hidden_);
    values_stride_ = (std::max({hidden_, 2 * inner, projected, 2 * attended, latent_item_}) + 63) / 16 * 16;
    values_ = s_.values.get<float>(threads * values_stride_);
    share_ = s_.share.get<float>(count);
    logits_ = s_.logits.get<float>(count * experts);
    ids_ = s_.ids.get<std::int32_t>(count * topk);
    weights_ = s_.weights.get<float>(count * topk);
    find_sequences();
    if (!m_.layers.empty()) plan_projections(0);
  }

  void run(Worker& worker) {
    start(worker);
    embed(worker);
    const DecoderLayer* before = nullptr;
    for (std::size_t i = 0; i < m_.layers.size(); ++i) {
      const DecoderLayer& layer = m_.layers[i];
      end_block(worker, before);
      normalize(worker, layer.before_attention);
      if (layer.has_states()) forget_padding(worker);
      s_.projections.prepare(worker);
      end_stage(worker, StepPart::kRows);
      s_.projections.multiply(worker);
      end_stage(worker, StepPart::kProducts);
      if (layer.delta.has_value()) {
        run_delta(worker, *layer.delta, i);
      } else if (layer.convolution.has_value()) {
        convolve(worker, *layer.convolution, i);
      } else if (layer.attention.latent.has_value()) {
        attend_latents(worker, layer.attention, step_.caches[i], i);
      } else {
        make_heads(worker, layer.attention, step_.caches[i]);
        if (worker.index == 0) plan_layer(i);
        end_stage(worker, StepPart::kRows);
        s_.attention.run(worker);
        end_stage(worker, StepPart::kAttention);
      }
      gate(worker, layer.attention);
      s_.output.prepare(worker);
      end_stage(worker, StepPart::kRows);
      s_.output.multiply(worker);
      end_stage(worker, StepPart::kProducts);
      add_to_residual(worker, mixed_, layer.after_attention, layer.residual_factor);
      normalize(worker, layer.before_block);
      run_block(worker, layer);
      before = &layer;
    }
    end_block(worker, before);
    finish(worker);
  }

 private:
  // Of a row of `projected_`.
  static std::int64_t width_of(const AttentionPart& a) {
    if (a.latent.has_value()) return a.query_width() + a.latent->depth();
    return a.query_width() + a.kv_heads * (a.depth + a.value_depth);
  }

  // Of what the expansions of a layer are made of.
  static std::int64_t narrow_width(const DeltaPart& d) {
    std::int64_t width = 0;
    for (const DeltaPart::Expansion& e : d.expansions) width += e.matrix.depth;
    return width;
  }

  // The rows of each sequence in this round.
  void find_sequences() {
    s_.sequence_rows.clear();
    for (std::int64_t r = 0; r < count_; ++r) {
      const std::int64_t sequence = step_.rows[static_cast<std::size_t>(first_ + r)].sequence;
      if (s_.sequence_rows.empty() || s_.sequence_rows.back().sequence != sequence) {
        s_.sequence_rows.push_back({sequence, r, 0});
      }
      ++s_.sequence_rows.back().rows;
    }
  }

  // ---- time --------------------------------------------------------------------------------------------------------

  void start(const Worker& worker) {
    if (worker.index == 0) time_ = Clock::now();
  }

  void end_stage(Worker& worker, StepPart part) {
    worker.barrier->wait();
    if (worker.index != 0) return;
    const Clock::time_point now = Clock::now();
    s_.seconds[static_cast<int>(part)] += std::chrono::duration<double>(now - time_).count();
    time_ = now;
  }

  // ---- rows: every worker has its share of them --------------------------------------------------------------------

  float* values_of(const Worker& worker) const { return values_ + worker.index * values_stride_; }
  std::uint8_t* row(std::uint8_t* rows, std::int64_t index) const { return at(rows, index * hidden_, type_); }

  template <class Body>
  void each_row(const Worker& worker, Body&& body) const {
    for (std::int64_t r = worker.share(count_); r < worker.next_share(count_); ++r) body(r);
  }

  void embed(const Worker& worker) {
    each_row(worker, [&](std::int64_t r) {
      const std::uint8_t* from = step_.tokens == nullptr ? at(step_.hidden, (first_ + r) * hidden_, type_)
                                                         : at(m_.embedding, step_.tokens[first_ + r] * hidden_, type_);
      std::memcpy(row(residual_, r), from, static_cast<std::size_t>(hidden_ * size_of(type_)));
      if (step_.tokens == nullptr || m_.embedding_factor == 1.0f) return;
      float* values = values_of(worker);
      k_.load_row(from, type_, static_cast<int>(hidden_), values);
      for (std::int64_t i = 0; i < hidden_; ++i) values[i] *= m_.embedding_factor;
      k_.store_row(values, hidden_, type_, row(residual_, r));
    });
  }

  void normalize_into(const void* from, const Norm& norm, void* to) const {
    k_.normalize_row({from, norm.weight, type_, norm.width, norm.epsilon, norm.round_first, norm.plus_one, to});
  }

  void normalize(const Worker& worker, const Norm& norm) {
    each_row(worker, [&](std::int64_t r) {
      if (norm) {
        normalize_into(row(residual_, r), norm, row(normed_, r));
      } else {
        std::memcpy(row(normed_, r), row(residual_, r), static_cast<std::size_t>(hidden_ * size_of(type_)));
      }
    });
  }

  void add_to_residual(const Worker& worker, std::uint8_t* rows, const Norm& norm, float factor) {
    each_row(worker, [&](std::int64_t r) {
      if (norm) normalize_into(row(rows, r), norm, row(rows, r));
      k_.add_row({row(residual_, r), row(rows, r), type_, hidden_, factor, row(residual_, r)});
    });
  }

  // What the block of the layer before has given is added to the residual stream.
  void end_block(const Worker& worker, const DecoderLayer* layer) {
    if (layer == nullptr) return;
    std::uint8_t* given = layer->experts.has_value() ? mixed_ : dense_out_;
    if (layer->dense.has_value()) {
      each_row(worker, [&](std::int64_t r) {
        if (layer->dense->share) {
          float* values = values_of(worker);
          k_.load_row(row(dense_out_, r), type_, static_cast<int>(hidden_), values);
          for (std::int64_t i = 0; i < hidden_; ++i) values[i] *= share_[r];
          k_.store_row(values, hidden_, type_, row(dense_out_, r));
        }
        if (layer->experts.has_value()) {
          k_.add_row({row(mixed_, r), row(dense_out_, r), type_, hidden_, 1.0f, row(mixed_, r)});
        }
      });
    }
    add_to_residual(worker, given, layer->after_block, layer->residual_factor);
  }

  // ---- attention ---------------------------------------------------------------------------------------------------

  void plan_projections(std::size_t index) {
    const DecoderLayer& layer = m_.layers[index];
    std::vector<MatrixOut>& outs = s_.outs;
    outs.clear();
    if (layer.delta.has_value()) {
      plan_columns_of_delta(*layer.delta);
    } else if (layer.convolution.has_value()) {
      const Matrix& projection = layer.convolution->projection;
      outs.push_back({&projection, projected_, projection.columns, type_});
    } else {
      const AttentionPart& a = layer.attention;
      const std::int64_t width = width_of(a), keys = a.query_width(), values = keys + a.kv_heads * a.depth;
      const MatrixOut queries{&a.query, projected_, width, type_};
      if (a.latent.has_value()) {
        outs.push_back({&a.latent->latent, at(projected_, keys, type_), width, type_});
      } else if (a.key) {
        outs.push_back({&a.key, at(projected_, keys, type_), width, type_});
        outs.push_back({&a.value, at(projected_, values, type_), width, type_});
      }
      if (a.latent.has_value() && a.latent->down) {
        outs.push_back({&a.latent->down, down_, a.latent->down.columns, type_});
        s_.queries.plan(k_, &queries, 1, down_, type_, count_, threads_);
      } else {
        outs.push_back(queries);
      }
      if (a.gate) outs.push_back({&a.gate, gates_, a.gate.columns, type_});
    }
    s_.projections.plan(k_, outs.data(), static_cast<int>(outs.size()), normed_, type_, count_, threads_);
  }

  // Everything of a layer whose sizes are known beforehand. The projections are those of the next one.
  void plan_layer(std::size_t index) {
    const DecoderLayer& layer = m_.layers[index];
    const AttentionPart& a = layer.attention;
    if (index + 1 < m_.layers.size()) {
      plan_projections(index + 1);
    } else {
      plan_head();
    }
    if (layer.delta.has_value()) {
      plan_delta(*layer.delta, step_.caches[index]);
    } else if (!layer.convolution.has_value() && !a.latent.has_value()) {
      plan_attention(a, step_.caches[index], 0, count_);
    }
    const Matrix* mixer_out = layer.delta.has_value()         ? &layer.delta->out
                              : layer.convolution.has_value() ? &layer.convolution->out
                                                              : &a.out;
    const MatrixOut out{mixer_out, mixed_, hidden_, type_};
    s_.output.plan(k_, &out, 1, attended_, type_, count_, threads_);
    if (layer.experts.has_value()) {
      const Matrix& router = layer.experts->router.weight;
      const MatrixOut logits{&router, logits_, router.columns, DType::kF32};
      s_.router.plan(k_, &logits, 1, normed_, type_, count_, threads_);
    }
    if (layer.dense.has_value()) {
      const DenseBlock& d = *layer.dense;
      const std::int64_t inner = d.down.depth;
      MatrixOut outs[3];
      int outs_count = 0;
      outs[outs_count++] = {&d.up, d.has_both() ? dense_in_ : at(dense_in_, inner, type_), 2 * inner, type_};
      if (d.gate) outs[outs_count++] = {&d.gate, dense_in_, 2 * inner, type_};
      if (d.share) outs[outs_count++] = {&d.share, share_, 1, DType::kF32};
      s_.dense_first.plan(k_, outs, outs_count, normed_, type_, count_, threads_);
      const MatrixOut down{&d.down, dense_out_, hidden_, type_};
      s_.dense_second.plan(k_, &down, 1, dense_hidden_, type_, count_, threads_);
    }
  }

  // Of rows [first, first + count) of the round.
  void plan_attention(const AttentionPart& a, const LayerCache& cache, std::int64_t first, std::int64_t count) {
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

  // Queries get their norm and rotation where they are; keys and values go to the cache.
  void make_heads(const Worker& worker, const AttentionPart& a, const LayerCache& cache) {
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

  void make_head(const Worker& worker, const AttentionPart& a, const LayerCache& cache, std::int64_t r,
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
    }
    if (is_query) return;
    k_.load_row(x, type_, static_cast<int>(depth), values);
    for (std::int64_t i = 0; !is_key && a.value_factor != 1.0f && i < depth; ++i) values[i] *= a.value_factor;
    keep(cache, is_key ? cache.keys : cache.values, row, (head - a.heads) % a.kv_heads, values, depth, x);
  }

  // Latents and rotated parts of keys go to the cache; then some rows at a time attend to them.
  void attend_latents(Worker& worker, const AttentionPart& a, const LayerCache& cache, std::size_t index) {
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

  // The first ones of all pairs of neighbours, then the second ones.
  static void separate(float* x, std::int64_t width) {
    float pairs[kMostRotated];
    std::copy_n(x, width, pairs);
    for (std::int64_t i = 0; i < width; ++i) x[i % 2 * (width / 2) + i / 2] = pairs[i];
  }

  void rotate(const AttentionPart& a, const StepRow& row, float* x) const {
    if (a.rotary < 0) return;
    const RotaryTable& table = m_.rotary[static_cast<std::size_t>(a.rotary)];
    const std::int64_t angles = row.position * table.width;
    if (a.separated) separate(x, table.width);
    k_.rotate_head({x, table.width, table.cos + angles, table.sin + angles, a.interleaved});
  }

  void keep_latent(const Worker& worker, const AttentionPart& a, const LayerCache& cache, std::int64_t r) {
    const LatentPart& l = *a.latent;
    const StepRow& row = step_.rows[static_cast<std::size_t>(first_ + r)];
    std::uint8_t* x = at(projected_, r * width_of(a) + a.query_width(), type_);
    if (l.latent_norm) normalize_into(x, l.latent_norm, x);
    float* values = values_of(worker);
    k_.load_row(x, type_, static_cast<int>(l.depth()), values);
    rotate(a, row, values + l.rank);
    keep(cache, cache.keys, row, 0, values, l.depth(), x);
  }

  std::uint8_t* cached_at(const LayerCache& cache, const CachedHeads& heads, std::int64_t offset) const {
    return cache.records ? static_cast<std::uint8_t*>(heads.data) + offset : at(heads.data, offset, type_);
  }

  // A row's numbers of a head into the cache; `rounded` has room for them in the type.
  void keep(const LayerCache& cache, const CachedHeads& heads, const StepRow& row, std::int64_t head, float* values,
            std::int64_t depth, std::uint8_t* rounded) const {
    std::uint8_t* to = cached_at(cache, heads, cache.offset(heads, row.sequence, head, row.place));
    flush(values, depth);
    k_.store_row(values, depth, type_, cache.records ? rounded : to);
    if (!cache.records) return;
    // Of numbers as a cache of floats has them: what comes back in the type gives the same record then.
    k_.load_row(rounded, type_, static_cast<int>(depth), values);
    k_.cache_records.write(values, depth, to);
  }

  static void flush(float* values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) values[i] = std::fabs(values[i]) < kSmallestCached ? 0.0f : values[i];
  }

  // Some of `rows` rows of one head, in shares.
  template <class Body>
  void each_latent_item(const Worker& worker, const AttentionPart& a, std::int64_t rows, Body&& body) const {
    const std::int64_t pieces = (rows + kLatentItemRows - 1) / kLatentItemRows;
    for (std::int64_t i = worker.share(a.heads * pieces); i < worker.next_share(a.heads * pieces); ++i) {
      const std::int64_t row = i % pieces * kLatentItemRows;
      body(i / pieces, row, std::min(kLatentItemRows, rows - row));
    }
  }

  const std::uint8_t* expansion_of(const AttentionPart& a, std::int64_t head) const {
    return at(a.latent->expansion, head * (a.latent->nope + a.value_depth) * a.latent->rank, type_);
  }

  // What the keys' part of the expansion would multiply latents with, for rows from `row` on behind `first`.
  void absorb(const Worker& worker, const AttentionPart& a, std::int64_t head, std::int64_t first, std::int64_t row,
              std::int64_t count) {
    const LatentPart& l = *a.latent;
    float *queries = values_of(worker), *absorbed = queries + count * a.depth + 16;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t r = first + row + i;
      float* query = queries + i * a.depth;
      k_.load_row(at(projected_, r * width_of(a) + head * a.depth, type_), type_, static_cast<int>(a.depth), query);
      rotate(a, step_.rows[static_cast<std::size_t>(first_ + r)], query + l.nope);
    }
    k_.sum_rows({queries, static_cast<int>(count), a.depth, expansion_of(a, head), type_, l.rank, l.nope, 0,
                 static_cast<int>(l.rank), absorbed, l.rank});
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint8_t* out = at(latent_queries_, ((row + i) * a.heads + head) * l.depth(), type_);
      k_.store_row(absorbed + i * l.rank, l.rank, type_, out);
      k_.store_row(queries + i * a.depth + l.nope, l.rotated, type_, at(out, l.rank, type_));
    }
  }

  void make_values(const Worker& worker, const AttentionPart& a, std::int64_t head, std::int64_t first,
                   std::int64_t row, std::int64_t count) {
    const LatentPart& l = *a.latent;
    float *sums = values_of(worker), *values = sums + count * l.rank + 16;
    for (std::int64_t i = 0; i < count; ++i) {
      k_.load_row(at(latent_sums_, ((row + i) * a.heads + head) * l.rank, type_), type_, static_cast<int>(l.rank),
                  sums + i * l.rank);
    }
    k_.dot_rows({sums, static_cast<int>(count), l.rank, at(expansion_of(a, head), l.nope * l.rank, type_), type_,
                 l.rank, 0, a.value_depth, values, a.value_depth});
    for (std::int64_t i = 0; i < count; ++i) {
      k_.store_row(values + i * a.value_depth, a.value_depth, type_,
                   at(attended_, ((first + row + i) * a.heads + head) * a.value_depth, type_));
    }
  }

  // Results of attention times the sigmoids of their gates.
  void gate(const Worker& worker, const AttentionPart& a) {
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

  // ---- layers with states
  // ----------------------------------------------------------------------------------------------

  // Where a sequence has not begun, nothing is remembered.
  void forget_padding(const Worker& worker) {
    each_row(worker, [&](std::int64_t r) {
      const StepRow& of_row = step_.rows[static_cast<std::size_t>(first_ + r)];
      if (of_row.place >= step_.seen[static_cast<std::size_t>(of_row.sequence)]) return;
      std::memset(row(normed_, r), 0, static_cast<std::size_t>(hidden_ * size_of(type_)));
    });
  }

  void convolve(Worker& worker, const ConvolutionPart& c, std::size_t index) {
    const ShortConvolutionCall call{c.convolution, type_, s_.sequence_rows, projected_, step_.caches[index].conv_state,
                                    attended_};
    convolve_shortly(k_, call, worker);
    if (worker.index == 0) plan_layer(index);
    end_stage(worker, StepPart::kAttention);
  }

  // What a layer's products give stands side by side in `projected_`; what is expanded is copied to `narrow_` first.
  void plan_columns_of_delta(const DeltaPart& d) {
    const std::int64_t width = d.width();
    std::int64_t column = 0, narrow = 0;
    for (const Matrix& m : d.projections) {
      s_.outs.push_back({&m, at(projected_, column, type_), width, type_});
      column += m.columns;
    }
    while (s_.expansions.size() < d.expansions.size()) s_.expansions.emplace_back();
    for (std::size_t i = 0; i < d.expansions.size(); ++i) {
      const Matrix& m = d.expansions[i].matrix;
      const MatrixOut out{&m, at(projected_, column, type_), width, type_};
      s_.expansions[i].plan(k_, &out, 1, at(narrow_, narrow * count_, type_), type_, count_, threads_);
      column += m.columns;
      narrow += m.depth;
    }
  }

  void plan_delta(const DeltaPart& d, const LayerCache& cache) {
    const auto rows_of = [&](const DeltaPart::Columns& c) {
      return HeadRows{at(projected_, c.first, type_), d.width(), c.group, c.group_stride, c.head_stride};
    };
    DeltaRuleCall call{};
    call.rule = d.rule;
    call.type = type_;
    call.sequences = s_.sequence_rows;
    call.queries = rows_of(d.queries);
    call.keys = rows_of(d.keys);
    call.values = rows_of(d.values);
    call.gates = rows_of(d.gates);
    call.betas = rows_of(d.betas);
    call.decays = rows_of(d.decays);
    call.conv_state = cache.conv_state;
    call.state = cache.state;
    call.out = attended_;
    s_.delta.plan(k_, call, threads_);
  }

  void run_delta(Worker& worker, const DeltaPart& d, std::size_t index) {
    if (!d.expansions.empty()) {
      std::int64_t narrow = 0;
      for (std::size_t i = 0; i < d.expansions.size(); ++i) {
        const DeltaPart::Expansion& e = d.expansions[i];
        each_row(worker, [&](std::int64_t r) {
          std::memcpy(at(narrow_, narrow * count_ + r * e.matrix.depth, type_),
                      at(projected_, r * d.width() + e.from, type_),
                      static_cast<std::size_t>(e.matrix.depth * size_of(type_)));
        });
        narrow += e.matrix.depth;
        s_.expansions[i].prepare(worker);
      }
      end_stage(worker, StepPart::kRows);
      for (std::size_t i = 0; i < d.expansions.size(); ++i) s_.expansions[i].multiply(worker);
      end_stage(worker, StepPart::kProducts);
    }
    if (worker.index == 0) plan_layer(index);
    end_stage(worker, StepPart::kRows);
    s_.delta.run(worker);
    end_stage(worker, StepPart::kAttention);
  }

  // ---- the block behind attention ----------------------------------------------------------------------------------

  void run_block(Worker& worker, const DecoderLayer& layer) {
    if (layer.experts.has_value()) s_.router.prepare(worker);
    if (layer.dense.has_value()) s_.dense_first.prepare(worker);
    end_stage(worker, StepPart::kRows);
    if (layer.experts.has_value()) {
      s_.router.multiply(worker);
      if (!layer.dense.has_value()) end_stage(worker, StepPart::kRouting);
    }
    if (layer.dense.has_value()) {
      s_.dense_first.multiply(worker);
      end_stage(worker, StepPart::kProducts);
      activate(worker, *layer.dense);
      s_.dense_second.prepare(worker);
    }
    if (layer.experts.has_value()) choose_experts(worker, *layer.experts);
    if (layer.dense.has_value()) {
      end_stage(worker, StepPart::kRows);
      s_.dense_second.multiply(worker);
    }
    if (!layer.experts.has_value()) return end_stage(worker, StepPart::kProducts);
    end_stage(worker, layer.dense.has_value() ? StepPart::kProducts : StepPart::kRouting);
    s_.experts.run(worker);
    end_stage(worker, StepPart::kExperts);
  }

  void activate(const Worker& worker, const DenseBlock& d) {
    const std::int64_t inner = d.down.depth, padded = (inner + 15) / 16 * 16;
    each_row(worker, [&](std::int64_t r) {
      float *gate = values_of(worker), *up = gate + padded;
      const std::uint8_t* from = at(dense_in_, r * 2 * inner, type_);
      k_.load_row(at(from, inner, type_), type_, static_cast<int>(inner), d.activation.gated ? up : gate);
      if (d.activation.gated) k_.load_row(from, type_, static_cast<int>(inner), gate);
      k_.activate_row({gate, up, inner, &d.activation, gate});
      k_.store_row(gate, inner, type_, at(dense_hidden_, r * inner, type_));
      if (d.share) {
        float shares[16] = {share_[r]};  // scoring works in whole vectors
        k_.score(shares, 1, Scoring::kSigmoid);
        share_[r] = shares[0];
      }
    });
  }

  // Of few rows by the first thread, which then plans; of more by all.
  void choose_experts(Worker& worker, const RoutedExperts& e) {
    const RouteCall call = e.router.call(count_, logits_, ids_, weights_);
    if (count_ > kFewRows) {
      round_logits(e.router, worker.share(count_), worker.next_share(count_));
      route_tokens(k_, call, worker.share(count_), worker.next_share(count_));
      worker.barrier->wait();
    }
    if (worker.index != 0) return;
    if (count_ <= kFewRows) {
      round_logits(e.router, 0, count_);
      route_tokens(k_, call, 0, count_);
    }
    MoeCall moe{};
    moe.gate_up = e.gate_up;
    moe.down = e.down;
    moe.x = normed_;
    moe.type = moe.out_type = type_;
    moe.tokens = count_;
    moe.topk = e.router.topk;
    moe.ids = ids_;
    moe.weights = weights_;
    moe.weight_on_input = e.weight_on_input;
    moe.activation = e.activation;
    moe.out = mixed_;
    s_.experts.plan(k_, moe, threads_);
  }

  // Logits as the router's model has them.
  void round_logits(const Router& router, std::int64_t first, std::int64_t last) {
    if (router.logits == DType::kF32) return;
    const std::int64_t experts = router.weight.columns;
    std::uint16_t rounded[64];
    for (std::int64_t i = first * experts; i < last * experts; i += 64) {
      const std::int64_t some = std::min<std::int64_t>(64, last * experts - i);
      k_.store_row(logits_ + i, some, router.logits, rounded);
      k_.load_row(rounded, router.logits, static_cast<int>(some), logits_ + i);
    }
  }

  // ---- the end -----------------------------------------------------------------------------------------------------

  std::int64_t first_wanted() const {
    return std::lower_bound(step_.wanted.begin(), step_.wanted.end(), first_) - step_.wanted.begin();
  }
  std::int64_t last_wanted() const {
    return std::lower_bound(step_.wanted.begin(), step_.wanted.end(), first_ + count_) - step_.wanted.begin();
  }

  void plan_head() {
    const std::int64_t wanted = last_wanted() - first_wanted();
    result_ = step_.hidden_out != nullptr ? at(step_.hidden_out, first_wanted() * hidden_, type_)
                                          : s_.wanted_rows.get<std::uint8_t>(wanted * hidden_ * size_of(type_));
    if (step_.logits_out == nullptr) return;
    const std::int64_t columns = m_.head.columns;
    const MatrixOut out{&m_.head, at(step_.logits_out, first_wanted() * columns, type_), columns, type_};
    s_.head.plan(k_, &out, 1, result_, type_, wanted, threads_);
  }

  void finish(Worker& worker) {
    end_stage(worker, StepPart::kRows);  // rows that are wanted may be those of another worker
    const std::int64_t first = first_wanted(), wanted = last_wanted() - first;
    for (std::int64_t i = worker.share(wanted); i < worker.next_share(wanted); ++i) {
      std::uint8_t* from = row(residual_, step_.wanted[static_cast<std::size_t>(first + i)] - first_);
      if (m_.norm) {
        normalize_into(from, m_.norm, row(result_, i));
      } else {
        std::memcpy(row(result_, i), from, static_cast<std::size_t>(hidden_ * size_of(type_)));
      }
    }
    if (step_.logits_out != nullptr && wanted > 0) {
      s_.head.prepare(worker);
      end_stage(worker, StepPart::kRows);
      s_.head.multiply(worker);
      end_stage(worker, StepPart::kHead);
    }
  }

  const Kernels& k_;
  const Step& step_;
  State& s_;
  const DecoderModel& m_;
  const DType type_;
  const std::int64_t first_, count_, hidden_;
  const int threads_;
  std::uint8_t *residual_, *normed_, *mixed_, *projected_, *attended_, *gates_, *down_, *narrow_, *dense_in_,
      *dense_hidden_, *dense_out_;
  std::uint8_t *latent_queries_, *latent_sums_, *result_ = nullptr;
  std::int64_t latent_item_ = 0;  // floats that a work item of latent attention takes
  std::int64_t values_stride_;
  float *values_, *share_, *logits_, *weights_;
  std::int32_t* ids_;
  Clock::time_point time_;
};

Decoder::Decoder(DecoderModel model) : state_(std::make_unique<State>()) {
  check_model(model);
  state_->most_rows = 4096;
  for (const DecoderLayer& layer : model.layers) {
    if (!layer.experts.has_value()) continue;
    state_->most_rows = std::min(state_->most_rows, tokens_at_once(layer.experts->down, layer.experts->router.topk));
  }
  state_->model = std::move(model);
}

Decoder::~Decoder() = default;

const DecoderModel& Decoder::model() const { return state_->model; }

void Decoder::step(const Kernels& kernels, const Step& step) {
  check_step(state_->model, step);
  if (step.clears_states) clear_states(step);
  const auto rows = static_cast<std::int64_t>(step.rows.size());
  for (std::int64_t first = 0; first < rows; first += state_->most_rows) {
    const int threads = state_->crowding.threads(threads_for(work_of(state_->model, rows)));
    Round round(kernels, step, *state_, first, std::min(state_->most_rows, rows - first), threads);
    state_->crowding.run(threads, [&](Worker& worker) { round.run(worker); });
  }
}

void Decoder::clear_states(const Step& step) const {
  for (const StepRow& row : step.rows) {
    if (row.place != 0) continue;
    for (std::size_t i = 0; i < step.caches.size(); ++i) {
      const LayerCache& cache = step.caches[i];
      if (cache.conv_state == nullptr) continue;
      const DecoderLayer& layer = state_->model.layers[i];
      std::int64_t size;
      if (layer.delta.has_value()) {
        const DeltaRule& rule = layer.delta->rule;
        std::fill_n(cache.state + row.sequence * rule.state_size(), rule.state_size(), 0.0f);
        size = rule.channels() * rule.taps;
      } else {
        size = layer.convolution->convolution.channels * layer.convolution->convolution.taps;
      }
      std::memset(at(cache.conv_state, row.sequence * size, state_->model.type), 0,
                  static_cast<std::size_t>(size * size_of(state_->model.type)));
    }
  }
}

void Decoder::take_seconds(double (&seconds)[kStepParts]) {
  std::copy(std::begin(state_->seconds), std::end(state_->seconds), seconds);
  std::fill(std::begin(state_->seconds), std::end(state_->seconds), 0.0);
}

}  // namespace cpumoe
