#include "ops/norm.h"

#include <vector>

#include "ops/elements.h"
#include "runtime/threads.h"

namespace cpumoe {

void rms_norm(const Kernels& kernels, const NormCall& c) {
  std::vector<float> converted;
  const auto* weight = static_cast<const float*>(c.weight);
  if (c.weight_type != DType::kF32) {
    converted.resize(static_cast<std::size_t>(c.width));
    kernels.load_row(c.weight, c.weight_type, static_cast<int>(c.width), converted.data());
    weight = converted.data();
  }
  run_on_threads(threads_for(4 * c.rows * c.width), [&](Worker& worker) {  // values in fp32
    for (std::int64_t r = worker.share(c.rows); r < worker.next_share(c.rows); ++r) {
      kernels.normalize_row({at(c.x, r * c.width, c.type), weight, c.type, c.width, c.epsilon, c.round_first,
                             c.plus_one, at(c.out, r * c.width, c.type)});
    }
  });
}

}  // namespace cpumoe
