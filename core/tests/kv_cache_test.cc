// Keys and values in int8, by themselves.
#include "ops/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/harness.h"
#include "tests/tests.h"

namespace cpumoe::tests {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

constexpr std::uint8_t kUntouched = 0x5A;

std::vector<std::uint8_t> written(const Kernels& k, const std::vector<float>& values) {
  const auto depth = static_cast<std::int64_t>(values.size());
  std::vector<std::uint8_t> record(size(cache_record_bytes(depth) + 8), kUntouched);
  k.cache_records.write(values.data(), depth, record.data());
  check(std::all_of(record.end() - 8, record.end(), [](std::uint8_t byte) { return byte == kUntouched; }),
        std::string(k.name) + " writes no more than a record");
  record.resize(record.size() - 8);
  return record;
}

std::vector<std::uint8_t> read(const Kernels& k, const std::vector<std::uint8_t>& record, std::int64_t depth,
                               DType type) {
  std::vector<std::uint8_t> bytes(size(depth * size_of(type) + 8), kUntouched);
  k.cache_records.read({record.data(), 0, 1, depth, type, bytes.data()});
  check(std::all_of(bytes.end() - 8, bytes.end(), [](std::uint8_t byte) { return byte == kUntouched; }),
        std::string(k.name) + " reads no more than a record");
  bytes.resize(bytes.size() - 8);
  return bytes;
}

std::vector<float> read_floats(const std::vector<std::uint8_t>& record, std::int64_t depth) {
  std::vector<float> values(size(depth));
  const auto bytes = read(scalar(), record, depth, DType::kF32);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Of every depth and magnitude: the same bits everywhere, at most half a step away, and the same record once more.
void test_depth(std::int64_t depth) {
  auto values = random_values(size(depth), static_cast<unsigned>(depth));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] *= std::ldexp(1.0f, static_cast<int>((i / kCacheGroup * 37 + values.size() * 11) % 150) - 50);
  }
  const auto record = written(scalar(), values);
  const auto back = read_floats(record, depth);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t first = i / kCacheGroup * kCacheGroup;
    float largest = 0.0f;
    for (std::size_t j = first; j < std::min(first + kCacheGroup, values.size()); ++j) {
      largest = std::max(largest, std::fabs(values[j]));
    }
    const double error = std::fabs(static_cast<double>(values[i]) - back[i]);
    check(error <= 0.5001 * static_cast<double>(largest) / 127, "a value of a record is off");
  }
  check(written(scalar(), back) == record, "what comes back of a record gives it once more");
  for (const Kernels* k : other_kernels()) {
    check(written(*k, values) == record, std::string(k->name) + " record of " + std::to_string(depth));
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      check(read(*k, record, depth, type) == read(scalar(), record, depth, type),
            std::string(k->name) + " values of a record of " + std::to_string(depth));
    }
  }
}

void test_special_values() {
  for (const Kernels* k : other_kernels()) {
    for (const float special : {NAN, INFINITY, -INFINITY, 3.4e38f, 1e-40f, 1e-17f, 0.0f, -0.0f}) {
      for (const std::size_t place : {std::size_t{3}, std::size_t{66}}) {
        auto values = random_values(90, 5);
        if (std::fabs(special) < 1.0f) std::fill(values.begin() + (place < 64 ? 0 : 64), values.end(), special);
        values[place] = special;
        const auto record = written(scalar(), values);
        check(written(*k, values) == record, std::string(k->name) + " record of " + std::to_string(special));
        check(read(*k, record, 90, DType::kBF16) == read(scalar(), record, 90, DType::kBF16),
              std::string(k->name) + " values of a record of " + std::to_string(special));
        const auto back = read_floats(record, 90);
        const std::size_t other = place < 64 ? 70 : 10;
        if (!std::isfinite(special)) {
          check(back[place] != back[place] && back[place - 1] != back[place - 1], "a broken group is NaN");
          check(std::fabs(back[other] - values[other]) < 0.1f, "and no other is");
        } else if (std::fabs(special) < 1.0f) {
          check(back[place] == 0.0f && !std::signbit(back[place]), "a group of tiny values is zero");
        }
      }
    }
  }
}

}  // namespace

void test_cache_records() {
  check(cache_record_bytes(128) == 136 && cache_record_bytes(1) == 8 && cache_record_bytes(66) == 76,
        "bytes of records");
  for (std::int64_t depth = 1; depth <= 200; ++depth) test_depth(depth);
  for (const std::int64_t depth : {576, 1000, 4096}) test_depth(depth);
  test_special_values();

  // Rows, on one thread and on several.
  for (const std::int64_t rows : {3, 400}) {
    const std::int64_t depth = 130, bytes = cache_record_bytes(depth);
    const auto values = random_values(size(rows * depth), 8);
    std::vector<std::uint8_t> records(size(rows * bytes));
    std::vector<float> back(values.size());
    write_cache_records(active_kernels(), values.data(), DType::kF32, rows, depth, records.data());
    read_cache_records(active_kernels(), records.data(), rows, depth, DType::kF32, back.data());
    bool same = true;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::vector<float> row(values.begin() + r * depth, values.begin() + (r + 1) * depth);
      const auto record = written(scalar(), row);
      same &= same_bits(record.data(), records.data() + r * bytes, size(bytes));
      same &= same_bits(read_floats(record, depth).data(), back.data() + r * depth, size(depth * 4));
    }
    check(same, std::to_string(rows) + " rows to and from records");
  }
}

}  // namespace cpumoe::tests
