#include "decoder/check.h"

#include <algorithm>
#include <limits>

#include "ops/experts.h"
#include "ops/routing.h"
#include "runtime/check.h"

namespace cpumoe {
namespace {

void check_norm(const Norm& norm, std::int64_t width, const char* name) {
  CPUMOE_REQUIRE(!norm || norm.width == width, name, " has ", norm.width, " values for rows of ", width);
}

// What is spread over the ranks of a group is spread over all of them.
void check_ranks(const DecoderModel& model, int ranks, const char* name) {
  const int all = model.group_ranks();
  CPUMOE_REQUIRE(ranks == 1 || ranks == all, name, " is spread over ", ranks, " ranks of ", all);
}

void check_groups(const DecoderModel& model) {
  if (model.group == nullptr) return;
  CPUMOE_REQUIRE(model.exchange != nullptr && model.ranks() % model.group_ranks() == 0 &&
                     model.exchange->rank() % model.group_ranks() == model.group->rank(),
                 "rank ", model.group->rank(), " of a group of ", model.group_ranks(),
                 " ranks does not fit the ranks of all experts, which are ", model.ranks());
}

void check_matrix(const Matrix& m, const DecoderModel& model, std::int64_t columns, std::int64_t depth,
                  const char* name) {
  CPUMOE_REQUIRE(m.columns == columns && m.depth == depth, name, " is [", m.columns, ", ", m.depth, "]; [", columns,
                 ", ", depth, "] is accepted");
  check_ranks(model, m.ranks, name);
  if (!m.is_packed()) return;
  CPUMOE_REQUIRE(m.packed.spec.experts == 1 && !m.packed.spec.gated, name, " holds experts; one matrix is accepted");
  CPUMOE_REQUIRE(!traits_of(rows_for(m.packed.spec, model.type)).of_tensor, name,
                 " has one scale for all rows of a call, which a step does not serve");
}

void check_rotary(const AttentionPart& a, const DecoderModel& model, std::int64_t most) {
  CPUMOE_REQUIRE(a.window >= 0, "window=", a.window, "; 0 (none) or more is accepted");
  CPUMOE_REQUIRE(a.rotary < static_cast<int>(model.rotary.size()), "rotary=", a.rotary, ", but there are ",
                 model.rotary.size(), " tables");
  if (a.rotary < 0) return;
  const std::int64_t width = model.rotary[static_cast<std::size_t>(a.rotary)].width;
  CPUMOE_REQUIRE(width % 2 == 0 && width <= std::min(most, kMostRotated), "the rotary table is ", width, " wide for ",
                 most, " values");
  CPUMOE_REQUIRE(!a.separated || !a.interleaved, "what is separated is not interleaved any more");
}

void check_latent(const AttentionPart& a, const DecoderModel& model) {
  const LatentPart& l = *a.latent;
  CPUMOE_REQUIRE(!a.key && !a.value && !a.query_norm && !a.key_norm && a.value_factor == 1.0f,
                 "attention over latents has no key, value and norms of heads");
  CPUMOE_REQUIRE(l.rank >= 1 && l.nope >= 0 && l.rotated >= 0 && l.rank <= 4096 && l.nope + l.rotated == a.depth,
                 "latents of ", l.rank, " and heads of ", l.nope, " + ", l.rotated, " values do not fit a depth of ",
                 a.depth);
  CPUMOE_REQUIRE(a.kv_heads == 1, "attention over latents has one head of keys, not ", a.kv_heads);
  if (l.down) {
    check_matrix(l.down, model, l.down.columns, model.hidden, "down");
    check_norm(l.down_norm, l.down.columns, "down_norm");
  }
  check_matrix(a.query, model, a.heads * a.depth, l.down ? l.down.columns : model.hidden, "query");
  check_matrix(l.latent, model, l.depth(), model.hidden, "latent");
  check_norm(l.latent_norm, l.rank, "latent_norm");
  check_matrix(a.out, model, model.hidden, a.ranks * a.heads * a.value_depth, "out");
  check_rotary(a, model, l.rotated);
}

void check_attention(const AttentionPart& a, const DecoderModel& model) {
  CPUMOE_REQUIRE(a.heads >= 1 && a.kv_heads >= 1 && a.heads % a.kv_heads == 0, "attention has ", a.heads, " heads for ",
                 a.kv_heads, " heads of keys; a multiple is accepted");
  CPUMOE_REQUIRE(a.depth >= 1 && a.value_depth >= 1 && a.depth <= 4096 && a.value_depth <= 4096, "heads have ", a.depth,
                 " and ", a.value_depth, " values; 1 to 4096 are accepted");
  check_ranks(model, a.ranks, "attention");
  if (a.gate) {
    check_matrix(a.gate, model, a.gate.columns == a.heads ? a.heads : a.heads * a.value_depth, model.hidden,
                 "the gate of attention");
  }
  if (a.latent.has_value()) return check_latent(a, model);
  const std::int64_t queries = a.heads * a.depth, keys = a.kv_heads * a.depth, values = a.kv_heads * a.value_depth;
  CPUMOE_REQUIRE(static_cast<bool>(a.key) == static_cast<bool>(a.value), "key and value must both be given, or none");
  check_matrix(a.query, model, a.key ? a.query_width() : queries + keys + values, model.hidden, "query");
  CPUMOE_REQUIRE(!a.gated_queries || (a.key && !a.gate && a.value_depth == a.depth && !a.norms_whole_rows),
                 "gates behind the heads of queries go with keys, values as wide, norms of heads and no other gate");
  if (a.key) {
    check_matrix(a.key, model, keys, model.hidden, "key");
    check_matrix(a.value, model, values, model.hidden, "value");
  }
  check_matrix(a.out, model, model.hidden, a.ranks * a.heads * a.value_depth, "out");
  check_norm(a.query_norm, a.norms_whole_rows ? queries : a.depth, "query_norm");
  check_norm(a.key_norm, a.norms_whole_rows ? keys : a.depth, "key_norm");
  CPUMOE_REQUIRE(!(a.norms_whole_rows && a.norms_after_rotary), "norms of whole rows come before the rotation");
  check_rotary(a, model, a.depth);
}

void check_dense(const DenseBlock& d, const DecoderModel& model) {
  const std::int64_t inner = d.down.depth;
  CPUMOE_REQUIRE(!d.gate || d.activation.gated, "gate is given for an activation that is not gated");
  if (d.gate) check_matrix(d.gate, model, inner, model.hidden, "gate");
  check_matrix(d.up, model, d.has_both() ? 2 * inner : inner, model.hidden, "up");
  check_matrix(d.down, model, model.hidden, inner, "down");
  if (d.share) check_matrix(d.share, model, 1, model.hidden, "share");
}

void check_columns(const DeltaPart& d, const DeltaPart::Columns& columns, std::int64_t heads, std::int64_t values,
                   const char* name) {
  CPUMOE_REQUIRE(columns.group >= 1 && columns.first >= 0 && columns.group_stride >= 0 && columns.head_stride >= 0,
                 name, " begin at column ", columns.first, " in groups of ", columns.group);
  const std::int64_t last = columns.first + (heads - 1) / columns.group * columns.group_stride +
                            std::min(heads - 1, columns.group - 1) * columns.head_stride + values;
  CPUMOE_REQUIRE(last <= d.width(), name, " end at column ", last, " of ", d.width());
}

void check_delta(const DeltaPart& d, const DecoderModel& model) {
  const DeltaRule& r = d.rule;
  check_delta_rule(r);
  CPUMOE_REQUIRE(r.key_depth >= 1 && r.value_depth >= 1 && r.key_depth <= 4096 && r.value_depth <= 4096,
                 "heads have states of ", r.key_depth, " x ", r.value_depth, "; 1 to 4096 are accepted");
  CPUMOE_REQUIRE(r.heads <= 4096, "there are ", r.heads, " heads with states; 1 to 4096 are accepted");
  std::int64_t width = 0;
  for (const Matrix& m : d.projections) {
    check_matrix(m, model, m.columns, model.hidden, "a projection");
    width += m.columns;
  }
  for (const DeltaPart::Expansion& e : d.expansions) {
    CPUMOE_REQUIRE(e.from >= 0 && e.matrix.depth >= 1 && e.from + e.matrix.depth <= width,
                   "an expansion is of columns ", e.from, " to ", e.from + e.matrix.depth - 1, "; there are ", width);
    check_matrix(e.matrix, model, e.matrix.columns, e.matrix.depth, "an expansion");
  }
  check_columns(d, d.queries, r.key_heads, r.key_depth, "queries");
  check_columns(d, d.keys, r.key_heads, r.key_depth, "keys");
  check_columns(d, d.values, r.heads, r.value_depth, "values");
  check_columns(d, d.gates, r.heads, r.value_depth, "gates");
  check_columns(d, d.betas, r.heads, 1, "betas");
  check_columns(d, d.decays, r.heads, r.decay_of_channels ? r.key_depth : 1, "decays");
  check_matrix(d.out, model, model.hidden, r.heads * r.value_depth, "out");
}

void check_layer(const DecoderLayer& layer, const DecoderModel& model) {
  check_norm(layer.before_attention, model.hidden, "before_attention");
  check_norm(layer.after_attention, model.hidden, "after_attention");
  check_norm(layer.before_block, model.hidden, "before_block");
  check_norm(layer.after_block, model.hidden, "after_block");
  if (layer.delta.has_value()) {
    check_delta(*layer.delta, model);
  } else if (layer.convolution.has_value()) {
    const ConvolutionPart& c = *layer.convolution;
    check_short_convolution(c.convolution);
    check_matrix(c.projection, model, 3 * c.convolution.channels, model.hidden, "projection");
    check_matrix(c.out, model, model.hidden, c.convolution.channels, "out");
  } else {
    check_attention(layer.attention, model);
  }
  CPUMOE_REQUIRE(layer.experts.has_value() || layer.dense.has_value(), "a layer has neither experts nor a dense block");
  if (layer.dense.has_value()) check_dense(*layer.dense, model);
  if (!layer.experts.has_value()) return;
  const RoutedExperts& e = *layer.experts;
  check_routing(e.router.call(0, nullptr, nullptr, nullptr));
  const std::int64_t experts = e.router.weight.columns;
  check_matrix(e.router.weight, model, experts, model.hidden, "router");
  CPUMOE_REQUIRE(e.spread || e.gate_up.data != nullptr, "a layer has a router and no experts");
  CPUMOE_REQUIRE(!e.spread || model.exchange != nullptr, "experts are spread over ranks that do not exchange");
  CPUMOE_REQUIRE(!e.spread || e.travel != RowTravel::kStay || !model.has_own_rows(),
                 "groups of ranks have rows of their own, which do not travel");
  CPUMOE_REQUIRE(e.spread || e.travel == RowTravel::kStay, "rows travel to experts that are all here");
  CPUMOE_REQUIRE(e.travel != RowTravel::kToExperts || e.copy_ranks != nullptr,
                 "rows travel to their experts, and it is not known where these are");
  CPUMOE_REQUIRE(
      !e.prepared_rows || (e.gate_up.data != nullptr && prepared_token_bytes(e.gate_up, model.type) > 0),
      "rows travel as the first product wants them, and there is none, or it is another one for each expert");
  if (e.gate_up.data == nullptr) return;
  check_experts(e.gate_up.spec, e.down.spec, e.activation);
  if (e.copy_begins == nullptr) {
    CPUMOE_REQUIRE(e.gate_up.spec.experts == experts, "the router is for ", experts, " experts, and there are ",
                   e.gate_up.spec.experts);
  } else {
    for (std::int32_t i = 0; i < e.copy_begins[experts]; ++i) {
      CPUMOE_REQUIRE(e.copy_places[i] >= -1 && e.copy_places[i] < e.gate_up.spec.experts, "copy ", i,
                     " of the experts is at place ", e.copy_places[i], "; there are ", e.gate_up.spec.experts);
    }
  }
  CPUMOE_REQUIRE(e.gate_up.spec.depth == model.hidden, "experts take ", e.gate_up.spec.depth, " features of ",
                 model.hidden);
  CPUMOE_REQUIRE(!traits_of(rows_for(e.gate_up.spec, model.type)).of_tensor,
                 "experts have one scale for all rows of a call, which a step does not serve");
}

}  // namespace

void check_model(const DecoderModel& model) {
  CPUMOE_REQUIRE(model.hidden >= 1 && model.hidden < (1 << 24), "hidden=", model.hidden,
                 "; 1 to 2^24 - 1 are accepted");
  check_groups(model);
  for (const DecoderLayer& layer : model.layers) check_layer(layer, model);
  check_norm(model.norm, model.hidden, "norm");
  if (model.head) check_matrix(model.head, model, model.head.columns, model.hidden, "head");
}

void check_step(const DecoderModel& m, const Step& s) {
  const auto rows = static_cast<std::int64_t>(s.rows.size()), sequences = static_cast<std::int64_t>(s.seen.size());
  if (rows == 0) {
    CPUMOE_REQUIRE(s.wanted.empty(), "results are wanted of a step without rows");
    return;
  }
  CPUMOE_REQUIRE((s.tokens != nullptr) != (s.hidden != nullptr), "tokens or hidden states must be given, and not both");
  CPUMOE_REQUIRE(s.tokens == nullptr || m.embedding != nullptr, "this decoder has no embedding: give hidden states");
  CPUMOE_REQUIRE(s.logits_out == nullptr || m.head, "this decoder has no head");
  for (std::int64_t r = 0; s.tokens != nullptr && r < rows; ++r) {
    CPUMOE_REQUIRE(s.tokens[r] >= 0 && s.tokens[r] < m.vocabulary, "token ", s.tokens[r], "; 0 to ", m.vocabulary - 1,
                   " are accepted");
  }
  CPUMOE_REQUIRE(s.caches.size() == m.layers.size(), "there are caches for ", s.caches.size(), " layers of ",
                 m.layers.size());
  std::int64_t least = std::numeric_limits<std::int64_t>::max();  // of positions that all tables have
  for (const RotaryTable& table : m.rotary) least = std::min(least, table.positions);
  for (const DecoderLayer& layer : m.layers) {
    if (layer.attention.query_factors != nullptr) least = std::min(least, layer.attention.query_factor_count);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    const StepRow& row = s.rows[static_cast<std::size_t>(r)];
    CPUMOE_REQUIRE(row.sequence >= 0 && row.sequence < sequences, "row ", r, " is of sequence ", row.sequence, " of ",
                   sequences);
    CPUMOE_REQUIRE(row.position >= 0 && row.position < least, "position ", row.position, "; 0 to ", least - 1,
                   " are accepted");
    const StepRow* last = r == 0 ? nullptr : &s.rows[static_cast<std::size_t>(r - 1)];
    CPUMOE_REQUIRE(
        last == nullptr || last->sequence < row.sequence || (last->sequence == row.sequence && last->place < row.place),
        "rows must come in the order of their sequences and places");
    for (const LayerCache& cache : s.caches) {
      if (cache.conv_state != nullptr) continue;  // it has no places
      CPUMOE_REQUIRE(row.place >= cache.first_place && row.place < cache.first_place + cache.places, "place ",
                     row.place, "; the cache has room for ", cache.first_place, " to ",
                     cache.first_place + cache.places - 1);
    }
  }
  for (const std::int64_t seen : s.seen) CPUMOE_REQUIRE(seen >= 0, "a sequence is seen from place ", seen, " on");
  for (std::size_t i = 0; i < s.wanted.size(); ++i) {
    CPUMOE_REQUIRE(s.wanted[i] >= (i == 0 ? 0 : s.wanted[i - 1] + 1) && s.wanted[i] < rows, "wanted row ", s.wanted[i],
                   " of ", rows);
  }
}

}  // namespace cpumoe
