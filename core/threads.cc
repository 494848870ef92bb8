#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "numa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cpumoe {
namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The register that holds rounding mode and treatment of subnormal numbers, and its default. On x86 the exception masks
// are in it too, and six sticky flags that change nothing.
#if defined(__x86_64__)
constexpr std::uint64_t kIeeeMode = 0x1F80, kModeBits = 0xFFC0;
std::uint64_t float_mode() { return _mm_getcsr(); }
void set_float_mode(std::uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
constexpr std::uint64_t kIeeeMode = 0, kModeBits = ~std::uint64_t{0};
std::uint64_t float_mode() {
  std::uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void set_float_mode(std::uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
constexpr std::uint64_t kIeeeMode = 0, kModeBits = 0;
std::uint64_t float_mode() { return kIeeeMode; }
void set_float_mode(std::uint64_t) {}
#endif

bool differs_from_ieee(std::uint64_t mode) { return ((mode ^ kIeeeMode) & kModeBits) != 0; }

constexpr int kSpinsBeforeYield = 20000;

// The entry points of an OpenMP runtime that something else has loaded (GOMP_parallel is the ABI that libgomp
// defines and libiomp5 and libomp offer too).
struct OpenMP {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
  int (*max_threads)() = nullptr;
  int (*proc_bind)() = nullptr;  // not every runtime has it

  // Whether each thread of a team is bound to a place of its own. What the calling thread may run on is its place then,
  // and says nothing of the others.
  bool binds() const { return proc_bind != nullptr && proc_bind() != 0; }

  bool found() const {
    return parallel != nullptr && thread_num != nullptr && num_threads != nullptr && max_threads != nullptr;
  }
};

template <class Function>
void look_up(const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

std::atomic<bool> forked_child{false};

const OpenMP* open_mp() {
  static OpenMP found;
  static std::atomic<bool> ready{false};
  if (!ready.load(std::memory_order_acquire)) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (ready.load(std::memory_order_relaxed)) return &found;
    look_up("GOMP_parallel", found.parallel);
    look_up("omp_get_thread_num", found.thread_num);
    look_up("omp_get_num_threads", found.num_threads);
    look_up("omp_get_max_threads", found.max_threads);
    look_up("omp_get_proc_bind", found.proc_bind);
    if (!found.found()) return nullptr;  // PyTorch may still be imported: look again next time
    ready.store(true, std::memory_order_release);
  }
  return &found;
}

// Its threads do not survive a fork; a child may still read its settings.
const OpenMP* usable_open_mp() { return forked_child.load(std::memory_order_relaxed) ? nullptr : open_mp(); }

void run_body(Worker worker, void (*body)(void*, Worker&), void* context) {
  const IeeeArithmetic arithmetic;
  settle_thread(worker.index, worker.count);
  body(context, worker);
}

// Workers that sleep between calls.
class OwnPool {
 public:
  void run(int threads, void (*body)(void*, Worker&), void* context, Barrier* barrier) {
    while (static_cast<int>(threads_.size()) < threads - 1) {
      const int index = static_cast<int>(threads_.size()) + 1;
      const std::uint32_t seen = call_.load();
      threads_.emplace_back([this, index, seen] { work(index, seen); });
      threads_.back().detach();
    }
    body_ = body;
    context_ = context;
    barrier_ = barrier;
    count_ = threads;
    pending_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
    call_.fetch_add(1, std::memory_order_release);
    call_.notify_all();
    run_body({0, threads, barrier}, body, context);
    for (int spins = 0; pending_.load(std::memory_order_acquire) != 0;) {
      relax();
      if (++spins > kSpinsBeforeYield) sched_yield();
    }
  }

 private:
  void work(int index, std::uint32_t seen) {
    for (;;) {
      for (int spins = 0; call_.load(std::memory_order_acquire) == seen; ++spins) {
        if (spins < kSpinsBeforeYield) {
          relax();
        } else {
          call_.wait(seen, std::memory_order_acquire);
        }
      }
      ++seen;
      if (index < count_) run_body({index, count_, barrier_}, body_, context_);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> threads_;
  void (*body_)(void*, Worker&) = nullptr;
  void* context_ = nullptr;
  Barrier* barrier_ = nullptr;
  int count_ = 0;
  alignas(64) std::atomic<std::uint32_t> call_{0};
  alignas(64) std::atomic<int> pending_{0};
};

// The team belongs to one caller at a time: two calls that each spin at their barriers on the same cores would
// starve each other. Never destroyed: threads may still wait in it when the process ends.
struct Team {
  std::mutex mutex;
  Barrier barrier;
  OwnPool* pool = new OwnPool;
};

Team* team = nullptr;

Team& the_team() {
  static std::once_flag once;
  std::call_once(once, [] {
    team = new Team;
    // A child has none of the threads. It gets a new team; what the old one held is left alone.
    pthread_atfork([] { team->mutex.lock(); }, [] { team->mutex.unlock(); },
                   [] {
                     forked_child.store(true);
                     team = new Team;
                   });
  });
  return *team;
}

// When the library is loaded, not at the first call: a child of a process that has used PyTorch's threads, but not ours
// yet, must know what it is.
[[maybe_unused]] const Team& team_at_load = the_team();

struct Region {
  void (*body)(void*, Worker&);
  void* context;
  Barrier* barrier;
  const OpenMP* omp;
  std::atomic<bool> counted{false};
};

void region_entry(void* data) {
  auto* region = static_cast<Region*>(data);
  // The runtime may grant fewer threads than asked for (OMP_THREAD_LIMIT, a region inside a region).
  const int count = region->omp->num_threads(), index = region->omp->thread_num();
  if (index == 0) {
    region->barrier->reset(count);
    region->counted.store(true, std::memory_order_release);
  }
  while (!region->counted.load(std::memory_order_acquire)) relax();
  run_body({index, count, region->barrier}, region->body, region->context);
}

int parse_thread_count(const char* text) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  CPUMOE_REQUIRE(end != text && *end == '\0' && value >= 1 && value <= 4096, "CPUMOE_NUM_THREADS=", text,
                 "; a whole number from 1 to 4096 is accepted");
  return static_cast<int>(value);
}

std::atomic<int> chosen_threads{0};
std::atomic<int> cpu_quota{std::numeric_limits<int>::max()};

}  // namespace

IeeeArithmetic::IeeeArithmetic() : found_(float_mode()) {
  if (differs_from_ieee(found_)) set_float_mode(kIeeeMode);
}

IeeeArithmetic::~IeeeArithmetic() {
  if (differs_from_ieee(found_)) set_float_mode(found_);
}

void Barrier::reset(int threads) {
  threads_ = threads;
  arrived_.store(0, std::memory_order_relaxed);
}

void Barrier::wait() {
  if (threads_ == 1) return;
  const std::uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; generation_.load(std::memory_order_acquire) == generation;) {
    relax();
    if (++spins > kSpinsBeforeYield) sched_yield();
  }
}

void run_team(int threads, void (*body)(void*, Worker&), void* context) {
  Team& t = the_team();
  const std::lock_guard<std::mutex> lock(t.mutex);
  if (threads <= 1) {
    t.barrier.reset(1);
    run_body({0, 1, &t.barrier}, body, context);
    return;
  }
  if (const OpenMP* omp = usable_open_mp(); omp != nullptr) {
    Region region{body, context, &t.barrier, omp};
    omp->parallel(region_entry, &region, static_cast<unsigned>(threads), 0);
    return;
  }
  t.barrier.reset(threads);
  t.pool->run(threads, body, context, &t.barrier);
}

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int cpus = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set)
                                                                : static_cast<int>(std::thread::hardware_concurrency());
  return std::min(cpus, cpu_quota.load(std::memory_order_relaxed));
}

