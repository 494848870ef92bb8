#include "ops/delta_rule.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <vector>

#include "ops/elements.h"
#include "runtime/check.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

namespace cpumoe {
namespace {

constexpr std::int64_t kTokensAtOnce = 128;  // of a sequence, between two barriers
constexpr std::int64_t kRowsAtOnce = 256;    // tokens of all sequences: their rows in fp32 stay in the L2 and L3 caches
constexpr float kLengthEpsilon = 1e-6f;

std::int64_t padded(std::int64_t count) { return (count + kPaddedLanes - 1) / kPaddedLanes * kPaddedLanes; }

// Work items from a counter that all threads share.
template <class Item>
void take(std::atomic<std::int64_t>& next, std::int64_t count, Item&& item) {
  for (std::int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) item(i);
}

// Rows of a sequence that are worked on between two barriers.
struct Piece {
  std::int64_t sequence, tokens;
  std::int64_t first;  // counted from the first row of the part
};

struct Part {
  std::int64_t first_row = 0, rows = 0;
  std::vector<Piece> pieces;
  std::int64_t columns = 0;  // of the states that a work item takes
  std::atomic<std::int64_t> next_input{0}, next_state{0};
};

}  // namespace

struct DeltaRuleStage::State {
  const Kernels* k = nullptr;
  DeltaRuleCall c{};
  DeltaRule r;
  std::deque<Part> parts;
  std::int64_t decay_width = 0, gate_count = 0;  // decays of a token, padded; work items for its gates
  float *queries = nullptr, *keys = nullptr;     // of a piece: [key head][token][key_depth]
  float* values = nullptr;                       // of a piece: [head][token][value_depth]
  float *betas = nullptr, *decays = nullptr;     // [row][heads, padded], [row][decay_width]
  float *rates = nullptr, *bias = nullptr, *norm = nullptr, *slices = nullptr;
  std::int64_t slice_floats = 0;
  Buffer query_rows, key_rows, value_rows, beta_rows, decay_rows, rate_values, bias_values, norm_values, slice_values;

  void plan(const Kernels& kernels, const DeltaRuleCall& call, int threads) {
    k = &kernels;
    c = call;
    r = call.rule;
    cut(threads);
    std::int64_t rows = 0;
    for (const Part& part : parts) rows = std::max(rows, part.rows);
    decay_width = padded(r.decay_of_channels ? r.heads * padded(r.key_depth) : r.heads);
    gate_count = r.decay_of_channels ? r.heads : 1;
    queries = query_rows.get<float>(rows * r.key_heads * r.key_depth);
    keys = key_rows.get<float>(rows * r.key_heads * r.key_depth);
    values = value_rows.get<float>(rows * r.heads * r.value_depth);
    betas = beta_rows.get<float>(rows * padded(r.heads));
    decays = decay_rows.get<float>(rows * decay_width);
    slice_floats = padded((kStateColumns + 2) * r.key_depth);
    slices = slice_values.get<float>(threads * slice_floats);
    load_parameters();
  }

  // Cuts the rows into parts, each with one piece of a sequence at most: it goes on where the one before has ended.
  void cut(int threads) {
    parts.clear();
    for (const SequenceRows& sequence : c.sequences) {
      for (std::int64_t token = 0; token < sequence.rows; token += kTokensAtOnce) {
        const std::int64_t tokens = std::min(kTokensAtOnce, sequence.rows - token);
        if (parts.empty() || token > 0 || parts.back().rows + tokens > kRowsAtOnce) {
          parts.emplace_back().first_row = sequence.first_row + token;
        }
        Part& part = parts.back();
        part.pieces.push_back({sequence.sequence, tokens, part.rows});
        part.rows += tokens;
      }
    }
    for (Part& part : parts) {
      // With one token whole rows of the state are read, unless there are too few heads for all threads.
      const auto pieces = static_cast<std::int64_t>(part.pieces.size());
      part.columns = part.rows > pieces || pieces * r.heads < 2 * threads ? kStateColumns : r.value_depth;
    }
  }

  void load_parameters() {
    const std::int64_t biases = r.heads * (r.decay_of_channels ? r.key_depth : 1);
    rates = rate_values.get<float>(padded(r.heads));
    bias = bias_values.get<float>(biases);
    norm = norm_values.get<float>(r.value_depth);
    k->load_row(r.decay_bias.data, r.decay_bias.type, static_cast<int>(biases), bias);
    k->load_row(r.norm_weight.data, r.norm_weight.type, static_cast<int>(r.value_depth), norm);
    k->recurrent.decay_rates(r.log_rates.data, r.log_rates.type, r.heads, rates);
  }

