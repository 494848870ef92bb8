// Kernels of layers with a recurrent state: short convolutions, gated norms, the gated delta rule and state spaces
// (Mamba).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/formats.h"

namespace cpumoe {

static constexpr int kMostTaps = 16;      // of a convolution
static constexpr int kTapChannels = 128;  // most that one call convolves
static constexpr int kStateColumns = 32;  // that are advanced at once over several tokens: 16 KB at 128 rows
static constexpr int kPaddedLanes = 16;   // rows that are worked on in place have room for whole vectors of these

// Causal convolution of each channel along the tokens: out[t][c] = bias[c] + sum over taps j of weight[c][j] *
// x[t - taps + 1 + j][c], taps in ascending order. Inputs before the first token come from the state: any cut of the
// tokens gives the same bits.
struct ConvolveRows {
  DType type;             // of x, both gates and the state
  const void* x;          // [tokens, channels]
  const void* gate;       // x is multiplied by it and rounded to its type before all else; or null
  std::ptrdiff_t stride;  // elements from one token to the next, of x and both gates
  int tokens, channels, taps;
  DType weight_type, bias_type;
  const void* weight;    // [channels, taps]
  const void* bias;      // [channels], or null
  void* state;           // [channels, taps]: the last inputs; moved on by the tokens
  bool silu;             // of the result
  const float* mask;     // [tokens], factors of the result; or null
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

// The factor by which a state decays at a token, in place: e^(rate * log(1 + e^(x + bias))), or with a bound below zero
// e^(bound / (1 + e^(rate * (x + bias)))). 0 where it would be below e^-87. Room for whole vectors.
struct DecayRow {
  float* x;
  int count;
  const float* bias;
  const float* rate;  // as decay_rates gives them; one for each value, or `shared_rate`: one for all
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

// out[i] = normed(x[i] * f(gate[i])), or normed(x[i]) * f(gate[i]) with `gate_last`, f = silu or sigmoid. Every `group`
// values are divided by the root of their mean square + epsilon and multiplied by the weight; without a weight there is
// no norm. Without `gate_last`, x is overwritten by x * f(gate).
struct GateRow {
  float* x;
  const float* weight;  // [count] or null
  const void* gate;
  DType type;  // of gate and out
  std::int64_t count, group;
  float epsilon;
  bool gate_last, sigmoid;
  void* out;
};

struct RecurrentKernels {
  void (*convolve)(const ConvolveRows&);
  void (*gate)(const GateRow&);
  void (*decay_rates)(const void* logarithms, DType type, std::int64_t count, float* rates);  // -e^x
  void (*decay)(const DecayRow&);
  void (*normalize_lengths)(const NormalizeLengths&);
  void (*advance)(const DeltaSteps&);
  void (*time_steps)(const TimeSteps&);
  void (*scan_state)(const ScanState&);
};

}  // namespace cpumoe
