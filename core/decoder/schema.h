// What a decoder consists of, as values: which norms, which rotation, which window, which router.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/formats.h"
#include "ops/delta_rule.h"
#include "ops/linear.h"
#include "ops/routing.h"
#include "packed/layout.h"
#include "ranks/row_traffic.h"
#include "runtime/exchange.h"

namespace cpumoe {

// A root-mean-square norm; see NormalizeRow.
struct Norm {
  const float* weight = nullptr;  // null: there is none
  std::int64_t width = 0;
  float epsilon = 0.0f;
  bool round_first = false, plus_one = false;

  explicit operator bool() const { return weight != nullptr; }
};

constexpr std::int64_t kMostRotated = 4096;  // values of a head

// Cosines and sines by position, as a model's rotary embedding gives them.
struct RotaryTable {
  const float *cos = nullptr, *sin = nullptr;  // [positions, width]
  std::int64_t positions = 0, width = 0;
};

// Queries, keys and values of attention over latents. A token's keys and values would be made of its latent; instead
// queries are brought to the latents, and sums of latents to values ("absorbed").
struct LatentPart {
  Matrix down;  // or none: what queries are made of is made smaller first
  Norm down_norm;
  Matrix latent;  // [rank + rotated, hidden]: the latent, and the rotated part of a key that all heads share
  Norm latent_norm;
  const void* expansion = nullptr;  // [heads, nope + value_depth, rank], of the decoder's type
  std::int64_t rank = 0, nope = 0, rotated = 0;

  std::int64_t depth() const { return rank + rotated; }
};

// Grouped-query attention, or attention over latents: then there are no key, value and norms, and a head of `query` is
// nope + rotated wide, which is also its depth.
struct AttentionPart {
  Matrix query, key, value, out;  // without key and value, query gives all three side by side
  std::optional<LatentPart> latent;
  std::int64_t heads = 0, kv_heads = 0, depth = 0, value_depth = 0;
  // What is a sigmoid away from the factors of the result, or none: a matrix that gives one for each value or for each
  // head, or values behind each head of the query, which is twice as wide then.
  Matrix gate;
  bool gated_queries = false;
  float value_factor = 1.0f;
  Norm query_norm, key_norm;
  bool norms_whole_rows = false;    // of all heads at once, not of each
  bool norms_after_rotary = false;  // else before
  int rotary = -1;                  // the number of its table; -1: positions are not in queries and keys
  bool interleaved = false;         // see RotateHead
  bool separated = false;           // neighbours are turned, and stand half of the width apart behind that
  std::int64_t window = 0;          // tokens that one sees, itself included; 0: all before it
  const float* sinks = nullptr;     // [heads] or null
  // Factors of queries by position (Llama 4's attention temperature), or null.
  const float* query_factors = nullptr;
  std::int64_t query_factor_count = 0;
  float scale = 1.0f, softcap = 0.0f;
  int ranks = 1;  // over so many the heads are spread, of which these are this rank's: `out` takes those of all

  // From one head of queries to the next, and of all of them.
  std::int64_t query_stride() const { return gated_queries ? 2 * depth : depth; }
  std::int64_t query_width() const { return heads * query_stride(); }
};

// A gated delta net or Kimi delta attention, in the place of attention. All that it is made of stands side by side in a
// row: the results of `projections`, and behind them those of `expansions`.
struct DeltaPart {
  // Of one row, in elements: see HeadRows.
  struct Columns {
    std::int64_t first = 0, group = 1, group_stride = 0, head_stride = 0;
  };
  // A matrix of what another one has given, which begins at this column of the row.
  struct Expansion {
    Matrix matrix;
    std::int64_t from = 0;
  };

  DeltaRule rule;
  std::vector<Matrix> projections;
  std::vector<Expansion> expansions;
  Columns queries, keys, values, gates, betas, decays;
  Matrix out;

  std::int64_t width() const;
};

// A short convolution in the place of attention: [B, C, x] of one matrix.
struct ConvolutionPart {
  ChannelConvolution convolution;
  Matrix projection, out;
};

struct Router {
  Matrix weight;
  DType logits = DType::kF32;
  std::int64_t topk = 0;
  Scoring scoring = Scoring::kSoftmax;
  bool score_chosen = false, renormalize = false;
  const float* correction = nullptr;  // [experts] or null
  std::int64_t groups = 0, topk_groups = 0;
  float scale = 1.0f;

