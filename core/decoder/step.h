// One step: a chunk of rows through all layers. For core/decoder alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <vector>

#include "decoder/decoder.h"
#include "decoder/mixer.h"
#include "ops/delta_rule.h"
#include "ops/elements.h"
#include "ops/experts.h"
#include "ops/latent_attention.h"
#include "ops/linear.h"
#include "ranks/products.h"
#include "ranks/row_traffic.h"
#include "runtime/crowding.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

namespace cpumoe {

// Rows for which one thread chooses the experts; more are shared out.
constexpr std::int64_t kFewRows = 16;

// Products, operator stages and lists that mixers plan and compute with.
struct MixerStages {
  RankProducts projections, output;
  CachedAttention attention;
  LatentAttention latent_attention;
  RankProducts queries;                 // of MLA: q_b_proj
  std::deque<RankProducts> expansions;  // of a delta net, as many as a layer has at most
  DeltaRuleStage delta;
  std::vector<MatrixOut> outs;
  std::vector<CachedSequence> sequences;
  std::vector<AttentionRow> attention_rows;
};

// Buffers and plans that a decoder keeps from step to step. Hidden states are of the model's type.
struct StepWorkspace {
  Buffer residual, normed, mixed, scratch, dense_in, dense_hidden, dense_out, output_rows;
  Buffer values, share, logits, ids, own_ids, weights, sums;
  MixerStages mixers;
  RankProducts router, dense_first, dense_second, head;
  MoeStage experts;
  RowTraffic traffic;
  Buffer share_rows;
  std::vector<std::int64_t> shares;
  std::vector<SequenceRows> sequence_rows;
  std::int64_t rows_done = 0;  // before this step
  double seconds[kStepParts] = {};
};

// Rows [first, first + count) of an input through all layers; `counts` are those of all ranks.
class Step {
 public:
  Step(const Kernels& kernels, const StepInput& input, const DecoderModel& model, StepWorkspace& workspace,
       std::int64_t first, const std::vector<std::int64_t>& counts, int threads);
  void run(Worker& worker);

  // ---- for mixers --------------------------------------------------------------------------------------------------

  const Kernels& kernels() const { return k_; }
  const StepInput& input() const { return input_; }
  const DecoderModel& model() const { return m_; }
  MixerStages& stages() { return w_.mixers; }
  DType type() const { return type_; }
  std::int64_t count() const { return count_; }
  int threads() const { return threads_; }
  const StepRow& row_at(std::int64_t r) const { return input_.rows[static_cast<std::size_t>(first_ + r)]; }
  const LayerCache& cache(std::size_t layer) const { return input_.caches[layer]; }
  const std::vector<SequenceRows>& sequences() const { return w_.sequence_rows; }

  // The mixer's memory: the same array for every layer.
  Scratch scratch() const { return Scratch(scratch_); }
  // Floats that a thread works with: at least MixerSizes::thread_floats.
  float* values_of(const Worker& worker) const { return values_ + worker.index * values_stride_; }

  // Rows, of which every worker has its share.
  template <class Body>
  void each_row(const Worker& worker, Body&& body) const {
    for (std::int64_t r = worker.share(count_); r < worker.next_share(count_); ++r) body(r);
  }
  void normalize_into(const void* from, const Norm& norm, void* to) const;

  // Plans products of the normed rows; the outputs are stages().outs.
  void plan_inputs();
  // Plans the mixer's last product: `rows` [count, out.depth] times `out`.
  void plan_output(const Matrix& out, const std::uint8_t* rows);
  // Computes the products of plan_inputs.
  void project(Worker& worker) { compute(worker, w_.mixers.projections); }
  // Computes the product of plan_output; the result is added to the residual stream.
  void finish_mixer(Worker& worker) { compute(worker, w_.mixers.output); }

  // Plans everything of a layer whose sizes are known beforehand, and the projections of the next one. By the first
  // thread, before a barrier.
  void plan_layer(std::size_t layer);

  // Ends with a barrier.
  void end_stage(Worker& worker, StepPart part);
  // Prepares the worker's share of rows, then multiplies.
  void compute(Worker& worker, RankProducts& products, StepPart part = StepPart::kProducts);
  // Computes products and gathers the columns of other ranks. Ends with a barrier, after which the products may be
  // planned again.
  void multiply(Worker& worker, RankProducts& products, StepPart part = StepPart::kProducts);

  // Clears the normed rows of padding: a sequence that has not begun leaves nothing in a recurrent state.
  void clear_padding(const Worker& worker);

 private:
  void find_sequences();
  void note_time(StepPart part);

  // ---- residual stream ---------------------------------------------------------------------------------------------

  std::uint8_t* row(std::uint8_t* rows, std::int64_t index) const { return at(rows, index * hidden_, type_); }
  void embed(const Worker& worker);
  void normalize(const Worker& worker, const Norm& norm);
  void normalize_hidden(const void* from, const Norm& norm, void* to) const;  // copies where there is no norm
  void scale_row(const Worker& worker, float factor, std::uint8_t* row) const;
  void add(const Worker& worker, std::uint8_t* rows, const Norm& norm, float factor);
  // Adds what the block of a layer has computed to the residual stream.
  void finish_block(const Worker& worker, const DecoderLayer& layer);

  // ---- experts on other ranks: remote_experts.cc

  void add_sums(Worker& worker);
  // The share of a tensor parallel group's rows that a rank dispatches.
  RowShare share_of(int rank) const;
  void plan_traffic(const RoutedExperts& e);
  // Receives the rows of all ranks that have chosen experts of this rank.
  void receive_rows(Worker& worker, const RoutedExperts& e);
  void return_sums(Worker& worker);
  // A step in which only other ranks have rows.
  void serve_others(Worker& worker);

  // ---- block: block.cc

  void plan_dense(const DenseBlock& d);
  void run_block(Worker& worker, const DecoderLayer& layer);
  void activate(const Worker& worker, const DenseBlock& d);
  // The first thread chooses for few rows and then plans; all threads choose for more.
  void choose_experts(Worker& worker, const RoutedExperts& e);
  ChosenRows chosen_rows(const RoutedExperts& e) const;
  void plan_experts(const RoutedExperts& e);
  void run_experts(Worker& worker, const RoutedExperts& e);
  // Rounds logits to the type that the model's router computes in.
  void round_logits(const Router& router, std::int64_t first, std::int64_t last);

  // ---- output rows

  std::int64_t first_wanted() const;
  std::int64_t last_wanted() const;
  void plan_head();
  void finish(Worker& worker);

  const Kernels& k_;
  const StepInput& input_;
  const DecoderModel& m_;
  StepWorkspace& w_;
  const DType type_;
  const std::vector<std::int64_t>& counts_;
  const std::int64_t first_, count_, hidden_;
  const int threads_;
  std::uint8_t *residual_, *normed_, *mixed_, *scratch_, *dense_in_, *dense_hidden_, *dense_out_, *share_rows_,
      *result_ = nullptr;
  std::int64_t values_stride_;
  float *values_, *share_, *logits_, *weights_, *sums_ = nullptr;
  std::int32_t *ids_, *own_ids_ = nullptr;
  bool computes_experts_ = false;  // of the layer that is being computed
  std::chrono::steady_clock::time_point time_;
};

}  // namespace cpumoe
