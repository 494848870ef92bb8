// AVX-VNNI: vpdpbusd on 256-bit registers, for CPUs without AVX-512.
#include "ymm_multiply.h"

namespace cpumoe {
namespace {

struct AvxVnniDot {
  static constexpr bool kTimes16 = true;

  struct Sum {
    __m256i total;

    void clear() { total = _mm256_setzero_si256(); }

    template <WeightType>
    void add(__m256i u, __m256i w) {
#if defined(CPUMOE_EMULATE)
      total = _mm256_dpbusd_epi32(total, u, w);  // the AVX-512 encoding of the same instruction
#else
      total = _mm256_dpbusd_avx_epi32(total, u, w);
#endif
    }

    template <WeightType>
    void fold() {}

    __m256i value() const { return total; }
  };
};

}  // namespace

extern const Kernels kAvxVnniKernels;
constexpr Kernels kAvxVnniKernels = ymm_kernels<AvxVnniDot>("avx_vnni");

}  // namespace cpumoe
