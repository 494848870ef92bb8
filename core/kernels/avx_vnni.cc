// AVX-VNNI: vpdpbusd on 256-bit registers, for CPUs without AVX-512.
#include "kernels/ymm_multiply.h"

namespace cpumoe {
namespace {

struct AvxVnniDot {
  static constexpr bool kTimes16 = true;

  static constexpr int lines(int) { return 8; }

  struct Sum {
    __m256i total;

    void clear() { total = _mm256_setzero_si256(); }

    template <int largest>
    void add(__m256i u, __m256i w) {
// Assembly: GCC 12 copies every running sum of a loop around its own intrinsic.
#if defined(CPUMOE_EMULATE)
      asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(u), "v"(w));  // the AVX-512 encoding of the same instruction
#else
      asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(total) : "x"(u), "x"(w));
#endif
    }

    template <int largest>
    __m256i value() const {
      return total;
    }
  };
};

}  // namespace

extern const Kernels kAvxVnniKernels;
constexpr Kernels kAvxVnniKernels = kernels_of<F32x8, Ymm<AvxVnniDot>>("avx_vnni");

}  // namespace cpumoe