  // One head of queries, keys or values of a piece: `out` [tokens, depth].
  void convolve(const Part& part, const Piece& piece, const HeadRows& heads, std::int64_t head, std::int64_t depth,
                std::int64_t channel, float* out) const {
    const void* x = heads.at(part.first_row + piece.first, head, c.type);
    for (std::int64_t first = 0; first < depth; first += kTapChannels) {
      ConvolveRows rows = r.convolution.rows(c.type, c.conv_state, piece.sequence, channel + first, channel + depth);
      rows.x = at(x, first, c.type);
      rows.stride = heads.token_stride;
      rows.tokens = static_cast<int>(piece.tokens);
      rows.silu = true;
      rows.out_type = DType::kF32;
      rows.out = out + first;
      rows.out_stride = depth;
      k->recurrent.convolve(rows);
    }
  }

  float* values_of(const Piece& piece, std::int64_t head) const {
    return values + (piece.first * r.heads + head * piece.tokens) * r.value_depth;
  }
  std::int64_t key_of(const Piece& piece, std::int64_t head) const {
    return (piece.first * r.key_heads + head * piece.tokens) * r.key_depth;
  }

  void prepare_head(const Part& part, std::int64_t item) const {
    const std::int64_t all = 2 * r.key_heads + r.heads, index = item % all;
    const Piece& piece = part.pieces[static_cast<std::size_t>(item / all)];
    if (index >= 2 * r.key_heads) {
      const std::int64_t head = index - 2 * r.key_heads;
      const std::int64_t channel = 2 * r.key_heads * r.key_depth + head * r.value_depth;
      return convolve(part, piece, c.values, head, r.value_depth, channel, values_of(piece, head));
    }
    const bool is_query = index < r.key_heads;
    const std::int64_t head = index % r.key_heads;
    float* out = (is_query ? queries : keys) + key_of(piece, head);
    convolve(part, piece, is_query ? c.queries : c.keys, head, r.key_depth, index * r.key_depth, out);
    const float factor = is_query ? 1.0f / std::sqrt(static_cast<float>(r.key_depth)) : 1.0f;
    k->recurrent.normalize_lengths({out, piece.tokens, static_cast<int>(r.key_depth), kLengthEpsilon, factor});
  }

  // What the tokens remember and how much is kept: of all heads of a token, or of one where its channels differ.
  void prepare_gates(const Part& part, std::int64_t item) const {
    const std::int64_t row = item / gate_count, input = part.first_row + row;
    float* beta = betas + row * padded(r.heads);
    float* decay = decays + row * decay_width;
    if (r.decay_of_channels) {
      const std::int64_t head = item % gate_count, depth = r.key_depth;
      float* of_head = decay + head * padded(depth);
      k->load_row(c.decays.at(input, head, c.type), c.type, static_cast<int>(depth), of_head);
      k->recurrent.decay({of_head, static_cast<int>(depth), bias + head * depth, rates + head, true, r.decay_bound});
      if (head > 0) return;
    } else {
      for (std::int64_t h = 0; h < r.heads; ++h) k->load_row(c.decays.at(input, h, c.type), c.type, 1, decay + h);
      k->recurrent.decay({decay, static_cast<int>(r.heads), bias, rates, false, r.decay_bound});
    }
    for (std::int64_t h = 0; h < r.heads; ++h) k->load_row(c.betas.at(input, h, c.type), c.type, 1, beta + h);
    k->score(beta, static_cast<int>(r.heads), Scoring::kSigmoid);
  }

  std::int64_t slices_of_head(const Part& part) const { return (r.value_depth + part.columns - 1) / part.columns; }

