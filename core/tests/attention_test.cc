// Attention over cached keys and values.
#include "ops/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/threads.h"
#include "tests/harness.h"
#include "tests/tests.h"

namespace cpumoe::tests {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Sequences of which each has its last rows attend.
struct Case {
  std::int64_t heads, kv_heads, depth, value_depth;
  std::vector<std::int64_t> tokens, rows;  // of each sequence
  std::int64_t window = 0, padding = 0;    // padding: tokens at the beginning of the first sequence that no row sees
  bool sunk = false, token_major = false;
  float softcap = 0.0f;

  std::string name() const {
    return "attention of " + std::to_string(heads) + "/" + std::to_string(kv_heads) + " heads of " +
           std::to_string(depth) + "/" + std::to_string(value_depth) + " to " + std::to_string(tokens[0]) + " tokens";
  }
};

constexpr int kRoom = 5;  // tokens behind the last of a sequence, which hold no numbers

// Numbers that a case attends to, in fp32 and in a type.
class Numbers {
 public:
  Numbers(const Case& c, DType type) : c_(c), type_(type), sinks_(random_values(size(c.heads), 4)) {
    std::int64_t all_rows = 0;
    for (std::size_t s = 0; s < c.tokens.size(); ++s) {
      const std::int64_t tokens = c.tokens[s] + kRoom;
      keys_.push_back(rounded(random_values(size(c.kv_heads * tokens * c.depth), 10 + static_cast<unsigned>(s))));
      values_.push_back(
          rounded(random_values(size(c.kv_heads * tokens * c.value_depth), 50 + static_cast<unsigned>(s))));
      for (std::int64_t head = 0; head < c.kv_heads; ++head) {
        for (std::int64_t t = c.tokens[s]; t < tokens; ++t) set_token(s, head, t, NAN, NAN);
      }
      for (std::int64_t r = 0; r < c.rows[s]; ++r) {
        const std::int64_t last = c.tokens[s] - c.rows[s] + r + 1, padding = s == 0 ? c.padding : 0;
        const std::int64_t first = std::max(c.window == 0 ? 0 : last - c.window, padding);
        rows_.push_back({static_cast<std::int32_t>(s), first, std::max(first, last)});
      }
      all_rows += c.rows[s];
    }
    query_ = rounded(random_values(size(all_rows * c.heads * c.depth), 3, 0.0f));
    store();
  }

  // Makes all numbers of a key and a value the same ones; `store` comes next.
  void set_token(std::size_t s, std::int64_t head, std::int64_t token, float key, float value) {
    for (std::int64_t i = 0; i < c_.depth; ++i) {
      keys_[s][size(head * key_head_stride(s) + token * key_token_stride() + i)] = key;
    }
    for (std::int64_t i = 0; i < c_.value_depth; ++i) {
      values_[s][size(head * value_head_stride(s) + token * value_token_stride() + i)] = value;
    }
  }

  // Brings queries to 2^-48, and keys and values to 2^-58, where some of them are too small: these must be 0 in a
  // cache, unless calls flush them.
  void shrink(bool flushes) {
    for (float& q : query_) q *= 0x1p-48f;
    for (auto* caches : {&keys_, &values_}) {
      for (auto& cache : *caches) {
        for (float& x : cache) x = std::fabs(x) < 0x1p-2f && !flushes ? 0.0f : x * 0x1p-58f;
      }
    }
    store();
  }

  // The last `count` numbers of the keys in memory of their own, where calls have none of them.
  std::vector<std::vector<std::uint8_t>> cut_keys(CachedAttentionCall& call, std::int64_t count,
                                                  std::vector<CachedSequence>& sequences) {
    std::vector<std::vector<std::uint8_t>> ends;
    const std::int64_t element = size_of(type_), bytes = count * element, stride = count + 3;
    for (std::size_t s = 0; s < keys_.size(); ++s) {
      auto& end = ends.emplace_back(size((c_.tokens[s] + kRoom) * stride * element));
      for (std::int64_t t = 0; t < c_.tokens[s] + kRoom; ++t) {
        std::uint8_t* from = stored_keys_[s].data() + (t * key_token_stride() + c_.depth - count) * element;
        std::memcpy(end.data() + t * stride * element, from, size(bytes));
        std::memset(from, 0xFF, size(bytes));  // NaN
      }
      sequences.push_back({call.sequences[s].keys, call.sequences[s].values, end.data()});
    }
    call.sequences = sequences.data();
    call.key_end = count;
    call.key_end_stride = stride;
    return ends;
  }

