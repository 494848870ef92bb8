// Root-mean-square norms of rows.
#pragma once

#include <cstdint>

#include "kernels/table.h"

namespace cpumoe {

struct NormCall {
  DType type, weight_type;  // of x and out; of weight
  std::int64_t rows, width;
  const void *x, *weight;  // [rows, width], [width]
  float epsilon;
  bool round_first, plus_one;  // see NormalizeRow
  void* out;                   // [rows, width]
};

void rms_norm(const Kernels& kernels, const NormCall& call);

}  // namespace cpumoe
