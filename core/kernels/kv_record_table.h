// Keys and values in int8: what a cache holds of a token and a head, and what that asks of an instruction set;
// kernels/kv_records.h has the arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/formats.h"

namespace cpumoe {

static constexpr int kCacheGroup = 64;  // values that share a scale; the last group may have fewer

// A record of `depth` values: their codes, of a byte each, zeros up to a multiple of 4, and the groups' scales in fp32.
static constexpr std::int64_t cache_code_bytes(std::int64_t depth) { return (depth + 3) / 4 * 4; }
static constexpr std::int64_t cache_record_bytes(std::int64_t depth) {
  return cache_code_bytes(depth) + (depth + kCacheGroup - 1) / kCacheGroup * 4;
}

// A value is its code, from -127 to 127, times its group's scale: a 127th of the group's largest magnitude. What comes
// back is 0, or at least as large as attention needs it to be (ops/attention.h): a group whose scale would be
// smaller is all zeros. One with a NaN or an infinity comes back as NaN.
struct ReadRecords {
  const std::uint8_t* records;  // `stride` bytes apart
  std::ptrdiff_t stride;
  std::int64_t rows, depth;
  DType type;
  void* values;  // [rows, depth]
};

struct CacheRecordKernels {
  void (*write)(const float* values, std::int64_t depth, std::uint8_t* record);
  void (*read)(const ReadRecords&);
};

}  // namespace cpumoe
