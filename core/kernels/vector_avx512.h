// Sixteen floats in a ZMM register (AVX-512 F, BW, VL, DQ).
#pragma once

#include <immintrin.h>

#include "kernels/vector_scalar.h"

namespace cpumoe {
namespace {

struct F32x16 {
  static constexpr int kWidth = 16;
  template <DType type>
  using Element = typename ElementOf<type>::Type;

  __m512 v;

  static F32x16 set(float f) { return {_mm512_set1_ps(f)}; }
  static F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static void store(float* p, F32x16 x) { _mm512_storeu_ps(p, x.v); }
  static F32x16 load_int(const std::int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
  static void store_scaled_int(const std::int32_t* sums, std::int32_t factor, std::int32_t* dst) {
    _mm512_storeu_si512(dst, _mm512_mullo_epi32(_mm512_loadu_si512(sums), _mm512_set1_epi32(factor)));
  }
  friend F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static F32x16 divide(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
  static F32x16 square_root(F32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
  static float sum_of_halves(F32x16 a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  static F32x16 abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
  static F32x16 copy_sign(F32x16 magnitude, F32x16 sign) {
    const __m512 mask = _mm512_set1_ps(-0.0f);
    return {_mm512_or_ps(_mm512_andnot_ps(mask, magnitude.v), _mm512_and_ps(mask, sign.v))};
  }
  static F32x16 select_less(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
  }
  static F32x16 keep_nan(F32x16 value, F32x16 x) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), value.v, x.v)};
  }
  static F32x16 power_of_two(F32x16 n) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvttps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
  }
  static F32x16 reciprocal_guess(F32x16 d) {
    return {_mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(0x7EF311C7), _mm512_castps_si512(d.v)))};
  }
  static __m512i bits(F32x16 a) { return _mm512_castps_si512(a.v); }
  static F32x16 floats(__m512i bits) { return {_mm512_castsi512_ps(bits)}; }
  static F32x16 load_bits32(const void* p) { return floats(_mm512_loadu_si512(p)); }
  static F32x16 load_bytes(const std::uint8_t* p) {
    return floats(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static F32x16 load_e4m3(const std::uint8_t* p) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_cvtph_ps(_mm256_slli_epi16(words, 7))};
  }
  static F32x16 and_bits(F32x16 a, std::uint32_t mask) {
    return floats(_mm512_and_si512(bits(a), _mm512_set1_epi32(static_cast<int>(mask))));
  }
  static F32x16 or_bits(F32x16 a, F32x16 b) { return {_mm512_or_ps(a.v, b.v)}; }
  static F32x16 flip_bits(F32x16 a, std::uint32_t mask) {
    return floats(_mm512_xor_si512(bits(a), _mm512_set1_epi32(static_cast<int>(mask))));
  }
  static F32x16 add_bits(F32x16 a, std::uint32_t n) {
    return floats(_mm512_add_epi32(bits(a), _mm512_set1_epi32(static_cast<int>(n))));
  }
  static F32x16 shift_left(F32x16 a, int n) { return floats(_mm512_sll_epi32(bits(a), _mm_cvtsi32_si128(n))); }
  static F32x16 shift_right(F32x16 a, int n) { return floats(_mm512_srl_epi32(bits(a), _mm_cvtsi32_si128(n))); }
  static void store_rounded(std::uint8_t* dst, F32x16 x, std::int32_t zero) {
    const __m512 half = copy_sign(set(0.49999997f), x).v;
    __m512i i = _mm512_cvttps_epi32(_mm512_add_ps(x.v, half));
    i = _mm512_max_epi32(_mm512_add_epi32(i, _mm512_set1_epi32(zero)), _mm512_setzero_si512());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm512_cvtusepi32_epi8(i));
  }
  static void store_rounded_words(std::uint8_t* upper, std::uint8_t* lower, F32x16 x, std::int32_t zero) {
    const __m512 half = copy_sign(set(0.49999997f), x).v;
    __m512i i = _mm512_cvttps_epi32(_mm512_add_ps(x.v, half));
    i = _mm512_max_epi32(_mm512_add_epi32(i, _mm512_set1_epi32(zero)), _mm512_setzero_si512());
    i = _mm512_min_epi32(i, _mm512_set1_epi32(65535));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(upper), _mm512_cvtepi32_epi8(_mm512_srli_epi32(i, 8)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lower), _mm512_cvtepi32_epi8(i));
  }

  template <DType type>
  static F32x16 load_as(const Element<type>* p) {
    if constexpr (type == DType::kF32) {
      return load(p);
    } else {
      const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      if constexpr (type == DType::kF16) return {_mm512_cvtph_ps(h)};
      return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
    }
  }
  template <DType type>
  static void store_as(Element<type>* p, F32x16 x) {
    if constexpr (type == DType::kF32) {
      store(p, x);
    } else {
      __m256i h;
      if constexpr (type == DType::kF16) {
        h = _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      } else {
        const __m512i bits = _mm512_castps_si512(x.v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
        const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
        const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
        h = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h);
    }
  }
};

}  // namespace
}  // namespace cpumoe
