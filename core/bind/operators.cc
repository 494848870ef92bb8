// The Python seam of routing, attention of one token, and norms.
#include <algorithm>
#include <optional>
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
#include "kernels/dispatch.h"
#include "ops/decode_attention.h"
#include "ops/latent_attention.h"
#include "ops/norm.h"
#include "ops/routing.h"
#include "runtime/check.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

void select_experts(nb::handle logits_, nb::handle weights_, nb::handle ids_, int scoring, bool score_chosen,
                    nb::handle bias_, std::int64_t groups, std::int64_t topk_groups, bool renormalize, float scale) {
  const Array logits(logits_, "router_logits"), weights(weights_, "weights"), ids(ids_, "ids");
  RouteCall call{};
  call.type = logits.contiguous(2).float_type();
  weights.writable().contiguous(2).expect<float>("float32");
  ids.writable().contiguous(2).expect<std::int32_t>("int32");
  call.tokens = logits.dim(0);
  call.experts = logits.dim(1);
  call.topk = ids.dim(1);
  CPUMOE_REQUIRE(ids.dim(0) == call.tokens && weights.dim(0) == call.tokens && weights.dim(1) == call.topk,
                 "ids and weights must be [", call.tokens, ", topk]");
  CPUMOE_REQUIRE(scoring >= 0 && scoring <= static_cast<int>(Scoring::kSqrtSoftplus), "scoring=", scoring,
                 "; 0 to 3 are accepted");
  call.scoring = static_cast<Scoring>(scoring);
  call.score_chosen = score_chosen;
  std::optional<Array> bias;
  if (!bias_.is_none()) {
    bias.emplace(bias_, "correction_bias");
    bias->contiguous(1).expect<float>("float32");
    CPUMOE_REQUIRE(bias->dim(0) == call.experts, "correction_bias has ", bias->dim(0), " values for ", call.experts,
                   " experts");
    call.bias = bias->data<float>();
  }
  call.groups = groups;
  call.topk_groups = topk_groups;
  call.renormalize = renormalize;
  call.scale = scale;
  call.logits = logits.data();
  call.ids = ids.data<std::int32_t>();
  call.weights = weights.data<float>();
  const Computation computation;
  route(active_kernels(), call);
}

void logits_of_router(nb::handle x_, nb::handle weight_, nb::handle bias_, nb::handle logits_) {
  const Array x(x_, "x"), weight(weight_, "weight"), logits(logits_, "logits");
  LogitsCall call{};
  call.type = x.contiguous(2).float_type();
  CPUMOE_REQUIRE(weight.contiguous(2).same_type(x), "weight must have the dtype of x");
  call.tokens = x.dim(0);
  call.depth = x.dim(1);
  call.experts = weight.dim(0);
  CPUMOE_REQUIRE(weight.dim(1) == call.depth, "x has ", call.depth, " features, but the weight takes ", weight.dim(1));
  call.logits_type = logits.writable().contiguous(2).float_type();
  CPUMOE_REQUIRE(logits.dim(0) == call.tokens && logits.dim(1) == call.experts, "logits must be [", call.tokens, ", ",
                 call.experts, "]");
  std::optional<Array> bias;
  if (!bias_.is_none()) {
    bias.emplace(bias_, "bias");
    bias->contiguous(1).expect<float>("float32");
    CPUMOE_REQUIRE(bias->dim(0) == call.experts, "bias has ", bias->dim(0), " values for ", call.experts, " experts");
    call.bias = bias->data<float>();
  }
  call.x = x.data();
  call.weight = weight.data();
  call.logits = logits.data();
  const Computation computation;
  router_logits(active_kernels(), call);
}

