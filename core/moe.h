// The fused layer: out_t = sum over chosen experts of w * (down . act(gate_up . x_t + b1) + b2), in one call.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "packed.h"

namespace cpumoe {

struct MoeCall {
  PackedMatrix gate_up, down;
  const void* x;  // [tokens, hidden], contiguous
  DType type,
      out_type;  // of x, and of out: that of x, or fp32 for sums that others are added to before they are rounded
  std::int64_t tokens, topk;
  const std::int32_t* ids;  // [tokens, topk]; -1 contributes nothing
  const float* weights;     // [tokens, topk]
  bool weight_on_input;     // scale the token by its weight before the first product, not after the second
  ActivationSpec activation;
  void* out;  // [tokens, hidden]
};

// Refuses matrices that do not belong together and ids out of range.
void moe_forward(const Kernels& kernels, const MoeCall& call);

}  // namespace cpumoe
