// The product on 256-bit registers, for AVX2 and AVX-VNNI. They differ in how four bytes are multiplied and summed:
//
//   struct Dot {
//     static constexpr bool kTimes16;   // int4 weights come in as 16 w, not w
//     lines(largest)                    // that running sums of integers of that magnitude may take, at most 8
//     struct Sum { ... };               // running sums of 8 columns over so many lines (4 inputs each)
//     Sum::clear(), Sum::add<largest>(activations, weights), Sum::value<largest>() -> __m256i of 8 int32
//   };
#pragma once

#include "kernels/float_products.h"
#include "kernels/row_blocks.h"
#include "kernels/rowwise.h"
#include "kernels/vector_avx2.h"

namespace cpumoe {
namespace {

inline __m256i load_ymm(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256i broadcast_quad(const std::uint8_t* p) {
  std::int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return _mm256_set1_epi32(quad);
}

// The 16 integers that nibbles stand for (but for zero points), twice, as vpshufb takes them.
template <Decoding decoding>
inline __m256i integers_of_nibbles() {
  alignas(16) static constexpr std::int8_t kInt4[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
  const std::int8_t* table = decoding == Decoding::kFp4 ? kFp4Doubled : kInt4;
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}

// Nibbles of a vector as signed bytes, by masks or by a table; those with a zero point from 0 to 15.
template <class Dot, Decoding decoding, int half>
inline __m256i nibbles(__m256i v) {
  if constexpr (decoding == Decoding::kNibbles && Dot::kTimes16) {
    const __m256i mask = _mm256_set1_epi8(static_cast<char>(0xF0));
    return _mm256_and_si256(half == 0 ? _mm256_slli_epi16(v, 4) : v, mask);
  } else {
    const __m256i codes = _mm256_and_si256(half == 0 ? v : _mm256_srli_epi16(v, 4), _mm256_set1_epi8(0x0F));
    if constexpr (decoding == Decoding::kNibblesOfZero) return codes;
    return _mm256_shuffle_epi8(integers_of_nibbles<decoding>(), codes);
  }
}

// The zero points of 8 columns, four bytes of each.
inline __m256i load_zeros(const std::uint8_t* zeros) {
  const __m256i first_bytes =
      _mm256_set_epi32(0x0C0C0C0C, 0x08080808, 0x04040404, 0, 0x0C0C0C0C, 0x08080808, 0x04040404, 0);
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros));
  return _mm256_shuffle_epi8(_mm256_cvtepu8_epi32(bytes), first_bytes);
}

// sums[row][c] (+)= `lines` lines (4 inputs each) of 8 columns each, for one 16-column tile and one half of the record.
// Not inlined: what the sums of a whole record need would otherwise push the running sums of these lines out of the 16
// registers. `decoding` is kBytes where the record is in the int8 layout.
template <class Dot, int M, int largest, int lines, Decoding decoding, int half>
__attribute__((noinline)) void part_sums(const std::uint8_t* w, const std::uint8_t* x, bool add, __m256i (*sums)[2]) {
  typename Dot::Sum sum[M][2];
  for (int r = 0; r < M; ++r) {
    sum[r][0].clear();
    sum[r][1].clear();
  }
#pragma GCC unroll 2  // no more: GCC would reorder the block and spill
  for (int line = 0; line < lines; ++line) {
    __m256i w0 = load_ymm(w + line * 128), w1 = load_ymm(w + line * 128 + 32);
    if constexpr (decoding != Decoding::kBytes) {
      w0 = nibbles<Dot, decoding, half>(w0);
      w1 = nibbles<Dot, decoding, half>(w1);
    }
#pragma GCC unroll 8
    for (int r = 0; r < M; ++r) {
      const __m256i u = broadcast_quad(x + r * 64 + line * 4);
      sum[r][0].template add<largest>(u, w0);
      sum[r][1].template add<largest>(u, w1);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < M; ++r) {
    for (int c = 0; c < 2; ++c) {
      const __m256i value = sum[r][c].template value<largest>();
      sums[r][c] = add ? _mm256_add_epi32(sums[r][c], value) : value;
    }
  }
}

template <class Dot>
struct Ymm : FloatProducts<F32x8> {
  static constexpr int kRowsAtOnce = 4;  // 8 running sums in the 16 registers
  template <WeightFormat format>
  static constexpr int kStraightRows = traits_of(format).has_zeros() ? 0 : 4;

  // Whether the integers come in 16 times too small, and how large they are then.
  template <WeightFormat format>
  static constexpr bool kSmall = traits_of(format).decoding == Decoding::kNibbles && !Dot::kTimes16;
  template <WeightFormat format>
  static constexpr int kLargest = kSmall<format> ? 8 : traits_of(format).largest;

  template <WeightFormat format>
  static void unpack_record(const Record& record, std::uint8_t* unpacked) {
    constexpr Decoding kDecoding = traits_of(format).decoding;
    for (int line = 0; line < 16; ++line) {
      for (int c = 0; c < 4; ++c) {  // eight columns each
        const int at = line * 128 + c * 32;
        const __m256i v = load_ymm(record.weights + at);
        __m256i low = nibbles<Dot, kDecoding, 0>(v), high = nibbles<Dot, kDecoding, 1>(v);
        if constexpr (kDecoding == Decoding::kNibblesOfZero) {
          const std::uint8_t* zeros = record.zeros + c * 8;
          low = _mm256_sub_epi8(low, load_zeros(zeros + scale_slot(format, line * 4) * kBlockColumns));
          high = _mm256_sub_epi8(high, load_zeros(zeros + scale_slot(format, 64 + line * 4) * kBlockColumns));
        }
        _mm256_store_si256(reinterpret_cast<__m256i*>(unpacked + at), low);
        _mm256_store_si256(reinterpret_cast<__m256i*>(unpacked + kInt8RecordBytes / 2 + at), high);
      }
    }
  }

  template <WeightFormat format>
  static void multiply(const Product& p) {
    multiply_rows<Ymm, format>(p);
  }

  template <int M, WeightFormat format, bool packed>
  static void record_product(const RecordArgs& args) {
    constexpr int subgroup = traits_of(format).subgroup, kSumLines = Dot::lines(kLargest<format>);
    constexpr int kLines = subgroup == 16 && kSumLines > 4 ? 4 : kSumLines;
    constexpr Decoding kDecoding = packed ? traits_of(format).decoding : Decoding::kBytes;
    constexpr int kShift = kSmall<format> ? 4 : 0;  // brings w to 16 w
    for (int tile = 0; tile < 2; ++tile) {          // 16 columns at a time
      __m256i sums[M][2];
      bool started = false;
      float* tile_acc = args.acc + tile * (kTileRows * kTileColumns);
      for (int i = 0; i < 2 * 16 / kLines; ++i) {
        const RecordPart part = record_part<format, kLines>(i);
        const std::uint8_t* w =
            args.weights + part.line * 128 + tile * 64 + (packed ? 0 : part.half * (kInt8RecordBytes / 2));
        const std::uint8_t* x = args.a + part.half * args.half_bytes + part.line * 4;
        if (part.half == 0) {
          part_sums<Dot, M, kLargest<format>, kLines, kDecoding, 0>(w, x, started, sums);
        } else {
          part_sums<Dot, M, kLargest<format>, kLines, kDecoding, 1>(w, x, started, sums);
        }
        started = !part.scale_ends;
        if (!part.scale_ends) continue;
        for (int c = 0; c < 2; ++c) {
          const int column = tile * kTileColumns + c * 8;
          const __m256 s =
              scales_at<F32x8, format>(args.record.scales, args.record.scale_type, part.slot * kBlockColumns + column)
                  .v;
          for (int r = 0; r < M; ++r) {
            float* p = tile_acc + r * kTileColumns + c * 8;
            const __m256 v = _mm256_cvtepi32_ps(_mm256_slli_epi32(sums[r][c], kShift));
            _mm256_storeu_ps(p, _mm256_fmadd_ps(v, s, _mm256_loadu_ps(p)));
          }
        }
      }
      if (subgroup != 0) continue;
      for (int r = 0; r < M; ++r) {
        for (int c = 0; c < 2; ++c) {
          auto* p = reinterpret_cast<__m256i*>(tile_acc + r * kTileColumns + c * 8);
          _mm256_storeu_si256(p, _mm256_add_epi32(_mm256_slli_epi32(sums[r][c], kShift), _mm256_loadu_si256(p)));
        }
      }
    }
  }

  // The instruction mix of part_sums on registers alone.
  static double dot_peak(std::int64_t iterations) {
    constexpr int kChains = 8;
    __m256i u = _mm256_set1_epi8(3), w = _mm256_set1_epi8(5), total = _mm256_setzero_si256();
    for (std::int64_t i = 0; i < iterations; ++i) {
      typename Dot::Sum sum[kChains];
      for (auto& s : sum) s.clear();
      for (int line = 0; line < 8; ++line) {
#pragma GCC unroll 8
        for (int j = 0; j < kChains; ++j) {
          asm volatile("" : "+x"(u), "+x"(w));  // a product of its own for every chain
          sum[j].template add<8>(u, w);
        }
      }
#pragma GCC unroll 8
      for (int j = 0; j < kChains; ++j) total = _mm256_add_epi32(total, sum[j].template value<8>());
    }
    asm volatile("" : : "x"(total));
    return static_cast<double>(iterations) * 8 * kChains * 64.0;
  }
};

}  // namespace
}  // namespace cpumoe
