#include "delta_rule.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "check.h"
#include "memory.h"
#include "threads.h"

namespace cpumoe {
namespace {

constexpr std::int64_t kTokensAtOnce = 128;  // of a sequence, between two barriers
constexpr std::int64_t kRowsAtOnce = 256;    // tokens of all sequences: their rows in fp32 stay in the L2 and L3 caches
constexpr float kLengthEpsilon = 1e-6f;

struct Scratch {
  Buffer queries, keys, values, betas, decays, rates, bias, norm, slices;
};

std::int64_t padded(std::int64_t count) { return (count + kPaddedLanes - 1) / kPaddedLanes * kPaddedLanes; }

// Work items from a counter that all threads share.
template <class Item>
void take(std::atomic<std::int64_t>& next, std::int64_t count, Item&& item) {
  for (std::int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) item(i);
}

struct Forward {
  const Kernels& k;
  const DeltaRuleCall& c;
  std::int64_t decay_width, gate_count;  // decays of a token, padded; work items for its gates
  float *queries, *keys;                 // [sequence][key head][token][key_depth]
  float* values;                         // [sequence][head][token][value_depth]
  float *betas, *decays;                 // [sequence][token][heads, padded], [..][decay_width]
  float *rates, *bias, *norm;
  float* slices;
  std::int64_t slice_floats;

  // The part of the input that is worked on between barriers.
  std::int64_t first_sequence = 0, sequences = 0, first_token = 0, tokens = 0;
  std::int64_t columns = 0;  // of one work item

  Forward(const Kernels& kernels, const DeltaRuleCall& call, Scratch& scratch, int threads) : k(kernels), c(call) {
    const std::int64_t tokens_at_once = std::min(c.tokens, kTokensAtOnce);
    const std::int64_t rows =
        std::min(c.batch, std::max<std::int64_t>(1, kRowsAtOnce / tokens_at_once)) * tokens_at_once;
    decay_width = padded(c.decay_of_channels ? c.heads * padded(c.key_depth) : c.heads);
    gate_count = c.decay_of_channels ? c.heads : 1;
    queries = scratch.queries.get<float>(rows * c.key_heads * c.key_depth);
    keys = scratch.keys.get<float>(rows * c.key_heads * c.key_depth);
    values = scratch.values.get<float>(rows * c.heads * c.value_depth);
    betas = scratch.betas.get<float>(rows * padded(c.heads));
    decays = scratch.decays.get<float>(rows * decay_width);
    slice_floats = padded((kStateColumns + 2) * c.key_depth);
    slices = scratch.slices.get<float>(threads * slice_floats);
    load_parameters(scratch);
  }

  void load_parameters(Scratch& scratch) {
    const std::int64_t biases = c.heads * (c.decay_of_channels ? c.key_depth : 1);
    rates = scratch.rates.get<float>(padded(c.heads));
    bias = scratch.bias.get<float>(biases);
    norm = scratch.norm.get<float>(c.value_depth);
    k.load_row(c.log_rates.data, c.log_rates.type, static_cast<int>(c.heads), rates);
    k.load_row(c.decay_bias.data, c.decay_bias.type, static_cast<int>(biases), bias);
    k.load_row(c.norm_weight.data, c.norm_weight.type, static_cast<int>(c.value_depth), norm);
    k.delta.exponential(rates, static_cast<int>(c.heads));
  }

  // Token `token` of sequence `sequence` of this part, in the whole input.
  std::int64_t row_of(std::int64_t sequence, std::int64_t token) const {
    return (first_sequence + sequence) * c.tokens + first_token + token;
  }

  // One head of queries, keys or values of a sequence: `out` [tokens, depth].
  void convolve(const HeadRows& heads, std::int64_t sequence, std::int64_t head, std::int64_t depth,
                std::int64_t channel, float* out) const {
    auto* state = static_cast<std::uint8_t*>(c.conv_state);
    for (std::int64_t first = 0; first < depth; first += kTapChannels) {
      ConvolveRows rows{};
      rows.type = c.type;
      rows.x = static_cast<const std::uint8_t*>(heads.at(row_of(sequence, 0), head, c.type)) + first * size_of(c.type);
      rows.stride = heads.token_stride;
      rows.tokens = static_cast<int>(tokens);
      rows.channels = static_cast<int>(std::min<std::int64_t>(kTapChannels, depth - first));
      rows.taps = c.taps;
      rows.weight_type = c.conv_weight.type;
      rows.weight = c.conv_weight.at((channel + first) * c.taps);
      rows.bias = c.conv_bias.at(channel + first);
      rows.state = state + ((first_sequence + sequence) * c.channels() + channel + first) * c.taps * size_of(c.type);
      rows.silu = true;
      rows.out_type = DType::kF32;
      rows.out = out + first;
      rows.out_stride = depth;
      k.delta.convolve(rows);
    }
  }

