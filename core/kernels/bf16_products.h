// Products with rows of bf16 numbers by vdpbf16ps; shared by the AVX512-BF16 and the AMX kernel.
//
// It adds two products to a running sum, one after the other, each rounded to nearest even; subnormal numbers count as
// zero, and there are none (prepare_floats.h). So its bits are those of float_products.h.
#pragma once

#include <immintrin.h>

#include <bit>

#include "float_products.h"
#include "vector_avx512.h"

namespace cpumoe {
namespace {

// Of 16 columns, two inputs each: inputs 0 and 2, and inputs 1 and 3, of a line.
struct LinePairs {
  __m512i even, odd;
};

// sum + the products of w with the two bf16 numbers at `x`. Assembly, because GCC 12 copies every running sum of a loop
// around its own intrinsic.
inline __m512 add_pair(__m512 sum, __m512i w, const std::uint8_t* x) {
  struct Bytes {
    std::uint8_t four[4];
  };
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const Bytes*>(x)));
  return sum;
}

// The same with both in registers.
inline __m512 add_pairs(__m512 sum, __m512i w, __m512i x) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
  return sum;
}

// bf16 numbers by their codes: 16, or 64 of them.
struct CodeTable {
  std::uint16_t words[64];
};

template <const SmallFloat& format, int codes>
constexpr CodeTable table_of(float unit) {
  CodeTable table{};
  for (int code = 0; code < codes; ++code) {
    const int half = codes / 2, steps = 1 << format.mantissa;
    const int exponent = code % half / steps, mantissa = code % steps;
    float value = static_cast<float>(exponent == 0 ? mantissa : steps + mantissa) / static_cast<float>(steps);
    value *= format.smallest_normal * unit;
    for (int i = 1; i < exponent; ++i) value *= 2.0f;
    table.words[code] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(code < half ? value : -value) >> 16);
  }
  return table;
}

constexpr CodeTable kFp4Words = table_of<kE2M1, 16>(2.0f);
constexpr CodeTable kE3M2Words = table_of<kE3M2, 64>(1.0f), kE2M3Words = table_of<kE2M3, 64>(1.0f);
constexpr CodeTable kInt4Words = [] {
  CodeTable table{};
  for (int code = 0; code < 16; ++code) {
    const auto value = static_cast<float>(16 * (code < 8 ? code : code - 16));
    table.words[code] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  }
  return table;
}();

// Lines of a record as bf16 numbers.
template <WeightFormat format>
class LineDecoder {
 public:
  LineDecoder() {
    if constexpr (kTraits.bits == 6) {
      constexpr const CodeTable& kTable = kTraits.decoding == Decoding::kE3M2 ? kE3M2Words : kE2M3Words;
      low_ = _mm512_loadu_si512(kTable.words);
      high_ = _mm512_loadu_si512(kTable.words + 32);
    } else if constexpr (kTraits.bits == 4) {
      low_ = _mm512_loadu_si512(kTraits.decoding == Decoding::kFp4 ? kFp4Words.words : kInt4Words.words);
    } else if constexpr (kTraits.decoding == Decoding::kE4M3) {
      // Subnormal codes 0 to 7: multiples of 2^-9.
      low_ = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
    }
  }

  LinePairs decode(const Record& record, int half, int line, int tile) const {
    const int at = (line * 2 + tile) * 64;
    if constexpr (kTraits.bits == 8) {
      const __m512i v = _mm512_loadu_si512(record.weights + half * (kInt8RecordBytes / 2) + at);
      const __m512i even = _mm512_and_si512(v, _mm512_set1_epi16(0xFF)), odd = _mm512_srli_epi16(v, 8);
      if constexpr (kTraits.decoding == Decoding::kE4M3) return {e4m3(even), e4m3(odd)};
      const __m512i zeros = zeros_of(record, half, line, tile);
      return {difference(even, zeros), difference(odd, zeros)};
    } else {
      const __m512i v = _mm512_loadu_si512(record.weights + at);
      const __m512i first = half == 0 ? v : _mm512_srli_epi16(v, 4);
      __m512i even = _mm512_and_si512(first, _mm512_set1_epi16(0xF));
      __m512i odd = _mm512_and_si512(_mm512_srli_epi16(first, 8), _mm512_set1_epi16(0xF));
      if constexpr (kTraits.bits == 4) {
        return {_mm512_permutexvar_epi16(even, low_), _mm512_permutexvar_epi16(odd, low_)};
      } else {
        // The two upper bits of this half and tile, where the code has them.
        const __m512i upper = _mm512_loadu_si512(record.weights + kInt4RecordBytes + line * 64);
        const int shift = 4 * tile + 2 * half;
        const __m512i moved = _mm512_srl_epi16(_mm512_slli_epi16(upper, 4), _mm_cvtsi32_si128(shift));
        const __m512i later = _mm512_srl_epi16(upper, _mm_cvtsi32_si128(shift + 4));
        even = _mm512_or_si512(even, _mm512_and_si512(moved, _mm512_set1_epi16(0x30)));
        odd = _mm512_or_si512(odd, _mm512_and_si512(later, _mm512_set1_epi16(0x30)));
        return {_mm512_permutex2var_epi16(low_, even, high_), _mm512_permutex2var_epi16(low_, odd, high_)};
      }
    }
  }

 private:
  static constexpr FormatTraits kTraits = traits_of(format);

