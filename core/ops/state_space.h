// State spaces: what Mamba layers do between their projections.
//
// All of it is computed in fp32 and rounded once, to the type of the result. States are read and left as they were
// found: whoever knows their meaning can go on from them. Any number of threads, and any cut of the tokens into calls,
// gives the same bits.
#pragma once

#include <cstdint>

#include "kernels/table.h"

namespace cpumoe {

// Floats of any type; data may be null where that is said.
struct Floats {
  const void* data = nullptr;
  DType type = DType::kF32;
};

// Mamba2: a convolution over [x | B | C] with silu, steps, the pass over the state, and the gated norm.
struct Mamba2Call {
  DType type;  // of projected, conv_state and out
  std::int64_t batch, tokens, heads, head_dim, groups, depth, width;
  const void* projected;     // [batch, tokens, [gate: inner | x: inner | B: groups * depth | C: likewise | dt: heads]]
  void* conv_state;          // [batch, inner + 2 * groups * depth, width]: the last `width` inputs of the convolution
  float* state;              // [batch, heads, head_dim, depth]
  Floats conv_weight;        // [inner + 2 * groups * depth, width]
  Floats conv_bias;          // or null
  Floats dt_bias, A_log, D;  // [heads]
  Floats norm_weight;        // [inner]; or null: the gate alone
  std::int64_t norm_group;   // values that are normed together
  float epsilon;
  bool gate_last;             // see GateRow
  float step_low, step_high;  // limits of the steps
  const float* mask;          // [batch, tokens], times what the convolution gives; or null
  void* out;                  // [batch, tokens, inner]

  std::int64_t inner() const { return heads * head_dim; }
  std::int64_t convolved() const { return inner() + 2 * groups * depth; }
  std::int64_t row() const { return inner() + convolved() + heads; }
};

void mamba2(const Kernels& kernels, const Mamba2Call& call);

// The convolution of Mamba, whose result is projected once more before the steps are known.
struct ConvolutionCall {
  DType type;
  std::int64_t batch, tokens, channels, width, row;
  const void* projected;  // [batch, tokens, row]; the first `channels` of a row are convolved
  void* conv_state;       // [batch, channels, width]
  Floats weight, bias;    // [channels, width]; [channels] or null
  const float* mask;      // [batch, tokens] or null
  void* out;              // [batch, tokens, channels]
};

void convolve(const Kernels& kernels, const ConvolutionCall& call);

// Mamba: steps, B and C (normed if there are weights), the pass over the state, and the gate.
struct SelectiveScanCall {
  DType type;  // of all but the state and the Floats
  std::int64_t batch, tokens, channels, depth, parameter_row, gate_row;
  const void* x;              // [batch, tokens, channels]
  const void* steps;          // [batch, tokens, channels], before their bias
  const void* parameters;     // [batch, tokens, parameter_row]; a row ends in [B: depth | C: depth]
  const void* gate;           // [batch, tokens, gate_row]; a row ends in the gate [channels]
  float* state;               // [batch, channels, depth]
  Floats step_bias;           // [channels] or null
  Floats A_log, D;            // [channels, depth], [channels]
  Floats b_weight, c_weight;  // [depth], or null: no norm
  float epsilon;
  void* out;  // [batch, tokens, channels]
};

void selective_scan(const Kernels& kernels, const SelectiveScanCall& call);

}  // namespace cpumoe