  void prepare_head(std::int64_t item) const {
    const std::int64_t all = 2 * c.key_heads + c.heads, sequence = item / all, index = item % all;
    if (index >= 2 * c.key_heads) {
      const std::int64_t head = index - 2 * c.key_heads;
      const std::int64_t channel = 2 * c.key_heads * c.key_depth + head * c.value_depth;
      return convolve(c.values, sequence, head, c.value_depth, channel,
                      values + (sequence * c.heads + head) * tokens * c.value_depth);
    }
    const bool is_query = index < c.key_heads;
    const std::int64_t head = index % c.key_heads;
    float* out = (is_query ? queries : keys) + (sequence * c.key_heads + head) * tokens * c.key_depth;
    convolve(is_query ? c.queries : c.keys, sequence, head, c.key_depth, index * c.key_depth, out);
    const float factor = is_query ? 1.0f / std::sqrt(static_cast<float>(c.key_depth)) : 1.0f;
    k.delta.normalize_lengths({out, tokens, static_cast<int>(c.key_depth), kLengthEpsilon, factor});
  }

  // What the tokens remember and how much is kept: of all heads of a token, or of one where its channels differ.
  void prepare_gates(std::int64_t item) const {
    const std::int64_t row = item / gate_count, input = row_of(row / tokens, row % tokens);
    float* beta = betas + row * padded(c.heads);
    float* decay = decays + row * decay_width;
    if (c.decay_of_channels) {
      const std::int64_t head = item % gate_count, depth = c.key_depth;
      float* of_head = decay + head * padded(depth);
      k.load_row(c.decays.at(input, head, c.type), c.type, static_cast<int>(depth), of_head);
      k.delta.decay({of_head, static_cast<int>(depth), bias + head * depth, rates + head, true, c.decay_bound});
      if (head > 0) return;
    } else {
      for (std::int64_t h = 0; h < c.heads; ++h) k.load_row(c.decays.at(input, h, c.type), c.type, 1, decay + h);
      k.delta.decay({decay, static_cast<int>(c.heads), bias, rates, false, c.decay_bound});
    }
    for (std::int64_t h = 0; h < c.heads; ++h) k.load_row(c.betas.at(input, h, c.type), c.type, 1, beta + h);
    k.score(beta, static_cast<int>(c.heads), Scoring::kSigmoid);
  }

  void advance(std::int64_t item, float* scratch) const {
    const std::int64_t slices_of_head = (c.value_depth + columns - 1) / columns;
    const std::int64_t head = item / slices_of_head % c.heads, sequence = item / slices_of_head / c.heads;
    const std::int64_t first = item % slices_of_head * columns, key_head = head / (c.heads / c.key_heads);
    const std::int64_t key = (sequence * c.key_heads + key_head) * tokens * c.key_depth;
    const std::int64_t row = sequence * tokens;
    DeltaSteps steps{};
    steps.state = c.state + ((first_sequence + sequence) * c.heads + head) * c.key_depth * c.value_depth + first;
    steps.state_stride = c.value_depth;
    steps.rows = static_cast<int>(c.key_depth);
    steps.columns = static_cast<int>(std::min(columns, c.value_depth - first));
    steps.tokens = static_cast<int>(tokens);
    steps.queries = queries + key;
    steps.keys = keys + key;
    steps.decays = decays + row * decay_width + head * (c.decay_of_channels ? padded(c.key_depth) : 1);
    steps.decay_stride = decay_width;
    steps.shared_decay = !c.decay_of_channels;
    steps.betas = betas + row * padded(c.heads) + head;
    steps.beta_stride = padded(c.heads);
    steps.values = values + (sequence * c.heads + head) * tokens * c.value_depth + first;
    steps.value_stride = c.value_depth;
    steps.scratch = scratch;
    k.delta.advance(steps);
  }

  void gate(std::int64_t row, std::int64_t head) const {
    const std::int64_t sequence = row / tokens, token = row % tokens, input = row_of(sequence, token);
    const float* x = values + ((sequence * c.heads + head) * tokens + token) * c.value_depth;
    auto* out = static_cast<std::uint8_t*>(c.out) + (input * c.heads + head) * c.value_depth * size_of(c.type);
    k.delta.gate({x, norm, c.gates.at(input, head, c.type), c.type, static_cast<int>(c.value_depth), c.norm_epsilon,
                  c.sigmoid_gate, out});
  }

