// The Python seam of routing, attention and norms.
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
#include "bind/shaped_array.h"
#include "kernels/dispatch.h"
#include "ops/elements.h"
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
  const ShapedArray bias(bias_, "correction_bias", {call.experts}, Presence::kOptional);
  call.bias = bias.fp32();
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

// Sequences of keys and values [batch, kv_heads, tokens, ..] of any strides, and the rows that attend to them. No
// sequences if the result has no elements: the batch may be of any size then.
struct Attended {
  std::vector<CachedSequence> sequences;
  std::vector<AttentionRow> rows;
  CachedAttentionCall call{};

  Attended(const Array& query, const Array& keys, const Array& values, const Array& out, float scale,
           const float* sinks) {
    call.type = query.float_type();
    call.heads = query.dim(1);
    call.kv_heads = keys.dim(1);
    call.key_token_stride = keys.stride(2);
    call.key_head_stride = keys.stride(1);
    call.value_token_stride = values.stride(2);
    call.value_head_stride = values.stride(1);
    call.flushes = true;
    call.scale = scale;
    call.sinks = sinks;
    call.out = out.writable().like(query).data();
    for (std::int64_t b = 0; out.size() > 0 && b < query.dim(0); ++b) {
      sequences.push_back(
          {at(keys.data(), b * keys.stride(0), call.type), at(values.data(), b * values.stride(0), call.type)});
    }
    call.sequences = sequences.data();
  }

  // Returns false if the mask [batch, queries, tokens] is no ranges of tokens.
  bool find(const float* mask, std::int64_t queries, std::int64_t tokens) {
    if (!find_rows(mask, static_cast<std::int64_t>(sequences.size()), queries, tokens, rows)) return false;
    call.rows = static_cast<std::int64_t>(rows.size());
    call.row = rows.data();
    return true;
  }
};

void check_tokens(const Array& array) {
  const std::int64_t tokens = array.dim(2);
  CPUMOE_REQUIRE(tokens >= 1, array.name(), " has no tokens");
  CPUMOE_REQUIRE(tokens < (std::int64_t{1} << 30), array.name(), " has ", tokens,
                 " tokens; fewer than 2^30 are accepted");
}

// Returns false, and computes nothing, if the mask is no ranges of tokens.
bool decode_attention(nb::handle query_, nb::handle keys_, nb::handle values_, nb::handle mask_, nb::handle sinks_,
                      float scale, nb::handle out_) {
  const Array query(query_, "query"), keys(keys_, "keys"), values(values_, "values"), out(out_, "out");
  const std::int64_t batch = query.contiguous(3).dim(0), heads = query.dim(1), depth = query.dim(2);
  CPUMOE_REQUIRE(keys.rows(4).like(query).dim(0) == batch && keys.dim(3) == depth, "keys are ", keys.shape_text(),
                 "; [", batch, ", heads, tokens, ", depth, "] is accepted");
  values.rows(4).like(query);
  for (int i = 0; i < 3; ++i) {
    CPUMOE_REQUIRE(values.dim(i) == keys.dim(i), "values are ", values.shape_text(), " for keys ", keys.shape_text());
  }
  check_tokens(keys);
  CPUMOE_REQUIRE(out.contiguous(3).dim(0) == batch && out.dim(1) == heads && out.dim(2) == values.dim(3), "out is ",
                 out.shape_text(), "; [", batch, ", ", heads, ", ", values.dim(3), "] is accepted");
  const ShapedArray sinks(sinks_, "sinks", {heads}, Presence::kOptional);
  const ShapedArray mask(mask_, "mask", {batch, keys.dim(2)}, Presence::kOptional);
  Attended attended(query, keys, values, out, scale, sinks.fp32());
  CachedAttentionCall& call = attended.call;
  call.depth = depth;
  call.value_depth = values.dim(3);
  call.query = query.data();
  call.query_stride = heads * depth;
  call.query_head_stride = depth;
  call.out_stride = heads * call.value_depth;
  check_heads(call);
  const float* hidden = mask.fp32();
  const Computation computation;
  if (!attended.find(hidden, 1, keys.dim(2))) return false;
  attend_cached(active_kernels(), call);
  return true;
}

