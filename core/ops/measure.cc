#include "ops/measure.h"

#include <atomic>
#include <chrono>

#include "runtime/threads.h"

namespace cpumoe {
namespace {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

double read_rate(const Kernels& kernels, const std::uint8_t* data, std::int64_t bytes) {
  constexpr std::int64_t kUnit = 4096;
  const std::int64_t units = bytes / kUnit;
  std::atomic<std::uint64_t> sink{0};
  const double start = seconds();
  run_on_threads(thread_count(), [&](Worker& w) {
    const std::int64_t first = w.share(units), last = w.next_share(units);
    sink += kernels.read_bytes(data + first * kUnit, (last - first) * kUnit);
  });
  return static_cast<double>(units * kUnit) / (seconds() - start);
}

double dot_rate(const Kernels& kernels, std::int64_t iterations, bool floats) {
  std::atomic<double> operations{0.0};
  const double start = seconds();
  run_on_threads(thread_count(), [&](Worker&) {
    const double done = floats ? kernels.float_dot_peak(iterations) : kernels.dot_peak(iterations);
    double seen = operations.load();
    while (!operations.compare_exchange_weak(seen, seen + done)) {
    }
  });
  return operations.load() / (seconds() - start);
}

}  // namespace cpumoe
