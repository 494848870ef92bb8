// Arm dot product (FEAT_DotProd): sdot multiplies signed bytes only, so activations u become u - 128, and 128 times the
// sum of the weights, one more sdot per weight vector, brings the difference back.
#include "kernels/neon_multiply.h"

namespace cpumoe {
namespace {

struct NeonDot {
  template <int M>
  struct Sums {
    int32x4_t total[M][4], weights[4];

    void clear() {
      for (int quarter = 0; quarter < 4; ++quarter) {
        weights[quarter] = vdupq_n_s32(0);
        for (int r = 0; r < M; ++r) total[r][quarter] = vdupq_n_s32(0);
      }
    }

    void add(const int8x16_t (&w)[2][4], const std::uint8_t* x) {
      const int8x16_t ones = vdupq_n_s8(1);
      for (int quarter = 0; quarter < 4; ++quarter) {
        weights[quarter] = vdotq_s32(vdotq_s32(weights[quarter], w[0][quarter], ones), w[1][quarter], ones);
      }
      for (int r = 0; r < M; ++r) {
        const int8x8_t s = vreinterpret_s8_u8(veor_u8(vld1_u8(x + r * 64), vdup_n_u8(0x80)));
        for (int quarter = 0; quarter < 4; ++quarter) {
          total[r][quarter] = vdotq_lane_s32(total[r][quarter], w[0][quarter], s, 0);
          total[r][quarter] = vdotq_lane_s32(total[r][quarter], w[1][quarter], s, 1);
        }
      }
    }

    int32x4_t value(int row, int quarter) const {
      return vaddq_s32(total[row][quarter], vshlq_n_s32(weights[quarter], 7));
    }
  };
};

}  // namespace

extern const Kernels kNeonDotKernels;
constexpr Kernels kNeonDotKernels = kernels_of<F32x4, Neon<NeonDot>>("neon_dot");

}  // namespace cpumoe
