// AVX512-BF16: integers as AVX512-VNNI has them, and vdpbf16ps for rows of floats.
#include "kernels/avx512_rows.h"
#include "kernels/bf16_attention.h"
#include "kernels/bf16_products.h"
#include "kernels/rowwise.h"
#include "kernels/vector_avx512.h"

namespace cpumoe {
namespace {

struct Avx512Bf16 : Avx512Integers {
  template <WeightFormat format, RowKind kind>
  static void multiply_floats(const Product& p) {
    multiply_floats_by_pairs<format, kind>(p);
  }
};

constexpr Kernels make_kernels() {
  Kernels k = kernels_of<F32x16, Avx512Bf16>("avx512_bf16");
  add_bf16_attention(k);
  k.float_dot_peak = bf16_dot_peak;
  return k;
}

}  // namespace

extern const Kernels kAvx512Bf16Kernels;
constexpr Kernels kAvx512Bf16Kernels = make_kernels();

}  // namespace cpumoe
