// Attention of one new token over the keys and values of all tokens before it.
#pragma once

#include <cstdint>

#include "kernels/table.h"

namespace cpumoe {

struct AttentionCall {
  DType type;
  std::int64_t batch, heads, kv_heads, tokens, depth, value_depth;
  const void* query;   // [batch, heads, depth]; heads / kv_heads neighbours share keys and values
  const void* keys;    // [batch, kv_heads, tokens, depth]
  const void* values;  // [batch, kv_heads, tokens, value_depth]
  const float* mask;   // [batch, tokens], added to the scores; or null
  const float* sinks;  // [heads], a score that every row has besides those of its keys, without a value; or null
  float scale;         // of the scores
  void* out;           // [batch, heads, value_depth]
};

// Scores, softmax and sums in fp32; the same bits for any number of threads.
void attend(const Kernels& kernels, const AttentionCall& call);

}  // namespace cpumoe
