// The product of many rows with AVX512-VNNI; shared by the AVX512 and the AMX kernels.
#pragma once

#include "kernels/avx512_few_rows.h"

namespace cpumoe {
namespace {

struct Avx512Rows {
  static constexpr int kRowsAtOnce = 8;  // 16 running sums
  template <WeightFormat format>
  static constexpr int kStraightRows = 0;  // multiply_few_rows does these

  template <WeightFormat format>
  static void unpack_record(const Record& record, std::uint8_t* unpacked) {
    constexpr int kSubgroup = traits_of(format).subgroup;
    constexpr int kLines = kSubgroup == 0 || kSubgroup > 64 ? 16 : kSubgroup / 4;  // that share their zero points
    NibbleReader<format> reader;
    for (int first = 0; first < 16; first += kLines) {
      reader.begin(record, first);
#pragma GCC unroll 4
      for (int line = first; line < first + kLines; ++line) {
        for (int tile = 0; tile < 2; ++tile) {
          const int at = (line * 2 + tile) * 64;
          const __m512i v = _mm512_loadu_si512(record.weights + at);
          _mm512_store_si512(unpacked + at, reader.decode(v, 0, tile));
          _mm512_store_si512(unpacked + kInt8RecordBytes / 2 + at, reader.decode(v, 1, tile));
        }
      }
    }
  }

  template <int M, WeightFormat format, bool packed>
  static void record_product(const RecordArgs& args) {
    constexpr int subgroup = traits_of(format).subgroup;
    constexpr int kLines = subgroup == 16 ? 4 : 8;
    __m512i sum[M][2];
    for (int r = 0; r < M; ++r) {
      for (int tile = 0; tile < 2; ++tile) {
        sum[r][tile] = subgroup == 0 ? _mm512_loadu_si512(row_acc(args, r, tile)) : _mm512_setzero_si512();
      }
    }
    for (int i = 0; i < 2 * 16 / kLines; ++i) {
      const RecordPart part = record_part<format, kLines>(i);
      const std::uint8_t* w = args.weights + part.half * (kInt8RecordBytes / 2) + part.line * 128;
      const std::uint8_t* x = args.a + part.half * args.half_bytes + part.line * 4;
#pragma GCC unroll 2  // no more: GCC would spread the block over both tiles and spill the activations
      for (int line = 0; line < kLines; ++line) {
        const __m512i w0 = _mm512_loadu_si512(w + line * 128), w1 = _mm512_loadu_si512(w + line * 128 + 64);
#pragma GCC unroll 8
        for (int r = 0; r < M; ++r) {
          const __m512i u = broadcast_quad(x + r * 64 + line * 4);
          sum[r][0] = add_dot(sum[r][0], u, w0);
          sum[r][1] = add_dot(sum[r][1], u, w1);
        }
      }
      if (!part.scale_ends) continue;
      for (int tile = 0; tile < 2; ++tile) {
        const __m512 s = scales_at<F32x16, format>(args.record.scales, args.record.scale_type,
                                                   part.slot * kBlockColumns + tile * kTileColumns)
                             .v;
        for (int r = 0; r < M; ++r) {
          float* acc = row_acc(args, r, tile);
          _mm512_storeu_ps(acc, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][tile]), s, _mm512_loadu_ps(acc)));
          sum[r][tile] = _mm512_setzero_si512();
        }
      }
    }
    if (subgroup != 0) return;
    for (int r = 0; r < M; ++r) {
      for (int tile = 0; tile < 2; ++tile) _mm512_storeu_si512(row_acc(args, r, tile), sum[r][tile]);
    }
  }

 private:
  static float* row_acc(const RecordArgs& args, int row, int tile) {
    return args.acc + acc_index(row, tile * kTileColumns);
  }
};

// All products of integers without tiles.
struct Avx512Integers {
  template <WeightFormat format>
  static void multiply(const Product& p) {
    if (p.tile_rows <= kMaxFewRows) return multiply_few_rows<format>(p);
    multiply_rows<Avx512Rows, format>(p);
  }

  static double dot_peak(std::int64_t iterations) {
    constexpr int kChains = 16;
    __m512i sum[kChains];
    for (auto& s : sum) s = _mm512_setzero_si512();
    __m512i u = _mm512_set1_epi8(3), w = _mm512_set1_epi8(5);
    for (std::int64_t i = 0; i < iterations; ++i) {
      asm volatile("" : "+v"(u), "+v"(w));  // keeps the products in the loop
#pragma GCC unroll 16
      for (int j = 0; j < kChains; ++j) sum[j] = add_dot(sum[j], u, w);
    }
    for (auto& s : sum) asm volatile("" : : "v"(s));
    return static_cast<double>(iterations) * kChains * 128.0;
  }
};

}  // namespace
}  // namespace cpumoe
