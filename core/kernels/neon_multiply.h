// The product on NEON registers, for the dot product and the int8 matrix instructions. They differ in
//
//   template <int M> struct Dot::Sums {             // running sums of M rows x 16 columns
//     void clear();
//     // 8 inputs: two lines; rows of x are 64 bytes apart
//     void add(const int8x16_t (&w)[2][4], const std::uint8_t* x);
//     int32x4_t value(int row, int quarter) const;  // columns 4 quarter .. 4 quarter + 3
//   };
#pragma once

#include "kernels/float_products.h"
#include "kernels/row_blocks.h"
#include "kernels/rowwise.h"
#include "kernels/vector_neon.h"

namespace cpumoe {
namespace {

inline int8x16_t low_nibbles(int8x16_t v) { return vshlq_n_s8(v, 4); }
inline int8x16_t high_nibbles(int8x16_t v) { return vandq_s8(v, vdupq_n_s8(static_cast<std::int8_t>(0xF0))); }

inline int8x16_t load_signed(const std::uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }

// Nibbles of a vector as signed bytes; those with a zero point from 0 to 15.
template <Decoding decoding>
inline int8x16_t nibbles(int8x16_t v, int half) {
  if constexpr (decoding == Decoding::kNibbles) {
    return half == 0 ? low_nibbles(v) : high_nibbles(v);
  } else {
    const uint8x16_t bytes = vreinterpretq_u8_s8(v);
    const uint8x16_t codes = half == 0 ? vandq_u8(bytes, vdupq_n_u8(0x0F)) : vshrq_n_u8(bytes, 4);
    if constexpr (decoding == Decoding::kNibblesOfZero) return vreinterpretq_s8_u8(codes);
    return vqtbl1q_s8(vld1q_s8(kFp4Doubled), codes);
  }
}

// The zero points of 4 columns, four bytes of each.
inline int8x16_t load_zeros(const std::uint8_t* zeros) {
  static constexpr std::uint8_t kFourOfEach[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  std::uint32_t quad;
  memcpy(&quad, zeros, 4);
  return vreinterpretq_s8_u8(vqtbl1q_u8(vreinterpretq_u8_u32(vdupq_n_u32(quad)), vld1q_u8(kFourOfEach)));
}

template <class Dot>
struct Neon : FloatProducts<F32x4> {
  static constexpr int kRowsAtOnce = 4;  // 16 running sums in the 32 registers
  template <WeightFormat format>
  static constexpr int kStraightRows = traits_of(format).has_zeros() ? 0 : 4;

  template <WeightFormat format>
  static void unpack_record(const Record& record, std::uint8_t* unpacked) {
    constexpr Decoding kDecoding = traits_of(format).decoding;
    for (int line = 0; line < 16; ++line) {
      for (int c = 0; c < 8; ++c) {  // four columns each
        const int at = line * 128 + c * 16;
        const int8x16_t v = load_signed(record.weights + at);
        int8x16_t low = nibbles<kDecoding>(v, 0), high = nibbles<kDecoding>(v, 1);
        if constexpr (kDecoding == Decoding::kNibblesOfZero) {
          const std::uint8_t* zeros = record.zeros + c * 4;
          low = vsubq_s8(low, load_zeros(zeros + scale_slot(format, line * 4) * kBlockColumns));
          high = vsubq_s8(high, load_zeros(zeros + scale_slot(format, 64 + line * 4) * kBlockColumns));
        }
        vst1q_u8(unpacked + at, vreinterpretq_u8_s8(low));
        vst1q_u8(unpacked + kInt8RecordBytes / 2 + at, vreinterpretq_u8_s8(high));
      }
    }
  }

  template <WeightFormat format>
  static void multiply(const Product& p) {
    multiply_rows<Neon, format>(p);
  }

  template <int M, WeightFormat format, bool packed>
  static void record_product(const RecordArgs& args) {
    constexpr int subgroup = traits_of(format).subgroup, kLines = subgroup == 16 ? 4 : 8;
    for (int tile = 0; tile < 2; ++tile) {
      typename Dot::template Sums<M> sums;
      sums.clear();
      float* tile_acc = args.acc + tile * (kTileRows * kTileColumns);
#pragma GCC unroll 4
      for (int i = 0; i < 2 * 16 / kLines; ++i) {
        const RecordPart part = record_part<format, kLines>(i);
        const std::uint8_t* w =
            args.weights + part.line * 128 + tile * 64 + (packed ? 0 : part.half * (kInt8RecordBytes / 2));
        const std::uint8_t* x = args.a + part.half * args.half_bytes + part.line * 4;
        for (int pair = 0; pair < kLines / 2; ++pair) {
          int8x16_t lines[2][4];
          for (int line = 0; line < 2; ++line) {
            for (int quarter = 0; quarter < 4; ++quarter) {
              lines[line][quarter] = load_signed(w + (pair * 2 + line) * 128 + quarter * 16);
              if constexpr (packed) {
                lines[line][quarter] = nibbles<traits_of(format).decoding>(lines[line][quarter], part.half);
              }
            }
          }
          sums.add(lines, x + pair * 8);
        }
        if (!part.scale_ends) continue;
        for (int quarter = 0; quarter < 4; ++quarter) {
          const int column = tile * kTileColumns + quarter * 4;
          const float32x4_t s =
              scales_at<F32x4, format>(args.record.scales, args.record.scale_type, part.slot * kBlockColumns + column)
                  .v;
          for (int r = 0; r < M; ++r) {
            float* p = tile_acc + r * kTileColumns + quarter * 4;
            vst1q_f32(p, vfmaq_f32(vld1q_f32(p), vcvtq_f32_s32(sums.value(r, quarter)), s));
          }
        }
        sums.clear();
      }
      if (subgroup != 0) continue;
      for (int r = 0; r < M; ++r) {
        for (int quarter = 0; quarter < 4; ++quarter) {
          auto* p = reinterpret_cast<std::int32_t*>(tile_acc + r * kTileColumns + quarter * 4);
          vst1q_s32(p, vaddq_s32(vld1q_s32(p), sums.value(r, quarter)));
        }
      }
    }
  }

  // Register-only products of four rows, as the kernels do them.
  static double dot_peak(std::int64_t iterations) {
    typename Dot::template Sums<4> sums;
    sums.clear();
    std::uint8_t x[4 * 64];
    for (auto& byte : x) byte = 3;
    int8x16_t lines[2][4];
    for (auto& line : lines) {
      for (auto& quarter : line) quarter = vdupq_n_s8(5);
    }
    for (std::int64_t i = 0; i < iterations; ++i) {
      asm volatile("" : "+w"(lines[0][0]), "+w"(lines[1][0]) : : "memory");  // keeps the products in the loop
      sums.add(lines, x);
    }
    volatile std::int32_t sink = vgetq_lane_s32(sums.value(3, 3), 0);
    (void)sink;
    return static_cast<double>(iterations) * 4 * 16 * 8 * 2.0;
  }
};

}  // namespace
}  // namespace cpumoe
