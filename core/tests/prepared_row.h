// A row of activations as a kernel prepares it.
#pragma once

#include "harness.h"

namespace cpumoe::tests {

// A row by itself, as a kernel prepares it.
struct PreparedRow {
  RowScale scale{};
  int planes;
  std::vector<std::uint8_t> bytes;

  PreparedRow(const Kernels& k, RowFormat format, const void* x, DType type, std::int64_t count)
      : planes(planes_of(format)), bytes(static_cast<std::size_t>((count + 127) / 128 * 128 * planes), 1) {
    scale = k.of(format).prepare(
        {x, type, count, (count + 127) / 128 * 128, bytes.data(), 128 * planes, std::ptrdiff_t{64} * planes});
  }

  double at(std::int64_t i) const {
    const auto half = static_cast<std::size_t>(i / 64 * 64 * planes + i % 64);
    const int u = planes == 1 ? bytes[half] : bytes[half] * 256 + bytes[half + 64];
    return (u - scale.zero) * static_cast<double>(scale.scale);
  }

  bool operator==(const PreparedRow& other) const {
    const bool both_nan = scale.scale != scale.scale && other.scale.scale != other.scale.scale;
    return bytes == other.bytes && scale.zero == other.scale.zero && (both_nan || scale.scale == other.scale.scale);
  }
};

}  // namespace cpumoe::tests
