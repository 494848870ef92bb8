#include "ranks/products.h"

#include <cstring>

namespace cpumoe {

void RankProducts::plan(const Kernels& kernels, const MatrixOut* outs, int count, const void* x, DType type,
                        std::int64_t rows, int threads, RankExchange* exchange) {
  exchange_ = exchange;
  rows_ = rows;
  bytes_ = 0;
  split_.clear();
  outs_.assign(outs, outs + count);
  local_.resize(outs_.size());
  for (const MatrixOut& out : outs_) {
    if (out.matrix->ranks == 1) continue;
    const std::int64_t row_bytes = out.matrix->own_columns() * size_of(out.type);
    split_.push_back({out, bytes_, row_bytes});
    bytes_ += (rows * row_bytes + 63) / 64 * 64;
  }
  auto* mine = split_.empty() ? nullptr : mine_.get<std::uint8_t>(bytes_);
  if (mine != nullptr) all_.get<std::uint8_t>(bytes_ * exchange->ranks());
  std::size_t next = 0;
  for (std::size_t i = 0; i < outs_.size(); ++i) {
    MatrixOut& out = outs_[i];
    if (out.matrix->ranks == 1) continue;
    local_[i] = *out.matrix;
    local_[i].columns = out.matrix->own_columns();
    local_[i].ranks = 1;
    out = {&local_[i], mine + split_[next++].begin, local_[i].columns, out.type};
  }
  products_.plan(kernels, outs_.data(), count, x, type, rows, threads);
}

void RankProducts::gather(Worker& worker) {
  if (split_.empty()) return;
  auto* all = all_.get<std::uint8_t>(bytes_ * exchange_->ranks());
  if (worker.index == 0) exchange_->gather(mine_.get<std::uint8_t>(bytes_), bytes_, all);
  worker.barrier->wait();
  for (const Split& split : split_) {
    auto* out = static_cast<std::uint8_t*>(split.whole.out);
    const std::int64_t stride = split.whole.stride * size_of(split.whole.type);
    for (std::int64_t r = worker.share(rows_); r < worker.next_share(rows_); ++r) {
      for (int rank = 0; rank < exchange_->ranks(); ++rank) {
        std::memcpy(out + r * stride + rank * split.row_bytes, all + rank * bytes_ + split.begin + r * split.row_bytes,
                    static_cast<std::size_t>(split.row_bytes));
      }
    }
  }
  worker.barrier->wait();
}

}  // namespace cpumoe
