#include "ranks/row_traffic.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>

#include "ops/experts.h"
#include "runtime/check.h"

namespace cpumoe {
namespace {

void in_bytes(const std::vector<std::int64_t>& begins, std::int64_t bytes, std::vector<std::int64_t>& out) {
  out.resize(begins.size());
  std::transform(begins.begin(), begins.end(), out.begin(), [&](std::int64_t begin) { return begin * bytes; });
}

}  // namespace

std::int64_t RowTraffic::row_bytes() const {
  if (sent_rows_.experts->prepared_rows) return prepared_token_bytes(sent_rows_.experts->gate_up, sent_rows_.type);
  return sent_rows_.width * size_of(sent_rows_.type);
}

// Tells all ranks the kind of these rows and how many go to each; refuses ranks whose rows are of another kind, which
// would be misread.
void RowTraffic::tell_counts() {
  static constexpr const char* kTypes[] = {"float32", "bfloat16", "float16"};
  constexpr std::size_t kKind = 3;
  const auto ranks = static_cast<std::size_t>(exchange_->ranks()), rank = static_cast<std::size_t>(exchange_->rank());
  const std::size_t numbers = kKind + ranks;
  counts_ = {static_cast<std::int64_t>(sent_rows_.type), row_bytes_, sent_rows_.topk};
  for (std::size_t r = 0; r < ranks; ++r) counts_.push_back(sent_[r + 1] - sent_[r]);
  all_counts_.resize(ranks * numbers);
  exchange_->gather(counts_.data(), static_cast<std::int64_t>(numbers) * 8, all_counts_.data());
  for (std::size_t r = 0; r < ranks && !exchange_->has_failed(); ++r) {
    const std::int64_t* theirs = &all_counts_[r * numbers];
    given_[r + 1] = given_[r] + theirs[kKind + rank];
    if (std::equal(theirs, theirs + kKind, counts_.begin())) continue;
    exchange_->give_up(concat("the tokens of rank ", r, " are ", kTypes[std::clamp<std::int64_t>(theirs[0], 0, 2)],
                              ", ", theirs[1], " bytes and ", theirs[2], " experts each, and those of rank ", rank, " ",
                              kTypes[counts_[0]], ", ", counts_[1], " and ", counts_[2],
                              "; one kind for all is accepted"));
  }
  if (exchange_->has_failed()) given_.assign(ranks + 1, 0);
}

void RowTraffic::find_entries(const std::int64_t* counts) {
  const auto ranks = static_cast<std::size_t>(exchange_->ranks());
  const std::int64_t count = sent_rows_.count;
  rows_of_entries_.clear();
  entries_of_rows_.assign(ranks * static_cast<std::size_t>(count), -1);
  sent_.assign(ranks + 1, 0);
  given_.assign(ranks + 1, 0);
  if (sent_rows_.experts->travel == RowTravel::kToAll) {
    // One message for all: what comes back is as if each had got its own.
    rows_of_entries_.resize(static_cast<std::size_t>(count));
    std::iota(rows_of_entries_.begin(), rows_of_entries_.end(), 0);
    std::iota(entries_of_rows_.begin(), entries_of_rows_.end(), 0);
    for (std::size_t r = 0; r < ranks; ++r) sent_[r + 1] = sent_[r] + count;
    if (counts == nullptr) return tell_counts();
    std::partial_sum(counts, counts + ranks, given_.begin() + 1);
    return;
  }
  const std::span<const std::int32_t> owners = sent_rows_.experts->copies->ranks;
  for (std::size_t r = 0; r < ranks; ++r) {
    for (std::int64_t row = 0; row < count; ++row) {
      const std::int32_t* copies = sent_copies_.data() + row * sent_rows_.topk;
      const bool goes = std::any_of(copies, copies + sent_rows_.topk, [&](std::int32_t copy) {
        return copy >= 0 && static_cast<std::size_t>(owners[static_cast<std::size_t>(copy)]) == r;
      });
      if (!goes) continue;
      entries_of_rows_[r * static_cast<std::size_t>(count) + static_cast<std::size_t>(row)] = entries();
      rows_of_entries_.push_back(row);
    }
    sent_[r + 1] = entries();
  }
  tell_counts();
}

void RowTraffic::plan(const Kernels& kernels, const ChosenRows& rows, RankExchange& exchange,
                      const std::int64_t* counts) {
  kernels_ = &kernels;
  exchange_ = &exchange;
  sent_rows_ = rows;
  row_bytes_ = row_bytes();
  const std::int64_t topk = rows.topk;
  sent_copies_.resize(static_cast<std::size_t>(rows.count * topk));
  for (std::size_t i = 0; i < sent_copies_.size(); ++i) {
    const std::int64_t turn = rows.first_turn + static_cast<std::int64_t>(i) / topk;
    sent_copies_[i] = rows.experts->copy(rows.ids[i], turn);
  }
  find_entries(counts);
  const std::int64_t came = received();
  out_ = message_.get<std::uint8_t>(entries() * entry_bytes());
  in_ = messages_.get<std::uint8_t>(came * entry_bytes());
  rows_ = row_buffer_.get<std::uint8_t>(came * row_bytes_);
  copies_ = copy_buffer_.get<std::int32_t>(came * topk);
  weights_ = weight_buffer_.get<float>(came * topk);
  sums_ = sum_buffer_.get<float>(came * rows.width);
  back_ = back_buffer_.get<float>(sent_.back() * rows.width);
}

RowTraffic::Entry RowTraffic::entry_at(std::uint8_t* message, const std::vector<std::int64_t>& begins,
                                       std::int64_t index) const {
  const auto next = std::upper_bound(begins.begin(), begins.end(), index);
  const std::int64_t begin = *(next - 1), count = *next - begin, i = index - begin;
  std::uint8_t* block = message + begin * entry_bytes();
  std::uint8_t* copies = block + count * row_bytes_;
  std::uint8_t* weights = copies + count * sent_rows_.topk * 4;
  return {block + i * row_bytes_, copies + i * sent_rows_.topk * 4, weights + i * sent_rows_.topk * 4};
}

void RowTraffic::pack(std::int64_t first, std::int64_t last) {
  const auto numbers = static_cast<std::size_t>(sent_rows_.topk * 4);
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t row = rows_of_entries_[static_cast<std::size_t>(i)];
    const Entry to = entry_at(out_, sent_, i);
    const std::uint8_t* from = sent_rows_.x + row * sent_rows_.width * size_of(sent_rows_.type);
    if (sent_rows_.experts->prepared_rows) {
      prepare_token(*kernels_, sent_rows_.experts->gate_up, from, sent_rows_.type, to.row);
    } else {
      std::memcpy(to.row, from, static_cast<std::size_t>(row_bytes_));
    }
    std::memcpy(to.copies, sent_copies_.data() + row * sent_rows_.topk, numbers);
    std::memcpy(to.weights, sent_rows_.weights + row * sent_rows_.topk, numbers);
  }
}

