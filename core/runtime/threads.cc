#include "runtime/threads.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/check.h"
#include "runtime/numa.h"

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

using Clock = std::chrono::steady_clock;

// Seconds that a thread spins before it sleeps. A wait that ends while it spins makes it spin for longer the next time,
// and so does one that is short all in all: sleeping costs about 50 us. After long waits it sleeps sooner.
constexpr double kMostSpinning = 1e-3, kLeastSpinning = 1e-5, kShortWait = 3e-4;
constexpr int kSpinsBeforeClock = 256, kSpinsBetweenClocks = 64;
thread_local double spinning = kMostSpinning;
thread_local double slept = 0.0;

// std::atomic::wait would spin and yield first, in its own way.
void sleep_while(const std::atomic<std::uint32_t>& number, std::uint32_t value) {
  static_assert(sizeof(number) == sizeof(value));
  syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(const std::atomic<std::uint32_t>& number) {
  syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

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
      const std::uint32_t seen = call_.value();
      threads_.emplace_back([this, index, seen] { work(index, seen); });
      threads_.back().detach();
    }
    body_ = body;
    context_ = context;
    barrier_ = barrier;
    count_ = threads;
    pending_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
    const std::uint32_t call = call_.value() + 1;
    call_.set(call);
    run_body({0, threads, barrier}, body, context);
    if (!threads_.empty()) done_.wait_while(call - 1);
  }

 private:
  void work(int index, std::uint32_t seen) {
    for (;;) {
      call_.wait_while(seen);
      ++seen;
      if (index < count_) run_body({index, count_, barrier_}, body_, context_);
      if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.set(seen);
    }
  }

  std::vector<std::thread> threads_;
  void (*body_)(void*, Worker&) = nullptr;
  void* context_ = nullptr;
  Barrier* barrier_ = nullptr;
  int count_ = 0;
  alignas(64) Signal call_;  // the number of the call, and of the last one that all have done
  alignas(64) Signal done_;
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
  Signal counted;
};

void region_entry(void* data) {
  auto* region = static_cast<Region*>(data);
  // The runtime may grant fewer threads than asked for (OMP_THREAD_LIMIT, a region inside a region).
  const int count = region->omp->num_threads(), index = region->omp->thread_num();
  if (index == 0) {
    region->barrier->reset(count);
    region->counted.set(1);
  }
  region->counted.wait_while(0);
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

void Signal::wait_while(std::uint32_t value) {
  const auto is_over = [&](int spins) {
    for (; spins > 0; --spins) {
      if (value_.load(std::memory_order_acquire) != value) return true;
      relax();
    }
    return false;
  };
  if (is_over(kSpinsBeforeClock)) return;
  const Clock::time_point began = Clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(Clock::now() - began).count(); };
  double spun = 0.0;
  do {
    if (is_over(kSpinsBetweenClocks)) {
      spinning = std::min(kMostSpinning, spinning * 1.125);
      return;
    }
    spun = passed();
  } while (spun < spinning);
  // Sequentially consistent, here and in set: either this thread sees the new value, or the other one this sleeper.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == value) sleep_while(value_, value);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  const double waited = passed();
  slept += waited - spun;
  spinning = waited < kShortWait ? std::min(kMostSpinning, spinning * 2) : std::max(kLeastSpinning, spinning / 2);
}

void Signal::set(std::uint32_t value) {
  value_.store(value, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) wake_all(value_);
}

double seconds_asleep() { return slept; }

void Barrier::reset(int threads) {
  threads_ = threads;
  arrived_.store(0, std::memory_order_relaxed);
}

void Barrier::wait() {
  if (threads_ == 1) return;
  const std::uint32_t generation = generation_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.set(generation + 1);
    return;
  }
  generation_.wait_while(generation);
}

void run_team(int threads, void (*body)(void*, Worker&), void* context) {
  if (threads <= 1) {  // without the team, which may be busy for as long as a prompt takes
    Barrier alone;
    run_body({0, 1, &alone}, body, context);
    return;
  }
  Team& t = the_team();
  const std::lock_guard<std::mutex> lock(t.mutex);
  if (const OpenMP* omp = usable_open_mp(); omp != nullptr) {
    Region region{body, context, &t.barrier, omp, {}};
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
