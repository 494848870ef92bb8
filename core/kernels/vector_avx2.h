// Eight floats in a YMM register (AVX2, FMA, F16C).
#pragma once

#include <immintrin.h>

#include "kernels/vector_scalar.h"

namespace cpumoe {
namespace {

struct F32x8 {
  static constexpr int kWidth = 8;
  template <DType type>
  using Element = typename ElementOf<type>::Type;

  __m256 v;

  static F32x8 set(float f) { return {_mm256_set1_ps(f)}; }
  static F32x8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static void store(float* p, F32x8 x) { _mm256_storeu_ps(p, x.v); }
  static __m256i load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static F32x8 load_int(const std::int32_t* p) { return {_mm256_cvtepi32_ps(load_bits(p))}; }
  static void store_scaled_int(const std::int32_t* sums, std::int32_t factor, std::int32_t* dst) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst),
                        _mm256_mullo_epi32(load_bits(sums), _mm256_set1_epi32(factor)));
  }
  friend F32x8 operator+(F32x8 a, F32x8 b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend F32x8 operator-(F32x8 a, F32x8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend F32x8 operator*(F32x8 a, F32x8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
  static F32x8 fma(F32x8 a, F32x8 b, F32x8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static F32x8 divide(F32x8 a, F32x8 b) { return {_mm256_div_ps(a.v, b.v)}; }
  static F32x8 square_root(F32x8 a) { return {_mm256_sqrt_ps(a.v)}; }
  static float sum_of_halves(F32x8 a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  static F32x8 abs(F32x8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
  static F32x8 copy_sign(F32x8 magnitude, F32x8 sign) {
    const __m256 mask = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_andnot_ps(mask, magnitude.v), _mm256_and_ps(mask, sign.v))};
  }
  static F32x8 select_less(F32x8 a, F32x8 b, F32x8 yes, F32x8 no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
  }
  static F32x8 keep_nan(F32x8 value, F32x8 x) {
    return {_mm256_blendv_ps(value.v, x.v, _mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q))};
  }
  static F32x8 power_of_two(F32x8 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvttps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23))};
  }
  static F32x8 reciprocal_guess(F32x8 d) {
    return {_mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32(0x7EF311C7), _mm256_castps_si256(d.v)))};
  }
  static __m256i bits(F32x8 a) { return _mm256_castps_si256(a.v); }
  static F32x8 floats(__m256i bits) { return {_mm256_castsi256_ps(bits)}; }
  static F32x8 load_bits32(const void* p) { return floats(load_bits(p)); }
  static F32x8 load_bytes(const std::uint8_t* p) {
    return floats(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static F32x8 load_e4m3(const std::uint8_t* p) {
    const __m128i words = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_cvtph_ps(_mm_slli_epi16(words, 7))};
  }
  static F32x8 and_bits(F32x8 a, std::uint32_t mask) {
    return floats(_mm256_and_si256(bits(a), _mm256_set1_epi32(static_cast<int>(mask))));
  }
  static F32x8 or_bits(F32x8 a, F32x8 b) { return {_mm256_or_ps(a.v, b.v)}; }
  static F32x8 flip_bits(F32x8 a, std::uint32_t mask) {
    return floats(_mm256_xor_si256(bits(a), _mm256_set1_epi32(static_cast<int>(mask))));
  }
  static F32x8 add_bits(F32x8 a, std::uint32_t n) {
    return floats(_mm256_add_epi32(bits(a), _mm256_set1_epi32(static_cast<int>(n))));
  }
  static F32x8 shift_left(F32x8 a, int n) { return floats(_mm256_sll_epi32(bits(a), _mm_cvtsi32_si128(n))); }
  static F32x8 shift_right(F32x8 a, int n) { return floats(_mm256_srl_epi32(bits(a), _mm_cvtsi32_si128(n))); }
  static void store_rounded(std::uint8_t* dst, F32x8 x, std::int32_t zero) {
    const __m256 half = copy_sign(set(0.49999997f), x).v;
    const __m256i i = _mm256_add_epi32(_mm256_cvttps_epi32(_mm256_add_ps(x.v, half)), _mm256_set1_epi32(zero));
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(dst), _mm_packus_epi16(words, words));
  }
  static void store_rounded_words(std::uint8_t* upper, std::uint8_t* lower, F32x8 x, std::int32_t zero) {
    const __m256 half = copy_sign(set(0.49999997f), x).v;
    const __m256i i = _mm256_add_epi32(_mm256_cvttps_epi32(_mm256_add_ps(x.v, half)), _mm256_set1_epi32(zero));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    const __m128i lows = _mm_and_si128(words, _mm_set1_epi16(0xFF));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(upper), _mm_packus_epi16(_mm_srli_epi16(words, 8), words));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(lower), _mm_packus_epi16(lows, lows));
  }

  template <DType type>
  static F32x8 load_as(const Element<type>* p) {
    if constexpr (type == DType::kF32) {
      return load(p);
    } else {
      const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      if constexpr (type == DType::kF16) return {_mm256_cvtph_ps(h)};
      return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
    }
  }
  template <DType type>
  static void store_as(Element<type>* p, F32x8 x) {
    if constexpr (type == DType::kF32) {
      store(p, x);
    } else {
      __m128i h;
      if constexpr (type == DType::kF16) {
        h = _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      } else {
        const __m256i bits = _mm256_castps_si256(x.v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        const __m256i words = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
        h = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
      }
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), h);
    }
  }
};

}  // namespace
}  // namespace cpumoe
