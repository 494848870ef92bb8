// Decode with AVX512-VNNI, straight from the packed weights; shared by the AVX512-VNNI and the AMX kernel.
//
// One 64-byte line gives 16 columns x 4 inputs in its low nibbles and as many in its high ones: two masks and two
// vpdpbusd per row. The arithmetic is several times faster than DRAM, so what matters is reading ahead.
#pragma once

#include <immintrin.h>

#include "kernels/row_blocks.h"
#include "kernels/vector_avx512.h"

namespace cpumoe {
namespace {

constexpr int kMaxFewRows = 6;

inline __m512i broadcast_quad(const std::uint8_t* p) {
  std::int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return _mm512_set1_epi32(quad);
}

// sum + four products of unsigned u and signed w per lane. Assembly, because GCC 12 copies every running sum of a loop
// around its own intrinsic.
inline __m512i add_dot(__m512i sum, __m512i u, __m512i w) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(w));
  return sum;
}

inline __m512i high_nibbles(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(0xF0))); }
inline __m512i low_nibbles(__m512i v) { return high_nibbles(_mm512_slli_epi16(v, 4)); }

inline __m512i nibble_codes(__m512i v, int half) {
  return _mm512_and_si512(half == 0 ? v : _mm512_srli_epi16(v, 4), _mm512_set1_epi8(0x0F));
}

// The zero points of 16 columns, four bytes of each.
inline __m512i load_zeros(const std::uint8_t* zeros) {
  const __m512i first_bytes = _mm512_set4_epi32(0x0C0C0C0C, 0x08080808, 0x04040404, 0x00000000);
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
  return _mm512_shuffle_epi8(_mm512_cvtepu8_epi32(bytes), first_bytes);
}

// Decodes lines of nibbles into the bytes that are multiplied, for lines and columns that share their zero points.
template <WeightFormat format>
struct NibbleReader {
  static constexpr Decoding kDecoding = traits_of(format).decoding;
  __m512i zeros[2][2];  // [half][column tile]

  // Of the lines from `line` on.
  void begin(const Record& record, int line) {
    if constexpr (kDecoding == Decoding::kNibblesOfZero) {
      for (int half = 0; half < 2; ++half) {
        const int slot = scale_slot(format, half * 64 + line * 4);
        for (int tile = 0; tile < 2; ++tile) {
          zeros[half][tile] = load_zeros(record.zeros + slot * kBlockColumns + tile * kTileColumns);
        }
      }
    }
  }

  __m512i decode(__m512i v, int half, int tile) const {
    if constexpr (kDecoding == Decoding::kNibbles) {
      return half == 0 ? low_nibbles(v) : high_nibbles(v);
    } else if constexpr (kDecoding == Decoding::kFp4) {
      const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kFp4Doubled));
      return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibble_codes(v, half));
    } else {
      return _mm512_sub_epi8(nibble_codes(v, half), zeros[half][tile]);
    }
  }
};

template <int M>
struct FewSums {
  __m512i v[M][2];
  void clear() {
    for (int r = 0; r < M; ++r) v[r][0] = v[r][1] = _mm512_setzero_si512();
  }
  void add(const FewSums& other) {
    for (int r = 0; r < M; ++r) {
      v[r][0] = _mm512_add_epi32(v[r][0], other.v[r][0]);
      v[r][1] = _mm512_add_epi32(v[r][1], other.v[r][1]);
    }
  }
};

// The running sums of M rows from the accumulators: floats in `total` where inputs are grouped, else integers.
template <bool grouped, int M>
inline __attribute__((always_inline)) void load_sums(const float* acc, FewSums<M>& sums, __m512 (&total)[M][2]) {
  for (int r = 0; r < M; ++r) {
    for (int tile = 0; tile < 2; ++tile) {
      const float* from = acc + acc_index(r, tile * kTileColumns);
      if (grouped) total[r][tile] = _mm512_loadu_ps(from);
      if (!grouped) sums.v[r][tile] = _mm512_loadu_si512(from);
    }
  }
}

