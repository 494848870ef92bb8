// A row of activations as a kernel prepares it.
#pragma once

#include "runtime/float16.h"
#include "tests/harness.h"

namespace cpumoe::tests {

// A row by itself, as a kernel prepares it; `stored` is the scale that is not found in the row, `range` that of a row
// of which this is a part.
struct PreparedRow {
  RowFormat format;
  RowTraits traits;
  RowScale scale{};
  std::vector<std::uint8_t> bytes;
  std::vector<float> record_scales;

  PreparedRow(const Kernels& k, RowFormat row_format, const void* x, DType type, std::int64_t count,
              float stored = 0.0f, const float* range = nullptr)
      : format(row_format),
        traits(traits_of(row_format)),
        bytes(static_cast<std::size_t>((count + 127) / 128 * 2 * traits.planes * traits.half_bytes()), 1),
        record_scales(static_cast<std::size_t>((count + 127) / 128), 1.0f) {
    const std::ptrdiff_t half = std::ptrdiff_t{traits.half_bytes()} * traits.planes;
    scale = k.of(format).prepare(
        {x, type, count, (count + 127) / 128 * 128, bytes.data(), 2 * half, half, stored, record_scales.data(), range});
  }

  double at(std::int64_t i) const {
    const std::int64_t half = traits.half_bytes(), size = half / 64;
    const std::uint8_t* value =
        bytes.data() + i / 64 * half * traits.planes + place_in_half(traits.kind, i % 64) * size;
    if (traits.kind == RowKind::kBytes) {
      const int u = traits.planes == 1 ? *value : *value * 256 + value[64];
      return (u - scale.zero) * static_cast<double>(scale.scale);
    }
    double sum = 0;
    for (int plane = 0; plane < traits.planes; ++plane, value += half) {
      std::uint32_t bits = 0;
      std::memcpy(reinterpret_cast<std::uint8_t*>(&bits) + (size == 2 ? 2 : 0), value, static_cast<std::size_t>(size));
      sum += static_cast<double>(bits_as<float>(bits));
    }
    return sum * static_cast<double>(scale.scale) *
           static_cast<double>(record_scales[static_cast<std::size_t>(i / 128)]);
  }

  bool operator==(const PreparedRow& other) const {
    const bool both_nan = scale.scale != scale.scale && other.scale.scale != other.scale.scale;
    return bytes == other.bytes && record_scales == other.record_scales && scale.zero == other.scale.zero &&
           (both_nan || scale.scale == other.scale.scale);
  }
};

}  // namespace cpumoe::tests
