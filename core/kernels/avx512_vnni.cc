// AVX512-VNNI: vpdpbusd on unsigned activations and signed weights.
#include "avx512_rows.h"
#include "rowwise.h"
#include "vector_avx512.h"

namespace cpumoe {
namespace {

struct Avx512Vnni {
  template <WeightFormat format>
  static void multiply(const Product& p) {
    if (p.tile_rows <= kMaxFewRows) return multiply_few_rows<format>(p);
    multiply_rows<Avx512Rows, format>(p);
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
