#include "ops/kv_cache.h"

#include <vector>

#include "ops/elements.h"
#include "runtime/threads.h"

namespace cpumoe {

void write_cache_records(const Kernels& kernels, const void* values, DType type, std::int64_t rows, std::int64_t depth,
                         std::uint8_t* records) {
  const int threads = threads_for(4 * rows * depth);  // values in fp32
  std::vector<float> loaded(static_cast<std::size_t>(threads * depth));
  run_on_threads(threads, [&](Worker& worker) {
    float* row = loaded.data() + worker.index * depth;
    for (std::int64_t r = worker.share(rows); r < worker.next_share(rows); ++r) {
      kernels.load_row(at(values, r * depth, type), type, static_cast<int>(depth), row);
      kernels.cache_records.write(row, depth, records + r * cache_record_bytes(depth));
    }
  });
}

void read_cache_records(const Kernels& kernels, const std::uint8_t* records, std::int64_t rows, std::int64_t depth,
                        DType type, void* values) {
  const std::int64_t bytes = cache_record_bytes(depth);
  run_on_threads(threads_for(4 * rows * depth), [&](Worker& worker) {
    const std::int64_t first = worker.share(rows), count = worker.next_share(rows) - first;
    kernels.cache_records.read({records + first * bytes, bytes, count, depth, type, at(values, first * depth, type)});
  });
}

}  // namespace cpumoe
