// The portable kernel, and the definition of the arithmetic: every other kernel has to give these bits.
#include "rowwise.h"
#include "vector_scalar.h"

namespace cpumoe {
namespace {

// Weights of one line (4 consecutive inputs of 16 columns), times the format's unit.
template <int bits>
std::int32_t weight_at(const std::uint8_t* record, int half, int line, int column, int i) {
  const int tile = column / kTileColumns;
  const int offset = (line * 2 + tile) * 64 + column % kTileColumns * 4 + i;
  if constexpr (bits == 4) {
    const std::uint8_t byte = record[offset];
    return static_cast<std::int8_t>(half == 0 ? static_cast<std::uint8_t>(byte << 4)
                                              : static_cast<std::uint8_t>(byte & 0xF0u));
  } else {
    return static_cast<std::int8_t>(record[half * (kInt8RecordBytes / 2) + offset]);
  }
}

float scale_at(const std::uint8_t* scales, ScaleType type, int index) {
  if (type == ScaleType::kF32) {
    float f;
    memcpy(&f, scales + index * 4, 4);
    return f;
  }
  std::uint16_t h;
  memcpy(&h, scales + index * 2, 2);
  return bits_as<float>(static_cast<std::uint32_t>(h) << 16);
}

struct Scalar {
  template <WeightFormat format>
  static void multiply(const Product& p) {
    const int stride = record_bytes(format, p.format.scales);
    const int scale_bytes = record_scale_bytes(format, p.format.scales);
    constexpr int kBits = traits_of(format).bits, kSubgroup = traits_of(format).subgroup;
    // Lines that share a scale: 8 (sub-groups of 32) or all 16. With 128 both halves share one too.
    constexpr int kLines = kSubgroup == 32 ? 8 : 16;
    for (int row = 0; row < p.rows; ++row) {
      const int tile = row / p.tile_rows, r = row % p.tile_rows;
      for (int column = 0; column < kBlockColumns; ++column) {
        float* acc = p.acc + acc_index(tile * kTileRows + r, column);
        for (int g = 0; g < p.record_count; ++g) {
          const std::uint8_t* record = p.records + static_cast<std::ptrdiff_t>(g) * stride;
          const std::uint8_t* a = p.a + g * p.a_record_stride + tile * (2 * p.tile_rows * 64) + r * 64;
          std::int32_t sum = 0;
          int scale = 0;
          for (int first = 0; first < 16; first += kLines) {
            for (int half = 0; half < 2; ++half) {
              for (int line = first; line < first + kLines; ++line) {
                for (int i = 0; i < 4; ++i) {
                  sum += a[half * p.tile_rows * 64 + line * 4 + i] *
                         weight_at<kBits>(record + scale_bytes, half, line, column, i);
                }
              }
              const bool scale_ends = kSubgroup == 32 || kSubgroup == 64 || (kSubgroup == 128 && half == 1);
              if (scale_ends) {
                const float s = scale_at(record, p.format.scales, scale * kBlockColumns + column);
                *acc = __builtin_fmaf(static_cast<float>(sum), s, *acc);
                sum = 0;
                ++scale;
              }
            }
          }
          if (kSubgroup == 0) {
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
  k.read_bytes = read_bytes;
  return k;
}

}  // namespace

extern const Kernels kScalarKernels;
constexpr Kernels kScalarKernels = make_kernels();

}  // namespace cpumoe
