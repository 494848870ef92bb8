// All of a gated delta net, or of Kimi delta attention, between its projections; and short convolutions.
//
// Token after token rather than in chunks. With the state [dk, dv] of a head in fp32, a token takes 4 dk dv vector
// operations (decay, update, recall, and the next token's read of the new state, all in one pass), a chunk of C tokens
// in matrix products 3 dk dv + C (2.5 dk + 1.5 dv) for each of them: at dk = dv = 128 that is 65,500 and 81,900 with C
// = 64, 57,300 with C = 16. 32 columns of a state and all that a token needs stay in L1, so nothing is gained in bytes
// either. And however a text is cut into calls, every token gets the same bits.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/table.h"
#include "runtime/threads.h"

namespace cpumoe {

// A vector of parameters in a type of its own.
struct Parameters {
  const void* data = nullptr;
  DType type{};

  const void* at(std::int64_t index) const {  // null where there are none
    return data == nullptr ? nullptr : static_cast<const std::uint8_t*>(data) + index * size_of(type);
  }
};

// Where the heads of all tokens stand, in elements: head h of token t at t * token_stride + h / group * group_stride +
// h % group * head_stride.
struct HeadRows {
  const void* data = nullptr;
  std::int64_t token_stride = 0, group = 1, group_stride = 0, head_stride = 0;

  const void* at(std::int64_t token, std::int64_t head, DType type) const {
    const std::int64_t offset = token * token_stride + head / group * group_stride + head % group * head_stride;
    return static_cast<const std::uint8_t*>(data) + offset * size_of(type);
  }
};

// A causal convolution of each channel by itself. Its state is [channels, taps], the last inputs.
struct ChannelConvolution {
  std::int64_t channels = 0;
  int taps = 0;
  Parameters weight, bias;  // [channels, taps], [channels] or null

  std::int64_t state_size() const { return channels * taps; }
};

// What a layer of this kind is: its sizes and parameters.
struct DeltaRule {
  std::int64_t key_heads = 0, heads = 0, key_depth = 0, value_depth = 0;  // heads / key_heads neighbours share a key
  bool decay_of_channels = false;                                         // key_depth of them for a head, else one
  Parameters log_rates;                                                   // [heads]
  Parameters decay_bias;                                                  // [heads], or [heads, key_depth]
  float decay_bound = 0.0f;                                               // see DecayRow
  ChannelConvolution convolution;                                         // of queries, keys and values
  Parameters norm_weight;                                                 // [value_depth]
  float norm_epsilon = 0.0f;
  bool sigmoid_gate = false;  // else silu

  std::int64_t channels() const { return 2 * key_heads * key_depth + heads * value_depth; }
  std::int64_t state_size() const { return heads * key_depth * value_depth; }
};

// Tokens of one sequence that come one after the other, in rows side by side.
struct SequenceRows {
  std::int64_t sequence, first_row, rows;
};

struct DeltaRuleCall {
  DeltaRule rule;
  DType type;                               // of the projections, the convolution's state and out
  std::span<const SequenceRows> sequences;  // all rows from the first on, in their order
  HeadRows queries, keys, values, gates;    // of each row
  HeadRows betas;                           // one value for each head
  HeadRows decays;                          // likewise, or key_depth of them
  void* conv_state;                         // [sequences, channels, taps], moved on
  float* state;                             // [sequences, heads, key_depth, value_depth], moved on
  void* out;                                // [rows, heads, value_depth]
};

// Refuses sizes that do not belong together.
void check_delta_rule(const DeltaRule& rule);

// Convolution and silu of queries, keys and values; queries and keys to length 1 (1e-6 under the root) and queries
// times 1 / sqrt(key_depth); the gated delta rule with beta = sigmoid; norm and gate. The same bits for any number of
// threads and however the tokens come. A stage of a team: `plan` by one thread, then `run` by all; the result is
// complete behind their next barrier.
class DeltaRuleStage {
 public:
  DeltaRuleStage();
  ~DeltaRuleStage();

  void plan(const Kernels& kernels, const DeltaRuleCall& call, int threads);
  void run(Worker& worker);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// By itself, on a team of its own.
void gated_delta_rule(const Kernels& kernels, const DeltaRuleCall& call);

// out = C * convolution(B * x).
struct ShortConvolutionCall {
  ChannelConvolution convolution;
  DType type;
  std::span<const SequenceRows> sequences;
  const void* projected;  // [rows, 3, channels]: B, C, x
  void* state;            // [sequences, channels, taps], moved on
  void* out;              // [rows, channels]
};

// Refuses sizes that do not belong together.
void check_short_convolution(const ChannelConvolution& convolution);

// The share of one worker; the result is complete behind the next barrier of its team.
void convolve_shortly(const Kernels& kernels, const ShortConvolutionCall& call, const Worker& worker);

// By itself, on a team of its own.
void short_convolution(const Kernels& kernels, const ShortConvolutionCall& call);

}  // namespace cpumoe