  // Words with a code each.
  __m512i e4m3(__m512i code) const {
    const __m512i moved = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x7F)), 4);
    const __mmask32 subnormal = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
    const __m512i normal = _mm512_add_epi16(moved, _mm512_set1_epi16(0x3C00));
    const __m512i value = _mm512_mask_permutexvar_epi16(normal, subnormal, code, low_);
    // value | (code << 8 & 0x8000)
    return _mm512_ternarylogic_epi32(value, _mm512_slli_epi16(code, 8), _mm512_set1_epi16(static_cast<short>(0x8000)),
                                     0xF8);
  }

  // The zero points of 16 columns, in both words of a lane.
  static __m512i zeros_of(const Record& record, int half, int line, int tile) {
    const std::uint8_t* at =
        record.zeros + scale_slot(format, half * 64 + line * 4) * kBlockColumns + tile * kTileColumns;
    const __m512i lanes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return _mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16));
  }

  // int8 less a zero point that is held 128 larger: up to 255 in magnitude, which bf16 holds.
  static __m512i difference(__m512i bytes, __m512i zeros) {
    const __m512i words = _mm512_sub_epi16(_mm512_xor_si512(bytes, _mm512_set1_epi16(0x80)), zeros);
    const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16), high = _mm512_srai_epi32(words, 16);
    const __m512i low_bits = _mm512_castps_si512(_mm512_cvtepi32_ps(low));
    const __m512i high_bits = _mm512_castps_si512(_mm512_cvtepi32_ps(high));
    return _mm512_or_si512(_mm512_srli_epi32(low_bits, 16), high_bits);
  }

  __m512i low_, high_;
};

struct Bf16Dots {
  static constexpr int kRowsAtOnce = 8;    // 16 running sums
  static constexpr int kStraightRows = 4;  // beyond it decoding once and loading again is faster
  template <WeightFormat format>
  static constexpr bool kUnpacks = format != WeightFormat::kBF16;

  template <WeightFormat format>
  static void unpack(const Record& record, std::uint8_t* dst) {
    const LineDecoder<format> decoder;
    for (int half = 0; half < 2; ++half) {
      for (int line = 0; line < 16; ++line) {
        for (int tile = 0; tile < 2; ++tile) {
          const LinePairs pairs = decoder.decode(record, half, line, tile);
          std::uint8_t* to = dst + place(half, line, tile);
          _mm512_store_si512(to, pairs.even);
          _mm512_store_si512(to + kPairBytes, pairs.odd);
        }
      }
    }
  }

  template <int M, WeightFormat format, RowKind kind, bool packed>
  static void run(const FloatArgs& args, const RecordPart& part) {
    __m512 sum[M][2];
    for (auto& row : sum) row[0] = row[1] = _mm512_setzero_ps();
    const std::uint8_t* rows = args.a + part.half * args.half_bytes;
    [[maybe_unused]] const LineDecoder<format> decoder;
    for (int i = 0; i < run_lines(format); ++i) {
      const int line = part.line + i;
      for (int tile = 0; tile < 2; ++tile) {
        LinePairs w;
        if constexpr (packed) {
          w = decoder.decode(args.record, part.half, line, tile);
        } else {
          const std::uint8_t* at = args.weights + place(part.half, line, tile);
          w = {_mm512_loadu_si512(at), _mm512_loadu_si512(at + kPairBytes)};
        }
#pragma GCC unroll 8
        for (int r = 0; r < M; ++r) {
          sum[r][tile] = add_pair(sum[r][tile], w.even, rows + r * 128 + line * 8);
          sum[r][tile] = add_pair(sum[r][tile], w.odd, rows + r * 128 + line * 8 + 4);
        }
      }
    }
    for (int tile = 0; tile < 2; ++tile) {
      const F32x16 scale = run_scales<F32x16, format>(args.record, part.slot, tile * kTileColumns);
      for (int r = 0; r < M; ++r) add_run<F32x16, format>(args, r, tile * kTileColumns, F32x16{sum[r][tile]}, scale);
    }
  }

 private:
  static constexpr int kPairBytes = 128;
  static constexpr std::ptrdiff_t place(int half, int line, int tile) {
    return (half * 16 + line) * (2 * kPairBytes) + tile * 64;
  }
};

// Rows of floats on these instructions; fp32 ones have no faster way than any vectors have.
template <WeightFormat format, RowKind kind>
inline void multiply_floats_by_pairs(const Product& p) {
  if constexpr (kind == RowKind::kBF16) {
    multiply_float_rows<Bf16Dots, format, kind>(p);
  } else {
    multiply_float_rows<FloatVectors<F32x16>, format, kind>(p);
  }
}

inline double bf16_dot_peak(std::int64_t iterations) {
  constexpr int kChains = 16;
  __m512 sum[kChains];
  for (auto& s : sum) s = _mm512_setzero_ps();
  __m512i w = _mm512_set1_epi16(0x3F80);
  for (std::int64_t i = 0; i < iterations; ++i) {
    asm volatile("" : "+v"(w));  // keeps the products in the loop
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) sum[j] = add_pairs(sum[j], w, w);
  }
  for (auto& s : sum) asm volatile("" : : "v"(s));
  return static_cast<double>(iterations) * kChains * 64.0;
}

}  // namespace
}  // namespace cpumoe
