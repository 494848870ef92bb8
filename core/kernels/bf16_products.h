// Products with rows of bf16 numbers by vdpbf16ps: all of them in the AVX512-BF16 kernel, those of few rows and of
// groups of 16 inputs in the AMX kernel.
//
// It adds two products to a running sum, one after the other, each rounded to nearest even; subnormal numbers count as
// zero, and there are none (prepare_floats.h). So its bits are those of float_products.h.
#pragma once

#include <immintrin.h>

#include <bit>

#include "kernels/float_products.h"
#include "kernels/vector_avx512.h"

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

constexpr std::uint16_t upper_half(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

// The value of a small float without its sign.
constexpr float magnitude_of_code(const SmallFloat& format, int code) {
  const int steps = 1 << format.mantissa, exponent = code / steps, mantissa = code % steps;
  float value = static_cast<float>(exponent == 0 ? mantissa : steps + mantissa) / static_cast<float>(steps);
  value *= format.smallest_normal;
  for (int i = 1; i < exponent; ++i) value *= 2.0f;
  return value;
}

// The upper and the lower bytes of the bf16 numbers that e4m3 numbers are, by their codes without the sign.
struct ByteTables {
  std::uint8_t upper[128], lower[128];
};

constexpr ByteTables kE4M3Bytes = [] {
  ByteTables tables{};
  for (int code = 0; code < 128; ++code) {
    const std::uint16_t word = upper_half(magnitude_of_code(kE4M3, code));
    tables.upper[code] = static_cast<std::uint8_t>(word >> 8);
    tables.lower[code] = static_cast<std::uint8_t>(word & 0xFF);
  }
  return tables;
}();

// bf16 numbers by their codes of up to 5 bits, twice the 16 of codes of 4 bits: vpermw takes 5 bits of an index, so
// what lies above a code does not matter.
struct CodeTable {
  std::uint16_t words[32];
};

template <const SmallFloat& format>
constexpr CodeTable magnitudes() {
  CodeTable table{};
  for (int code = 0; code < 32; ++code) table.words[code] = upper_half(magnitude_of_code(format, code));
  return table;
}

template <Decoding decoding>
constexpr CodeTable nibbles() {
  CodeTable table{};
  for (int i = 0; i < 32; ++i) {
    const int code = i % 16;
    float value = static_cast<float>(16 * (code < 8 ? code : code - 16));
    if (decoding == Decoding::kFp4) value = static_cast<float>(kFp4Doubled[code]);
    table.words[i] = upper_half(decoding == Decoding::kFp4 && code == 8 ? -0.0f : value);
  }
  return table;
}

constexpr CodeTable kE3M2Table = magnitudes<kE3M2>(), kE2M3Table = magnitudes<kE2M3>();
constexpr CodeTable kInt4Table = nibbles<Decoding::kNibbles>(), kFp4Table = nibbles<Decoding::kFp4>();

constexpr const CodeTable& table_of(Decoding decoding) {
  switch (decoding) {
    case Decoding::kE3M2: return kE3M2Table;
    case Decoding::kE2M3: return kE2M3Table;
    case Decoding::kFp4: return kFp4Table;
    default: return kInt4Table;
  }
}

// Lines of a record as bf16 numbers.
template <WeightFormat format>
class LineReader {
 public:
  LineReader() {
    if constexpr (kTraits.decoding == Decoding::kE4M3) {
      for (int i = 0; i < 2; ++i) {
        upper_[i] = _mm512_loadu_si512(kE4M3Bytes.upper + 64 * i);
        lower_[i] = _mm512_loadu_si512(kE4M3Bytes.lower + 64 * i);
      }
    } else {
      table_ = _mm512_loadu_si512(table_of(kTraits.decoding).words);
    }
  }

  template <int half, int tile>
  __attribute__((always_inline)) LinePairs decode(const Record& record, int line) const {
    const int at = line * (kTraits.bits == 6 ? 192 : 128) + tile * 64;
    if constexpr (kTraits.bits == 8) {
      const __m512i v = _mm512_loadu_si512(record.weights + half * (kInt8RecordBytes / 2) + at);
      if constexpr (kTraits.decoding == Decoding::kE4M3) return e4m3(v);
      const __m512i even = _mm512_and_si512(v, _mm512_set1_epi16(0xFF)), odd = _mm512_srli_epi16(v, 8);
      const __m512i zeros = zeros_of(record, half, line, tile);
      return {difference(even, zeros), difference(odd, zeros)};
    } else {
      const __m512i v = _mm512_loadu_si512(record.weights + at);
      const __m512i even = half == 0 ? v : _mm512_srli_epi16(v, 4), odd = _mm512_srli_epi16(v, 8 + 4 * half);
      if constexpr (kTraits.bits == 4) {
        return {_mm512_permutexvar_epi16(even, table_), _mm512_permutexvar_epi16(odd, table_)};
      } else {
        // The two upper bits of this half and tile: one of the magnitude, and the sign.
        const __m512i upper = _mm512_loadu_si512(record.weights + line * 192 + 128);
        constexpr int kFirst = 4 * tile + 2 * half;
        return {six_bits<kFirst>(even, upper), six_bits<8 + kFirst>(odd, upper)};
      }
    }
  }

 private:
  static constexpr FormatTraits kTraits = traits_of(format);

  // The bytes of all numbers by two looks at tables, which take 7 bits of a code, then the sign in the upper ones.
  LinePairs e4m3(__m512i codes) const {
    const __m512i lower = _mm512_permutex2var_epi8(lower_[0], codes, lower_[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(upper_[0], codes, upper_[1]);
    const __m512i signs = _mm512_set1_epi8(static_cast<char>(0x80)), low_bytes = _mm512_set1_epi16(0xFF);
    const __m512i upper = _mm512_ternarylogic_epi32(magnitude, codes, signs, 0xF8);  // magnitude | (codes & signs)
    // low_bytes chooses the first of two
    return {_mm512_ternarylogic_epi32(lower, low_bytes, _mm512_slli_epi16(upper, 8), 0xE2),
            _mm512_ternarylogic_epi32(_mm512_srli_epi16(lower, 8), low_bytes, upper, 0xE2)};
  }

  // value | (sign & 0x8000)
  static __m512i with_sign(__m512i value, __m512i sign) {
    return _mm512_ternarylogic_epi32(value, sign, _mm512_set1_epi16(static_cast<short>(0x8000)), 0xF8);
  }

  // Nibbles in the lowest bits of words, and words with a code's upper bits from bit `first` on.
  template <int first>
  __m512i six_bits(__m512i nibbles, __m512i upper) const {
    // Bit 4 of the code: nibbles & 0xF | upper & 0x10, of which only 5 bits are looked at.
    const __m512i fifth = first < 4 ? _mm512_slli_epi16(upper, 4 - first) : _mm512_srli_epi16(upper, first - 4);
    const __m512i code = _mm512_ternarylogic_epi32(nibbles, _mm512_set1_epi16(0xF), fifth, 0xE2);
    return with_sign(_mm512_permutexvar_epi16(code, table_), _mm512_slli_epi16(upper, 14 - first));
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

  __m512i table_, upper_[2], lower_[2];
};

struct Bf16Dots {
  // 12 sums of runs and 12 running ones fit the registers; without scales of runs spilling a few is faster than more
  // turns.
  template <WeightFormat format>
  static constexpr int kRowsAtOnce = traits_of(format).subgroup == 0 ? 8 : 6;
  static constexpr int kStraightRows = 4;  // beyond it decoding once and loading again is faster
  template <WeightFormat format>
  static constexpr bool kUnpacks = format != WeightFormat::kBF16;

  template <WeightFormat format>
  static void unpack(const Record& record, std::uint8_t* dst) {
    const LineReader<format> reader;
    for (int line = 0; line < 16; ++line) unpack_line<format>(reader, record, line, dst);
  }

  // Where the pairs of 16 columns and a line stand in an unpacked record, and in one that holds bf16 numbers: the even
  // ones, then kPairBytes further on the odd ones.
  static constexpr int kPairBytes = 128;
  static constexpr std::ptrdiff_t place(int half, int line, int tile) {
    return (half * 16 + line) * (2 * kPairBytes) + tile * 64;
  }

  // A line of both halves.
  template <WeightFormat format>
  static __attribute__((always_inline)) void unpack_line(const LineReader<format>& reader, const Record& record,
                                                         int line, std::uint8_t* dst) {
    store(reader.template decode<0, 0>(record, line), dst + place(0, line, 0));
    store(reader.template decode<0, 1>(record, line), dst + place(0, line, 1));
    store(reader.template decode<1, 0>(record, line), dst + place(1, line, 0));
    store(reader.template decode<1, 1>(record, line), dst + place(1, line, 1));
  }

  template <int M, WeightFormat format, RowKind kind, bool packed>
  static void multiply(const FloatArgs& args) {
    constexpr int kLines = run_lines(format);
    F32x16 total[M][2];
    for (int r = 0; r < M; ++r) {
      for (int tile = 0; tile < 2; ++tile) total[r][tile] = F32x16::load(args.acc + acc_index(r, tile * kTileColumns));
    }
    const LineReader<format> reader;
    // Where a byte holds inputs of both halves, runs of these come in turn: a line that is read gives both.
    constexpr bool kBoth = packed && traits_of(format).bits < 8 && traits_of(format).subgroup != 64;
    for (int i = 0; i < 2 * 16 / kLines; i += kBoth ? 2 : 1) {
      const RecordPart part = place_of_part<format, kLines>(i);
      if constexpr (kBoth) {
        run_both<M, format>(args, reader, part, place_of_part<format, kLines>(i + 1), total);
      } else if (part.half == 0) {
        run<M, format, packed, 0>(args, reader, part, total);
      } else {
        run<M, format, packed, 1>(args, reader, part, total);
      }
    }
    for (int r = 0; r < M; ++r) {
      for (int tile = 0; tile < 2; ++tile) F32x16::store(args.acc + acc_index(r, tile * kTileColumns), total[r][tile]);
    }
  }

 private:
  static void store(const LinePairs& pairs, std::uint8_t* dst) {
    _mm512_store_si512(dst, pairs.even);
    _mm512_store_si512(dst + kPairBytes, pairs.odd);
  }

  template <WeightFormat format, bool packed, int half, int tile>
  static __attribute__((always_inline)) LinePairs pairs_of(const FloatArgs& args, const LineReader<format>& reader,
                                                           int line) {
    if constexpr (packed) {
      return reader.template decode<half, tile>(args.record, line);
    } else {
      const std::uint8_t* at = args.weights + place(half, line, tile);
      return {_mm512_loadu_si512(at), _mm512_loadu_si512(at + kPairBytes)};
    }
  }

  // Adds the products of a line with every row.
  template <int M>
  static __attribute__((always_inline)) void add_line(const std::uint8_t* x, const LinePairs& first,
                                                      const LinePairs& second, __m512 (&sum)[M][2]) {
#pragma GCC unroll 8
    for (int r = 0; r < M; ++r) {
      sum[r][0] = add_pair(sum[r][0], first.even, x + r * 128);
      sum[r][1] = add_pair(sum[r][1], second.even, x + r * 128);
      sum[r][0] = add_pair(sum[r][0], first.odd, x + r * 128 + 4);
      sum[r][1] = add_pair(sum[r][1], second.odd, x + r * 128 + 4);
    }
  }

  template <int M, WeightFormat format>
  static __attribute__((always_inline)) void finish(const FloatArgs& args, int slot, const __m512 (&sum)[M][2],
                                                    F32x16 (&total)[M][2]) {
    for (int tile = 0; tile < 2; ++tile) {
      const F32x16 scale = run_scales<F32x16, format>(args.record, slot, tile * kTileColumns);
      for (int r = 0; r < M; ++r) {
        total[r][tile] = with_run<F32x16, format>(args, r, total[r][tile], F32x16{sum[r][tile]}, scale);
      }
    }
  }

  template <int M, WeightFormat format, bool packed, int half>
  static __attribute__((always_inline)) void run(const FloatArgs& args, const LineReader<format>& reader,
                                                 const RecordPart& part, F32x16 (&total)[M][2]) {
    __m512 sum[M][2];
    for (auto& row : sum) row[0] = row[1] = _mm512_setzero_ps();
    const std::uint8_t* rows = args.a + half * args.half_bytes;
    for (int i = 0; i < run_lines(format); ++i) {
      const int line = part.line + i;
      const LinePairs first = pairs_of<format, packed, half, 0>(args, reader, line);
      const LinePairs second = pairs_of<format, packed, half, 1>(args, reader, line);
      add_line<M>(rows + line * 8, first, second, sum);
    }
    finish<M, format>(args, part.slot, sum, total);
  }

  template <int M, WeightFormat format>
  static __attribute__((always_inline)) void run_both(const FloatArgs& args, const LineReader<format>& reader,
                                                      const RecordPart& part, const RecordPart& other,
                                                      F32x16 (&total)[M][2]) {
    __m512 sum[2][M][2];
    for (auto& half : sum) {
      for (auto& row : half) row[0] = row[1] = _mm512_setzero_ps();
    }
    for (int i = 0; i < run_lines(format); ++i) {
      const int line = part.line + i;
      add_line<M>(args.a + line * 8, pairs_of<format, true, 0, 0>(args, reader, line),
                  pairs_of<format, true, 0, 1>(args, reader, line), sum[0]);
      add_line<M>(args.a + args.half_bytes + line * 8, pairs_of<format, true, 1, 0>(args, reader, line),
                  pairs_of<format, true, 1, 1>(args, reader, line), sum[1]);
    }
    finish<M, format>(args, part.slot, sum[0], total);
    finish<M, format>(args, other.slot, sum[1], total);
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