template <bool grouped, int M>
inline __attribute__((always_inline)) void store_sums(float* acc, const FewSums<M>& sums, const __m512 (&total)[M][2]) {
  for (int r = 0; r < M; ++r) {
    for (int tile = 0; tile < 2; ++tile) {
      float* to = acc + acc_index(r, tile * kTileColumns);
      grouped ? _mm512_storeu_ps(to, total[r][tile]) : _mm512_storeu_si512(to, sums.v[r][tile]);
    }
  }
}

template <WeightFormat format, int M>
inline __attribute__((always_inline)) void add_scaled(const FewSums<M>& sums, const std::uint8_t* scales,
                                                      ScaleType type, int slot, __m512 (&total)[M][2]) {
  for (int tile = 0; tile < 2; ++tile) {
    const __m512 s = scales_at<F32x16, format>(scales, type, slot * kBlockColumns + tile * kTileColumns).v;
    for (int r = 0; r < M; ++r) {
      total[r][tile] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums.v[r][tile]), s, total[r][tile]);
    }
  }
}

template <int M, WeightFormat format>
void few_rows_nibbles(const Product& p) {
  constexpr int subgroup = traits_of(format).subgroup;
  constexpr int kLines = subgroup == 16 ? 4 : subgroup == 32 ? 8 : 16;
  constexpr bool kOneScale = subgroup == 0 || subgroup == 128;  // both halves of a record share it
  // With one or two rows the halves get sums of their own, for more independent chains; with more, registers are short.
  constexpr bool kOneSum = kOneScale && M > 2;
  const int stride = record_bytes(format, p.layout.scales);
  const ScaleType type = p.layout.scales;
  const ReadAhead ahead = p.ahead;
  __m512 total[M][2];  // grouped
  FewSums<M> low, high;
  NibbleReader<format> reader;
  load_sums<subgroup != 0>(p.acc, low, total);
  if constexpr (subgroup == 0) high.clear();
  for (int g = 0; g < p.record_count; ++g) {
    const std::uint8_t* record = p.records + static_cast<std::ptrdiff_t>(g) * stride;
    const Record parts = record_at<format>(record, type);
    const std::uint8_t* w = parts.weights;
    const std::uint8_t* a = p.a + g * p.a_record_stride;
    const char* next = ahead_of(ahead, record);
    for (int first = 0; first < 16; first += kLines) {
      if constexpr (subgroup != 0) {
        low.clear();
        high.clear();
      }
      reader.begin(parts, first);
#pragma GCC unroll 2
      for (int line = first; line < first + kLines; ++line) {
        _mm_prefetch(next + line * 128, _MM_HINT_T1);
        _mm_prefetch(next + line * 128 + 64, _MM_HINT_T1);
        const __m512i v0 = _mm512_loadu_si512(w + line * 128), v1 = _mm512_loadu_si512(w + line * 128 + 64);
        const __m512i low0 = reader.decode(v0, 0, 0), low1 = reader.decode(v1, 0, 1);
        const __m512i high0 = reader.decode(v0, 1, 0), high1 = reader.decode(v1, 1, 1);
#pragma GCC unroll 8
        for (int r = 0; r < M; ++r) {
          FewSums<M>& other = kOneSum ? low : high;
          const __m512i u = broadcast_quad(a + r * 64 + line * 4);
          low.v[r][0] = add_dot(low.v[r][0], u, low0);
          low.v[r][1] = add_dot(low.v[r][1], u, low1);
          const __m512i v = broadcast_quad(a + M * 64 + r * 64 + line * 4);
          other.v[r][0] = add_dot(other.v[r][0], v, high0);
          other.v[r][1] = add_dot(other.v[r][1], v, high1);
        }
      }
      if constexpr (subgroup == 128) {
        if constexpr (!kOneSum) low.add(high);
        add_scaled<format, M>(low, record, type, 0, total);
      } else if constexpr (subgroup != 0) {
        add_scaled<format, M>(low, record, type, scale_slot(format, first * 4), total);
        add_scaled<format, M>(high, record, type, scale_slot(format, 64 + first * 4), total);
      }
    }
    for (int i = kInt4RecordBytes; i < stride; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
  }
  if constexpr (subgroup == 0 && !kOneSum) low.add(high);
  store_sums<subgroup != 0>(p.acc, low, total);
}

// Bytes: the lines of a record in their order, so that it is one stream.
template <int M, WeightFormat format>
void few_rows_bytes(const Product& p) {
  constexpr int subgroup = traits_of(format).subgroup;
  constexpr int kLines = subgroup == 32 ? 8 : 16;
  const ScaleType type = p.layout.scales;
  const int stride = record_bytes(format, type), scale_bytes = record_scale_bytes(format, type);
  __m512 total[M][2];  // grouped
  FewSums<M> sums;
  // Not through load_sums: with it GCC 12 makes a loop that reads DRAM 12 % slower for a single row.
  for (int r = 0; r < M; ++r) {
    for (int tile = 0; tile < 2; ++tile) {
      const float* acc = p.acc + acc_index(r, tile * kTileColumns);
      if constexpr (subgroup == 0) {
        sums.v[r][tile] = _mm512_loadu_si512(acc);
      } else {
        total[r][tile] = _mm512_loadu_ps(acc);
      }
    }
  }
  if constexpr (subgroup != 0) sums.clear();
  for (int g = 0; g < p.record_count; ++g) {
    const std::uint8_t* record = p.records + static_cast<std::ptrdiff_t>(g) * stride;
    const std::uint8_t* w = record + scale_bytes;
    const char* next = ahead_of(p.ahead, record);
    for (int i = kInt8RecordBytes; i < stride; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
    for (int half = 0; half < 2; ++half) {
      const std::uint8_t* a = p.a + g * p.a_record_stride + half * (M * 64);
      for (int first = 0; first < 16; first += kLines) {
#pragma GCC unroll 4
        for (int line = first; line < first + kLines; ++line, w += 128, next += 128) {
          _mm_prefetch(next, _MM_HINT_T1);
          _mm_prefetch(next + 64, _MM_HINT_T1);
          const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 8
          for (int r = 0; r < M; ++r) {
            const __m512i u = broadcast_quad(a + r * 64 + line * 4);
            sums.v[r][0] = add_dot(sums.v[r][0], u, w0);
            sums.v[r][1] = add_dot(sums.v[r][1], u, w1);
          }
        }
        if constexpr (subgroup != 0) {
          if (subgroup == kRecordDepth && half == 0) continue;
          add_scaled<format, M>(sums, record, type, scale_slot(format, half * 64 + first * 4), total);
          sums.clear();
        }
      }
    }
  }
  for (int r = 0; r < M; ++r) {
    for (int tile = 0; tile < 2; ++tile) {
      float* acc = p.acc + acc_index(r, tile * kTileColumns);
      if constexpr (subgroup == 0) {
        _mm512_storeu_si512(acc, sums.v[r][tile]);
      } else {
        _mm512_storeu_ps(acc, total[r][tile]);
      }
    }
  }
}

template <int M, WeightFormat format>
inline void few_rows(const Product& p) {
  if constexpr (traits_of(format).bits == 8) {
    few_rows_bytes<M, format>(p);
  } else {
    few_rows_nibbles<M, format>(p);
  }
}

// p.tiles is 1 and p.tile_rows is p.rows, at most kMaxFewRows.
template <WeightFormat format>
void multiply_few_rows(const Product& p) {
  static constexpr void (*kByRows[kMaxFewRows])(const Product&) = {few_rows<1, format>, few_rows<2, format>,
                                                                   few_rows<3, format>, few_rows<4, format>,
                                                                   few_rows<5, format>, few_rows<6, format>};
  kByRows[p.rows - 1](p);
}

}  // namespace
}  // namespace cpumoe