  void store() {
    stored_query_ = stored(query_);
    stored_keys_.clear();
    stored_values_.clear();
    sequences_.clear();
    for (std::size_t s = 0; s < keys_.size(); ++s) {
      stored_keys_.push_back(stored(keys_[s]));
      stored_values_.push_back(stored(values_[s]));
    }
    for (std::size_t s = 0; s < keys_.size(); ++s) {
      sequences_.push_back({stored_keys_[s].data(), stored_values_[s].data()});
    }
  }

  // Replaces keys and values by what comes back of their records, which calls have with `in_records`.
  void make_records() {
    for (std::size_t s = 0; s < keys_.size(); ++s) {
      key_records_.push_back(recorded(keys_[s], c_.depth));
      value_records_.push_back(recorded(values_[s], c_.value_depth));
    }
    store();
    for (std::size_t s = 0; s < keys_.size(); ++s) {
      record_sequences_.push_back({key_records_[s].data(), value_records_[s].data()});
    }
  }
  bool in_records = false;

  // All rows, or some of them.
  CachedAttentionCall call(std::vector<std::uint8_t>& out) { return call(0, row_count(), out); }
  CachedAttentionCall call(std::int64_t first, std::int64_t last, std::vector<std::uint8_t>& out) {
    CachedAttentionCall call{};
    call.type = type_;
    call.rows = last - first;
    call.heads = c_.heads;
    call.kv_heads = c_.kv_heads;
    call.depth = c_.depth;
    call.value_depth = c_.value_depth;
    call.query_stride = c_.heads * c_.depth;
    call.query_head_stride = c_.depth;
    call.query = stored_query_.data() + first * call.query_stride * size_of(type_);
    call.records = in_records;
    call.sequences = in_records ? record_sequences_.data() : sequences_.data();
    call.row = rows_.data() + first;
    call.key_token_stride = key_token_stride() / c_.depth * key_width();
    call.key_head_stride = key_head_stride(0) / c_.depth * key_width();
    call.value_token_stride = value_token_stride() / c_.value_depth * value_width();
    call.value_head_stride = value_head_stride(0) / c_.value_depth * value_width();
    call.scale = 0.7f / std::sqrt(static_cast<float>(c_.depth));
    call.softcap = c_.softcap;
    call.sinks = c_.sunk ? sinks_.data() : nullptr;
    call.out_stride = c_.heads * c_.value_depth;
    out.assign(size(call.rows * call.out_stride * size_of(type_)), 0xAA);
    call.out = out.data();
    return call;
  }

  std::int64_t row_count() const { return static_cast<std::int64_t>(rows_.size()); }
  std::int64_t row_bytes() const { return c_.heads * c_.value_depth * size_of(type_); }
  std::vector<AttentionRow>& rows() { return rows_; }

  // The definition, in double.
  std::vector<float> truth() const {
    std::vector<float> out;
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      const auto [sequence, first, last] = rows_[r];
      const std::size_t s = size(sequence);
      for (std::int64_t h = 0; h < c_.heads; ++h) {
        const std::int64_t kv = h / (c_.heads / c_.kv_heads);
        std::vector<double> sums(size(c_.value_depth));
        double total = c_.sunk ? std::exp(static_cast<double>(sinks_[size(h)])) : 0.0;
        for (std::int64_t t = first; t < last; ++t) {
          double score = 0;
          for (std::int64_t i = 0; i < c_.depth; ++i) {
            score += static_cast<double>(query_[(r * size(c_.heads) + size(h)) * size(c_.depth) + size(i)]) *
                     keys_[s][size(kv * key_head_stride(s) + t * key_token_stride() + i)];
          }
          score *= static_cast<double>(0.7f / std::sqrt(static_cast<float>(c_.depth)));
          if (c_.softcap != 0.0f) score = c_.softcap * std::tanh(score / static_cast<double>(c_.softcap));
          const double weight = std::exp(score);
          total += weight;
          for (std::int64_t i = 0; i < c_.value_depth; ++i) {
            sums[size(i)] += weight * values_[s][size(kv * value_head_stride(s) + t * value_token_stride() + i)];
          }
        }
        for (const double sum : sums) out.push_back(static_cast<float>(total == 0 ? 0.0 : sum / total));
      }
    }
    return out;
  }

