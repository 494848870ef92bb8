// The packed experts of a layer and the ranks that have them: expert parallelism, slices of each expert, or one rank.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "kernels/table.h"
#include "ops/experts.h"
#include "packed/layout.h"
#include "runtime/exchange.h"

namespace cpumoe {

// Dispatch mode of a layer: the ranks that compute the rows of a rank.
enum class RowTravel {
  kStay,       // every rank computes all rows, which it has already
  kToAll,      // all ranks
  kToExperts,  // those with one of the row's experts
};

// Copies of experts on ranks that have whole experts: those of expert e are begins[e] to begins[e + 1] - 1.
struct Copies {
  std::span<const std::int32_t> begins;  // [experts + 1]
  std::span<const std::int32_t> places;  // [copies]: index among the experts of this rank, or -1
  std::span<const std::int32_t> ranks;   // [copies]

  // Rejects lists that do not describe `experts` experts with at least one copy each.
  void check(std::int64_t experts) const;
};

struct PackedExperts {
  PackedMatrix gate_up, down;  // without data if this rank has no experts
  ActivationSpec activation;
  bool weight_on_input = false;
  bool spread = false;            // ranks have some experts each, or a slice of each expert: their sums are added
  std::optional<Copies> copies;   // none for slices, where every expert is here
  std::span<std::int64_t> loads;  // [experts] or empty: counts how often each expert is chosen
  // Dispatch mode, for ranks that have rows of their own.
  RowTravel travel = RowTravel::kStay;
  bool prepared_rows = false;  // rows travel in the row format of the first product; every rank has experts then

  bool are_here() const { return gate_up.data != nullptr; }
  // Experts of the layer, and copies of them on all ranks.
  std::int64_t count() const;
  std::int32_t copy_count() const;
  // Whether slices may be of different sizes, or a rank have no experts: then ranks do not know each other's sizes.
  bool is_unequal(int all_ranks) const { return spread && (!copies.has_value() || count() < all_ranks); }

  // The copy of an expert that a row takes: rows take turns. -1, no expert, stays -1.
  std::int32_t copy(std::int32_t expert, std::int64_t turn) const {
    if (!copies.has_value() || expert < 0) return expert;
    const std::int32_t* begin = &copies->begins[static_cast<std::size_t>(expert)];
    return begin[0] + static_cast<std::int32_t>(turn % (begin[1] - begin[0]));
  }
  // Index of a copy among the experts of this rank, or -1.
  std::int32_t place(std::int32_t copy) const {
    return !copies.has_value() || copy < 0 ? copy : copies->places[static_cast<std::size_t>(copy)];
  }
  void count_loads(const std::int32_t* ids, std::int64_t count) const;

  // Refuses parts that do not fit each other, rows of this width and type, or the exchange.
  void check(std::int64_t hidden, DType type, const RankExchange* exchange) const;

  // A call of the experts that are here; rows, routing and result are to be filled in.
  MoeCall call(DType type, std::int64_t topk, RankExchange* exchange) const;
};

// The rows [first, last) of `count` that a rank dispatches: the ranks of a tensor parallel group have the same rows and
// send a share of them each.
struct RowShare {
  RowShare(std::int64_t count, int rank, int group)
      : first(count * (rank % group) / group), last(count * (rank % group + 1) / group) {}
  std::int64_t count() const { return last - first; }

  std::int64_t first, last;
};

// Rows of this rank and the experts that they have chosen.
struct ChosenRows {
  const PackedExperts* experts;
  const std::uint8_t* x;  // [count, width]
  DType type;
  std::int64_t width, count, topk;
  const std::int32_t* ids;  // [count, topk]: experts of the whole layer, or -1
  const float* weights;     // [count, topk]
  std::int64_t first_turn;  // running number of the first row; modulo the number of copies it selects the copy

  ChosenRows part(const RowShare& share) const;
  // Places on this rank of the copies that the rows take: [count, topk].
  void find_places(std::int32_t* places) const;
  // A call of the experts that are here, for all rows; `places` is memory for those of copies.
  MoeCall call(std::int32_t* places, RankExchange* exchange) const;
};

// Refuses a group that is not some of all ranks, side by side; null: none.
void check_group(const RankExchange* all, const RankExchange* group);

// Gathers the shares of a group's ranks: `mine` is that of this rank, `all` becomes [count, row_bytes].
void gather_shares(RankExchange& group, std::int64_t count, std::int64_t row_bytes, const void* mine, void* all);

// The experts of a layer on all ranks, which all call it: dispatch, computation, combine. `out` becomes the sums of all
// ranks, in their order. Raises what has gone wrong. `exchange` is of all ranks, null for one; `group` of those with
// the same rows, which share them out to send them, or null.
void spread_forward(const Kernels& kernels, const ChosenRows& rows, RankExchange* exchange, RankExchange* group,
                    float* out);

}  // namespace cpumoe
