// Choosing experts: scores, groups, top-k and weights of each token.
#pragma once

#include <cstdint>

#include "kernels/table.h"

namespace cpumoe {

struct RouteCall {
  const void* logits;  // [tokens, experts], contiguous
  DType type;
  std::int64_t tokens, experts, topk;
  Scoring scoring;           // applied to all experts before the choice ...
  bool score_chosen;         // ... or only to the chosen ones after it
  const float* bias;         // [experts], added for the choice but not to the weights; or null
  std::int64_t groups;       // 0: none; experts come in this many groups of equal size ...
  std::int64_t topk_groups;  // ... and only the best of them take part
  bool renormalize;          // weights divided by their sum, also where they underflow
  float scale;               // weights times this
  std::int32_t* ids;         // [tokens, topk], best first; of equal scores the larger logit, then the lower id
  float* weights;            // [tokens, topk]
};

void route(const Kernels& kernels, const RouteCall& call);

// The same for tokens [first, last), by the calling thread, of a call that has been checked.
void route_tokens(const Kernels& kernels, const RouteCall& call, std::int64_t first, std::int64_t last);

// Refuses numbers of experts and groups that do not belong together.
void check_routing(const RouteCall& call);

}  // namespace cpumoe
