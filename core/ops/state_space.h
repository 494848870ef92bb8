// State spaces: Mamba layers between their projections, and lightning attention.
//
// All of it is computed in fp32 and rounded once, to the type of the result. States are read and left as they were
// found: whoever knows their meaning can go on from them. Any number of threads, and any cut of the tokens into calls,
// gives the same bits.
#pragma once

#include <cstdint>

#include "ops/convolution.h"

namespace cpumoe {

// Mamba2: a convolution over [x | B | C] with silu, steps, the pass over the state, and the gated norm.
struct Mamba2Call {
  DType type;  // of projected, conv_state and out
  std::int64_t batch, tokens, heads, head_dim, groups, depth;
  const void* projected;  // [batch, tokens, [gate: inner | x: inner | B: groups * depth | C: likewise | dt: heads]]
  void* conv_state;       // [batch, channels, taps] of the convolution
  float* state;           // [batch, heads, head_dim, depth]
  ChannelConvolution convolution;  // of inner + 2 * groups * depth channels
  Parameters dt_bias, A_log, D;    // [heads]
  Parameters norm_weight;          // [inner]; or null: the gate alone
  std::int64_t norm_group;         // values that are normed together
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

// Mamba: steps, B and C (normed if there are weights), the pass over the state, and the gate.
struct SelectiveScanCall {
  DType type;  // of all but the state and the parameters
  std::int64_t batch, tokens, channels, depth, parameter_row, gate_row;
  const void* x;                  // [batch, tokens, channels]
  const void* steps;              // [batch, tokens, channels], before their bias
  const void* parameters;         // [batch, tokens, parameter_row]; a row ends in [B: depth | C: depth]
  const void* gate;               // [batch, tokens, gate_row]; a row ends in the gate [channels]
  float* state;                   // [batch, channels, depth]
  Parameters step_bias;           // [channels] or null
  Parameters A_log, D;            // [channels, depth], [channels]
  Parameters b_weight, c_weight;  // [depth], or null: no norm
  float epsilon;
  void* out;  // [batch, tokens, channels]
};

void selective_scan(const Kernels& kernels, const SelectiveScanCall& call);

// Lightning attention: linear attention whose past decays at a fixed rate for each head, state = e^-slope * state +
// k^T v, out = q state. As a state space (ScanState) its rows are those of v, and it holds the transpose of `state`.
struct LightningCall {
  DType type;  // of qkv and out
  std::int64_t batch, tokens, heads, depth;
  const void* qkv;      // [batch, tokens, heads, [q | k | v]: depth each]
  const float* slopes;  // [heads]
  DType state_type;
  const void* state;  // [batch, heads, depth of k, depth of v] before the tokens, or null: zeros
  void* next_state;   // behind them
  void* out;          // [batch, tokens, heads, depth]
};

void lightning_attention(const Kernels& kernels, const LightningCall& call);

}  // namespace cpumoe
