#include "decoder/schema.h"

namespace cpumoe {

std::int64_t DeltaNet::width() const {
  std::int64_t width = 0;
  for (const Matrix& m : projections) width += m.columns;
  for (const Expansion& e : expansions) width += e.matrix.columns;
  return width;
}

DeltaRule DeltaNet::rule() const {
  DeltaRule rule;
  rule.key_heads = key_heads;
  rule.heads = heads;
  rule.key_depth = key_dim;
  rule.value_depth = value_dim;
  rule.decay_of_channels = decay_bias.shape[0] != heads;
  rule.log_rates = log_rates.parameters();
  rule.decay_bias = decay_bias.parameters();
  rule.decay_bound = decay_bound;
  rule.convolution = {rule.channels(), static_cast<int>(conv_weight.shape[1]), conv_weight.parameters(),
                      conv_bias.parameters()};
  rule.norm_weight = norm_weight.parameters();
  rule.norm_epsilon = norm_epsilon;
  rule.sigmoid_gate = sigmoid_gate;
  return rule;
}

ChannelConvolution ShortConv::convolution() const {
  return {conv_weight.shape[0], static_cast<int>(conv_weight.shape[1]), conv_weight.parameters(),
          conv_bias.parameters()};
}

RouteCall Router::call(std::int64_t tokens, const float* logits, std::int32_t* ids, float* weights) const {
  RouteCall routing{};
  routing.logits = logits;
  routing.type = DType::kF32;
  routing.tokens = tokens;
  routing.experts = weight.columns;
  routing.topk = topk;
  routing.scoring = scoring;
  routing.score_chosen = score_chosen;
  routing.bias = correction_bias.data();
  routing.groups = groups;
  routing.topk_groups = topk_groups;
  routing.renormalize = renormalize;
  routing.scale = scale;
  routing.ids = ids;
  routing.weights = weights;
  return routing;
}

}  // namespace cpumoe
