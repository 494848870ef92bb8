// What the ranks of one model give each other while they compute.
//
// Ranks call the same functions in the same order with the same sizes; what a rank adds up, it adds in the order of the
// ranks, so that all of them have the same bits. A rank that ends, fails, hangs or gives something else than the others
// is an error that names it, and the end of the exchange: nothing more is waited for then.
#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

namespace cpumoe {

// RankError in Python.
class RankFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class RankExchange {
 public:
  RankExchange(int rank, int ranks);
  virtual ~RankExchange() = default;
  RankExchange(const RankExchange&) = delete;
  RankExchange& operator=(const RankExchange&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // None of these throws: they are called inside of teams of threads. What went wrong is kept, later calls do nothing,
  // and `rethrow` raises it.
  //
  // `bytes` of every rank, one behind the other in `all`.
  void gather(const void* mine, std::int64_t bytes, void* all) noexcept;
  // What rank r gives are the bytes from begins[r] to begins[r + 1] of `all`.
  void gather_parts(const void* mine, const std::int64_t* begins, void* all) noexcept;
  // Bytes from begins[r] to begins[r + 1] of `mine` go to rank r, and what it gives goes to `all` likewise.
  void trade(const void* mine, const std::int64_t* begins, void* all, const std::int64_t* given) noexcept;
  // Every value becomes the sum over all ranks.
  void sum(float* values, std::int64_t count) noexcept;
  // Every value becomes the largest one; NaN counts for nothing.
  void largest(float* values, std::int64_t count) noexcept;

  bool has_failed() const { return failure_ != nullptr; }
  // Ends the exchange for a reason that was found in what came.
  void give_up(const std::string& reason) noexcept;
  void rethrow() const;
  // If `other` has failed, fails this exchange for the same reason, so that ranks that are not in `other` learn it.
  void fail_with(const RankExchange& other) noexcept;

  // Seconds that were spent waiting for ranks that came later, as far as that is known: what they lack in speed, and
  // not what messages cost.
  virtual double waited_seconds() const { return 0.0; }

  // Raises if it is known, without waiting, that another rank will not go on.
  virtual void check() const {}

  // Tells the others why this rank will not go on; where it cannot be told, they find that it has gone.
  virtual void fail(const std::string&) noexcept {}

 private:
  virtual void do_gather(const void* mine, const std::int64_t* begins, void* all) = 0;
  virtual void do_trade(const void* mine, const std::int64_t* begins, void* all, const std::int64_t* given) = 0;
  virtual void do_sum(float* values, std::int64_t count) = 0;
  virtual void do_largest(float* values, std::int64_t count) = 0;

  template <class Body>
  void guarded(Body&& body) noexcept;

  int rank_, ranks_;
  std::exception_ptr failure_;
};

}  // namespace cpumoe