  std::vector<float> loaded(const std::vector<std::uint8_t>& bytes) const {
    std::vector<float> values(bytes.size() / size(size_of(type_)));
    scalar().load_row(bytes.data(), type_, static_cast<int>(values.size()), values.data());
    return values;
  }

  // The same keys and values in pages, in an order of their own.
  struct Paged {
    std::vector<std::uint8_t> keys, values;
    std::vector<std::vector<std::int32_t>> pages;
    std::vector<const std::int32_t*> lists;
    std::vector<CachedSequence> sequences;
  };
  Paged paged(CachedAttentionCall& call, std::int64_t page_tokens) const {
    Paged p;
    std::int64_t count = 0;
    for (std::size_t s = 0; s < keys_.size(); ++s) {
      p.pages.emplace_back();
      for (std::int64_t t = 0; t < c_.tokens[s]; t += page_tokens) {
        p.pages.back().push_back(static_cast<std::int32_t>(count++));
      }
    }
    for (auto& pages : p.pages) {  // 0, 1, 2.. become count - 1, .., as far as they go
      for (auto& page : pages) page = static_cast<std::int32_t>(count - 1 - page);
      p.lists.push_back(pages.data());
    }
    const std::int64_t element = in_records ? 1 : size_of(type_), tokens = count * page_tokens;
    const std::int64_t key_bytes = key_width() * element, value_bytes = value_width() * element;
    const auto &keys = in_records ? key_records_ : stored_keys_, &values = in_records ? value_records_ : stored_values_;
    p.keys.assign(size(tokens * c_.kv_heads * key_bytes), 0xFF);  // NaN
    p.values.assign(size(tokens * c_.kv_heads * value_bytes), 0xFF);
    for (std::size_t s = 0; s < keys_.size(); ++s) {
      for (std::int64_t t = 0; t < c_.tokens[s]; ++t) {
        const std::int64_t to = p.pages[s][size(t / page_tokens)] * page_tokens + t % page_tokens;
        for (std::int64_t h = 0; h < c_.kv_heads; ++h) {
          const std::int64_t key = (h * key_head_stride(s) + t * key_token_stride()) / c_.depth;
          const std::int64_t value = (h * value_head_stride(s) + t * value_token_stride()) / c_.value_depth;
          std::memcpy(p.keys.data() + (to * c_.kv_heads + h) * key_bytes, keys[s].data() + key * key_bytes,
                      size(key_bytes));
          std::memcpy(p.values.data() + (to * c_.kv_heads + h) * value_bytes, values[s].data() + value * value_bytes,
                      size(value_bytes));
        }
      }
      p.sequences.push_back({p.keys.data(), p.values.data()});
    }
    call.page_tokens = page_tokens;
    call.key_page_stride = page_tokens * c_.kv_heads * key_width();
    call.value_page_stride = page_tokens * c_.kv_heads * value_width();
    call.pages = p.lists.data();
    call.sequences = p.sequences.data();
    call.key_token_stride = c_.kv_heads * key_width();
    call.key_head_stride = key_width();
    call.value_token_stride = c_.kv_heads * value_width();
    call.value_head_stride = value_width();
    return p;
  }

 private:
  std::vector<float> rounded(std::vector<float> values) const {
    const auto bytes = stored(values);
    scalar().load_row(bytes.data(), type_, static_cast<int>(values.size()), values.data());
    return values;
  }
  std::vector<std::uint8_t> stored(const std::vector<float>& values) const {
    std::vector<std::uint8_t> bytes(values.size() * size(size_of(type_)));
    scalar().store_row(values.data(), static_cast<std::int64_t>(values.size()), type_, bytes.data());
    return bytes;
  }

  // All rows of these as records; the rows become what comes back.
  std::vector<std::uint8_t> recorded(std::vector<float>& values, std::int64_t depth) const {
    const std::int64_t rows = static_cast<std::int64_t>(values.size()) / depth, bytes = cache_record_bytes(depth);
    std::vector<std::uint8_t> records(size(rows * bytes)), back(size(depth * size_of(type_)));
    for (std::int64_t r = 0; r < rows; ++r) {
      float* row = values.data() + r * depth;
      scalar().cache_records.write(row, depth, records.data() + r * bytes);
      scalar().cache_records.read({records.data() + r * bytes, bytes, 1, depth, type_, back.data()});
      scalar().load_row(back.data(), type_, static_cast<int>(depth), row);
    }
    return records;
  }
  std::int64_t key_width() const { return in_records ? cache_record_bytes(c_.depth) : c_.depth; }
  std::int64_t value_width() const { return in_records ? cache_record_bytes(c_.value_depth) : c_.value_depth; }

