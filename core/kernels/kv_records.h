// Keys and values in int8 (kv_record_table.h).
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/elementary.h"
#include "kernels/formats.h"
#include "kernels/prepare_floats.h"

namespace cpumoe {
namespace {

static constexpr float kLargestCode = 127.0f, kSmallestCacheScale = 0x1p-60f;

// A 127th of the largest magnitude, such that what comes back of a group has the same scale again: of every 128
// quotients one would move to its neighbour, which then stays.
inline float cache_scale(float largest) {
  const float scale = largest / kLargestCode, back = scale * kLargestCode;
  if (scale < kSmallestCacheScale) return 0.0f;
  return back <= 3.40282347e+38f ? back / kLargestCode : scale;
}

template <class V>
void write_cache_record(const float* values, std::int64_t depth, std::uint8_t* record) {
  std::uint8_t* scales = record + cache_code_bytes(depth);
  for (std::int64_t first = 0; first < depth; first += kCacheGroup, scales += 4) {
    const std::int64_t left = depth - first;
    const int count = left < kCacheGroup ? static_cast<int>(left) : kCacheGroup;
    const float largest = magnitude_of<V>(values + first, DType::kF32, count);
    const bool broken = largest != largest;
    const float scale = broken ? __builtin_nanf("") : cache_scale(largest);
    __builtin_memcpy(scales, &scale, 4);
    float group[kCacheGroup] = {};
    if (!broken && scale != 0.0f) load_row<V>(values + first, DType::kF32, count, group);
    const V factor = V::set(broken || scale == 0.0f ? 0.0f : kLargestCode / largest), magic = V::set(12582912.0f);
    std::uint8_t codes[kCacheGroup];
    for (int i = 0; i < kCacheGroup; i += V::kWidth) {
      const V bounded = clamp_to(-kLargestCode, kLargestCode, V::load(group + i) * factor);
      V::store_rounded(codes + i, (bounded + magic) - magic, 128);  // to nearest even
    }
    const std::int64_t padded = left < kCacheGroup ? cache_code_bytes(left) : kCacheGroup;
    for (std::int64_t i = 0; i < padded; ++i) record[first + i] = static_cast<std::uint8_t>(codes[i] ^ 0x80);
  }
}

// One group of `count` values.
template <class V, DType type>
inline void read_cache_group(const std::uint8_t* codes, const std::uint8_t* scale_bytes, int count,
                             typename V::template Element<type>* out) {
  using Element = typename V::template Element<type>;
  float scale;
  __builtin_memcpy(&scale, scale_bytes, 4);
  if (__builtin_fabsf(scale) < kSmallestCacheScale) scale = 0.0f;
  // The bits of 2^23 with a code, 128 larger, in their last byte are those of their sum.
  constexpr std::uint32_t kBits = 0x4B000080u;
  const auto factor = V::set(scale), offset = V::set(8388736.0f);
  const auto expand = [&](const std::uint8_t* from, Element* to) {
    V::template store_as<type>(to, (V::flip_bits(V::load_bytes(from), kBits) - offset) * factor);
  };
  int i = 0;
  for (; i + V::kWidth <= count; i += V::kWidth) expand(codes + i, out + i);
  if (i == count) return;
  std::uint8_t rest[V::kWidth] = {};
  Element numbers[V::kWidth];
  for (int j = i; j < count; ++j) rest[j - i] = codes[j];
  expand(rest, numbers);
  for (int j = i; j < count; ++j) out[j] = numbers[j - i];
}

template <class V, DType type>
void read_cache_typed(const ReadRecords& a) {
  constexpr int kRowsAhead = 24;  // about 4 KB: the hardware fetches ahead within a page of that size, not beyond it
  auto* out = static_cast<typename V::template Element<type>*>(a.values);
  const std::int64_t bytes = cache_record_bytes(a.depth), whole = a.depth / kCacheGroup * kCacheGroup;
  const std::uint8_t* record = a.records;
  for (std::int64_t row = 0; row < a.rows; ++row, record += a.stride, out += a.depth) {
    for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(record + kRowsAhead * a.stride + i);
    const std::uint8_t* scale = record + cache_code_bytes(a.depth);
    for (std::int64_t i = 0; i < whole; i += kCacheGroup, scale += 4) {
      read_cache_group<V, type>(record + i, scale, kCacheGroup, out + i);
    }
    if (whole < a.depth) {
      read_cache_group<V, type>(record + whole, scale, static_cast<int>(a.depth - whole), out + whole);
    }
  }
}

template <class V>
void expand_cache_records(const ReadRecords& a) {
  with_type(a.type, [&]<DType type>() { read_cache_typed<V, type>(a); });
}

}  // namespace
}  // namespace cpumoe
