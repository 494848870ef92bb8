// The product on 256-bit registers, for AVX2 and AVX-VNNI. They differ in how four bytes are multiplied and summed:
//
//   struct Dot {
//     static constexpr bool kTimes16;   // weights come in as 16 w (int4), not w
//     struct Sum { ... };               // running sums of 8 columns over at most 8 lines (32 inputs)
//     Sum::clear(), Sum::add<bits>(activations, weights), Sum::value<bits>() -> __m256i of 8 int32
//   };
#pragma once

#include "row_blocks.h"
#include "rowwise.h"
#include "vector_avx2.h"

namespace cpumoe {
namespace {

inline __m256i load_ymm(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256i broadcast_quad(const std::uint8_t* p) {
  std::int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return _mm256_set1_epi32(quad);
}

inline __m256 load_scales(const std::uint8_t* scales, ScaleType type, int index) {
  if (type == ScaleType::kF32) return _mm256_loadu_ps(reinterpret_cast<const float*>(scales + index * 4));
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + index * 2));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

// Nibbles of a vector as signed bytes: 16 w by masks, or w by a table.
template <class Dot, int half>
inline __m256i nibbles(__m256i v) {
  if constexpr (Dot::kTimes16) {
    const __m256i mask = _mm256_set1_epi8(static_cast<char>(0xF0));
    return _mm256_and_si256(half == 0 ? _mm256_slli_epi16(v, 4) : v, mask);
  } else {
    const __m256i table = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6,
                                           7, -8, -7, -6, -5, -4, -3, -2, -1);
    const __m256i mask = _mm256_set1_epi8(0x0F);
    return _mm256_shuffle_epi8(table, _mm256_and_si256(half == 0 ? v : _mm256_srli_epi16(v, 4), mask));
  }
}

// sums[row][c] (+)= eight lines (32 inputs) of 8 columns each, for one 16-column tile and one half of the record.
// `packed` reads nibbles on the way, else the record is in the int8 layout. Not inlined: what the sums of a whole
// record need would otherwise push the running sums of these lines out of the 16 registers.
template <class Dot, int M, int bits, bool packed, int half>
__attribute__((noinline)) void part_sums(const std::uint8_t* w, const std::uint8_t* x, bool add, __m256i (*sums)[2]) {
  typename Dot::Sum sum[M][2];
  for (int r = 0; r < M; ++r) {
    sum[r][0].clear();
    sum[r][1].clear();
  }
#pragma GCC unroll 2  // no more: GCC would reorder the block and spill
  for (int line = 0; line < 8; ++line) {
    __m256i w0 = load_ymm(w + line * 128), w1 = load_ymm(w + line * 128 + 32);
    if constexpr (packed) {
      w0 = nibbles<Dot, half>(w0);
      w1 = nibbles<Dot, half>(w1);
    }
#pragma GCC unroll 8
    for (int r = 0; r < M; ++r) {
      const __m256i u = broadcast_quad(x + r * 64 + line * 4);
      sum[r][0].template add<bits>(u, w0);
      sum[r][1].template add<bits>(u, w1);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < M; ++r) {
    for (int c = 0; c < 2; ++c) {
      const __m256i value = sum[r][c].template value<bits>();
      sums[r][c] = add ? _mm256_add_epi32(sums[r][c], value) : value;
    }
  }
}

template <class Dot>
struct Ymm {
  static constexpr int kRowsAtOnce = 4;  // 8 running sums in the 16 registers
  static constexpr int kStraightRows = 4;

  static void unpack_record(const std::uint8_t* packed, std::uint8_t* unpacked) {
    for (int i = 0; i < kInt4RecordBytes; i += 32) {
      const __m256i v = load_ymm(packed + i);
      _mm256_store_si256(reinterpret_cast<__m256i*>(unpacked + i), nibbles<Dot, 0>(v));
      _mm256_store_si256(reinterpret_cast<__m256i*>(unpacked + kInt8RecordBytes / 2 + i), nibbles<Dot, 1>(v));
    }
  }

  template <WeightFormat format>
  static void multiply(const Product& p) {
    multiply_rows<Ymm, format>(p);
  }

  template <int M, WeightFormat format, bool packed>
  static void record_product(const RecordArgs& args) {
    constexpr int bits = traits_of(format).bits, subgroup = traits_of(format).subgroup;
    constexpr int kShift = bits == 4 && !Dot::kTimes16 ? 4 : 0;  // brings w to 16 w
    for (int tile = 0; tile < 2; ++tile) {                       // 16 columns at a time
      __m256i sums[M][2];
      bool started = false;
      float* tile_acc = args.acc + tile * (kTileRows * kTileColumns);
      for (int i = 0; i < 4; ++i) {
        const RecordPart part = record_part<subgroup>(i);
        const std::uint8_t* w =
            args.weights + part.line * 128 + tile * 64 + (packed ? 0 : part.half * (kInt8RecordBytes / 2));
        const std::uint8_t* x = args.a + part.half * args.half_bytes + part.line * 4;
        if (part.half == 0) {
          part_sums<Dot, M, bits, packed, 0>(w, x, started, sums);
        } else {
          part_sums<Dot, M, bits, packed, 1>(w, x, started, sums);
        }
        started = !part.scale_ends;
        if (!part.scale_ends) continue;
        for (int c = 0; c < 2; ++c) {
          const __m256 s =
              load_scales(args.scales, args.scale_type, part.slot * kBlockColumns + tile * kTileColumns + c * 8);
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
};

// The instruction mix of part_sums on registers alone.
template <class Dot>
double dot_peak(std::int64_t iterations) {
  constexpr int kChains = 8;
  __m256i u = _mm256_set1_epi8(3), w = _mm256_set1_epi8(5), total = _mm256_setzero_si256();
  for (std::int64_t i = 0; i < iterations; ++i) {
    typename Dot::Sum sum[kChains];
    for (auto& s : sum) s.clear();
    for (int line = 0; line < 8; ++line) {
#pragma GCC unroll 8
      for (int j = 0; j < kChains; ++j) {
        asm volatile("" : "+x"(u), "+x"(w));  // a product of its own for every chain
        sum[j].template add<4>(u, w);
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < kChains; ++j) total = _mm256_add_epi32(total, sum[j].template value<4>());
  }
  asm volatile("" : : "x"(total));
  return static_cast<double>(iterations) * 8 * kChains * 64.0;
}

template <class Dot>
constexpr Kernels ymm_kernels(const char* name) {
  Kernels k = kernels_of<F32x8, Ymm<Dot>>(name);
  k.dot_peak = dot_peak<Dot>;
  k.read_bytes = read_ymm;
  return k;
}

}  // namespace
}  // namespace cpumoe
