#include "ranks/packed_experts.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "ranks/row_traffic.h"
#include "runtime/check.h"
#include "runtime/threads.h"

namespace cpumoe {
namespace {

// Bytes of sums up to which a thread keeps the buffers of a call for the next one: new memory costs a page fault for
// every 4 KB.
constexpr std::int64_t kKeptBytes = 64 << 20;

// Computes the experts that are here, whatever the number of rows.
void compute(const Kernels& kernels, const ChosenRows& rows, const MoeCall& call) {
  if (rows.experts->are_here()) return moe_forward(kernels, call);
  std::fill_n(static_cast<float*>(call.out), call.tokens * rows.width, 0.0f);
}

// Dispatch and combine. An exchange that has failed ends it at once: nothing may be computed of what did not come.
void send_and_compute(const Kernels& kernels, const ChosenRows& rows, RankExchange& exchange, RankExchange* group,
                      float* out) {
  static thread_local std::optional<RowTraffic> kept;
  RowTraffic& traffic = kept.has_value() ? *kept : kept.emplace();
  const auto on_threads = [&](std::int64_t count, auto&& body) {
    run_on_threads(threads_for(count * rows.width * 4), [&](Worker& w) { body(w.share(count), w.next_share(count)); });
  };
  const RowShare share(rows.count, exchange.rank(), group == nullptr ? 1 : group->ranks());
  traffic.plan(kernels, rows.part(share), exchange);
  // Frees large buffers at the end, also when the exchange fails.
  const struct Trim {
    std::int64_t row_bytes;
    ~Trim() {
      if (kept->largest_rows() * row_bytes > kKeptBytes) kept.reset();
    }
  } trim{rows.width * 4};
  on_threads(traffic.entries(), [&](std::int64_t first, std::int64_t last) { traffic.pack(first, last); });
  traffic.send();
  on_threads(traffic.received(), [&](std::int64_t first, std::int64_t last) { traffic.unpack(first, last); });
  traffic.find_places();
  exchange.rethrow();
  compute(kernels, rows, traffic.call());
  traffic.send_back();
  exchange.rethrow();
  float* mine = out + share.first * rows.width;
  on_threads(share.count(), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) traffic.add(row, mine + row * rows.width);
  });
  if (group == nullptr) return;
  gather_shares(*group, rows.count, rows.width * 4, mine, out);
  exchange.fail_with(*group);
  group->rethrow();
}

}  // namespace

void Copies::check(std::int64_t experts) const {
  CPUMOE_REQUIRE(begins.size() >= 2, "copies.begins has ", begins.size(), " values; 2 or more are accepted");
  CPUMOE_REQUIRE(static_cast<std::int64_t>(begins.size()) == experts + 1, "copies.begins has ", begins.size(),
                 " values; ", experts + 1, " are accepted");
  for (std::size_t i = 0; i < static_cast<std::size_t>(experts); ++i) {
    CPUMOE_REQUIRE(begins[0] == 0 && begins[i] < begins[i + 1], "copies.begins has none of expert ", i);
  }
  for (const auto& [name, values] : {std::pair{"places", places}, std::pair{"ranks", ranks}}) {
    CPUMOE_REQUIRE(static_cast<std::int64_t>(values.size()) == begins.back(), "copies.", name, " has ", values.size(),
                   " values; ", begins.back(), " are accepted");
  }
}

std::int64_t PackedExperts::count() const {
  return copies.has_value() ? static_cast<std::int64_t>(copies->begins.size()) - 1 : gate_up.spec.experts;
}

std::int32_t PackedExperts::copy_count() const {
  return copies.has_value() ? copies->begins.back() : static_cast<std::int32_t>(gate_up.spec.experts);
}

void PackedExperts::count_loads(const std::int32_t* ids, std::int64_t count) const {
  for (std::int64_t i = 0; i < count && !loads.empty(); ++i) {
    if (ids[i] < 0) continue;
    std::int64_t& load = loads[static_cast<std::size_t>(ids[i])];
    load = static_cast<std::int64_t>(static_cast<std::uint64_t>(load) + 1);  // unsigned: the caller's counts may wrap
  }
}

