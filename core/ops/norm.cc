#include "ops/norm.h"

#include <vector>

#include "runtime/threads.h"

namespace cpumoe {
namespace {

constexpr std::int64_t kValuesForThreads = 1 << 15;  // below, waking threads costs more than they save

}  // namespace

void rms_norm(const Kernels& kernels, const NormCall& c) {
  const std::int64_t row_bytes = c.width * size_of(c.type);
  const auto* x = static_cast<const std::uint8_t*>(c.x);
  auto* out = static_cast<std::uint8_t*>(c.out);
  std::vector<float> converted;
  const auto* weight = static_cast<const float*>(c.weight);
  if (c.weight_type != DType::kF32) {
    converted.resize(static_cast<std::size_t>(c.width));
    kernels.load_row(c.weight, c.weight_type, static_cast<int>(c.width), converted.data());
    weight = converted.data();
  }
  const auto normalize = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t r = first; r < last; ++r) {
      kernels.normalize_row(
          {x + r * row_bytes, weight, c.type, c.width, c.epsilon, c.round_first, c.plus_one, out + r * row_bytes});
    }
  };
  if (c.rows * c.width < kValuesForThreads) return normalize(0, c.rows);
  run_on_threads(thread_count(),
                 [&](Worker& w) { normalize(c.rows * w.index / w.count, c.rows * (w.index + 1) / w.count); });
}

}  // namespace cpumoe