// latents and rotated: [batch, 1, tokens, ..], of any strides, as in a cache that has room for more. Returns as above.
bool latent_attention(nb::handle query_, nb::handle latents_, nb::handle rotated_, nb::handle weight_, nb::handle mask_,
                      nb::handle sinks_, float scale, nb::handle out_) {
  const Array query(query_, "query"), latents(latents_, "latents"), rotated(rotated_, "rotated");
  const Array out(out_, "out");
  const std::int64_t batch = query.rows(4).dim(0), heads = query.dim(1), queries = query.dim(2);
  const std::int64_t tokens = latents.rows(4).dim(2);
  for (const Array* array : {&latents, &rotated}) {
    CPUMOE_REQUIRE(array->rows(4).like(query).dim(0) == batch && array->dim(1) == 1 && array->dim(2) == tokens,
                   array->name(), " is ", array->shape_text(), "; [", batch, ", 1, ", tokens, ", ..] is accepted");
  }
  check_tokens(latents);
  const ShapedArray sinks(sinks_, "sinks", {heads}, Presence::kOptional);
  const ShapedArray mask(mask_, "mask", {batch, queries, tokens}, Presence::kOptional);
  CPUMOE_REQUIRE(out.contiguous(4).dim(0) == batch && out.dim(1) == queries && out.dim(2) == heads, "out is ",
                 out.shape_text(), "; [", batch, ", ", queries, ", ", heads, ", ..] is accepted");
  Attended attended(query, latents, latents, out, scale, sinks.fp32());
  LatentAttentionCall call{};
  call.rank = latents.dim(3);
  call.rope_dim = rotated.dim(3);
  call.nope_dim = query.dim(3) - call.rope_dim;
  CPUMOE_REQUIRE(call.rank >= 1 && call.cached_dim() <= 65536, "latents and rotated have ", call.rank, " and ",
                 call.rope_dim, " numbers a token; 1 to 65536 are accepted");
  CPUMOE_REQUIRE(call.nope_dim >= 0, "query has rows of ", query.dim(3), ", shorter than the ", call.rope_dim,
                 " of rotated");
  call.value_dim = out.dim(3);
  const ShapedArray expansion(weight_, "weight", {heads * (call.nope_dim + call.value_dim), call.rank});
  call.expansion = expansion.like(query);
  call.out = attended.call.out;
  for (std::size_t b = 0; b < attended.sequences.size(); ++b) {
    attended.sequences[b].key_ends =
        at(rotated.data(), static_cast<std::int64_t>(b) * rotated.stride(0), attended.call.type);
  }
  attended.call.key_end = call.rope_dim;
  attended.call.key_end_stride = rotated.stride(2);
  const float* hidden = mask.fp32();
  const Computation computation;
  if (!attended.find(hidden, queries, tokens)) return false;
  call.cached = attended.call;
  attend_latents(active_kernels(), call, {query.data(), queries, query.stride(0), query.stride(1), query.stride(2)});
  return true;
}

// Rows are few in decode: the calling thread does them, unless there is work for several.
void normalize(nb::handle x_, nb::handle weight_, float epsilon, bool round_first, bool plus_one, nb::handle out_) {
  const Array x(x_, "x"), weight(weight_, "weight"), out(out_, "out");
  NormCall call{};
  call.type = x.contiguous(2).float_type();
  call.weight_type = weight.contiguous(1).float_type();
  out.writable().contiguous(2).like(x);
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
  m.def("decode_attention", &decode_attention, "query"_a, "keys"_a, "values"_a, "mask"_a.none(), "sinks"_a.none(),
        "scale"_a, "out"_a);
  m.def("latent_attention", &latent_attention, "query"_a, "latents"_a, "rotated"_a, "weight"_a, "mask"_a.none(),
        "sinks"_a.none(), "scale"_a, "out"_a);
  m.def("rms_norm", &normalize, "x"_a, "weight"_a, "epsilon"_a, "round_first"_a, "plus_one"_a, "out"_a);
}

}  // namespace cpumoe
