// AVX512-VNNI: vpdpbusd on unsigned activations and signed weights.
#include "kernels/avx512_rows.h"
#include "kernels/float_products.h"
#include "kernels/rowwise.h"
#include "kernels/vector_avx512.h"

namespace cpumoe {
namespace {

struct Avx512Vnni : Avx512Integers {
  template <WeightFormat format, RowKind kind>
  static void multiply_floats(const Product& p) {
    multiply_float_rows<FloatVectors<F32x16>, format, kind>(p);
  }
};

constexpr Kernels make_kernels() {
  Kernels k = kernels_of<F32x16, Avx512Vnni>("avx512_vnni");
  k.dot_peak = vnni_dot_peak;
  k.float_dot_peak = fma_peak<F32x16>;
  k.read_bytes = read_zmm;
  return k;
}

}  // namespace

extern const Kernels kAvx512VnniKernels;
constexpr Kernels kAvx512VnniKernels = make_kernels();

}  // namespace cpumoe
