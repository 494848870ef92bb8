// A quantised linear on the kernels of the fused layer: out = x . W^T + bias.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "packed.h"

namespace cpumoe {

struct LinearCall {
  PackedMatrix weight;   // one "expert"
  const void* x;         // [rows, in_features], contiguous
  DType type, out_type;  // of x, and of out: that of x or fp32
  std::int64_t rows;
  void* out;  // [rows, out_features]
};

void linear_forward(const Kernels& kernels, const LinearCall& call);

}  // namespace cpumoe
