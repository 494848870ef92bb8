// Attention over latents: all heads share one row of numbers for each token, from which keys and values are made by
// weights of the head. They never are made here: the weights of the keys multiply the query instead, and those of the
// values the weighted sum of latents.
#pragma once

#include <cstdint>

#include "kernels/table.h"

namespace cpumoe {

struct LatentAttentionCall {
  DType type;
  std::int64_t batch, heads, queries, tokens;
  std::int64_t rank;    // numbers of a latent
  std::int64_t rotary;  // numbers of a key that all heads share besides; may be 0
  std::int64_t nope;    // numbers of a key that are made from the latent
  std::int64_t value_depth;
  const void* query;                           // [batch, heads, queries, nope + rotary]
  const void* latents;                         // [batch, tokens, rank]
  const void* rotated;                         // [batch, tokens, rotary]
  std::int64_t latent_stride, rotated_stride;  // from one sequence of the batch to the next, in numbers
  const void* weight;                          // [heads, nope + value_depth, rank]: first the rows of keys
  const float* mask;                           // [batch, queries, tokens], added to the scores; or null
  const float* sinks;  // [heads], a score that every row has besides those of its keys, without a value; or null
  float scale;         // of the scores
  void* out;           // [batch, queries, heads, value_depth]
};

// All in fp32 between inputs and result; the same bits for any number of threads. A query that sees no token gets 0.
void attend_latents(const Kernels& kernels, const LatentAttentionCall& call);

}  // namespace cpumoe
