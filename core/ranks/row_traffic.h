// Rows on their way to the ranks that have their experts, and the sums of these on their way back.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/table.h"
#include "packed/layout.h"
#include "runtime/exchange.h"
#include "runtime/memory.h"

namespace cpumoe {

// Where the rows of a rank go.
enum class RowTravel {
  kStay,       // nowhere: every rank has all rows
  kToAll,      // to every rank
  kToExperts,  // to those that have one of the row's experts
};

// What a rank sends, and what it knows of the others.
struct RowSending {
  RowTravel travel;
  const std::uint8_t* x;  // [count, width]
  DType type;
  std::int64_t width, count, topk;
  const std::int32_t* copies;        // [count, topk]: the copies of experts that the rows take
  const float* weights;              // [count, topk]
  const PackedMatrix* first;         // rows travel as this wants them; null: as they are
  const std::int32_t* owners;        // by copy, for kToExperts: the rank that has it
  const std::int64_t* other_counts;  // by rank: rows that it sends, this one included
};

// All of these are called by every rank, in their order, also by one that has no rows. `plan`, `send` and `send_back`
// by one thread; the others by several, each for some of the rows, with a barrier on both sides.
class RowTraffic {
 public:
  void plan(const Kernels& kernels, const RowSending& sending, RankExchange& exchange);
  // Entries of the messages: a row may go to several ranks.
  std::int64_t entries() const { return static_cast<std::int64_t>(rows_of_entries_.size()); }
  void pack(std::int64_t first, std::int64_t last);
  void send();

  // What came, by rank.
  std::int64_t received() const { return given_.back(); }
  void unpack(std::int64_t first, std::int64_t last);
  const std::uint8_t* rows() const { return rows_; }
  std::int32_t* copies() const { return copies_; }  // -1 everywhere if ranks did not answer
  const float* weights() const { return weights_; }
  float* sums() const { return sums_; }  // [received, width], to be filled in

  void send_back();
  // The sum over all ranks of a row that was sent, in their order.
  void add(std::int64_t row, float* out) const;

 private:
  std::int64_t row_bytes() const;
  // Rounded up, so that rows of every block begin where vectors do.
  std::int64_t entry_bytes() const { return (row_bytes_ + sending_.topk * 8 + 63) / 64 * 64; }
  void find_entries();

  // Of one block of a message: rows, behind them copies, behind them weights.
  struct Entry {
    std::uint8_t *row, *copies, *weights;
  };
  Entry entry_at(std::uint8_t* message, const std::vector<std::int64_t>& begins, std::int64_t index) const;

  const Kernels* kernels_ = nullptr;
  RankExchange* exchange_ = nullptr;
  RowSending sending_{};
  std::int64_t row_bytes_ = 0;
  std::vector<std::int64_t> sent_, given_;     // by rank: where its entries begin; and behind the last
  std::vector<std::int64_t> rows_of_entries_;  // the row of each entry that is sent
  std::vector<std::int64_t> entries_of_rows_;  // by rank and row: its entry among those that come back, or -1
  std::vector<std::int64_t> begins_, ends_, counts_, all_counts_;
  Buffer message_, messages_, row_buffer_, copy_buffer_, weight_buffer_, sum_buffer_, back_buffer_;
  std::uint8_t *out_ = nullptr, *in_ = nullptr, *rows_ = nullptr;
  std::int32_t* copies_ = nullptr;
  float *weights_ = nullptr, *sums_ = nullptr, *back_ = nullptr;
};

}  // namespace cpumoe
