// The portable kernel, and the definition of the arithmetic: every other kernel has to give these bits.
#include "kernels/float_products.h"
#include "kernels/row_blocks.h"
#include "kernels/rowwise.h"
#include "kernels/vector_scalar.h"

namespace cpumoe {
namespace {

// The integer that stands for the weight of input 64 half + 4 line + i and a column.
template <WeightFormat format>
std::int32_t integer_at(const Record& record, int half, int line, int column, int i) {
  constexpr FormatTraits traits = traits_of(format);
  const int tile = column / kTileColumns;
  const int offset = (line * 2 + tile) * 64 + column % kTileColumns * 4 + i;
  if constexpr (traits.decoding == Decoding::kBytes) {
    return static_cast<std::int8_t>(record.weights[half * (kInt8RecordBytes / 2) + offset]);
  }
  const std::uint8_t byte = record.weights[offset];
  const int nibble = half == 0 ? byte & 0xF : byte >> 4;
  if constexpr (traits.decoding == Decoding::kNibbles) return static_cast<std::int8_t>(nibble << 4);
  if constexpr (traits.decoding == Decoding::kFp4) return kFp4Doubled[nibble];
  return nibble - record.zeros[scale_slot(format, half * 64 + line * 4) * kBlockColumns + column];
}

struct Scalar : FloatProducts<F32x1> {
  template <WeightFormat format>
  static void multiply(const Product& p) {
    constexpr int kLines = 4, kParts = 2 * 16 / kLines;
    const int stride = record_bytes(format, p.layout.scales);
    for (int row = 0; row < p.rows; ++row) {
      const int tile = row / p.tile_rows, r = row % p.tile_rows;
      for (int column = 0; column < kBlockColumns; ++column) {
        float* acc = p.acc + acc_index(tile * kTileRows + r, column);
        for (int g = 0; g < p.record_count; ++g) {
          const Record record = record_at<format>(p.records + static_cast<std::ptrdiff_t>(g) * stride, p.layout.scales);
          const std::uint8_t* a = p.a + g * p.a_record_stride + tile * (2 * p.tile_rows * 64) + r * 64;
          std::int32_t sum = 0;
          for (int index = 0; index < kParts; ++index) {
            const RecordPart part = record_part<format, kLines>(index);
            for (int line = part.line; line < part.line + kLines; ++line) {
              for (int i = 0; i < 4; ++i) {
                sum += a[part.half * p.tile_rows * 64 + line * 4 + i] *
                       integer_at<format>(record, part.half, line, column, i);
              }
            }
            if (part.scale_ends) {
              const float s =
                  scales_at<F32x1, format>(record.scales, record.scale_type, part.slot * kBlockColumns + column).v;
              *acc = __builtin_fmaf(static_cast<float>(sum), s, *acc);
              sum = 0;
            }
          }
          if (traits_of(format).subgroup == 0) {
            std::int32_t total;
            memcpy(&total, acc, 4);
            total = static_cast<std::int32_t>(static_cast<std::uint32_t>(total) + static_cast<std::uint32_t>(sum));
            memcpy(acc, &total, 4);
          }
        }
      }
    }
  }

  static double dot_peak(std::int64_t iterations) {
    volatile std::int32_t a = 3, b = 5;
    std::int32_t sum[4] = {};
    for (std::int64_t i = 0; i < iterations; ++i) {
      const std::int32_t x = a, y = b;
      for (int j = 0; j < 4; ++j) sum[j] += x * (y + j);
    }
    volatile std::int32_t sink = sum[0] + sum[1] + sum[2] + sum[3];
    (void)sink;
    return static_cast<double>(iterations) * 8.0;
  }
};

}  // namespace

extern const Kernels kScalarKernels;
constexpr Kernels kScalarKernels = kernels_of<F32x1, Scalar>("scalar");

}  // namespace cpumoe
