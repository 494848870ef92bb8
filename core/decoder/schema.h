// A decoder as values: the norms, mixers, routers, experts and weights of each layer.
//
// Every struct lists its fields once, in `fields`. Reading them from Python, comparing the names with those of the
// Python values and fuzzing them all go through that list.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "kernels/formats.h"
#include "kernels/table.h"
#include "ops/delta_rule.h"
#include "ops/linear.h"
#include "ops/routing.h"
#include "packed/layout.h"
#include "ranks/packed_experts.h"
#include "runtime/exchange.h"

namespace cpumoe {

// Floats of one or two dimensions, contiguous; null data: none.
struct Tensor {
  const void* data = nullptr;
  DType type = DType::kF32;
  std::int64_t shape[2] = {0, 0};
  int dims = 0;

  explicit operator bool() const { return data != nullptr; }
  Parameters parameters() const { return {data, type}; }
};

// RMSNorm; see NormalizeRow. Without a weight there is no norm.
struct Norm {
  std::span<const float> weight;
  float epsilon = 0.0f;
  bool round_first = false, plus_one = false;

  explicit operator bool() const { return !weight.empty(); }
};

constexpr std::int64_t kMaxRotated = 4096;  // values of a head
constexpr std::int64_t kMaxHeads = 1 << 16;

// Cosines and sines of RoPE by position, as a model's rotary embedding computes them: [positions, width] in fp32.
struct RopeTable {
  Tensor cos, sin;

  std::int64_t positions() const { return cos.shape[0]; }
  std::int64_t width() const { return cos.shape[1]; }
  const float* angles(const Tensor& of, std::int64_t position) const {
    return static_cast<const float*>(of.data) + position * width();
  }
};

// RoPE of a mixer: its table, and the arrangement of the pairs that are rotated.
struct Rope {
  int table = -1;            // index in DecoderModel::rope; -1: no RoPE
  bool interleaved = false;  // pairs are neighbours, see RotateHead
  bool separated = false;    // pairs are neighbours before the rotation, and half of the width apart after it
};

// Fields that GQA and MLA share: the scores, the gate and the output of attention.
struct Attention {
  Matrix query, out;  // `out` takes the heads of all ranks
  Matrix gate;        // or none: the result times the sigmoid of its output, a factor for each head or each value
  std::int64_t heads = 0, value_dim = 0;
  Rope rope;
  std::int64_t window = 0;       // sliding window: tokens that a query sees, itself included; 0: no window
  std::span<const float> sinks;  // [heads] or empty: an attention score without a value
  // [positions] or empty: factors of queries, such as Llama 4's attention temperature.
  std::span<const float> query_factors;
  float scale = 1.0f, softcap = 0.0f;
  int ranks = 1;  // tensor parallel ranks that share the heads; these are the heads of this rank
};

// Grouped-query attention.
struct Gqa : Attention {
  static constexpr const char* kName = "Gqa";

  Matrix key, value;  // none: `query` computes all three, side by side
  std::int64_t kv_heads = 0, head_dim = 0;
  bool gated_queries = false;  // each query head is followed by its gate, so that `query` is twice as wide
  float value_factor = 1.0f;
  Norm query_norm, key_norm;
  bool norms_whole_rows = false;  // a norm spans all heads
  bool norms_after_rope = false;

  std::int64_t query_stride() const { return gated_queries ? 2 * head_dim : head_dim; }
  std::int64_t query_width() const { return heads * query_stride(); }
};

// Multi-head latent attention in its absorbed form: the KV cache has a token's latent and the rotated part of its key,
// and kv_b_proj is absorbed into the queries and applied to the weighted sums of latents.
struct Mla : Attention {
  static constexpr const char* kName = "Mla";

  Matrix query_down;  // q_a_proj, or none
  Norm query_down_norm;
  Matrix latent;  // kv_a_proj_with_mqa: [kv_lora_rank + rope_dim, hidden]
  Norm latent_norm;
  Tensor expansion;  // kv_b_proj: [heads * (nope_dim + value_dim), kv_lora_rank], of the decoder's type
  std::int64_t kv_lora_rank = 0, nope_dim = 0, rope_dim = 0;

  std::int64_t head_dim() const { return nope_dim + rope_dim; }
  std::int64_t cached_dim() const { return kv_lora_rank + rope_dim; }
  std::int64_t query_width() const { return heads * head_dim(); }
};

// Positions of heads in a row, in elements: see HeadRows.
struct HeadColumns {
  std::int64_t first = 0, group_stride = 0, group = 1, head_stride = 0;
};

// A linear of columns of the row itself, from column `first` on: the second of two factors of a projection.
struct Expansion {
  Matrix matrix;
  std::int64_t first = 0;
};

// A gated delta net or Kimi delta attention. A row has the outputs of `projections`, then those of `expansions`.
struct DeltaNet {
  static constexpr const char* kName = "DeltaNet";