  void run_part(int threads) {
    // With one token whole rows of the state are read, unless there are too few heads for all threads.
    columns = tokens > 1 || sequences * c.heads < 2 * threads ? kStateColumns : c.value_depth;
    const std::int64_t heads = sequences * (2 * c.key_heads + c.heads), rows = sequences * tokens;
    const std::int64_t states = sequences * c.heads * ((c.value_depth + columns - 1) / columns);
    std::atomic<std::int64_t> next_input{0}, next_state{0};
    run_on_threads(threads, [&](Worker& worker) {
      take(next_input, heads + rows * gate_count,
           [&](std::int64_t i) { i < heads ? prepare_head(i) : prepare_gates(i - heads); });
      worker.barrier->wait();
      take(next_state, states, [&](std::int64_t i) { advance(i, slices + worker.index * slice_floats); });
      worker.barrier->wait();
      const std::int64_t outputs = rows * c.heads, last = outputs * (worker.index + 1) / worker.count;
      for (std::int64_t i = outputs * worker.index / worker.count; i < last; ++i) gate(i / c.heads, i % c.heads);
    });
  }

  void run(int threads) {
    const std::int64_t tokens_at_once = std::min(c.tokens, kTokensAtOnce);
    const std::int64_t sequences_at_once = std::max<std::int64_t>(1, kRowsAtOnce / tokens_at_once);
    for (first_sequence = 0; first_sequence < c.batch; first_sequence += sequences_at_once) {
      sequences = std::min(sequences_at_once, c.batch - first_sequence);
      for (first_token = 0; first_token < c.tokens; first_token += tokens_at_once) {
        tokens = std::min(tokens_at_once, c.tokens - first_token);
        run_part(threads);
      }
    }
  }
};

}  // namespace

void gated_delta_rule(const Kernels& kernels, const DeltaRuleCall& c) {
  CPUMOE_REQUIRE(c.key_heads >= 1 && c.heads % c.key_heads == 0, "there are ", c.heads, " heads of values for ",
                 c.key_heads, " heads of keys; a multiple is accepted");
  CPUMOE_REQUIRE(c.taps >= 1 && c.taps <= kMostTaps, "conv_weight has ", c.taps, " taps; 1 to ", kMostTaps,
                 " are accepted");
  if (c.batch * c.tokens * c.heads * c.key_depth * c.value_depth == 0) return;
  static thread_local Scratch scratch;
  const std::int64_t state_bytes = c.batch * c.heads * c.key_depth * c.value_depth * 4;
  const int threads = threads_for(2 * state_bytes * std::min<std::int64_t>(c.tokens, 16));
  Forward(kernels, c, scratch, threads).run(threads);
}

void short_convolution(const Kernels& kernels, const ShortConvolutionCall& c) {
  CPUMOE_REQUIRE(c.taps >= 1 && c.taps <= kMostTaps, "weight has ", c.taps, " taps; 1 to ", kMostTaps, " are accepted");
  const std::int64_t pieces = (c.channels + kTapChannels - 1) / kTapChannels;
  const std::int64_t element = size_of(c.type), width = 3 * c.channels;
  if (c.tokens == 0) return;
  const int threads = threads_for(c.batch * c.channels * element * (4 * c.tokens + 3 * c.taps));
  std::atomic<std::int64_t> next{0};
  run_on_threads(threads, [&](Worker&) {
    take(next, c.batch * pieces, [&](std::int64_t item) {
      const std::int64_t sequence = item / pieces, first = item % pieces * kTapChannels;
      const auto* row = static_cast<const std::uint8_t*>(c.projected) + (sequence * c.tokens * width + first) * element;
      ConvolveRows rows{};
      rows.type = rows.out_type = c.type;
      rows.gate = row;
      rows.out_gate = row + c.channels * element;
      rows.x = row + 2 * c.channels * element;
      rows.stride = width;
      rows.tokens = static_cast<int>(c.tokens);
      rows.channels = static_cast<int>(std::min<std::int64_t>(kTapChannels, c.channels - first));
      rows.taps = c.taps;
      rows.weight_type = c.weight.type;
      rows.weight = c.weight.at(first * c.taps);
      rows.bias = c.bias.at(first);
      rows.state = static_cast<std::uint8_t*>(c.state) + (sequence * c.channels + first) * c.taps * element;
      rows.out = static_cast<std::uint8_t*>(c.out) + (sequence * c.tokens * c.channels + first) * element;
      rows.out_stride = c.channels;
      kernels.delta.convolve(rows);
    });
  });
}

}  // namespace cpumoe
