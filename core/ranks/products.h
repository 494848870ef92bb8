// Rows times matrices of which every rank may have some columns only.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/linear.h"
#include "runtime/exchange.h"
#include "runtime/memory.h"

namespace cpumoe {

// RowProducts whose results are whole on every rank: behind the barrier that follows `multiply`, `gather` brings the
// columns of other ranks, and ends with a barrier where there are some.
class RankProducts {
 public:
  void plan(const Kernels& kernels, const MatrixOut* outs, int count, const void* x, DType type, std::int64_t rows,
            int threads, RankExchange* exchange);
  void prepare(const Worker& worker) { products_.prepare(worker); }
  void multiply(const Worker& worker) { products_.multiply(worker); }
  bool is_split() const { return !split_.empty(); }
  void gather(Worker& worker);

 private:
  // A result of which this rank computes some columns, all rows one behind the other.
  struct Split {
    MatrixOut whole;
    std::int64_t begin, row_bytes;  // of the bytes that this rank gives
  };

  RowProducts products_;
  RankExchange* exchange_ = nullptr;
  std::int64_t rows_ = 0, bytes_ = 0;
  std::vector<Matrix> local_;
  std::vector<MatrixOut> outs_;
  std::vector<Split> split_;
  Buffer mine_, all_;
};

}  // namespace cpumoe
