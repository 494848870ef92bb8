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

float scale_at(const Record& record, int index, int unit) {
  switch (record.scale_type) {
    case ScaleType::kE8M0: {
      const std::uint32_t bits = static_cast<std::uint32_t>(record.scales[index]) << 23;
      return bits_as<float>(bits == 0 ? 0x00400000u : bits);  // 2^-127 is subnormal
    }
    case ScaleType::kE4M3: return half_to_float(static_cast<std::uint16_t>(record.scales[index] << 7));
    case ScaleType::kF16: {
      std::uint16_t h;
      memcpy(&h, record.scales + index * 2, 2);
      return half_to_float(h) * (1.0f / static_cast<float>(unit));
    }
    case ScaleType::kBF16: {
      std::uint16_t h;
      memcpy(&h, record.scales + index * 2, 2);
      return bfloat_to_float(h);
    }
    case ScaleType::kNone:
    case ScaleType::kF32: break;
  }
  float f;
  memcpy(&f, record.scales + index * 4, 4);
  return f;
}

struct Scalar {
  template <WeightFormat format, RowKind kind>
  static void multiply_floats(const Product& p) {
    multiply_float_rows<FloatVectors<F32x1>, format, kind>(p);
  }

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
              const float s = scale_at(record, part.slot * kBlockColumns + column, traits_of(format).unit);
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
};

double dot_peak(std::int64_t iterations) {
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

std::uint64_t read_bytes(const std::uint8_t* data, std::int64_t bytes) {
  std::uint64_t sum[4] = {};
  for (std::int64_t i = 0; i < bytes; i += 32) {
    for (int j = 0; j < 4; ++j) {
      std::uint64_t word;
      memcpy(&word, data + i + j * 8, 8);
      sum[j] += word;
    }
  }
  return sum[0] + sum[1] + sum[2] + sum[3];
}

constexpr Kernels make_kernels() {
  Kernels k = kernels_of<F32x1, Scalar>("scalar");
  k.dot_peak = dot_peak;
  k.float_dot_peak = fma_peak<F32x1>;
  k.read_bytes = read_bytes;
  return k;
}

}  // namespace

extern const Kernels kScalarKernels;
constexpr Kernels kScalarKernels = make_kernels();

}  // namespace cpumoe
