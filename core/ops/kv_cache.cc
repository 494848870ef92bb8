#include "ops/kv_cache.h"

#include <vector>

#include "runtime/threads.h"

namespace cpumoe {
namespace {

constexpr std::int64_t kValuesForThreads = 1 << 15;  // below, waking threads costs more than they save

int threads_of(std::int64_t values) { return values < kValuesForThreads ? 1 : thread_count(); }

}  // namespace

void write_cache_records(const Kernels& kernels, const void* values, DType type, std::int64_t rows, std::int64_t depth,
                         std::uint8_t* records) {
  const auto* from = static_cast<const std::uint8_t*>(values);
  const int threads = threads_of(rows * depth);
  std::vector<float> loaded(static_cast<std::size_t>(threads * depth));
  run_on_threads(threads, [&](Worker& worker) {
    float* row = loaded.data() + worker.index * depth;
    for (std::int64_t r = worker.share(rows); r < worker.next_share(rows); ++r) {
      kernels.load_row(from + r * depth * size_of(type), type, static_cast<int>(depth), row);
      kernels.cache_records.write(row, depth, records + r * cache_record_bytes(depth));
    }
  });
}

void read_cache_records(const Kernels& kernels, const std::uint8_t* records, std::int64_t rows, std::int64_t depth,
                        DType type, void* values) {
  auto* to = static_cast<std::uint8_t*>(values);
  const std::int64_t bytes = cache_record_bytes(depth);
  run_on_threads(threads_of(rows * depth), [&](Worker& worker) {
    const std::int64_t first = worker.share(rows), count = worker.next_share(rows) - first;
    kernels.cache_records.read(
        {records + first * bytes, bytes, count, depth, type, to + first * depth * size_of(type)});
  });
}

}  // namespace cpumoe
