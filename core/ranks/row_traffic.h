// Rows on their way to the ranks that have their experts, and the sums of these on their way back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/table.h"
#include "ranks/packed_experts.h"
#include "runtime/exchange.h"
#include "runtime/memory.h"

namespace cpumoe {

// All of these are called by every rank, in their order, also by one that has no rows. `pack`, `unpack` and `add` by
// several threads, each for some of the rows, with a barrier on both sides; everything else by one.
class RowTraffic {
 public:
  // `counts`: by rank, rows that it sends, this one included; null: ranks ask each other.
  void plan(const Kernels& kernels, const ChosenRows& rows, RankExchange& exchange,
            const std::int64_t* counts = nullptr);
  // Entries of the messages: a row may go to several ranks.
  std::int64_t entries() const { return static_cast<std::int64_t>(rows_of_entries_.size()); }
  void pack(std::int64_t first, std::int64_t last);
  void send();

  // What came, by rank.
  std::int64_t received() const { return given_.back(); }
  void unpack(std::int64_t first, std::int64_t last);
  // Replaces copies of experts by their places on this rank, after `unpack`.
  void find_places();
  // The most rows that one of the buffers holds.
  std::int64_t largest_rows() const { return std::max({entries(), received(), sent_.back()}); }
  // A call of the experts here for what came. Its result, fp32, is what `send_back` sends.
  MoeCall call() const;

  void send_back();
  // The sum over all ranks of a row that was sent, in their order; 0 if it has no expert.
  void add(std::int64_t row, float* out) const;

 private:
  std::int64_t row_bytes() const;
  void tell_counts();
  // Rounded up, so that rows of every block begin where vectors do.
  std::int64_t entry_bytes() const { return (row_bytes_ + sent_rows_.topk * 8 + 63) / 64 * 64; }
  void find_entries(const std::int64_t* counts);

  // Of one block of a message: rows, behind them copies, behind them weights.
  struct Entry {
    std::uint8_t *row, *copies, *weights;
  };
  Entry entry_at(std::uint8_t* message, const std::vector<std::int64_t>& begins, std::int64_t index) const;

  const Kernels* kernels_ = nullptr;
  RankExchange* exchange_ = nullptr;
  ChosenRows sent_rows_{};
  std::int64_t row_bytes_ = 0;
  std::vector<std::int64_t> sent_, given_;     // by rank: where its entries begin; and behind the last
  std::vector<std::int64_t> rows_of_entries_;  // the row of each entry that is sent
  std::vector<std::int64_t> entries_of_rows_;  // by rank and row: its entry among those that come back, or -1
  std::vector<std::int32_t> sent_copies_;      // [count, topk]: of the experts that rows have chosen
  std::vector<std::int64_t> begins_, ends_, counts_, all_counts_;
  Buffer message_, messages_, row_buffer_, copy_buffer_, weight_buffer_, sum_buffer_, back_buffer_;
  std::uint8_t *out_ = nullptr, *in_ = nullptr, *rows_ = nullptr;
  std::int32_t* copies_ = nullptr;
  float *weights_ = nullptr, *sums_ = nullptr, *back_ = nullptr;
};

}  // namespace cpumoe
