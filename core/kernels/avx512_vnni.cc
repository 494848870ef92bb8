// AVX512-VNNI: vpdpbusd on unsigned activations and signed weights.
#include "avx512_few_rows.h"
#include "rowwise.h"
#include "vector_avx512.h"

namespace cpumoe {
namespace {

struct Avx512Vnni {
  static constexpr int kRowsAtOnce = 8;    // 16 running sums
  static constexpr int kStraightRows = 0;  // multiply_few_rows does these

  static void unpack_record(const std::uint8_t* packed, std::uint8_t* unpacked) {
#pragma GCC unroll 8
    for (int line = 0; line < 32; ++line) {
      const __m512i v = _mm512_loadu_si512(packed + line * 64);
      _mm512_store_si512(unpacked + line * 64, low_nibbles(v));
      _mm512_store_si512(unpacked + kInt8RecordBytes / 2 + line * 64, high_nibbles(v));
    }
  }

  template <WeightFormat format>
  static void multiply(const Product& p) {
    if (p.tile_rows <= kMaxFewRows) return multiply_few_rows<format>(p);
    multiply_rows<Avx512Vnni, format>(p);
  }

  template <int M, WeightFormat format, bool packed>
  static void record_product(const RecordArgs& args) {
    constexpr int subgroup = traits_of(format).subgroup;
    __m512i sum[M][2];
    for (int r = 0; r < M; ++r) {
      for (int tile = 0; tile < 2; ++tile) {
        sum[r][tile] = subgroup == 0 ? _mm512_loadu_si512(row_acc(args, r, tile)) : _mm512_setzero_si512();
      }
    }
    for (int i = 0; i < 4; ++i) {
      const RecordPart part = record_part<subgroup>(i);
      const std::uint8_t* w = args.weights + part.half * (kInt8RecordBytes / 2) + part.line * 128;
      const std::uint8_t* x = args.a + part.half * args.half_bytes + part.line * 4;
#pragma GCC unroll 2  // no more: GCC would spread the block over both tiles and spill the activations
      for (int line = 0; line < 8; ++line) {
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
        const __m512 s = load_scales(args.scales, args.scale_type, part.slot * kBlockColumns + tile * kTileColumns);
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

double dot_peak(std::int64_t iterations) {
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

constexpr Kernels make_kernels() {
  Kernels k = kernels_of<F32x16, Avx512Vnni>("avx512_vnni");
  k.dot_peak = dot_peak;
  k.read_bytes = read_zmm;
  return k;
}

}  // namespace

extern const Kernels kAvx512VnniKernels;
constexpr Kernels kAvx512VnniKernels = make_kernels();

}  // namespace cpumoe
