// The vector type of width one: plain floats. It defines what the others must compute.
#pragma once

#include "kernels/formats.h"
#include "runtime/float16.h"

namespace cpumoe {
namespace {

template <DType type>
struct ElementOf {
  using Type = std::uint16_t;
};
template <>
struct ElementOf<DType::kF32> {
  using Type = float;
};

struct F32x1 {
  static constexpr int kWidth = 1;
  template <DType type>
  using Element = typename ElementOf<type>::Type;

  float v;

  static F32x1 set(float f) { return {f}; }
  // What is loaded may be packed weights, which need no alignment.
  template <class T>
  static T read(const T* p) {
    T value;
    memcpy(&value, p, sizeof(value));
    return value;
  }
  static F32x1 load(const float* p) { return {read(p)}; }
  static void store(float* p, F32x1 x) { *p = x.v; }
  static F32x1 load_int(const std::int32_t* p) { return {static_cast<float>(read(p))}; }
  static void store_scaled_int(const std::int32_t* sums, std::int32_t factor, std::int32_t* dst) {
    *dst = static_cast<std::int32_t>(static_cast<std::uint32_t>(read(sums)) * static_cast<std::uint32_t>(factor));
  }
  friend F32x1 operator+(F32x1 a, F32x1 b) { return {a.v + b.v}; }
  friend F32x1 operator-(F32x1 a, F32x1 b) { return {a.v - b.v}; }
  friend F32x1 operator*(F32x1 a, F32x1 b) { return {a.v * b.v}; }
  static F32x1 fma(F32x1 a, F32x1 b, F32x1 c) { return {__builtin_fmaf(a.v, b.v, c.v)}; }
  static F32x1 divide(F32x1 a, F32x1 b) { return {a.v / b.v}; }
  static F32x1 square_root(F32x1 a) { return {__builtin_sqrtf(a.v)}; }
  // The lanes' sum: the upper half is added to the lower one until one lane is left.
  static float sum_of_halves(F32x1 a) { return a.v; }
  static F32x1 abs(F32x1 a) { return {__builtin_fabsf(a.v)}; }
  static F32x1 copy_sign(F32x1 magnitude, F32x1 sign) { return {__builtin_copysignf(magnitude.v, sign.v)}; }
  static F32x1 select_less(F32x1 a, F32x1 b, F32x1 yes, F32x1 no) { return a.v < b.v ? yes : no; }
  static F32x1 keep_nan(F32x1 value, F32x1 x) { return x.v != x.v ? x : value; }

  // 2^n for an integral n in [-126, 127]
  static F32x1 power_of_two(F32x1 n) {
    const auto exponent = static_cast<std::int32_t>(n.v == n.v ? n.v : 0.0f);
    return {bits_as<float>((exponent + 127) << 23)};
  }
  static F32x1 reciprocal_guess(F32x1 d) {
    return {bits_as<float>(static_cast<std::uint32_t>(0x7EF311C7u) - bits_as<std::uint32_t>(d.v))};
  }

  // Whole 32-bit lanes as bits.
  static F32x1 load_bits32(const void* p) { return {read(static_cast<const float*>(p))}; }
  static F32x1 load_bytes(const std::uint8_t* p) { return {bits_as<float>(static_cast<std::uint32_t>(*p))}; }
  // e4m3 numbers without a sign, as 256ths of their values.
  static F32x1 load_e4m3(const std::uint8_t* p) { return {half_to_float(static_cast<std::uint16_t>(*p << 7))}; }
  static F32x1 and_bits(F32x1 a, std::uint32_t mask) { return {bits_as<float>(bits_as<std::uint32_t>(a.v) & mask)}; }
  static F32x1 or_bits(F32x1 a, F32x1 b) {
    return {bits_as<float>(bits_as<std::uint32_t>(a.v) | bits_as<std::uint32_t>(b.v))};
  }
  static F32x1 flip_bits(F32x1 a, std::uint32_t mask) { return {bits_as<float>(bits_as<std::uint32_t>(a.v) ^ mask)}; }
  static F32x1 add_bits(F32x1 a, std::uint32_t n) { return {bits_as<float>(bits_as<std::uint32_t>(a.v) + n)}; }
  static F32x1 shift_left(F32x1 a, int n) { return {bits_as<float>(bits_as<std::uint32_t>(a.v) << n)}; }
  static F32x1 shift_right(F32x1 a, int n) { return {bits_as<float>(bits_as<std::uint32_t>(a.v) >> n)}; }

  // Rounds to nearest, ties away from zero, adds the zero point, clamps to a byte. 0.5 - 2^-25 is the
  // constant for which truncation after the addition rounds every float below 2^22 correctly.
  static void store_rounded(std::uint8_t* dst, F32x1 x, std::int32_t zero) {
    const auto i = static_cast<std::int32_t>(x.v + __builtin_copysignf(0.49999997f, x.v)) + zero;
    *dst = static_cast<std::uint8_t>(i < 0 ? 0 : i > 255 ? 255 : i);
  }
  // The same with 16 bits, whose upper and lower bytes go apart.
  static void store_rounded_words(std::uint8_t* upper, std::uint8_t* lower, F32x1 x, std::int32_t zero) {
    const auto i = static_cast<std::int32_t>(x.v + __builtin_copysignf(0.49999997f, x.v)) + zero;
    const std::int32_t word = i < 0 ? 0 : i > 65535 ? 65535 : i;
    *upper = static_cast<std::uint8_t>(word >> 8);
    *lower = static_cast<std::uint8_t>(word & 0xFF);
  }

  template <DType type>
  static F32x1 load_as(const Element<type>* p) {
    if constexpr (type == DType::kF32) {
      return {read(p)};
    } else if constexpr (type == DType::kBF16) {
      return {bfloat_to_float(read(p))};
    } else {
      return {half_to_float(read(p))};
    }
  }
  template <DType type>
  static void store_as(Element<type>* p, F32x1 x) {
    if constexpr (type == DType::kF32) {
      *p = x.v;
    } else if constexpr (type == DType::kBF16) {
      *p = float_to_bfloat(x.v);
    } else {
      *p = float_to_half(x.v);
    }
  }
};

}  // namespace
}  // namespace cpumoe
