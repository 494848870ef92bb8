// Arm int8 matrix multiplication (FEAT_I8MM): usmmla takes 2 rows x 8 inputs of unsigned activations and 2 columns x 8
// inputs of signed weights; a row on its own uses sudot.
#include "kernels/neon_multiply.h"

namespace cpumoe {
namespace {

struct NeonI8mm {
  template <int M>
  struct Sums {
    static constexpr int kPairs = M / 2;
    // pair_total[p][c]: rows 2p, 2p + 1 x columns 2c, 2c + 1
    int32x4_t pair_total[kPairs == 0 ? 1 : kPairs][8], single[4];

    void clear() {
      for (auto& pair : pair_total) {
        for (auto& t : pair) t = vdupq_n_s32(0);
      }
      for (auto& t : single) t = vdupq_n_s32(0);
    }

    void add(const int8x16_t (&w)[2][4], const std::uint8_t* x) {
      if constexpr (kPairs > 0) {
        int8x16_t columns[8];  // 2 columns x 8 inputs each
        for (int quarter = 0; quarter < 4; ++quarter) {
          const int32x4_t first = vreinterpretq_s32_s8(w[0][quarter]), second = vreinterpretq_s32_s8(w[1][quarter]);
          columns[quarter * 2] = vreinterpretq_s8_s32(vzip1q_s32(first, second));
          columns[quarter * 2 + 1] = vreinterpretq_s8_s32(vzip2q_s32(first, second));
        }
        for (int p = 0; p < kPairs; ++p) {
          const uint8x16_t rows = vcombine_u8(vld1_u8(x + 2 * p * 64), vld1_u8(x + (2 * p + 1) * 64));
          for (int c = 0; c < 8; ++c) pair_total[p][c] = vusmmlaq_s32(pair_total[p][c], rows, columns[c]);
        }
      }
      if constexpr (M % 2 == 1) {
        const uint8x8_t row = vld1_u8(x + (M - 1) * 64);
        for (int quarter = 0; quarter < 4; ++quarter) {
          single[quarter] = vsudotq_lane_s32(single[quarter], w[0][quarter], row, 0);
          single[quarter] = vsudotq_lane_s32(single[quarter], w[1][quarter], row, 1);
        }
      }
    }

    int32x4_t value(int row, int quarter) const {
      if (M % 2 == 1 && row == M - 1) return single[quarter];
      const int32x4_t left = pair_total[row / 2][quarter * 2], right = pair_total[row / 2][quarter * 2 + 1];
      return row % 2 == 0 ? vcombine_s32(vget_low_s32(left), vget_low_s32(right))
                          : vcombine_s32(vget_high_s32(left), vget_high_s32(right));
    }
  };
};

}  // namespace

extern const Kernels kNeonI8mmKernels;
constexpr Kernels kNeonI8mmKernels = kernels_of<F32x4, Neon<NeonI8mm>>("neon_i8mm");

}  // namespace cpumoe