  void advance(const Part& part, std::int64_t item, float* scratch) const {
    const std::int64_t of_head = slices_of_head(part), head = item / of_head % r.heads;
    const Piece& piece = part.pieces[static_cast<std::size_t>(item / of_head / r.heads)];
    const std::int64_t first = item % of_head * part.columns, key = key_of(piece, head / (r.heads / r.key_heads));
    DeltaSteps steps{};
    steps.state = c.state + piece.sequence * r.state_size() + head * r.key_depth * r.value_depth + first;
    steps.state_stride = r.value_depth;
    steps.rows = static_cast<int>(r.key_depth);
    steps.columns = static_cast<int>(std::min(part.columns, r.value_depth - first));
    steps.tokens = static_cast<int>(piece.tokens);
    steps.queries = queries + key;
    steps.keys = keys + key;
    steps.decays = decays + piece.first * decay_width + head * (r.decay_of_channels ? padded(r.key_depth) : 1);
    steps.decay_stride = decay_width;
    steps.shared_decay = !r.decay_of_channels;
    steps.betas = betas + piece.first * padded(r.heads) + head;
    steps.beta_stride = padded(r.heads);
    steps.values = values_of(piece, head) + first;
    steps.value_stride = r.value_depth;
    steps.scratch = scratch;
    k->recurrent.advance(steps);
  }

  void gate(const Part& part, const Piece& piece, std::int64_t token, std::int64_t head) const {
    const std::int64_t input = part.first_row + piece.first + token;
    float* x = values_of(piece, head) + token * r.value_depth;
    void* out = at(c.out, (input * r.heads + head) * r.value_depth, c.type);
    k->recurrent.gate({x, norm, c.gates.at(input, head, c.type), c.type, r.value_depth, r.value_depth, r.norm_epsilon,
                       true, r.sigmoid_gate, out});
  }

  void run(Worker& worker) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (i > 0) worker.barrier->wait();  // the rows of the part before are still read
      run_part(parts[i], worker);
    }
  }

  void run_part(Part& part, Worker& worker) {
    const auto pieces = static_cast<std::int64_t>(part.pieces.size());
    const std::int64_t heads = pieces * (2 * r.key_heads + r.heads);
    take(part.next_input, heads + part.rows * gate_count,
         [&](std::int64_t i) { i < heads ? prepare_head(part, i) : prepare_gates(part, i - heads); });
    worker.barrier->wait();
    take(part.next_state, pieces * r.heads * slices_of_head(part),
         [&](std::int64_t i) { advance(part, i, slices + worker.index * slice_floats); });
    worker.barrier->wait();
    const std::int64_t first = worker.share(part.rows * r.heads), last = worker.next_share(part.rows * r.heads);
    std::size_t piece = 0;
    for (std::int64_t i = first; i < last; ++i) {
      while (i / r.heads >= part.pieces[piece].first + part.pieces[piece].tokens) ++piece;
      gate(part, part.pieces[piece], i / r.heads - part.pieces[piece].first, i % r.heads);
    }
  }
};

DeltaRuleStage::DeltaRuleStage() : state_(std::make_unique<State>()) {}
DeltaRuleStage::~DeltaRuleStage() = default;

void DeltaRuleStage::plan(const Kernels& kernels, const DeltaRuleCall& call, int threads) {
  state_->plan(kernels, call, threads);
}

void DeltaRuleStage::run(Worker& worker) { state_->run(worker); }

void check_delta_rule(const DeltaRule& r) {
  CPUMOE_REQUIRE(r.key_heads >= 1 && r.heads >= 1 && r.heads % r.key_heads == 0, "there are ", r.heads,
                 " heads of values for ", r.key_heads, " heads of keys; a multiple is accepted");
  check_convolution(r.convolution);
  CPUMOE_REQUIRE(r.convolution.channels == r.channels(), "the convolution has ", r.convolution.channels, " channels; ",
                 r.channels(), " are accepted");
  CPUMOE_REQUIRE(r.decay_bound <= 0.0f, "decay_bound=", r.decay_bound,
                 "; a number below 0, or 0 for none, is accepted");
}

void gated_delta_rule(const Kernels& kernels, const DeltaRuleCall& c) {
  check_delta_rule(c.rule);
  std::int64_t work = 0;  // bytes of states that are read and written, or could be while tokens are computed
  for (const SequenceRows& rows : c.sequences) work += 8 * c.rule.state_size() * std::min<std::int64_t>(rows.rows, 16);
  if (work == 0) return;
  static thread_local DeltaRuleStage stage_of_this_thread;
  DeltaRuleStage& stage = stage_of_this_thread;  // whichever thread uses it
  const int threads = threads_for(work);
  stage.plan(kernels, c, threads);
  run_on_threads(threads, [&](Worker& worker) { stage.run(worker); });
}

}  // namespace cpumoe