void set_cpu_quota(int cpus) {
  CPUMOE_REQUIRE(cpus >= 0, "cpus=", cpus, "; a number from 1, or 0 for no quota, is accepted");
  cpu_quota.store(cpus == 0 ? std::numeric_limits<int>::max() : cpus);
}

int thread_count() {
  static const char* const text = std::getenv("CPUMOE_NUM_THREADS");
  int threads = chosen_threads.load(std::memory_order_relaxed);
  if (threads == 0 && text != nullptr) {
    static const int from_environment = parse_thread_count(text);
    threads = from_environment;
  }
  if (threads != 0) return threads;
  const OpenMP* omp = open_mp();
  if (omp != nullptr && omp->binds()) return std::min(omp->max_threads(), cpu_quota.load(std::memory_order_relaxed));
  const int cpus = available_cpus();
  return omp != nullptr && omp->max_threads() < cpus ? omp->max_threads() : cpus;
}

int threads_for(std::int64_t bytes) {
  // One or all: OpenMP's runtime ends and makes threads when the size of a team changes, which takes far longer. What
  // is read in eight microseconds is not worth waking others.
  constexpr std::int64_t kBytesForOne = 128 << 10;
  return bytes < kBytesForOne ? 1 : thread_count();
}

void set_thread_count(int threads) {
  CPUMOE_REQUIRE(threads >= 0 && threads <= 4096, "num_threads=", threads,
                 "; 1 to 4096, or 0 for the default, is accepted");
  chosen_threads.store(threads);
}

const char* thread_source() { return usable_open_mp() != nullptr ? "openmp" : "own"; }

}  // namespace cpumoe