  std::int64_t key_token_stride() const { return c_.token_major ? c_.kv_heads * c_.depth : c_.depth; }
  std::int64_t value_token_stride() const { return c_.token_major ? c_.kv_heads * c_.value_depth : c_.value_depth; }
  // Where heads come first, sequences have as many tokens as the first one: a call has one stride.
  std::int64_t key_head_stride(std::size_t s) const {
    return c_.token_major ? c_.depth : (c_.tokens[s] + kRoom) * c_.depth;
  }
  std::int64_t value_head_stride(std::size_t s) const {
    return c_.token_major ? c_.value_depth : (c_.tokens[s] + kRoom) * c_.value_depth;
  }

  const Case& c_;
  DType type_;
  std::vector<float> sinks_, query_;
  std::vector<std::vector<float>> keys_, values_;
  std::vector<std::uint8_t> stored_query_;
  std::vector<std::vector<std::uint8_t>> stored_keys_, stored_values_;
  std::vector<std::vector<std::uint8_t>> key_records_, value_records_;
  std::vector<CachedSequence> sequences_, record_sequences_;
  std::vector<AttentionRow> rows_;
};

void attend_with(const Kernels& kernels, const CachedAttentionCall& call, int threads,
                 std::int64_t most_floats = std::int64_t{4} << 20) {
  static CachedAttention attention;  // with what calls before have left in it
  attention.plan(kernels, call, threads, most_floats);
  run_on_threads(threads, [](Worker& worker) { attention.run(worker); });
}

std::vector<const Kernels*> all_kernels() {
  auto all = other_kernels();
  all.push_back(&scalar());
  return all;
}

// Every kernel and number of threads, and any rows beside a row: the same bits. These are near the truth.
void test_case(const Case& c, DType type) {
  Numbers numbers(c, type);
  std::vector<std::uint8_t> expected, out;
  attend_with(scalar(), numbers.call(expected), 1);
  const double error = distance(numbers.loaded(expected), numbers.truth());
  check(error < (type == DType::kF32   ? 1e-6
                 : type == DType::kF16 ? 1e-3
                                       : 4e-3),
        c.name() + " is " + std::to_string(error) + " from the truth");
  for (const Kernels* k : all_kernels()) {
    const std::string name = std::string(k->name) + " " + c.name();
    for (const int threads : {1, 2, 5}) {
      attend_with(*k, numbers.call(out), threads);
      check(out == expected, name + " with " + std::to_string(threads) + " threads");
    }
    attend_with(*k, numbers.call(out), 3, 1);
    check(out == expected, name + " with room for little");
    for (const std::int64_t page_tokens : {16, 256}) {
      auto call = numbers.call(out);
      const auto paged = numbers.paged(call, page_tokens);
      attend_with(*k, call, 2);
      check(out == expected, name + " in pages of " + std::to_string(page_tokens));
    }
    for (const std::int64_t piece : {1, 23}) {
      bool same = true;
      for (std::int64_t first = 0; first < numbers.row_count(); first += piece) {
        // All rows one by one take long; some of them do.
        if (piece == 1 && first % 17 != 0 && first + 1 != numbers.row_count()) continue;
        attend_with(*k, numbers.call(first, std::min(first + piece, numbers.row_count()), out), 1);
        same &= same_bits(out.data(), expected.data() + first * numbers.row_bytes(), out.size());
      }
      check(same, name + " in pieces of " + std::to_string(piece));
    }
  }
}

// Values that are the first numbers of keys, as latents are.
CachedAttentionCall joined(CachedAttentionCall call, std::vector<CachedSequence>& sequences) {
  for (CachedSequence& sequence : sequences) sequence.values = sequence.keys;
  call.sequences = sequences.data();
  call.value_token_stride = call.key_token_stride;
  call.value_head_stride = call.key_head_stride;
  return call;
}