  RouteCall call(std::int64_t tokens, const float* logits, std::int32_t* ids, float* weights) const;
};

struct RoutedExperts {
  Router router;
  PackedMatrix gate_up, down;  // without data where this rank has none of the experts
  ActivationSpec activation;
  bool weight_on_input = false;
  // Experts are spread over ranks: each has some, or a slice of all of them. The sums of all ranks are added.
  bool spread = false;
  // Where ranks have whole experts, of which there may be copies: those of expert e are copy_begins[e] to
  // copy_begins[e + 1] - 1, and copy_places has for each its place among those that are here, or -1; copy_ranks has the
  // rank that it is on. Null for slices, where an expert is its own copy.
  const std::int32_t *copy_begins = nullptr, *copy_places = nullptr, *copy_ranks = nullptr;
  std::int64_t* loads = nullptr;  // [experts] or null: how often each has been chosen
  // Where ranks do not have the same rows, or each computes the experts of its share of them.
  RowTravel travel = RowTravel::kStay;
  bool prepared_rows = false;  // rows travel as the first product wants them, which every rank knows then

  // The copy of an expert that a row takes: they take turns.
  std::int32_t copy(std::int32_t expert, std::int64_t turn) const {
    if (copy_begins == nullptr) return expert;
    const std::int32_t first = copy_begins[expert];
    return first + static_cast<std::int32_t>(turn % (copy_begins[expert + 1] - first));
  }
  std::int32_t copies() const {
    const std::int64_t experts = router.weight.columns;
    return copy_begins == nullptr ? static_cast<std::int32_t>(experts) : copy_begins[experts];
  }
  // Where a copy is among the experts that are here, or -1.
  std::int32_t place(std::int32_t copy) const { return copy_places == nullptr ? copy : copy_places[copy]; }
};

// A feed-forward block of linears: that of a layer without experts, or one that all tokens take beside them.
struct DenseBlock {
  Matrix gate, up, down;  // without gate, up gives both side by side, or the activation is not gated
  ActivationSpec activation;
  Matrix share;  // [1, hidden] or none: the result times the sigmoid of this product

  bool has_both() const { return activation.gated && !gate; }
};

struct DecoderLayer {
  Norm before_attention, after_attention, before_block, after_block;
  AttentionPart attention;
  // One of these in the place of attention, which is empty then.
  std::optional<DeltaPart> delta;
  std::optional<ConvolutionPart> convolution;
  std::optional<RoutedExperts> experts;
  std::optional<DenseBlock> dense;
  float residual_factor = 1.0f;  // of what attention and block add to the residual stream

  // Of a layer that has states, or null.
  const ChannelConvolution* state_convolution() const {
    if (delta.has_value()) return &delta->rule.convolution;
    return convolution.has_value() ? &convolution->convolution : nullptr;
  }
};

struct DecoderModel {
  DType type = DType::kF32;  // of hidden states, keys and values
  std::int64_t hidden = 0;
  const void* embedding = nullptr;  // [vocabulary, hidden], of the type; null: rows come as hidden states
  std::int64_t vocabulary = 0;
  float embedding_factor = 1.0f;
  std::vector<RotaryTable> rotary;
  std::vector<DecoderLayer> layers;
  Norm norm;
  Matrix head;  // or none
  // Of the ranks that experts are spread over, or null.
  RankExchange* exchange = nullptr;
  // Of those that heads and columns are spread over, or null: some of the former, side by side, with the same rows.
  // Where these are not all of them, every group has rows of its own, and all groups run the same number of steps.
  RankExchange* group = nullptr;

  int ranks() const { return exchange == nullptr ? 1 : exchange->ranks(); }
  int group_ranks() const { return group == nullptr ? 1 : group->ranks(); }
  // Whether a rank may have rows while others have none.
  bool has_own_rows() const { return group_ranks() < ranks(); }
};

}  // namespace cpumoe
