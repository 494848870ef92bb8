// Exchange of ranks on one machine through shared memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/exchange.h"

namespace cpumoe {

// Ranks on one machine, through memory that they share: a message is written once and read by whom it is for, which
// takes about a microsecond where sockets and sleeping threads take a hundred and more.
class SharedExchange : public RankExchange {
 public:
  // Of the file that all ranks map; `slot_bytes` is a multiple of 4096.
  static std::int64_t file_bytes(int ranks, std::int64_t slot_bytes);

  // `file`: a descriptor that this process has opened itself, of a file of that size that was all zeros. It may be
  // closed afterwards. A rank that gives nothing for `seconds` is an error. `first_rank` is what rank 0 is called in
  // errors: these ranks may be some of a larger number.
  SharedExchange(int file, int rank, int ranks, std::int64_t slot_bytes, double seconds, int first_rank = 0);
  ~SharedExchange() override;

  double waited_seconds() const override;
  void check() const override;
  // The first reason is the one that counts: what follows from it does not.
  void fail(const std::string& reason) noexcept override;

 private:
  struct Region;

  void do_gather(const void* mine, const std::int64_t* begins, void* all) override;
  void do_trade(const void* mine, const std::int64_t* begins, void* all, const std::int64_t* given) override;
  void do_sum(float* values, std::int64_t count) override;
  void do_largest(float* values, std::int64_t count) override;

  std::unique_ptr<Region> region_;
};

}  // namespace cpumoe