// Records give the bits that floats give which hold the same numbers.
void test_records(const Case& c, DType type) {
  Numbers numbers(c, type);
  numbers.set_token(0, 0, c.tokens[0] - 1, 0.5f, NAN);  // which the last row alone sees
  numbers.make_records();
  std::vector<std::uint8_t> expected, expected_joined, out;
  attend_with(scalar(), numbers.call(expected), 1);
  const bool joins = c.value_depth <= c.depth;
  const auto joined_call = [&](std::vector<std::uint8_t>& to, std::vector<CachedSequence>& sequences) {
    const CachedAttentionCall call = numbers.call(to);
    sequences.assign(call.sequences, call.sequences + c.tokens.size());
    return joined(call, sequences);
  };
  std::vector<CachedSequence> sequences;
  if (joins) attend_with(scalar(), joined_call(expected_joined, sequences), 1);
  numbers.in_records = true;
  for (const Kernels* k : all_kernels()) {
    const std::string name = std::string(k->name) + " records, " + c.name();
    attend_with(*k, numbers.call(out), 3);
    check(out == expected, name);
    if (joins) {
      attend_with(*k, joined_call(out, sequences), 1);
      check(out == expected_joined, name + ", joined");
    }
    auto call = numbers.call(out);
    const auto paged = numbers.paged(call, 16);
    attend_with(*k, call, 2);
    check(out == expected, name + " in pages");
  }
}

// What is not a number reaches the rows that see it and no others.
void test_special_numbers(DType type) {
  for (const Case& c :
       {Case{4, 2, 16, 24, {150}, {40}}, Case{3, 3, 7, 5, {300}, {110}, 20}, Case{8, 1, 32, 16, {131}, {9}}}) {
    Numbers plain(c, type), marked(c, type);
    const std::int64_t token = c.tokens[0] - c.rows[0] / 2;
    for (const auto& [key, value] :
         {std::pair{0.5f, NAN}, std::pair{0.5f, INFINITY}, std::pair{NAN, 0.5f}, std::pair{NAN, -INFINITY}}) {
      marked.set_token(0, 0, token, key, value);
      marked.store();
      for (const Kernels* k : all_kernels()) {
        std::vector<std::uint8_t> expected, out;
        attend_with(*k, plain.call(expected), 2);
        attend_with(*k, marked.call(out), 2);
        const auto before = plain.loaded(expected), after = marked.loaded(out);
        bool others_same = true, seen = true;
        for (std::size_t i = 0; i < after.size(); ++i) {
          const std::size_t head = i / size(c.value_depth) % size(c.heads);
          const AttentionRow& row = marked.rows()[i / size(c.value_depth * c.heads)];
          if (head < size(c.heads / c.kv_heads) && row.first <= token && token < row.last) {
            seen &= !std::isfinite(after[i]);
          } else {
            others_same &= same_bits(&after[i], &before[i], 4);
          }
        }
        check(others_same && seen, std::string(k->name) + " special numbers in " + c.name());
      }
    }
  }
}

// Numbers whose products are next to those that vdpbf16ps takes for zero.
void test_small_numbers() {
  const Case c{8, 2, 40, 24, {200}, {20}};
  Numbers numbers(c, DType::kBF16), smaller(c, DType::kBF16);
  numbers.shrink(false);
  smaller.shrink(true);
  std::vector<std::uint8_t> expected, out;
  const auto scaled = [&](Numbers& from, std::vector<std::uint8_t>& to) {
    auto call = from.call(to);
    call.scale = 0x1p104f;
    call.flushes = &from == &smaller;
    return call;
  };
  attend_with(scalar(), scaled(numbers, expected), 1);
  for (const Kernels* k : all_kernels()) {
    for (Numbers* from : {&numbers, &smaller}) {
      attend_with(*k, scaled(*from, out), 2);
      check(out == expected, std::string(k->name) + " attention of small numbers");
    }
  }
}

// Keys in two pieces give the bits of whole ones.
void test_cut_keys(DType type) {
  for (const Case& c : {Case{5, 1, 40, 24, {300, 300}, {1, 9}, 0, 0, true}, Case{20, 1, 9, 9, {130}, {130}}}) {
    for (const std::int64_t count : {std::int64_t{1}, c.depth - 1}) {
      for (const Kernels* k : all_kernels()) {
        Numbers numbers(c, type);
        std::vector<std::uint8_t> expected, out;
        attend_with(scalar(), numbers.call(expected), 1);
        auto call = numbers.call(out);
        std::vector<CachedSequence> sequences;
        const auto ends = numbers.cut_keys(call, count, sequences);
        attend_with(*k, call, 2);
        check(out == expected, std::string(k->name) + " keys in two pieces, " + c.name());
      }
    }
  }
}