  std::vector<Matrix> projections;
  std::vector<Expansion> expansions;
  HeadColumns queries, keys, values, gates, betas, decays;
  std::int64_t key_heads = 0, heads = 0, key_dim = 0, value_dim = 0;
  Tensor log_rates;   // A_log: [heads]
  Tensor decay_bias;  // dt_bias: [heads], or [heads * key_dim] if every channel has its own decay
  float decay_bound = 0.0f;
  Tensor conv_weight, conv_bias;  // [channels, taps] of queries, keys and values; [channels] or none
  Tensor norm_weight;             // [value_dim]
  float norm_epsilon = 0.0f;
  bool sigmoid_gate = false;
  Matrix out;

  std::int64_t width() const;
  DeltaRule rule() const;
};

// A short convolution: out_proj of C * convolution(B * x).
struct ShortConv {
  static constexpr const char* kName = "ShortConv";

  Matrix projection, out;         // in_proj: [3 * channels, hidden], for B, C and x; out_proj: [hidden, channels]
  Tensor conv_weight, conv_bias;  // [channels, taps], [channels] or none

  ChannelConvolution convolution() const;
};

// What mixes the tokens of a sequence. mixer.h has the functions that each kind implements in a file of its own; kName
// is the name of its class in Python.
using Mixer = std::variant<Gqa, Mla, DeltaNet, ShortConv>;

struct Router {
  Matrix weight;
  std::int64_t topk = 0;
  Scoring scoring = Scoring::kSoftmax;
  bool score_chosen = false, renormalize = false;
  std::span<const float> correction_bias;  // [experts] or empty
  std::int64_t groups = 0, topk_groups = 0;
  float scale = 1.0f;
  bool in_fp32 = true;  // logits are not rounded to the decoder's type

  RouteCall call(std::int64_t tokens, const float* logits, std::int32_t* ids, float* weights) const;
};

struct RoutedExperts : PackedExperts {
  Router router;
};

// A feed-forward block of all tokens: that of a layer without experts, or shared experts.
struct DenseBlock {
  Matrix gate, up, down;  // without gate, `up` computes both side by side, or the activation is not gated
  ActivationSpec activation;
  Matrix share;  // shared_expert_gate, [1, hidden], or none: the result times the sigmoid of its output

  bool has_both() const { return activation.gated && !gate; }
};

struct DecoderLayer {
  Norm before_mixer, after_mixer, before_block, after_block;
  Mixer mixer;
  std::optional<RoutedExperts> experts;
  std::optional<DenseBlock> dense;
  float residual_factor = 1.0f;  // of what mixer and block add to the residual stream
};

struct DecoderModel {
  Tensor embedding;  // [vocabulary, hidden]; its type is that of hidden states and of the KV cache
  float embedding_factor = 1.0f;
  std::vector<RopeTable> rope;
  std::vector<DecoderLayer> layers;
  Norm norm;
  Matrix head;  // or none
  // The exchange of all ranks that experts are spread over, or null.
  RankExchange* exchange = nullptr;
  // The exchange of the tensor parallel group, or null: some of the ranks of `exchange`, side by side, with the same
  // rows. If these are not all of them, every group has rows of its own, and all groups run the same number of steps.
  RankExchange* group = nullptr;