void decode_attention(nb::handle query_, nb::handle keys_, nb::handle values_, nb::handle mask_, nb::handle sinks_,
                      float scale, nb::handle out_) {
  const Array query(query_, "query"), keys(keys_, "keys"), values(values_, "values"), out(out_, "out");
  AttentionCall call{};
  call.type = query.contiguous(3).float_type();
  call.batch = query.dim(0);
  call.heads = query.dim(1);
  call.depth = query.dim(2);
  CPUMOE_REQUIRE(keys.contiguous(4).same_type(query), "keys must have the dtype of query");
  CPUMOE_REQUIRE(values.contiguous(4).same_type(query), "values must have the dtype of query");
  CPUMOE_REQUIRE(out.writable().contiguous(3).same_type(query), "out must have the dtype of query");
  call.kv_heads = keys.dim(1);
  call.tokens = keys.dim(2);
  CPUMOE_REQUIRE(keys.dim(0) == call.batch && keys.dim(3) == call.depth, "keys are ", keys.shape_text(), "; [",
                 call.batch, ", heads, tokens, ", call.depth, "] is accepted");
  call.value_depth = values.dim(3);
  for (int i = 0; i < 3; ++i) {
    CPUMOE_REQUIRE(values.dim(i) == keys.dim(i), "values are ", values.shape_text(), " for keys ", keys.shape_text());
  }
  CPUMOE_REQUIRE(out.dim(0) == call.batch && out.dim(1) == call.heads && out.dim(2) == call.value_depth,
                 "out must be [", call.batch, ", ", call.heads, ", ", call.value_depth, "]");
  std::optional<Array> mask;
  if (!mask_.is_none()) {
    mask.emplace(mask_, "mask");
    mask->contiguous(2).expect<float>("float32");
    CPUMOE_REQUIRE(mask->dim(0) == call.batch && mask->dim(1) == call.tokens, "mask is ", mask->shape_text(), "; [",
                   call.batch, ", ", call.tokens, "] is accepted");
    call.mask = mask->data<float>();
  }
  std::optional<Array> sinks;
  if (!sinks_.is_none()) {
    sinks.emplace(sinks_, "sinks");
    sinks->contiguous(1).expect<float>("float32");
    CPUMOE_REQUIRE(sinks->dim(0) == call.heads, "sinks has ", sinks->dim(0), " values for ", call.heads, " heads");
    call.sinks = sinks->data<float>();
  }
  call.scale = scale;
  call.query = query.data();
  call.keys = keys.data();
  call.values = values.data();
  call.out = out.data();
  const Computation computation;
  attend(active_kernels(), call);
}

