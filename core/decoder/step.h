// The inside of a decoder: what it keeps between steps, and one round of rows through all layers. For core/decoder
// alone.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "decoder/decoder.h"
#include "ops/attention.h"
#include "ops/delta_rule.h"
#include "ops/experts.h"
#include "ops/linear.h"
#include "ranks/products.h"
#include "ranks/row_traffic.h"
#include "runtime/crowding.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

namespace cpumoe {

// Of latent attention: rows that are attended at a time, whose queries take memory, and those of one work item.
constexpr std::int64_t kLatentRows = 256, kLatentItemRows = 16;

// Rows for which one thread chooses the experts; more are shared out.
constexpr std::int64_t kFewRows = 16;

inline std::uint8_t* at(void* data, std::int64_t element, DType type) {
  return static_cast<std::uint8_t*>(data) + element * size_of(type);
}
inline const std::uint8_t* at(const void* data, std::int64_t element, DType type) {
  return static_cast<const std::uint8_t*>(data) + element * size_of(type);
}

struct Decoder::State {
  // Held for a whole step: the buffers and plans below are those of one step. Only `model` may be read without it.
  std::mutex mutex;
  DecoderModel model;
  std::int64_t most_rows = 0;  // of a round
  std::int64_t rows_done = 0;  // before this step
  Crowding crowding;
  double seconds[kStepParts] = {};

  // Of the rows of a round; hidden states are of the model's type.
  Buffer residual, normed, mixed, projected, attended, gates, latent_queries, latent_sums, down, narrow, dense_in,
      dense_hidden, dense_out, wanted_rows, gathered, all_attended;
  Buffer values, share, logits, ids, own_ids, weights, sums;
  RankProducts projections, queries, output, router, dense_first, dense_second, head;
  std::deque<RankProducts> expansions;  // as many as a layer has at most
  CachedAttention attention;
  DeltaRuleStage delta;
  MoeStage experts;
  RowTraffic traffic;
  Buffer share_rows, traffic_copies;
  std::vector<std::int64_t> shares, share_begins;
  std::vector<CachedSequence> sequences;
  std::vector<AttentionRow> attention_rows;
  std::vector<SequenceRows> sequence_rows;
  std::vector<MatrixOut> outs;
};

// Rows [first, first + count) of a step through all layers; `counts` are those of all ranks. The stages of a layer,
// with barriers between them:
//   rows (residual, norm, preparation); query, key and value; heads (norms, rotation, cache); attention; output;
//   rows; router and the first linears of a dense block; choice of experts; its last linear; experts.
// Products are planned by the first thread while heads are made; those of experts when their choice is known.
class Decoder::Round {
 public:
  Round(const Kernels& kernels, const Step& step, State& state, std::int64_t first,
        const std::vector<std::int64_t>& counts, int threads);
  void run(Worker& worker);

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
  void find_sequences();

  // ---- time --------------------------------------------------------------------------------------------------------

  void start(const Worker& worker);
  void end_stage(Worker& worker, StepPart part);
  void note_time(StepPart part);

  // ---- what other ranks have ----------------------------------------------------------------------------------------

  // Products behind the barrier that follows them.
  void gather(Worker& worker, RankProducts& products);
  // Heads of attention; where they are all here, these are what attention has given.
  void gather_heads(Worker& worker, const AttentionPart& a);
  std::uint8_t* attended_by(const DecoderLayer& layer) const {
    return layer.attention.ranks > 1 ? all_attended_ : attended_;
  }
  void add_sums(Worker& worker);

  // ---- rows that the experts of other ranks compute: remote_experts.cc
  // -----------------------------------------------

  // Of the rows of a group each of its ranks sends a share, of which rank r has its first and the one behind its last.
  std::int64_t share_begin(int rank) const;
  std::int64_t share_end(int rank) const;
  void plan_traffic(const RoutedExperts& e);
  // The rows of all ranks that have experts here; then `traffic` has them.
  void bring_rows(Worker& worker, const RoutedExperts& e);
  // Copies of experts become places among those that are here.
  void find_places(const RoutedExperts& e);
  void return_sums(Worker& worker);
  // A round of others, in which this rank has no rows.
  void serve_others(Worker& worker);

  // ---- rows: every worker has its share of them --------------------------------------------------------------------

  float* values_of(const Worker& worker) const { return values_ + worker.index * values_stride_; }
  std::uint8_t* row(std::uint8_t* rows, std::int64_t index) const { return at(rows, index * hidden_, type_); }

  template <class Body>
  void each_row(const Worker& worker, Body&& body) const {
    for (std::int64_t r = worker.share(count_); r < worker.next_share(count_); ++r) body(r);
  }

  void embed(const Worker& worker);
  void normalize_into(const void* from, const Norm& norm, void* to) const;
  void normalize(const Worker& worker, const Norm& norm);
  void add_to_residual(const Worker& worker, std::uint8_t* rows, const Norm& norm, float factor);

  // What the block of the layer before has given is added to the residual stream.
  void end_block(const Worker& worker, const DecoderLayer* layer);

  // ---- plans -------------------------------------------------------------------------------------------------------

  void plan_projections(std::size_t index);

