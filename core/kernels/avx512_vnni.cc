// AVX512-VNNI: vpdpbusd on unsigned activations and signed weights.
#include "kernels/avx512_rows.h"
#include "kernels/float_products.h"
#include "kernels/rowwise.h"
#include "kernels/vector_avx512.h"

namespace cpumoe {
namespace {

struct Avx512Vnni : Avx512Integers, FloatProducts<F32x16> {};

}  // namespace

extern const Kernels kAvx512VnniKernels;
constexpr Kernels kAvx512VnniKernels = kernels_of<F32x16, Avx512Vnni>("avx512_vnni");

}  // namespace cpumoe