void RowTraffic::send() {
  in_bytes(given_, entry_bytes(), ends_);
  if (sent_rows_.experts->travel == RowTravel::kToAll) {
    exchange_->gather_parts(out_, ends_.data(), in_);
  } else {
    in_bytes(sent_, entry_bytes(), begins_);
    exchange_->trade(out_, begins_.data(), in_, ends_.data());
  }
}

void RowTraffic::unpack(std::int64_t first, std::int64_t last) {
  const auto numbers = static_cast<std::size_t>(sent_rows_.topk * 4);
  if (exchange_->has_failed()) {  // the step will end with it; until then nothing may follow from what is not there
    std::fill(copies_ + first * sent_rows_.topk, copies_ + last * sent_rows_.topk, -1);
    std::fill(rows_ + first * row_bytes_, rows_ + last * row_bytes_, std::uint8_t{0});
    std::fill(weights_ + first * sent_rows_.topk, weights_ + last * sent_rows_.topk, 0.0f);
    return;
  }
  for (std::int64_t i = first; i < last; ++i) {
    const Entry from = entry_at(in_, given_, i);
    std::memcpy(rows_ + i * row_bytes_, from.row, static_cast<std::size_t>(row_bytes_));
    std::memcpy(copies_ + i * sent_rows_.topk, from.copies, numbers);
    std::memcpy(weights_ + i * sent_rows_.topk, from.weights, numbers);
  }
}

void RowTraffic::find_places() {
  const std::int32_t count = sent_rows_.experts->copy_count();
  for (std::int64_t i = 0; i < received() * sent_rows_.topk; ++i) {
    if (copies_[i] < -1 || copies_[i] >= count) {
      exchange_->give_up(concat("a row has come that asks for copy ", copies_[i], " of an expert, of ", count));
      copies_[i] = -1;
    }
    copies_[i] = sent_rows_.experts->place(copies_[i]);
  }
}

MoeCall RowTraffic::call() const {
  MoeCall call = sent_rows_.experts->call(sent_rows_.type, sent_rows_.topk, exchange_);
  if (sent_rows_.experts->prepared_rows) {
    call.prepared = rows_;
  } else {
    call.x = rows_;
  }
  call.tokens = received();
  call.ids = copies_;
  call.weights = weights_;
  call.out = sums_;
  return call;
}

void RowTraffic::send_back() {
  const std::int64_t bytes = sent_rows_.width * static_cast<std::int64_t>(sizeof(float));
  in_bytes(given_, bytes, begins_);
  in_bytes(sent_, bytes, ends_);
  exchange_->trade(sums_, begins_.data(), back_, ends_.data());
}

void RowTraffic::add(std::int64_t row, float* out) const {
  const std::int64_t width = sent_rows_.width;
  bool found = false;
  for (std::int64_t r = 0; r < exchange_->ranks(); ++r) {
    const std::int64_t entry = entries_of_rows_[static_cast<std::size_t>(r * sent_rows_.count + row)];
    if (entry < 0) continue;
    const float* part = back_ + entry * width;
    if (!found) {
      std::copy_n(part, width, out);
    } else {
      for (std::int64_t i = 0; i < width; ++i) out[i] += part[i];
    }
    found = true;
  }
  if (!found) std::fill_n(out, width, 0.0f);
}

}  // namespace cpumoe
