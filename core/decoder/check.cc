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

void check_dense(const DenseBlock& d, const DecoderModel& model) {
  const std::int64_t inner = d.down.depth;
  CPUMOE_REQUIRE(static_cast<bool>(d.down), "dense.down is None");
  CPUMOE_REQUIRE(!d.gate || d.activation.gated, "dense.gate is given for an activation that is not gated");
  if (d.gate) check_matrix(d.gate, model, inner, model.hidden(), "dense.gate");
  check_matrix(d.up, model, d.has_both() ? 2 * inner : inner, model.hidden(), "dense.up");
  check_matrix(d.down, model, model.hidden(), inner, "dense.down");
  if (d.share) check_matrix(d.share, model, 1, model.hidden(), "dense.share");
}

void check_experts_of(const RoutedExperts& e, const DecoderModel& model) {
  const bool are_here = e.gate_up.data != nullptr && !e.copies.has_value();
  const std::int64_t experts = are_here ? e.gate_up.spec.experts : e.router.weight.columns;
  check_matrix(e.router.weight, model, experts, model.hidden(), "router.weight");
  CPUMOE_REQUIRE(static_cast<int>(e.router.scoring) <= static_cast<int>(Scoring::kSqrtSoftplus),
                 "scoring=", static_cast<int>(e.router.scoring), "; 0 to 3 are accepted");
  check_count(e.router.correction_bias.size(), experts, "correction_bias");
  check_routing(e.router.call(0, nullptr, nullptr, nullptr));
  e.check(model.hidden(), model.type(), model.exchange);
  CPUMOE_REQUIRE(e.count() == experts, "router.weight is for ", experts, " experts, and there are ", e.count());
  CPUMOE_REQUIRE(e.spread || !e.copies.has_value(), "copies is given for experts that are not spread");
  CPUMOE_REQUIRE(e.are_here() || e.is_unequal(model.ranks()), "gate_up is None, but there are ", experts,
                 " experts for ", model.ranks(), " ranks: each must have some");
  CPUMOE_REQUIRE(!e.spread || e.travel != RowTravel::kStay || !model.has_own_rows(),
                 "travel=0, but groups of ranks have rows of their own");
  CPUMOE_REQUIRE(!e.are_here() || !traits_of(rows_for(e.gate_up.spec, model.type())).of_tensor,
                 "experts have one scale for all rows of a call, which a step does not serve");
}

void check_layer(const DecoderLayer& layer, const DecoderModel& model) {
  check_norm(layer.before_mixer, model.hidden(), "before_mixer");
  check_norm(layer.after_mixer, model.hidden(), "after_mixer");
  check_norm(layer.before_block, model.hidden(), "before_block");
  check_norm(layer.after_block, model.hidden(), "after_block");
  std::visit([&](const auto& kind) { check_mixer(kind, model); }, layer.mixer);
  CPUMOE_REQUIRE(layer.experts.has_value() || layer.dense.has_value(), "a layer has neither experts nor dense");
  if (layer.dense.has_value()) check_dense(*layer.dense, model);
  if (layer.experts.has_value()) check_experts_of(*layer.experts, model);
}

}  // namespace

void check_norm(const Norm& norm, std::int64_t width, const char* name) {
  if (norm) check_count(norm.weight.size(), width, name);
}

void check_matrix(const Matrix& m, const DecoderModel& model, std::int64_t columns, std::int64_t depth,
                  const char* name) {
  CPUMOE_REQUIRE(static_cast<bool>(m), name, " is None");
  CPUMOE_REQUIRE(m.columns == columns && m.depth == depth, name, " is [", m.columns, ", ", m.depth, "]; [", columns,
                 ", ", depth, "] is accepted");
  CPUMOE_REQUIRE(m.ranks == 1 || m.ranks == model.group_ranks(), name, " is spread over ", m.ranks, " ranks of ",
                 model.group_ranks());
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
  CPUMOE_REQUIRE(weight, "conv_weight is None");
  CPUMOE_REQUIRE(weight.dims == 2 && weight.shape[0] == channels, "conv_weight is [", weight.shape[0], ", ",
                 weight.shape[1], "]; [", channels, ", taps] is accepted");
  if (bias) check_tensor(bias, channels, "conv_bias");
}

void check_model(const DecoderModel& model) {
  CPUMOE_REQUIRE(model.embedding.dims == 2, "embedding has ", model.embedding.dims, " dimensions, not 2");
  CPUMOE_REQUIRE(model.hidden() >= 1 && model.hidden() < (1 << 24), "hidden=", model.hidden(),
                 "; 1 to 2^24 - 1 are accepted");
  CPUMOE_REQUIRE(!model.layers.empty(), "a decoder has no layers");
  check_group(model.exchange, model.group);
  for (std::size_t i = 0; i < model.rope.size(); ++i) {
    const RopeTable& table = model.rope[i];
    for (const auto& [name, of] : {std::pair{"cos", &table.cos}, std::pair{"sin", &table.sin}}) {
      CPUMOE_REQUIRE(of->dims == 2 && of->type == DType::kF32, "rope[", i, "].", name, " has ", of->dims,
                     " dimensions; 2 in float32 are accepted");
      CPUMOE_REQUIRE(of->shape[0] == table.cos.shape[0] && of->shape[1] == table.cos.shape[1], "rope[", i, "].", name,
                     " is [", of->shape[0], ", ", of->shape[1], "]; [", table.cos.shape[0], ", ", table.cos.shape[1],
                     "], like cos, is accepted");
    }
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
