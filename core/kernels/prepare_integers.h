// Activations as integers of 8 or 16 bits with a scale and a zero point, found in the row or stored with the weights.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/elementary.h"
#include "kernels/prepare_floats.h"
#include "kernels/table.h"

namespace cpumoe {
namespace {

// Scale and zero point of a row, from its smallest and its largest value with 0 among them (asymmetric int8 as
// PyTorch's dynamic quantisation has it, here shifted by 128 so that the bytes are unsigned; or the same with 16 bits).
// Returns the factor that values are multiplied with before rounding.
//
// A row whose scale would be subnormal, below 2^-126, counts as a row of zeros: so small a scale has few bits, its
// reciprocal may be infinite, and such rows would be off by more than a step. The limit of the range is exact: both
// range / steps and 1 / (steps / range), rounded to fp32, are below 2^-126 if and only if the range is below it.
template <int bits>
inline float row_parameters(float low, float high, RowScale* q) {
  constexpr float kLargest = 3.40282347e+38f;
  constexpr auto kSteps = static_cast<float>((1 << bits) - 1), kMiddle = static_cast<float>(1 << (bits - 1));
  const float range = high - low;
  float factor = 0.0f;
  if (range < kSteps * 0x1p-126f) {
    q->scale = 0.0f;  // zeros must give zero, not what rounding leaves of the zero point's share
  } else {
    // A range that overflows has a half that does not.
    factor = range > kLargest ? kSteps * 0.5f / (high * 0.5f - low * 0.5f) : kSteps / range;
    q->scale = 1.0f / factor;
  }
  const float scaled_low = low * factor, scaled_high = high * factor;
  constexpr float kFirst = -kMiddle, kLast = kMiddle - 1.0f;
  float z = (kFirst + scaled_low) + (kLast + scaled_high) > 0.0f ? kFirst - scaled_low : kLast - scaled_high;
  z = z < kFirst ? kFirst : z > kLast ? kLast : z;
  const float rounded = (z + 12582912.0f) - 12582912.0f;  // to nearest even
  q->zero = static_cast<std::int32_t>(rounded) + (1 << (bits - 1));
  return factor;
}

template <class V, int bits, DType type>
RowScale quantize_typed(const PrepareRow& args) {
  using Element = typename V::template Element<type>;
  const auto* x = static_cast<const Element*>(args.src);
  const std::int64_t whole = args.count / V::kWidth * V::kWidth;
  V low = V::set(0.0f), high = low, broken = low;
  for (std::int64_t i = 0; i < whole; i += V::kWidth) {
    const V v = V::template load_as<type>(x + i);
    low = min_of(v, low);
    high = max_of(v, high);
    broken = broken + (v - v);  // 0, or NaN from an infinity or a NaN on
  }
  float lows[V::kWidth], highs[V::kWidth], brokens[V::kWidth];
  V::store(lows, low);
  V::store(highs, high);
  V::store(brokens, broken);
  float rmin = 0.0f, rmax = 0.0f, bad = 0.0f;
  for (int i = 0; i < V::kWidth; ++i) {
    rmin = lows[i] < rmin ? lows[i] : rmin;
    rmax = highs[i] > rmax ? highs[i] : rmax;
    bad += brokens[i];
  }
  Element rest[V::kWidth] = {};  // the last, partial vector
  for (std::int64_t i = whole; i < args.count; ++i) rest[i - whole] = x[i];
  if (whole < args.count) {
    const V v = V::template load_as<type>(rest);
    V::store(lows, v);
    V::store(brokens, v - v);
    for (int i = 0; i < V::kWidth; ++i) {
      rmin = lows[i] < rmin ? lows[i] : rmin;
      rmax = lows[i] > rmax ? lows[i] : rmax;
      bad += brokens[i];
    }
  }
  if (args.range != nullptr) {
    rmin = args.range[0];
    rmax = args.range[1];
  }
  RowScale q{};
  float factor_of_row = 0.0f;
  if (bad == 0.0f) {
    factor_of_row = row_parameters<bits>(rmin, rmax, &q);
  } else {
    // This row's products become 0 * NaN: the token comes out as NaN and touches no other.
    q.scale = __builtin_nanf("");
    q.zero = 0;
  }
  const V factor = V::set(factor_of_row);
  const bool clean = bad == 0.0f;
  for (std::int64_t chunk = 0; chunk < args.padded / 64; ++chunk) {
    std::uint8_t* dst = args.dst + chunk / 2 * args.record_stride + chunk % 2 * args.half_stride;
    for (int j = 0; j < 64; j += V::kWidth) {
      const std::int64_t i = chunk * 64 + j;
      std::int64_t filled = clean ? args.count - i : 0;
      if (filled > 0) {
        const V value = V::template load_as<type>(filled >= V::kWidth ? x + i : rest) * factor;
        if constexpr (bits == 8) {
          V::store_rounded(dst + j, value, q.zero);
        } else {
          V::store_rounded_words(dst + j, dst + 64 + j, value, q.zero);
        }
      } else {
        filled = 0;
      }
      for (std::int64_t b = filled; b < V::kWidth; ++b) {
        dst[j + b] = 0;
        if constexpr (bits == 16) dst[64 + j + b] = 0;
      }
    }
  }
  return q;
}

template <class V, int bits>
RowScale quantize_row(const PrepareRow& args) {
  return with_type(args.type, [&]<DType type>() { return quantize_typed<V, bits, type>(args); });
}

// With the scale that is given: rounded to nearest even, from -128 to 127, held 128 larger.
template <class V>
RowScale quantize_static(const PrepareRow& args) {
  const float magnitude = magnitude_of<V>(args.src, args.type, args.count);
  const bool broken = magnitude != magnitude;
  const V scale = V::set(args.scale), magic = V::set(12582912.0f);
  for (std::int64_t record = 0; record < args.padded / kRecordDepth; ++record) {
    float values[kRecordDepth];
    load_record<V>(args, record, broken, values);
    for (int j = 0; j < kRecordDepth; j += V::kWidth) {
      const V bounded = clamp_to(-128.0f, 127.0f, V::divide(V::load(values + j), scale));
      std::uint8_t* dst = args.dst + record * args.record_stride + j / 64 * args.half_stride + j % 64;
      V::store_rounded(dst, (bounded + magic) - magic, 128);
    }
  }
  return {broken ? __builtin_nanf("") : args.scale, 128};
}

}  // namespace
}  // namespace cpumoe
