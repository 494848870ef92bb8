// Lightning attention: linear attention whose past decays at a fixed rate for each head.
#pragma once

#include <cstdint>

#include "kernels/table.h"

namespace cpumoe {

// For each head: state = e^-slope * state + k^T v, out = q state. It is a state space (ScanState) whose rows are those
// of v: what it holds is the transpose of `state`.
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

// In fp32, rounded once; any number of threads gives the same bits.
void lightning_attention(const Kernels& kernels, const LightningCall& call);

}  // namespace cpumoe
