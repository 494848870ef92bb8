#include "ranks/row_traffic.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "ops/experts.h"

namespace cpumoe {
namespace {

void in_bytes(const std::vector<std::int64_t>& begins, std::int64_t bytes, std::vector<std::int64_t>& out) {
  out.resize(begins.size());
  std::transform(begins.begin(), begins.end(), out.begin(), [&](std::int64_t begin) { return begin * bytes; });
}

}  // namespace

std::int64_t RowTraffic::row_bytes() const {
  if (sending_.first != nullptr) return prepared_token_bytes(*sending_.first, sending_.type);
  return sending_.width * size_of(sending_.type);
}

void RowTraffic::find_entries() {
  const auto ranks = static_cast<std::size_t>(exchange_->ranks()), rank = static_cast<std::size_t>(exchange_->rank());
  const std::int64_t count = sending_.count;
  rows_of_entries_.clear();
  entries_of_rows_.assign(ranks * static_cast<std::size_t>(count), -1);
  sent_.assign(ranks + 1, 0);
  given_.assign(ranks + 1, 0);
  if (sending_.travel == RowTravel::kToAll) {
    // One message for all: what comes back is as if each had got its own.
    rows_of_entries_.resize(static_cast<std::size_t>(count));
    std::iota(rows_of_entries_.begin(), rows_of_entries_.end(), 0);
    std::iota(entries_of_rows_.begin(), entries_of_rows_.end(), 0);
    for (std::size_t r = 0; r < ranks; ++r) {
      sent_[r + 1] = sent_[r] + count;
      given_[r + 1] = given_[r] + sending_.other_counts[r];
    }
    return;
  }
  counts_.assign(ranks, 0);
  for (std::size_t r = 0; r < ranks; ++r) {
    for (std::int64_t row = 0; row < count; ++row) {
      const std::int32_t* copies = sending_.copies + row * sending_.topk;
      const bool goes = std::any_of(copies, copies + sending_.topk, [&](std::int32_t copy) {
        return static_cast<std::size_t>(sending_.owners[copy]) == r;
      });
      if (!goes) continue;
      entries_of_rows_[r * static_cast<std::size_t>(count) + static_cast<std::size_t>(row)] = entries();
      rows_of_entries_.push_back(row);
    }
    sent_[r + 1] = entries();
    counts_[r] = sent_[r + 1] - sent_[r];
  }
  all_counts_.assign(ranks * ranks, 0);
  exchange_->gather(counts_.data(), static_cast<std::int64_t>(ranks) * 8, all_counts_.data());
  if (exchange_->has_failed()) all_counts_.assign(ranks * ranks, 0);
  for (std::size_t r = 0; r < ranks; ++r) given_[r + 1] = given_[r] + all_counts_[r * ranks + rank];
}

void RowTraffic::plan(const Kernels& kernels, const RowSending& sending, RankExchange& exchange) {
  kernels_ = &kernels;
  exchange_ = &exchange;
  sending_ = sending;
  row_bytes_ = row_bytes();
  find_entries();
  const std::int64_t came = received(), topk = sending.topk;
  out_ = message_.get<std::uint8_t>(entries() * entry_bytes());
  in_ = messages_.get<std::uint8_t>(came * entry_bytes());
  rows_ = row_buffer_.get<std::uint8_t>(came * row_bytes_);
  copies_ = copy_buffer_.get<std::int32_t>(came * topk);
  weights_ = weight_buffer_.get<float>(came * topk);
  sums_ = sum_buffer_.get<float>(came * sending.width);
  back_ = back_buffer_.get<float>(sent_.back() * sending.width);
}

RowTraffic::Entry RowTraffic::entry_at(std::uint8_t* message, const std::vector<std::int64_t>& begins,
                                       std::int64_t index) const {
  const auto next = std::upper_bound(begins.begin(), begins.end(), index);
  const std::int64_t begin = *(next - 1), count = *next - begin, i = index - begin;
  std::uint8_t* block = message + begin * entry_bytes();
  std::uint8_t* copies = block + count * row_bytes_;
  std::uint8_t* weights = copies + count * sending_.topk * 4;
  return {block + i * row_bytes_, copies + i * sending_.topk * 4, weights + i * sending_.topk * 4};
}

void RowTraffic::pack(std::int64_t first, std::int64_t last) {
  const auto numbers = static_cast<std::size_t>(sending_.topk * 4);
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t row = rows_of_entries_[static_cast<std::size_t>(i)];
    const Entry to = entry_at(out_, sent_, i);
    const std::uint8_t* from = sending_.x + row * sending_.width * size_of(sending_.type);
    if (sending_.first != nullptr) {
      prepare_token(*kernels_, *sending_.first, from, sending_.type, to.row);
    } else {
      std::memcpy(to.row, from, static_cast<std::size_t>(row_bytes_));
    }
    std::memcpy(to.copies, sending_.copies + row * sending_.topk, numbers);
    std::memcpy(to.weights, sending_.weights + row * sending_.topk, numbers);
  }
}

void RowTraffic::send() {
  in_bytes(given_, entry_bytes(), ends_);
  if (sending_.travel == RowTravel::kToAll) {
    exchange_->gather_parts(out_, ends_.data(), in_);
  } else {
    in_bytes(sent_, entry_bytes(), begins_);
    exchange_->trade(out_, begins_.data(), in_, ends_.data());
  }
}

void RowTraffic::unpack(std::int64_t first, std::int64_t last) {
  const auto numbers = static_cast<std::size_t>(sending_.topk * 4);
  if (exchange_->has_failed()) {  // the step will end with it; until then nothing may follow from what is not there
    std::fill(copies_ + first * sending_.topk, copies_ + last * sending_.topk, -1);
    std::fill(rows_ + first * row_bytes_, rows_ + last * row_bytes_, std::uint8_t{0});
    std::fill(weights_ + first * sending_.topk, weights_ + last * sending_.topk, 0.0f);
    return;
  }
  for (std::int64_t i = first; i < last; ++i) {
    const Entry from = entry_at(in_, given_, i);
    std::memcpy(rows_ + i * row_bytes_, from.row, static_cast<std::size_t>(row_bytes_));
    std::memcpy(copies_ + i * sending_.topk, from.copies, numbers);
    std::memcpy(weights_ + i * sending_.topk, from.weights, numbers);
  }
}

void RowTraffic::send_back() {
  const std::int64_t bytes = sending_.width * static_cast<std::int64_t>(sizeof(float));
  in_bytes(given_, bytes, begins_);
  in_bytes(sent_, bytes, ends_);
  exchange_->trade(sums_, begins_.data(), back_, ends_.data());
}

void RowTraffic::add(std::int64_t row, float* out) const {
  const std::int64_t width = sending_.width;
  bool found = false;
  for (std::int64_t r = 0; r < exchange_->ranks(); ++r) {
    const std::int64_t entry = entries_of_rows_[static_cast<std::size_t>(r * sending_.count + row)];
    if (entry < 0) continue;
    const float* part = back_ + entry * width;
    if (!found) {
      std::copy_n(part, width, out);
    } else {
      for (std::int64_t i = 0; i < width; ++i) out[i] += part[i];
    }
    found = true;
  }
}

}  // namespace cpumoe