// Additive masks and the ranges of tokens that they stand for.
void test_masks() {
  const float none = -INFINITY, low = -65504.0f;
  const auto rows_of = [](std::vector<float> mask, std::int64_t queries) {
    std::vector<AttentionRow> rows;
    std::string text;
    if (!find_rows(mask.data(), 1, queries, static_cast<std::int64_t>(mask.size()) / queries, rows)) return text;
    for (const AttentionRow& row : rows) text += std::to_string(row.first) + "-" + std::to_string(row.last) + " ";
    return text;
  };
  check(rows_of({0, 0, 0, 0}, 1) == "0-4 ", "a mask that hides nothing");
  check(rows_of({none, 0, 0, none, low, 0, 0, 0}, 2) == "1-3 1-4 ", "masks of two queries");
  check(rows_of({none, none, none, 0, 0, none}, 2) == "0-0 0-2 ", "a query that sees nothing");
  check(rows_of({low, low, low}, 1).empty(), "lowest numbers alone are no -inf");
  check(rows_of({0, none, 0}, 1).empty() && rows_of({0, -1.0f, 0}, 1).empty() && rows_of({0, NAN}, 1).empty(),
        "masks that are no ranges");
  check(rows_of({none, 0, 0, none}, 2).empty(), "ranges that go back");
  std::vector<AttentionRow> rows;
  check(find_rows(nullptr, 2, 1, 7, rows) && rows.size() == 2 && rows[1].sequence == 1 && rows[1].last == 7, "no mask");
}

}  // namespace

void test_cached_attention() {
  const std::vector<Case> cases = {
      {8, 1, 128, 128, {300}, {1}},
      {4, 2, 64, 64, {140}, {140}},
      {8, 1, 16, 16, {260}, {100}},
      {3, 1, 80, 33, {200, 200}, {5, 70}},
      {2, 2, 7, 5, {131}, {131}},
      {6, 2, 192, 128, {129}, {3}},
      {1, 1, 1, 1, {1}, {1}},
      {4, 4, 16, 80, {256}, {130}, 100},
      {4, 1, 64, 64, {400}, {60}, 33, 350, true},
      {16, 2, 32, 16, {150, 3, 300, 128}, {1, 3, 2, 128}, 0, 0, true, true, 3.0f},
      {100, 1, 8, 8, {140}, {2}, 0, 0, true},
      {2, 1, 33, 20, {150}, {150}, 16, 0, false, true, 30.0f},
  };
  for (const Case& c : cases) {
    for (const DType type : {DType::kBF16, DType::kF32, DType::kF16}) {
      test_case(c, type);
      if (type != DType::kF16) test_records(c, type);
    }
  }
  for (const DType type : {DType::kBF16, DType::kF32, DType::kF16}) test_special_numbers(type);

  test_small_numbers();
  for (const DType type : {DType::kBF16, DType::kF32, DType::kF16}) test_cut_keys(type);
  test_masks();

  // No rows; rows that see nothing; shapes that are refused.
  const Case c{4, 2, 16, 16, {40}, {5}};
  for (const Kernels* k : all_kernels()) {
    Numbers numbers(c, DType::kBF16);
    std::vector<std::uint8_t> out;
    attend_with(*k, numbers.call(0, 0, out), 2);
    for (AttentionRow& row : numbers.rows()) row.last = row.first;
    attend_with(*k, numbers.call(out), 2);
    check(std::all_of(out.begin(), out.end(), [](std::uint8_t byte) { return byte == 0; }),
          std::string(k->name) + " rows that see nothing");
    auto call = numbers.call(out);
    call.page_tokens = 48;
    check(refused([&] { attend_with(*k, call, 1); }), "pages of 48 tokens are refused");
    call.page_tokens = 0;
    call.kv_heads = 3;
    check(refused([&] { attend_with(*k, call, 1); }), "4 heads for 3 of keys are refused");
  }

  // By itself, on threads of its own choice.
  Numbers numbers(c, DType::kF32);
  std::vector<std::uint8_t> expected, out;
  attend_with(scalar(), numbers.call(expected), 1);
  attend_cached(active_kernels(), numbers.call(out));
  check(out == expected, "attention by itself");
}

}  // namespace cpumoe::tests
