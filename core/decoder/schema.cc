#include "decoder/schema.h"

namespace cpumoe {

RouteCall Router::call(std::int64_t tokens, const float* logits, std::int32_t* ids, float* weights) const {
  RouteCall routing{};
  routing.logits = logits;
  routing.type = DType::kF32;
  routing.tokens = tokens;
  routing.experts = weight.columns;
  routing.topk = topk;
  routing.scoring = scoring;
  routing.score_chosen = score_chosen;
  routing.bias = correction;
  routing.groups = groups;
  routing.topk_groups = topk_groups;
  routing.renormalize = renormalize;
  routing.scale = scale;
  routing.ids = ids;
  routing.weights = weights;
  return routing;
}

std::int64_t DeltaPart::width() const {
  std::int64_t width = 0;
  for (const Matrix& m : projections) width += m.columns;
  for (const Expansion& e : expansions) width += e.matrix.columns;
  return width;
}

}  // namespace cpumoe