void PackedExperts::check(std::int64_t hidden, DType type, const RankExchange* exchange) const {
  if (copies.has_value()) copies->check(count());
  CPUMOE_REQUIRE(are_here() == (down.data != nullptr), "gate_up and down must both be given, or none");
  CPUMOE_REQUIRE(are_here() || (spread && copies.has_value()),
                 "gate_up is None; only ranks that share copies of experts may have none");
  CPUMOE_REQUIRE(loads.empty() || static_cast<std::int64_t>(loads.size()) == count(), "loads has ", loads.size(),
                 " values; ", count(), " are accepted");
  CPUMOE_REQUIRE(!spread || exchange != nullptr, "experts are spread over ranks, and exchange is None");
  CPUMOE_REQUIRE(spread || travel == RowTravel::kStay, "travel is given for experts that are not spread");
  CPUMOE_REQUIRE(travel != RowTravel::kToExperts || copies.has_value(),
                 "rows travel to their experts, and copies is None");
  CPUMOE_REQUIRE(!prepared_rows || (are_here() && prepared_token_bytes(gate_up, type) > 0),
                 "prepared_rows needs a gate_up whose rows are the same for all experts");
  for (std::size_t i = 0; spread && copies.has_value() && i < copies->ranks.size(); ++i) {
    CPUMOE_REQUIRE(copies->ranks[i] >= 0 && copies->ranks[i] < exchange->ranks(), "copies.ranks holds ",
                   copies->ranks[i], "; 0 to ", exchange->ranks() - 1, " are accepted");
  }
  if (!are_here()) return;
  check_experts(gate_up.spec, down.spec, activation);
  CPUMOE_REQUIRE(gate_up.spec.depth == hidden, "hidden_states have ", hidden, " features, but gate_up takes ",
                 gate_up.spec.depth);
  for (std::size_t i = 0; copies.has_value() && i < copies->places.size(); ++i) {
    CPUMOE_REQUIRE(copies->places[i] >= -1 && copies->places[i] < gate_up.spec.experts, "copies.places holds ",
                   copies->places[i], "; -1 to ", gate_up.spec.experts - 1, " are accepted");
  }
}

MoeCall PackedExperts::call(DType type, std::int64_t topk, RankExchange* exchange) const {
  MoeCall call{};
  call.gate_up = gate_up;
  call.down = down;
  call.type = type;
  call.out_type = DType::kF32;
  call.topk = topk;
  call.weight_on_input = weight_on_input;
  call.activation = activation;
  if (spread && !copies.has_value()) call.slices = exchange;
  return call;
}

ChosenRows ChosenRows::part(const RowShare& share) const {
  ChosenRows part = *this;
  part.x += share.first * width * size_of(type);
  part.ids += share.first * topk;
  part.weights += share.first * topk;
  part.first_turn += share.first;
  part.count = share.count();
  return part;
}

void ChosenRows::find_places(std::int32_t* places) const {
  for (std::int64_t i = 0; i < count * topk; ++i) {
    places[i] = experts->place(experts->copy(ids[i], first_turn + i / topk));
  }
}

MoeCall ChosenRows::call(std::int32_t* places, RankExchange* exchange) const {
  MoeCall call = experts->call(type, topk, exchange);
  call.x = x;
  call.tokens = count;
  call.weights = weights;
  call.ids = ids;
  if (!experts->copies.has_value()) return call;
  find_places(places);
  call.ids = places;
  return call;
}

void check_group(const RankExchange* all, const RankExchange* group) {
  if (group == nullptr) return;
  const int ranks = all == nullptr ? 1 : all->ranks();
  CPUMOE_REQUIRE(all != nullptr && ranks % group->ranks() == 0 && all->rank() % group->ranks() == group->rank(),
                 "group has rank ", group->rank(), " of ", group->ranks(), ", which does not fit exchange, of ", ranks,
                 " ranks");
}

void gather_shares(RankExchange& group, std::int64_t count, std::int64_t row_bytes, const void* mine, void* all) {
  std::vector<std::int64_t> begins;
  begins.reserve(static_cast<std::size_t>(group.ranks()) + 1);
  for (int rank = 0; rank < group.ranks(); ++rank) {
    begins.push_back(RowShare(count, rank, group.ranks()).first * row_bytes);
  }
  begins.push_back(count * row_bytes);
  group.gather_parts(mine, begins.data(), all);
}

void spread_forward(const Kernels& kernels, const ChosenRows& rows, RankExchange* exchange, RankExchange* group,
                    float* out) {
  const PackedExperts& experts = *rows.experts;
  if (experts.travel != RowTravel::kStay) return send_and_compute(kernels, rows, *exchange, group, out);
  std::vector<std::int32_t> places(experts.copies.has_value() ? static_cast<std::size_t>(rows.count * rows.topk) : 0);
  MoeCall call = rows.call(places.data(), exchange);
  call.out = out;
  compute(kernels, rows, call);
  if (!experts.spread) return;
  exchange->sum(out, rows.count * rows.width);
  exchange->rethrow();
}

}  // namespace cpumoe
