// What layers with a recurrent state ask of an instruction set: short convolutions, gates and the gated delta rule.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpumoe {

enum class DType : std::uint8_t;  // kernel.h

static constexpr int kMostTaps = 16;      // of a convolution
static constexpr int kTapChannels = 128;  // most that one call convolves
static constexpr int kStateColumns = 32;  // that are advanced at once over several tokens: 16 KB at 128 rows
static constexpr int kPaddedLanes = 16;   // rows that are worked on in place have room for whole vectors of these

// Causal convolution of each channel along the tokens: out[t][c] = bias[c] + sum over taps j of weight[c][j] * x[t -
// taps
// + 1 + j][c], taps in ascending order, what came before the first token taken from the state.
struct ConvolveRows {
  DType type;             // of x, both gates and the state
  const void* x;          // [tokens, channels]
  const void* gate;       // x is multiplied by it and rounded to its type before all else; or null
  std::ptrdiff_t stride;  // elements from one token to the next, of x and both gates
  int tokens, channels, taps;
  DType weight_type;     // of the weight and the bias
  const void* weight;    // [channels, taps]
  const void* bias;      // [channels], or null
  void* state;           // [channels, taps]: the last inputs; moved on by the tokens
  bool silu;             // of the result
  const void* out_gate;  // the result is multiplied by it; or null
  DType out_type;
  void* out;  // [tokens, channels]
  std::ptrdiff_t out_stride;
};

// Rows [rows, depth] in place: x * factor / sqrt(sum of squares + epsilon).
struct NormalizeLengths {
  float* x;
  std::int64_t rows;
  int depth;
  float epsilon, factor;
};

// What is left of a state after a token, in place: e^(-rate * log(1 + e^(x + bias))), or with a bound below zero
// e^(bound / (1 + e^(-rate * (x + bias)))). 0 where it would be below e^-87. Room for whole vectors.
struct DecayRow {
  float* x;
  int count;
  const float* bias;
  const float* rate;  // one for each value, or `shared_rate`: one for all
  bool shared_rate;
  float bound;  // 0: none
};

// The gated delta rule, token after token, on `columns` columns of a state [rows, columns]:
//   read = (key * decay)^T state;  change = (value - read) * beta;  state = decay * state + key change^T;
//   value = query^T state.
// Sums run over rows in ascending order, one fma each, whatever the columns and however many tokens one call has.
struct DeltaSteps {
  float* state;
  std::ptrdiff_t state_stride;
  int rows, columns, tokens;
  const float *queries, *keys;  // [tokens, rows]
  const float* decays;          // [tokens, rows], or with `shared_decay` one for all rows of a token
  std::ptrdiff_t decay_stride;
  bool shared_decay;
  const float* betas;
  std::ptrdiff_t beta_stride;
  float* values;  // [tokens, columns]: what is to be remembered, then what was recalled
  std::ptrdiff_t value_stride;
  float* scratch;  // (2 + kStateColumns) * rows values
};

// dst[i] = x[i] / sqrt(mean of squares + epsilon) * weight[i] * f(gate[i]), f = silu or sigmoid.
struct GatedNormRow {
  const float *x, *weight;
  const void* gate;
  DType type;  // of gate and dst
  int count;
  float epsilon;
  bool sigmoid;
  void* dst;
};

struct DeltaKernels {
  // x[i] = e^x[i], in place, with room for whole vectors.
  void (*exponential)(float* x, int count);
  void (*convolve)(const ConvolveRows&);
  void (*normalize_lengths)(const NormalizeLengths&);
  void (*decay)(const DecayRow&);
  void (*advance)(const DeltaSteps&);
  void (*gate)(const GatedNormRow&);
};

}  // namespace cpumoe
