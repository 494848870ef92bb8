// What layers with a recurrent state ask of an instruction set: short convolutions, gates and the gated delta rule.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/formats.h"

namespace cpumoe {

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

// Channels, each convolved with its inputs up to a token's own:
// out[t, c] = silu(bias[c] + sum over k < width of weight[c, k] * input[t - width + 1 + k, c]) * mask[t].
// `state` holds the `width` inputs before x and then those up to the last of x: any cut of the tokens gives the same
// bits.
struct ConvolveChannels {
  DType type;     // of x and state
  const void* x;  // [tokens, channels], rows x_stride elements apart
  std::int64_t x_stride, tokens;
  int channels, width;  // at most kConvolvedChannels and kConvolutionWidth
  void* state;          // [channels, width]
  DType weight_type;
  const void* weight;  // [channels, width]
  DType bias_type;
  const void* bias;   // [channels] or null
  const float* mask;  // [tokens] or null
  DType out_type;
  void* out;  // [tokens, channels], rows out_stride elements apart
  std::int64_t out_stride;
};

static constexpr int kConvolvedChannels = 64, kConvolutionWidth = 16;

// Steps of a state space: steps[i] = log(1 + e^(raw[i] + bias[i])) within [low, high], and decays[i] = e^(steps[i] *
// rates[i]) if there are rates.
struct TimeSteps {
  const void* raw;
  DType type;
  const float *bias, *rates;  // or null
  std::int64_t count;
  float low, high;
  float *steps, *decays;
};

// A state space with `rows` rows of `depth` values, over tokens:
//   state[r, n] = state[r, n] * decay + step * x[t, r] * b[t, n]
//   out[t, r] = sum over n of state[r, n] * c[t, n] + skip * x[t, r]
// where the sum runs in 16 interleaved lanes, which are then added in halves. The decay and the step are those of the
// token; or, with `rates`, every row has a step of its own and decays by e^(step * rates[r, n]).
struct ScanState {
  float* state;  // [rows, depth]
  std::int64_t rows, depth, tokens;
  const float* x;  // [tokens, rows]; may be `out`
  std::int64_t x_stride;
  const float *b, *c;  // [tokens, depth]
  std::int64_t bc_stride;
  const float *steps, *decays;  // [tokens], or steps [tokens, rows] and no decays
  std::int64_t step_stride;
  const float* rates;  // [rows, depth] or null
  const float* skip;   // [1] or, with rates, [rows]
  float* out;          // [tokens, rows]
  std::int64_t out_stride;
};

// out[i] = normed(x[i] * silu(gate[i])), or normed(x[i]) * silu(gate[i]) with `gate_last`. Every `group` values are
// divided by the root of their mean square + epsilon and multiplied by the weight; without a weight there is no norm.
// x is overwritten.
struct GateRow {
  float* x;
  const void* gate;
  DType type;  // of gate and out
  std::int64_t count, group;
  const void* weight;  // [count] or null
  DType weight_type;
  float epsilon;
  bool gate_last;
  void* out;
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
