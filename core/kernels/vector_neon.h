// Four floats in a NEON register (AArch64, Armv8.0).
#pragma once

#include <arm_neon.h>

#include "kernels/vector_scalar.h"

namespace cpumoe {
namespace {

struct F32x4 {
  static constexpr int kWidth = 4;
  template <DType type>
  using Element = typename ElementOf<type>::Type;

  float32x4_t v;

  static F32x4 set(float f) { return {vdupq_n_f32(f)}; }
  static F32x4 load(const float* p) { return {vld1q_f32(p)}; }
  static void store(float* p, F32x4 x) { vst1q_f32(p, x.v); }
  static F32x4 load_int(const std::int32_t* p) { return {vcvtq_f32_s32(vld1q_s32(p))}; }
  static void store_scaled_int(const std::int32_t* sums, std::int32_t factor, std::int32_t* dst) {
    vst1q_s32(dst, vmulq_s32(vld1q_s32(sums), vdupq_n_s32(factor)));
  }
  friend F32x4 operator+(F32x4 a, F32x4 b) { return {vaddq_f32(a.v, b.v)}; }
  friend F32x4 operator-(F32x4 a, F32x4 b) { return {vsubq_f32(a.v, b.v)}; }
  friend F32x4 operator*(F32x4 a, F32x4 b) { return {vmulq_f32(a.v, b.v)}; }
  static F32x4 fma(F32x4 a, F32x4 b, F32x4 c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
  static F32x4 divide(F32x4 a, F32x4 b) { return {vdivq_f32(a.v, b.v)}; }
  static F32x4 square_root(F32x4 a) { return {vsqrtq_f32(a.v)}; }
  static float sum_of_halves(F32x4 a) {
    const float32x2_t two = vadd_f32(vget_low_f32(a.v), vget_high_f32(a.v));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
  static F32x4 abs(F32x4 a) { return {vabsq_f32(a.v)}; }
  static F32x4 copy_sign(F32x4 magnitude, F32x4 sign) {
    return {vbslq_f32(vdupq_n_u32(0x80000000u), sign.v, magnitude.v)};
  }
  static F32x4 select_less(F32x4 a, F32x4 b, F32x4 yes, F32x4 no) {
    return {vbslq_f32(vcltq_f32(a.v, b.v), yes.v, no.v)};
  }
  static F32x4 keep_nan(F32x4 value, F32x4 x) { return {vbslq_f32(vceqq_f32(x.v, x.v), value.v, x.v)}; }
  static F32x4 power_of_two(F32x4 n) {
    return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v), vdupq_n_s32(127)), 23))};
  }
  static F32x4 reciprocal_guess(F32x4 d) {
    return {vreinterpretq_f32_u32(vsubq_u32(vdupq_n_u32(0x7EF311C7u), vreinterpretq_u32_f32(d.v)))};
  }
  static uint32x4_t bits(F32x4 a) { return vreinterpretq_u32_f32(a.v); }
  static F32x4 floats(uint32x4_t bits) { return {vreinterpretq_f32_u32(bits)}; }
  static F32x4 load_bits32(const void* p) {
    return floats(vreinterpretq_u32_u8(vld1q_u8(static_cast<const std::uint8_t*>(p))));
  }
  static F32x4 load_bytes(const std::uint8_t* p) {
    std::uint32_t four;
    __builtin_memcpy(&four, p, 4);
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    return floats(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
  }
  static F32x4 load_e4m3(const std::uint8_t* p) {
    std::uint32_t four;
    __builtin_memcpy(&four, p, 4);
    const uint16x4_t words = vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four))));
    return {vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(words, 7)))};
  }
  static F32x4 and_bits(F32x4 a, std::uint32_t mask) { return floats(vandq_u32(bits(a), vdupq_n_u32(mask))); }
  static F32x4 or_bits(F32x4 a, F32x4 b) { return floats(vorrq_u32(bits(a), bits(b))); }
  static F32x4 flip_bits(F32x4 a, std::uint32_t mask) { return floats(veorq_u32(bits(a), vdupq_n_u32(mask))); }
  static F32x4 add_bits(F32x4 a, std::uint32_t n) { return floats(vaddq_u32(bits(a), vdupq_n_u32(n))); }
  static F32x4 shift_left(F32x4 a, int n) { return floats(vshlq_u32(bits(a), vdupq_n_s32(n))); }
  static F32x4 shift_right(F32x4 a, int n) { return floats(vshlq_u32(bits(a), vdupq_n_s32(-n))); }
  static void store_rounded(std::uint8_t* dst, F32x4 x, std::int32_t zero) {
    const float32x4_t half = copy_sign(set(0.49999997f), x).v;
    const int32x4_t i = vaddq_s32(vcvtq_s32_f32(vaddq_f32(x.v, half)), vdupq_n_s32(zero));
    const uint8x8_t bytes = vqmovun_s16(vcombine_s16(vqmovn_s32(i), vdup_n_s16(0)));
    const std::uint32_t quad = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    memcpy(dst, &quad, 4);
  }
  static void store_rounded_words(std::uint8_t* upper, std::uint8_t* lower, F32x4 x, std::int32_t zero) {
    const float32x4_t half = copy_sign(set(0.49999997f), x).v;
    const int32x4_t i = vaddq_s32(vcvtq_s32_f32(vaddq_f32(x.v, half)), vdupq_n_s32(zero));
    const uint16x8_t words = vcombine_u16(vqmovun_s32(i), vdup_n_u16(0));
    const std::uint32_t highs = vget_lane_u32(vreinterpret_u32_u8(vshrn_n_u16(words, 8)), 0);
    const std::uint32_t lows = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(words)), 0);
    memcpy(upper, &highs, 4);
    memcpy(lower, &lows, 4);
  }

  template <DType type>
  static F32x4 load_as(const Element<type>* p) {
    if constexpr (type == DType::kF32) {
      return load(p);
    } else if constexpr (type == DType::kBF16) {
      return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))};
    } else {
      return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))};
    }
  }
  template <DType type>
  static void store_as(Element<type>* p, F32x4 x) {
    if constexpr (type == DType::kF32) {
      store(p, x);
    } else if constexpr (type == DType::kF16) {
      vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x.v)));
    } else {
      const uint32x4_t bits = vreinterpretq_u32_f32(x.v);
      const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
      const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
      const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
      vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x.v, x.v), rounded, quiet), 16));
    }
  }
};

}  // namespace
}  // namespace cpumoe
