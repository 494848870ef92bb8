// Activations as floats: small ones with scales, which bf16 numbers hold exactly, and floats as they are.
//
// A row of a product is bf16 numbers and a scale. bf16 dot instructions take subnormal numbers for zero, others do not:
// that both give the same bits, the numbers of a row are brought near 1 by a power of two where they could be any, and
// what is then below 2^-60 becomes 0. With weights of at least 2^-50 (small floats, integers, and what packing leaves
// of bf16 numbers) every product is a multiple of 2^-124, and so is every sum.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/elementary.h"
#include "kernels/table.h"

namespace cpumoe {
namespace {

// A float of few bits.
struct SmallFloat {
  int mantissa;  // bits
  float largest, smallest_normal;
  int exponent_of_largest;
  int scale_mantissa;  // an MX scale is chosen after its group's largest value was rounded to so many bits
};

constexpr SmallFloat kE4M3{3, 448.0f, 0x1p-6f, 8, 1}, kE3M2{2, 28.0f, 0x1p-2f, 4, 2};
constexpr SmallFloat kE2M3{3, 7.5f, 1.0f, 2, 3}, kE2M1{1, 6.0f, 1.0f, 2, 1};

constexpr std::uint32_t kExponentBits = 0x7F800000u;

// Rounded to nearest even, and to the largest value beyond it: adding and subtracting a number whose last bit is worth
// what the last one of the result is.
template <class V, const SmallFloat& format>
inline V round_to(V x) {
  const V magnitude = min_of(V::set(format.largest), V::abs(x));
  const V power = max_of(V::and_bits(magnitude, kExponentBits), V::set(format.smallest_normal));
  const V magic = power * V::set(1.5f * static_cast<float>(1 << (23 - format.mantissa)));
  return V::copy_sign((magnitude + magic) - magic, x);
}

template <class V>
inline float largest_of(const float* values, int count) {
  V largest = V::set(0.0f);
  for (int i = 0; i < count; i += V::kWidth) largest = max_of(V::abs(V::load(values + i)), largest);
  float lanes[V::kWidth], result = 0.0f;
  V::store(lanes, largest);
  for (const float lane : lanes) result = lane > result ? lane : result;
  return result;
}

template <class V, DType type>
float magnitude_typed(const void* src, std::int64_t count) {
  using Element = typename V::template Element<type>;
  const auto* x = static_cast<const Element*>(src);
  V largest = V::set(0.0f), broken = largest;
  const auto add = [&](const Element* at) {
    const V v = V::template load_as<type>(at);
    largest = max_of(V::abs(v), largest);
    broken = broken + (v - v);  // 0, or NaN from an infinity or a NaN on
  };
  std::int64_t i = 0;
  for (; i + V::kWidth <= count; i += V::kWidth) add(x + i);
  if (i < count) {
    Element rest[V::kWidth] = {};
    for (std::int64_t j = i; j < count; ++j) rest[j - i] = x[j];
    add(rest);
  }
  float lanes[V::kWidth], brokens[V::kWidth], result = 0.0f, bad = 0.0f;
  V::store(lanes, largest);
  V::store(brokens, broken);
  for (int lane = 0; lane < V::kWidth; ++lane) {
    result = lanes[lane] > result ? lanes[lane] : result;
    bad += brokens[lane];
  }
  return bad == 0.0f ? result : __builtin_nanf("");
}

template <class V>
float magnitude_of(const void* src, DType type, std::int64_t count) {
  return with_type(type, [&]<DType type>() { return magnitude_typed<V, type>(src, count); });
}

// The inputs of a record in fp32, zero beyond the end, and all of them zero where the row is broken.
template <class V>
inline void load_record(const PrepareRow& args, std::int64_t record, bool broken, float* values) {
  const std::int64_t first = record * kRecordDepth, left = broken ? 0 : args.count - first;
  const auto present = static_cast<int>(left < 0 ? 0 : left < kRecordDepth ? left : kRecordDepth);
  load_row<V>(static_cast<const std::uint8_t*>(args.src) + first * size_of(args.type), args.type, present, values);
  for (int i = present; i < kRecordDepth; ++i) values[i] = 0.0f;
}

// 64 values as bf16, of every four in the order 0, 2, 1, 3.
template <class V>
inline void store_half(const float* values, std::uint8_t* dst) {
  std::uint16_t words[64];
  for (int i = 0; i < 64; i += V::kWidth) V::template store_as<DType::kBF16>(words + i, V::load(values + i));
  for (int i = 0; i < 64; i += 4) {
    std::uint64_t four;
    __builtin_memcpy(&four, words + i, 8);
    four = (four & 0xFFFF00000000FFFFu) | (four & 0xFFFF0000u) << 16 | (four >> 16 & 0xFFFF0000u);
    __builtin_memcpy(dst + i * 2, &four, 8);
  }
}

// Calls encode(record, values [128]), which replaces them, and stores what it leaves.
template <class V, class Encode>
inline void encode_records(const PrepareRow& args, bool broken, const Encode& encode) {
  for (std::int64_t record = 0; record < args.padded / kRecordDepth; ++record) {
    alignas(64) float values[kRecordDepth];
    load_record<V>(args, record, broken, values);
    encode(record, values);
    for (int half = 0; half < 2; ++half) {
      store_half<V>(values + half * 64, args.dst + record * args.record_stride + half * args.half_stride);
    }
  }
}

template <class V, const SmallFloat& format>
inline void round_group(float* values, int count, float step, float unit) {
  const V divisor = V::set(step), factor = V::set(unit);
  for (int i = 0; i < count; i += V::kWidth) {
    const V rounded = step == 0.0f ? V::set(0.0f) : round_to<V, format>(V::divide(V::load(values + i), divisor));
    V::store(values + i, rounded * factor);
  }
}

// e4m3, with the scale that is given.
template <class V>
RowScale scaled_fp8_row(const PrepareRow& args) {
  const float magnitude = magnitude_of<V>(args.src, args.type, args.count);
  const bool broken = magnitude != magnitude;
  encode_records<V>(args, broken, [&](std::int64_t, float* values) {
    round_group<V, kE4M3>(values, kRecordDepth, args.scale, 1.0f);
  });
  return {broken ? magnitude : args.scale, 0};
}

// With the scale that makes the row's largest value the largest of e4m3.
template <class V>
RowScale fp8_row(const PrepareRow& args) {
  float magnitude = magnitude_of<V>(args.src, args.type, args.count);
  if (args.range != nullptr && magnitude == magnitude) {
    magnitude = -args.range[0] > args.range[1] ? -args.range[0] : args.range[1];
  }
  const float scale = magnitude / kE4M3.largest;
  encode_records<V>(args, magnitude != magnitude,
                    [&](std::int64_t, float* values) { round_group<V, kE4M3>(values, kRecordDepth, scale, 1.0f); });
  return {scale, 0};
}

// The same for every record of the row.
template <class V>
RowScale fp8_records(const PrepareRow& args) {
  const float magnitude = magnitude_of<V>(args.src, args.type, args.count);
  encode_records<V>(args, magnitude != magnitude, [&](std::int64_t record, float* values) {
    const float scale = largest_of<V>(values, kRecordDepth) / kE4M3.largest;
    args.record_scales[record] = scale;
    round_group<V, kE4M3>(values, kRecordDepth, scale, 1.0f);
  });
  return {magnitude == magnitude ? 1.0f : magnitude, 0};
}

// The power of two that brings a row near 1; NaN for a broken row.
inline float power_of_row(float magnitude) {
  if (magnitude != magnitude) return magnitude;
  const std::uint32_t bits = bits_as<std::uint32_t>(magnitude) & kExponentBits;
  return bits == 0 ? 0x1p-126f : bits_as<float>(bits);
}

template <class V>
inline V without_tiny(V x) {
  return V::select_less(V::abs(x), V::set(0x1p-60f), V::set(0.0f), x);
}

// A power of two for 32 inputs, so that their largest value has the largest exponent of the format.
template <const SmallFloat& format>
inline float mx_step(float magnitude) {
  const std::uint32_t rounded = bits_as<std::uint32_t>(magnitude) + (1u << (22 - format.scale_mantissa));
  const int exponent = static_cast<int>(rounded >> 23) - format.exponent_of_largest;
  const int stored = exponent < 0 ? 0 : exponent > 254 ? 254 : exponent;
  return bits_as<float>(stored == 0 ? 0x00400000u : static_cast<std::uint32_t>(stored) << 23);
}

template <class V, const SmallFloat& format>
RowScale mx_row(const PrepareRow& args) {
  constexpr int kGroup = 32;
  const float magnitude = magnitude_of<V>(args.src, args.type, args.count), power = power_of_row(magnitude);
  encode_records<V>(args, magnitude != magnitude, [&](std::int64_t, float* values) {
    for (int first = 0; first < kRecordDepth; first += kGroup) {
      const float step = mx_step<format>(largest_of<V>(values + first, kGroup));
      round_group<V, format>(values + first, kGroup, step, step / power);
    }
    for (int i = 0; i < kRecordDepth; i += V::kWidth) V::store(values + i, without_tiny(V::load(values + i)));
  });
  return {power, 0};
}

template <class V>
RowScale nvfp4_row(const PrepareRow& args) {
  constexpr int kGroup = 16;
  const float magnitude = magnitude_of<V>(args.src, args.type, args.count), global = args.scale;
  encode_records<V>(args, magnitude != magnitude, [&](std::int64_t, float* values) {
    for (int first = 0; first < kRecordDepth; first += kGroup) {
      const float wanted = global * (largest_of<V>(values + first, kGroup) / kE2M1.largest);
      const float scale = round_to<F32x1, kE4M3>({wanted}).v;
      round_group<V, kE2M1>(values + first, kGroup, scale / global, scale);
    }
  });
  return {magnitude == magnitude ? 1.0f / global : magnitude, 0};
}

template <class V>
RowScale bf16_row(const PrepareRow& args) {
  const float magnitude = magnitude_of<V>(args.src, args.type, args.count), power = power_of_row(magnitude);
  encode_records<V>(args, magnitude != magnitude, [&](std::int64_t, float* values) {
    for (int i = 0; i < kRecordDepth; i += V::kWidth) {
      V::store(values + i, without_tiny(V::divide(V::load(values + i), V::set(power))));
    }
  });
  return {power, 0};
}

// Two bf16 numbers for a value, in rows one behind the other.
template <class V>
RowScale bf16_pair(const PrepareRow& args) {
  const float magnitude = magnitude_of<V>(args.src, args.type, args.count), power = power_of_row(magnitude);
  constexpr int kBehind = traits_of(RowFormat::kBF16Pair).half_bytes();
  for (std::int64_t record = 0; record < args.padded / kRecordDepth; ++record) {
    alignas(64) float values[kRecordDepth], rests[kRecordDepth];
    load_record<V>(args, record, magnitude != magnitude, values);
    for (int i = 0; i < kRecordDepth; i += V::kWidth) {
      const V value = without_tiny(V::divide(V::load(values + i), V::set(power)));
      std::uint16_t rounded[V::kWidth];
      V::template store_as<DType::kBF16>(rounded, value);
      V::store(rests + i, without_tiny(value - V::template load_as<DType::kBF16>(rounded)));
      V::store(values + i, value);
    }
    for (int half = 0; half < 2; ++half) {
      std::uint8_t* dst = args.dst + record * args.record_stride + half * args.half_stride;
      store_half<V>(values + half * 64, dst);
      store_half<V>(rests + half * 64, dst + kBehind);
    }
  }
  return {power, 0};
}

template <class V>
RowScale fp32_row(const PrepareRow& args) {
  const float magnitude = magnitude_of<V>(args.src, args.type, args.count);
  for (std::int64_t record = 0; record < args.padded / kRecordDepth; ++record) {
    alignas(64) float values[kRecordDepth];
    load_record<V>(args, record, magnitude != magnitude, values);
    for (int half = 0; half < 2; ++half) {
      __builtin_memcpy(args.dst + record * args.record_stride + half * args.half_stride, values + half * 64, 256);
    }
  }
  return {magnitude == magnitude ? 1.0f : magnitude, 0};
}

}  // namespace
}  // namespace cpumoe
