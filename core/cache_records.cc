#include "cache_records.h"

#include <vector>

#include "threads.h"

namespace cpumoe {
namespace {

constexpr std::int64_t kValuesForThreads = 1 << 15;  // below, waking threads costs more than they save

// Calls body(thread, row) for all rows.
template <class Body>
void share_rows(int threads, std::int64_t rows, const Body& body) {
  run_on_threads(threads, [&](Worker& worker) {
    for (std::int64_t r = worker.share(rows); r < worker.next_share(rows); ++r) body(worker.index, r);
  });
}

int threads_of(std::int64_t values) { return values < kValuesForThreads ? 1 : thread_count(); }

}  // namespace

void write_cache_records(const Kernels& kernels, const void* values, DType type, std::int64_t rows, std::int64_t depth,
                         std::uint8_t* records) {
  const auto* from = static_cast<const std::uint8_t*>(values);
  const int threads = threads_of(rows * depth);
  std::vector<float> loaded(static_cast<std::size_t>(threads * depth));
  share_rows(threads, rows, [&](int thread, std::int64_t r) {
    float* row = loaded.data() + thread * depth;
    kernels.load_row(from + r * depth * size_of(type), type, static_cast<int>(depth), row);
    kernels.cache_records.write(row, depth, records + r * cache_record_bytes(depth));
  });
}

void read_cache_records(const Kernels& kernels, const std::uint8_t* records, std::int64_t rows, std::int64_t depth,
                        DType type, void* values) {
  auto* to = static_cast<std::uint8_t*>(values);
  share_rows(threads_of(rows * depth), rows, [&](int, std::int64_t r) {
    kernels.cache_records.read(records + r * cache_record_bytes(depth), depth, type, to + r * depth * size_of(type));
  });
}

}  // namespace cpumoe
