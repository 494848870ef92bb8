// Keys and values in int8 (cache_record_kernels.h).
//
// Internal linkage on purpose: see kernel.h.
#pragma once

#include "../kernel.h"
#include "elementary.h"
#include "prepare_floats.h"

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

template <class V, DType type>
void read_cache_typed(const std::uint8_t* record, std::int64_t depth, void* values) {
  using Element = typename V::template Element<type>;
  auto* out = static_cast<Element*>(values);
  const std::uint8_t* scales = record + cache_code_bytes(depth);
  // The bits of 2^23 with a code, 128 larger, in their last byte are those of their sum.
  constexpr std::uint32_t kBits = 0x4B000080u;
  const V offset = V::set(8388736.0f);
  for (std::int64_t first = 0; first < depth; first += kCacheGroup, scales += 4) {
    float scale;
    __builtin_memcpy(&scale, scales, 4);
    if (__builtin_fabsf(scale) < kSmallestCacheScale) scale = 0.0f;
    const V factor = V::set(scale);
    const auto expand = [&](const std::uint8_t* codes, Element* to) {
      V::template store_as<type>(to, (V::flip_bits(V::load_bytes(codes), kBits) - offset) * factor);
    };
    const std::int64_t last = depth - first < kCacheGroup ? depth : first + kCacheGroup;
    std::int64_t i = first;
    for (; i + V::kWidth <= last; i += V::kWidth) expand(record + i, out + i);
    if (i < last) {
      std::uint8_t codes[V::kWidth] = {};
      Element rest[V::kWidth];
      for (std::int64_t j = i; j < last; ++j) codes[j - i] = record[j];
      expand(codes, rest);
      for (std::int64_t j = i; j < last; ++j) out[j] = rest[j - i];
    }
  }
}

template <class V>
void read_cache_record(const std::uint8_t* record, std::int64_t depth, DType type, void* values) {
  switch (type) {
    case DType::kF32: return read_cache_typed<V, DType::kF32>(record, depth, values);
    case DType::kBF16: return read_cache_typed<V, DType::kBF16>(record, depth, values);
    case DType::kF16: return read_cache_typed<V, DType::kF16>(record, depth, values);
  }
}

}  // namespace
}  // namespace cpumoe
