#include "decoder/check.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "decoder/mixer.h"
#include "ops/experts.h"
#include "ops/routing.h"
#include "runtime/check.h"

namespace cpumoe {
namespace {

void check_groups(const DecoderModel& model) {
  if (model.group == nullptr) return;
  CPUMOE_REQUIRE(model.exchange != nullptr && model.ranks() % model.group_ranks() == 0 &&
                     model.exchange->rank() % model.group_ranks() == model.group->rank(),
                 "rank ", model.group->rank(), " of a group of ", model.group_ranks(),
                 " ranks does not fit the ranks of all experts, which are ", model.ranks());
}

void check_dense(const DenseBlock& d, const DecoderModel& model) {
  const std::int64_t inner = d.down.depth;
  CPUMOE_REQUIRE(!d.gate || d.activation.gated, "gate is given for an activation that is not gated");
  if (d.gate) check_matrix(d.gate, model, inner, model.hidden(), "gate");
  check_matrix(d.up, model, d.has_both() ? 2 * inner : inner, model.hidden(), "up");
  check_matrix(d.down, model, model.hidden(), inner, "down");
  if (d.share) check_matrix(d.share, model, 1, model.hidden(), "share");
}

void check_copies(const RoutedExperts& e) {
  const std::int64_t experts = e.router.weight.columns;
  const Copies& c = *e.copies;
  CPUMOE_REQUIRE(e.spread && static_cast<std::int64_t>(c.begins.size()) == experts + 1, "begins of copies has ",
                 c.begins.size(), " values; ", experts + 1, " of experts that are spread are accepted");
  for (std::size_t i = 0; i < static_cast<std::size_t>(experts); ++i) {
    CPUMOE_REQUIRE(c.begins[0] == 0 && c.begins[i] < c.begins[i + 1], "expert ", i, " has no copy");
  }
  for (const auto& [name, values] : {std::pair{"places", c.places}, std::pair{"ranks", c.ranks}}) {
    CPUMOE_REQUIRE(static_cast<std::int64_t>(values.size()) == c.begins.back(), name, " of copies has ", values.size(),
                   " values; ", c.begins.back(), " are accepted");
  }
}

void check_experts_of(const RoutedExperts& e, const DecoderModel& model) {
  const std::int64_t experts = e.router.weight.columns;
  CPUMOE_REQUIRE(static_cast<int>(e.router.scoring) <= static_cast<int>(Scoring::kSqrtSoftplus),
                 "scoring=", static_cast<int>(e.router.scoring), "; 0 to 3 are accepted");
  check_count(e.router.correction_bias.size(), experts, "correction_bias");
  check_count(e.loads.size(), experts, "loads");
  check_routing(e.router.call(0, nullptr, nullptr, nullptr));
  check_matrix(e.router.weight, model, experts, model.hidden(), "router");
  if (e.copies.has_value()) check_copies(e);
  CPUMOE_REQUIRE(e.spread || e.gate_up.data != nullptr, "a layer has a router and no experts");
  CPUMOE_REQUIRE(!e.spread || model.exchange != nullptr, "experts are spread over ranks that do not exchange");
  CPUMOE_REQUIRE(!e.spread || e.travel != RowTravel::kStay || !model.has_own_rows(),
                 "groups of ranks have rows of their own, which do not travel");
  CPUMOE_REQUIRE(e.spread || e.travel == RowTravel::kStay, "rows travel to experts that are all here");
  CPUMOE_REQUIRE(e.travel != RowTravel::kToExperts || e.copies.has_value(),
                 "rows travel to their experts, and it is not known where these are");
  CPUMOE_REQUIRE(
      !e.prepared_rows || (e.gate_up.data != nullptr && prepared_token_bytes(e.gate_up, model.type()) > 0),
      "rows travel as the first product wants them, and there is none, or it is another one for each expert");
  if (e.gate_up.data == nullptr) return;
  check_experts(e.gate_up.spec, e.down.spec, e.activation);
  if (!e.copies.has_value()) {
    CPUMOE_REQUIRE(e.gate_up.spec.experts == experts, "the router is for ", experts, " experts, and there are ",
                   e.gate_up.spec.experts);
  } else {
    for (std::size_t i = 0; i < e.copies->places.size(); ++i) {
      const std::int32_t place = e.copies->places[i];
      CPUMOE_REQUIRE(place >= -1 && place < e.gate_up.spec.experts, "copy ", i, " of the experts is at place ", place,
                     "; there are ", e.gate_up.spec.experts);
    }
  }
  CPUMOE_REQUIRE(e.gate_up.spec.depth == model.hidden(), "experts take ", e.gate_up.spec.depth, " features of ",
                 model.hidden());
  CPUMOE_REQUIRE(!traits_of(rows_for(e.gate_up.spec, model.type())).of_tensor,
                 "experts have one scale for all rows of a call, which a step does not serve");
}

void check_layer(const DecoderLayer& layer, const DecoderModel& model) {
  check_norm(layer.before_mixer, model.hidden(), "before_mixer");
  check_norm(layer.after_mixer, model.hidden(), "after_mixer");
  check_norm(layer.before_block, model.hidden(), "before_block");
  check_norm(layer.after_block, model.hidden(), "after_block");
  std::visit([&](const auto& kind) { check_mixer(kind, model); }, layer.mixer);
  CPUMOE_REQUIRE(layer.experts.has_value() || layer.dense.has_value(), "a layer has neither experts nor a dense block");
  if (layer.dense.has_value()) check_dense(*layer.dense, model);
  if (layer.experts.has_value()) check_experts_of(*layer.experts, model);
}

}  // namespace

void check_norm(const Norm& norm, std::int64_t width, const char* name) {
  if (norm) check_count(norm.weight.size(), width, name);
}

void check_ranks(const DecoderModel& model, int ranks, const char* name) {
  const int all = model.group_ranks();
  CPUMOE_REQUIRE(ranks == 1 || ranks == all, name, " is spread over ", ranks, " ranks of ", all);
}

void check_matrix(const Matrix& m, const DecoderModel& model, std::int64_t columns, std::int64_t depth,
                  const char* name) {
  CPUMOE_REQUIRE(m.columns == columns && m.depth == depth, name, " is [", m.columns, ", ", m.depth, "]; [", columns,
                 ", ", depth, "] is accepted");
  check_ranks(model, m.ranks, name);
  if (!m.is_packed()) return;
  CPUMOE_REQUIRE(m.packed.spec.experts == 1 && !m.packed.spec.gated, name, " holds experts; one matrix is accepted");
  CPUMOE_REQUIRE(!traits_of(rows_for(m.packed.spec, model.type())).of_tensor, name,
                 " has one scale for all rows of a call, which a step does not serve");
}

void check_count(std::size_t found, std::int64_t count, const char* name) {
  CPUMOE_REQUIRE(found == 0 || static_cast<std::int64_t>(found) == count, name, " has ", found, " values; ", count,
                 " are accepted");
}

void check_tensor(const Tensor& tensor, std::int64_t size, const char* name) {
  CPUMOE_REQUIRE(tensor.dims == 1 && tensor.shape[0] == size, name, " has ", tensor.dims, " dimensions of ",
                 tensor.shape[0], "; [", size, "] is accepted");
}

void check_tensor(const Tensor& tensor, std::int64_t rows, std::int64_t columns, const char* name) {
  CPUMOE_REQUIRE(tensor.dims == 2 && tensor.shape[0] == rows && tensor.shape[1] == columns, name, " is [",
                 tensor.shape[0], ", ", tensor.shape[1], "]; [", rows, ", ", columns, "] is accepted");
}

void check_convolution(const Tensor& weight, const Tensor& bias, std::int64_t channels) {
  CPUMOE_REQUIRE(weight.dims == 2 && weight.shape[0] == channels, "conv_weight is [", weight.shape[0], ", ",
                 weight.shape[1], "]; [", channels, ", taps] is accepted");
  CPUMOE_REQUIRE(weight.shape[1] >= 1 && weight.shape[1] <= kMostTaps, "conv_weight has ", weight.shape[1],
                 " taps; 1 to ", kMostTaps, " are accepted");
  if (!bias) return;
  check_tensor(bias, channels, "conv_bias");
  CPUMOE_REQUIRE(bias.type == weight.type, "conv_bias has another dtype than conv_weight");
}

void check_model(const DecoderModel& model) {
  CPUMOE_REQUIRE(model.embedding.dims == 2, "the embedding has ", model.embedding.dims, " dimensions; 2 are accepted");
  CPUMOE_REQUIRE(model.hidden() >= 1 && model.hidden() < (1 << 24), "hidden=", model.hidden(),
                 "; 1 to 2^24 - 1 are accepted");
  CPUMOE_REQUIRE(!model.layers.empty(), "a decoder has no layers");
  check_groups(model);
  for (const RopeTable& table : model.rope) {
    for (const Tensor* of : {&table.cos, &table.sin}) {
      CPUMOE_REQUIRE(of->dims == 2 && of->type == DType::kF32, "a RoPE table has ", of->dims,
                     " dimensions; 2 in float32 are accepted");
    }
    CPUMOE_REQUIRE(table.cos.shape[0] == table.sin.shape[0] && table.cos.shape[1] == table.sin.shape[1], "cos is [",
                   table.cos.shape[0], ", ", table.cos.shape[1], "], but sin is [", table.sin.shape[0], ", ",
                   table.sin.shape[1], "]");
  }
  for (const DecoderLayer& layer : model.layers) check_layer(layer, model);
  check_norm(model.norm, model.hidden(), "norm");
  if (model.head) check_matrix(model.head, model, model.head.columns, model.hidden(), "head");
}

void check_step(const DecoderModel& m, const StepInput& s) {
  const auto rows = static_cast<std::int64_t>(s.rows.size()), sequences = static_cast<std::int64_t>(s.seen.size());
  if (rows == 0) {
    CPUMOE_REQUIRE(s.wanted.empty(), "results are wanted of a step without rows");
    return;
  }
  CPUMOE_REQUIRE((s.tokens != nullptr) != (s.hidden != nullptr), "tokens or hidden states must be given, and not both");
  CPUMOE_REQUIRE(s.tokens == nullptr || m.embedding, "this decoder has no embedding: give hidden states");
  CPUMOE_REQUIRE(s.logits_out == nullptr || m.head, "this decoder has no head");
  for (std::int64_t r = 0; s.tokens != nullptr && r < rows; ++r) {
    CPUMOE_REQUIRE(s.tokens[r] >= 0 && s.tokens[r] < m.vocabulary(), "token ", s.tokens[r], "; 0 to ",
                   m.vocabulary() - 1, " are accepted");
  }
  CPUMOE_REQUIRE(s.caches.size() == m.layers.size(), "there are caches for ", s.caches.size(), " layers of ",
                 m.layers.size());
  std::int64_t least = std::numeric_limits<std::int64_t>::max();  // of positions that all tables have
  for (const RopeTable& table : m.rope) least = std::min(least, table.positions());
  for (const DecoderLayer& layer : m.layers) {
    std::visit(
        [&](const auto& kind) {
          if constexpr (std::is_base_of_v<Attention, std::decay_t<decltype(kind)>>) {
            const auto factors = static_cast<std::int64_t>(kind.query_factors.size());
            if (factors > 0) least = std::min(least, factors);
          }
        },
        layer.mixer);
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
      if (cache.states[0] != nullptr) continue;  // it has no places
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