  DType type() const { return embedding.type; }
  std::int64_t vocabulary() const { return embedding.shape[0]; }
  std::int64_t hidden() const { return embedding.shape[1]; }
  int ranks() const { return exchange == nullptr ? 1 : exchange->ranks(); }
  int group_ranks() const { return group == nullptr ? 1 : group->ranks(); }
  // Whether a rank may have rows while others have none.
  bool has_own_rows() const { return group_ranks() < ranks(); }
};

// ---- the fields of each struct, by the names that Python has for them -----------------------------------------------

template <class V>
void fields(V& v, Norm& n) {
  v("weight", n.weight), v("epsilon", n.epsilon), v("round_first", n.round_first), v("plus_one", n.plus_one);
}

template <class V>
void fields(V& v, RopeTable& t) {
  v("cos", t.cos), v("sin", t.sin);
}

template <class V>
void fields(V& v, Rope& r) {
  v("table", r.table), v("interleaved", r.interleaved), v("separated", r.separated);
}

template <class V>
void fields(V& v, Attention& a) {
  v("query", a.query), v("out", a.out), v("heads", a.heads), v("value_dim", a.value_dim), v("scale", a.scale);
  v("gate", a.gate), v("rope", a.rope), v("window", a.window), v("sinks", a.sinks);
  v("query_factors", a.query_factors), v("softcap", a.softcap), v("ranks", a.ranks);
}

template <class V>
void fields(V& v, Gqa& g) {
  fields(v, static_cast<Attention&>(g));
  v("key", g.key), v("value", g.value), v("kv_heads", g.kv_heads), v("head_dim", g.head_dim);
  v("gated_queries", g.gated_queries), v("value_factor", g.value_factor);
  v("query_norm", g.query_norm), v("key_norm", g.key_norm);
  v("norms_whole_rows", g.norms_whole_rows), v("norms_after_rope", g.norms_after_rope);
}

template <class V>
void fields(V& v, Mla& m) {
  fields(v, static_cast<Attention&>(m));
  v("query_down", m.query_down), v("query_down_norm", m.query_down_norm);
  v("latent", m.latent), v("latent_norm", m.latent_norm), v("expansion", m.expansion);
  v("kv_lora_rank", m.kv_lora_rank), v("nope_dim", m.nope_dim), v("rope_dim", m.rope_dim);
}

template <class V>
void fields(V& v, HeadColumns& c) {
  v("first", c.first), v("group_stride", c.group_stride), v("group", c.group), v("head_stride", c.head_stride);
}

template <class V>
void fields(V& v, Expansion& e) {
  v("matrix", e.matrix), v("first", e.first);
}

template <class V>
void fields(V& v, DeltaNet& d) {
  v("projections", d.projections), v("expansions", d.expansions);
  v("queries", d.queries), v("keys", d.keys), v("values", d.values);
  v("gates", d.gates), v("betas", d.betas), v("decays", d.decays);
  v("key_heads", d.key_heads), v("heads", d.heads), v("key_dim", d.key_dim), v("value_dim", d.value_dim);
  v("log_rates", d.log_rates), v("decay_bias", d.decay_bias), v("decay_bound", d.decay_bound);
  v("conv_weight", d.conv_weight), v("conv_bias", d.conv_bias);
  v("norm_weight", d.norm_weight), v("norm_epsilon", d.norm_epsilon), v("sigmoid_gate", d.sigmoid_gate);
  v("out", d.out);
}

template <class V>
void fields(V& v, ShortConv& c) {
  v("projection", c.projection), v("out", c.out), v("conv_weight", c.conv_weight), v("conv_bias", c.conv_bias);
}

template <class V>
void fields(V& v, ActivationSpec& a) {
  v("kind", a.kind), v("gated", a.gated), v("alpha", a.alpha), v("limit", a.limit);
}

template <class V>
void fields(V& v, Router& r) {
  v("weight", r.weight), v("topk", r.topk), v("scoring", r.scoring), v("score_chosen", r.score_chosen);
  v("renormalize", r.renormalize), v("correction_bias", r.correction_bias), v("groups", r.groups);
  v("topk_groups", r.topk_groups), v("scale", r.scale), v("in_fp32", r.in_fp32);
}

template <class V>
void fields(V& v, Copies& c) {
  v("begins", c.begins), v("places", c.places), v("ranks", c.ranks);
}

template <class V>
void fields(V& v, PackedExperts& e) {
  v("gate_up", e.gate_up), v("down", e.down), v("activation", e.activation);
  v("weight_on_input", e.weight_on_input), v("spread", e.spread), v("copies", e.copies), v("loads", e.loads);
  v("travel", e.travel), v("prepared_rows", e.prepared_rows);
}

template <class V>
void fields(V& v, RoutedExperts& e) {
  fields(v, static_cast<PackedExperts&>(e));
  v("router", e.router);
}

template <class V>
void fields(V& v, DenseBlock& d) {
  v("gate", d.gate), v("up", d.up), v("down", d.down), v("activation", d.activation), v("share", d.share);
}

template <class V>
void fields(V& v, DecoderLayer& l) {
  v("mixer", l.mixer), v("experts", l.experts), v("dense", l.dense);
  v("before_mixer", l.before_mixer), v("after_mixer", l.after_mixer);
  v("before_block", l.before_block), v("after_block", l.after_block), v("residual_factor", l.residual_factor);
}

template <class V>
void fields(V& v, DecoderModel& m) {
  v("embedding", m.embedding), v("embedding_factor", m.embedding_factor), v("rope", m.rope), v("layers", m.layers);
  v("norm", m.norm), v("head", m.head), v("exchange", m.exchange), v("group", m.group);
}

}  // namespace cpumoe