// latents and rotated: [batch, 1, tokens, ..], sequences any distance apart, as in a cache that has room for more.
void latent_attention(nb::handle query_, nb::handle latents_, nb::handle rotated_, nb::handle weight_, nb::handle mask_,
                      nb::handle sinks_, float scale, nb::handle out_) {
  const Array query(query_, "query"), latents(latents_, "latents"), rotated(rotated_, "rotated");
  const Array weight(weight_, "weight"), out(out_, "out");
  LatentAttentionCall call{};
  call.type = query.contiguous(4).float_type();
  call.batch = query.dim(0);
  call.heads = query.dim(1);
  call.queries = query.dim(2);
  call.latent_stride = latents.contiguous_but_first(4);
  call.rotated_stride = rotated.contiguous_but_first(4);
  for (const Array* array : {&latents, &rotated}) {
    CPUMOE_REQUIRE(array->same_type(query), array->name(), " is ", array->dtype_text(), "; that of query, ",
                   query.dtype_text(), ", is accepted");
    CPUMOE_REQUIRE(array->dim(0) == call.batch && array->dim(1) == 1 && array->dim(2) == latents.dim(2), array->name(),
                   " is ", array->shape_text(), "; [", call.batch, ", 1, ", latents.dim(2), ", ..] is accepted");
  }
  call.tokens = latents.dim(2);
  call.rank = latents.dim(3);
  call.rotary = rotated.dim(3);
  call.nope = query.dim(3) - call.rotary;
  CPUMOE_REQUIRE(call.nope >= 0, "query has rows of ", query.dim(3), ", shorter than the ", call.rotary, " of rotated");
  CPUMOE_REQUIRE(out.writable().contiguous(4).same_type(query), "out must have the dtype of query");
  call.value_depth = out.dim(3);
  CPUMOE_REQUIRE(out.dim(0) == call.batch && out.dim(1) == call.queries && out.dim(2) == call.heads, "out is ",
                 out.shape_text(), "; [", call.batch, ", ", call.queries, ", ", call.heads, ", ..] is accepted");
  CPUMOE_REQUIRE(weight.contiguous(2).same_type(query), "weight is ", weight.dtype_text(), "; that of query, ",
                 query.dtype_text(), ", is accepted");
  const std::int64_t rows = call.heads * (call.nope + call.value_depth);
  CPUMOE_REQUIRE(weight.dim(0) == rows && weight.dim(1) == call.rank, "weight is ", weight.shape_text(), "; [", rows,
                 ", ", call.rank, "] is accepted");
  std::optional<Array> mask;
  if (!mask_.is_none()) {
    mask.emplace(mask_, "mask");
    mask->contiguous(3).expect<float>("float32");
    CPUMOE_REQUIRE(mask->dim(0) == call.batch && mask->dim(1) == call.queries && mask->dim(2) == call.tokens,
                   "mask is ", mask->shape_text(), "; [", call.batch, ", ", call.queries, ", ", call.tokens,
                   "] is accepted");
    call.mask = mask->data<float>();
  }
  std::optional<Array> sinks;
  if (!sinks_.is_none()) {
    sinks.emplace(sinks_, "sinks");
    sinks->contiguous(1).expect<float>("float32");
    CPUMOE_REQUIRE(sinks->dim(0) == call.heads, "sinks has ", sinks->dim(0), " values for ", call.heads, " heads");
    call.sinks = sinks->data<float>();
  }
  call.scale = scale;
  call.query = query.data();
  call.latents = latents.data();
  call.rotated = rotated.data();
  call.weight = weight.data();
  call.out = out.data();
  const Computation computation;
  attend_latents(active_kernels(), call);
}

// Rows are few in decode: the calling thread does them, unless there is work for several.
void normalize(nb::handle x_, nb::handle weight_, float epsilon, bool round_first, bool plus_one, nb::handle out_) {
  const Array x(x_, "x"), weight(weight_, "weight"), out(out_, "out");
  NormCall call{};
  call.type = x.contiguous(2).float_type();
  call.weight_type = weight.contiguous(1).float_type();
  CPUMOE_REQUIRE(out.writable().contiguous(2).same_type(x), "out must have the dtype of x");
  CPUMOE_REQUIRE(weight.dim(0) == x.dim(1), "weight has ", weight.dim(0), " values for rows of ", x.dim(1));
  CPUMOE_REQUIRE(out.dim(0) == x.dim(0) && out.dim(1) == x.dim(1), "out must have the shape of x");
  call.rows = x.dim(0);
  call.width = x.dim(1);
  call.x = x.data();
  call.weight = weight.data();
  call.epsilon = epsilon;
  call.round_first = round_first;
  call.plus_one = plus_one;
  call.out = out.data();
  const Computation computation;
  rms_norm(active_kernels(), call);
}

}  // namespace

void bind_operators(nb::module_& m) {
  using namespace nb::literals;
  m.def("select_experts", &select_experts, "logits"_a, "weights"_a, "ids"_a, "scoring"_a, "score_chosen"_a,
        "bias"_a.none(), "groups"_a, "topk_groups"_a, "renormalize"_a, "scale"_a);
  m.def("router_logits", &logits_of_router, "x"_a, "weight"_a, "bias"_a.none(), "logits"_a);
  m.def("decode_attention", &decode_attention, "query"_a, "keys"_a, "values"_a, "mask"_a.none(), "sinks"_a.none(),
        "scale"_a, "out"_a);
  m.def("latent_attention", &latent_attention, "query"_a, "latents"_a, "rotated"_a, "weight"_a, "mask"_a.none(),
        "sinks"_a.none(), "scale"_a, "out"_a);
  m.def("rms_norm", &normalize, "x"_a, "weight"_a, "epsilon"_a, "round_first"_a, "plus_one"_a, "out"_a);
}

}  // namespace cpumoe
