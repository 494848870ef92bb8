// The gated delta rule: all of a gated delta net, or of Kimi delta attention, between its projections.
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

#include "ops/convolution.h"

namespace cpumoe {

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

}  // namespace cpumoe