  // Everything of a layer whose sizes are known beforehand. The projections are those of the next one.
  void plan_layer(std::size_t index);

  // ---- attention: attention.cc ------------------------------------------------------------------------------

  // Of rows [first, first + count) of the round.
  void plan_attention(const AttentionPart& a, const LayerCache& cache, std::int64_t first, std::int64_t count);

  // Queries get their norm and rotation where they are; keys and values go to the cache.
  void make_heads(const Worker& worker, const AttentionPart& a, const LayerCache& cache);
  void make_head(const Worker& worker, const AttentionPart& a, const LayerCache& cache, std::int64_t r,
                 std::int64_t head);

  // Latents and rotated parts of keys go to the cache; then some rows at a time attend to them.
  void attend_latents(Worker& worker, const AttentionPart& a, const LayerCache& cache, std::size_t index);

  // The first ones of all pairs of neighbours, then the second ones.
  static void separate(float* x, std::int64_t width);
  void rotate(const AttentionPart& a, const StepRow& row, float* x) const;
  // Multiplies a head of queries (a.depth values) by the factor of its position.
  static void scale_query(const AttentionPart& a, const StepRow& row, float* query);
  void keep_latent(const Worker& worker, const AttentionPart& a, const LayerCache& cache, std::int64_t r);
  std::uint8_t* cached_at(const LayerCache& cache, const CachedHeads& heads, std::int64_t offset) const;

  // A row's numbers of a head into the cache; `rounded` has room for them in the type.
  void keep(const LayerCache& cache, const CachedHeads& heads, const StepRow& row, std::int64_t head, float* values,
            std::int64_t depth, std::uint8_t* rounded) const;
  static void flush(float* values, std::int64_t count);

  // Some of `rows` rows of one head, in shares.
  template <class Body>
  void each_latent_item(const Worker& worker, const AttentionPart& a, std::int64_t rows, Body&& body) const {
    const std::int64_t pieces = (rows + kLatentItemRows - 1) / kLatentItemRows;
    for (std::int64_t i = worker.share(a.heads * pieces); i < worker.next_share(a.heads * pieces); ++i) {
      const std::int64_t row = i % pieces * kLatentItemRows;
      body(i / pieces, row, std::min(kLatentItemRows, rows - row));
    }
  }

  const std::uint8_t* expansion_of(const AttentionPart& a, std::int64_t head) const;

  // What the keys' part of the expansion would multiply latents with, for rows from `row` on behind `first`.
  void absorb(const Worker& worker, const AttentionPart& a, std::int64_t head, std::int64_t first, std::int64_t row,
              std::int64_t count);
  void make_values(const Worker& worker, const AttentionPart& a, std::int64_t head, std::int64_t first,
                   std::int64_t row, std::int64_t count);

  // Results of attention times the sigmoids of their gates.
  void gate(const Worker& worker, const AttentionPart& a);

  // ---- layers with states: states.cc ------------------------------------------------------------------------

  // Where a sequence has not begun, nothing is remembered.
  void forget_padding(const Worker& worker);
  void convolve(Worker& worker, const ConvolutionPart& c, std::size_t index);

  // What a layer's products give stands side by side in `projected_`; what is expanded is copied to `narrow_` first.
  void plan_columns_of_delta(const DeltaPart& d);
  void plan_delta(const DeltaPart& d, const LayerCache& cache);
  void run_delta(Worker& worker, const DeltaPart& d, std::size_t index);

  // ---- the block behind attention: block.cc -----------------------------------------------------------------

  void run_block(Worker& worker, const DecoderLayer& layer);
  void activate(const Worker& worker, const DenseBlock& d);

  // Of few rows by the first thread, which then plans; of more by all.
  void choose_experts(Worker& worker, const RoutedExperts& e);
  void plan_experts(const RoutedExperts& e);
  void run_experts(Worker& worker, const RoutedExperts& e);

  // Logits as the router's model has them.
  void round_logits(const Router& router, std::int64_t first, std::int64_t last);

  // ---- the end -----------------------------------------------------------------------------------------------------

  std::int64_t first_wanted() const;
  std::int64_t last_wanted() const;
  void plan_head();
  void finish(Worker& worker);

  const Kernels& k_;
  const Step& step_;
  State& s_;
  const DecoderModel& m_;
  const DType type_;
  const std::vector<std::int64_t>& counts_;
  const std::int64_t first_, count_, hidden_;
  const int threads_;
  std::uint8_t *residual_, *normed_, *mixed_, *projected_, *attended_, *gates_, *down_, *narrow_, *dense_in_,
      *dense_hidden_, *dense_out_;
  std::uint8_t *latent_queries_, *latent_sums_, *result_ = nullptr, *all_attended_ = nullptr, *gathered_ = nullptr;
  std::int64_t latent_item_ = 0;  // floats that a work item of latent attention takes
  std::int64_t values_stride_;
  float *values_, *share_, *logits_, *weights_, *sums_ = nullptr;
  std::int32_t *ids_, *own_ids_ = nullptr;
  bool computes_experts_ = false;  // of the layer that is being computed
  std::chrono::steady_clock::time_point time_;
};

}  // namespace cpumoe
