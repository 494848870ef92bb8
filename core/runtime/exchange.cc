#include "runtime/exchange.h"

#include <vector>

#include "runtime/check.h"

namespace cpumoe {

RankExchange::RankExchange(int rank, int ranks) : rank_(rank), ranks_(ranks) {
  CPUMOE_REQUIRE(ranks >= 1, "ranks=", ranks, "; 1 or more is accepted");
  CPUMOE_REQUIRE(rank >= 0 && rank < ranks, "rank=", rank, "; 0 to ", ranks - 1, " are accepted");
}

template <class Body>
void RankExchange::guarded(Body&& body) noexcept {
  if (failure_ != nullptr) return;
  try {
    body();
  } catch (const std::exception& problem) {
    failure_ = std::current_exception();
    fail(problem.what());  // who waits for this rank learns what it has learnt
  } catch (...) {
    failure_ = std::current_exception();
    fail("an unknown error");
  }
}

void RankExchange::give_up(const std::string& reason) noexcept {
  guarded([&] { throw RankFailure(reason); });
}

void RankExchange::fail_with(const RankExchange& other) noexcept {
  guarded([&] { other.rethrow(); });
}

void RankExchange::rethrow() const {
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

void RankExchange::gather(const void* mine, std::int64_t bytes, void* all) noexcept {
  guarded([&] {
    std::vector<std::int64_t> begins(static_cast<std::size_t>(ranks_) + 1);
    for (int r = 0; r <= ranks_; ++r) begins[static_cast<std::size_t>(r)] = r * bytes;
    do_gather(mine, begins.data(), all);
  });
}

void RankExchange::gather_parts(const void* mine, const std::int64_t* begins, void* all) noexcept {
  guarded([&] { do_gather(mine, begins, all); });
}

void RankExchange::trade(const void* mine, const std::int64_t* begins, void* all, const std::int64_t* given) noexcept {
  guarded([&] { do_trade(mine, begins, all, given); });
}

void RankExchange::sum(float* values, std::int64_t count) noexcept {
  guarded([&] { do_sum(values, count); });
}

void RankExchange::largest(float* values, std::int64_t count) noexcept {
  guarded([&] { do_largest(values, count); });
}

}  // namespace cpumoe
