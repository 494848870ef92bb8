// Threads: one team for the whole process, shared with PyTorch where PyTorch is.
//
// PyTorch computes on the threads of its OpenMP runtime, which spin for a while after each parallel region.
// A second pool on the same cores would be slowed by those spinning threads and slow them in turn, so when an
// OpenMP runtime is already loaded (its symbols are global) its team runs our work too; nothing is linked.
// Without one (no PyTorch, or in a child after fork, where OpenMP teams do not survive) an own pool is used.
#pragma once

#include <atomic>
#include <cstdint>

namespace cpumoe {

// A number that threads wait for another thread to change. They spin first, for longer than threads of a team wait for
// each other on cores of their own, and sleep then: who spins takes the core that the other one needs, and has used up
// its share of time when its turn comes. A thread that had to sleep spins for less the next time.
class Signal {
 public:
  std::uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void wait_while(std::uint32_t value);  // returns once the value is another one
  void set(std::uint32_t value);         // everything before it is seen by those that waited

 private:
  std::atomic<std::uint32_t> value_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

// Seconds that the calling thread has slept in Signal, since it began.
double seconds_asleep();

// Barrier for the threads of one team.
class Barrier {
 public:
  void reset(int threads);
  void wait();

 private:
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) Signal generation_;
  int threads_ = 1;
};

// While it lives, the thread computes as IEEE 754 has it by default: subnormal numbers are numbers, rounding is to
// nearest even. A caller may have switched its own thread to something else (torch.set_flush_denormal), and not those
// of the team: results would depend on which of them computed a value. The mode found is restored at the end. 15 ns.
class IeeeArithmetic {
 public:
  IeeeArithmetic();
  ~IeeeArithmetic();
  IeeeArithmetic(const IeeeArithmetic&) = delete;
  IeeeArithmetic& operator=(const IeeeArithmetic&) = delete;

 private:
  std::uint64_t found_;
};

struct Worker {
  int index, count;
  Barrier* barrier;

  // Of `total` things those from share to next_share are this worker's.
  std::int64_t share(std::int64_t total) const { return total * index / count; }
  std::int64_t next_share(std::int64_t total) const { return total * (index + 1) / count; }
};

// Runs body(worker) once on each of up to `threads` threads, the calling one included, and returns when all are
// done. The team is handed out to one caller at a time; one thread computes without it. The body must not throw. It
// runs in IeeeArithmetic on each.
void run_team(int threads, void (*body)(void*, Worker&), void* context);

template <class Body>
void run_on_threads(int threads, Body&& body) {
  run_team(threads, [](void* context, Worker& worker) { (*static_cast<Body*>(context))(worker); }, &body);
}

// Threads worth waking for a call that reads or computes as much as reading `bytes` from memory: one for little, which
// is done before another thread has heard of it, else thread_count().
int threads_for(std::int64_t bytes);

// Threads that the next call uses: set_thread_count, else CPUMOE_NUM_THREADS, else what PyTorch uses in this
// thread but no more than available_cpus().
int thread_count();
void set_thread_count(int threads);  // 0: back to the default

// CPUs in the affinity mask of the calling thread, but no more than the quota.
int available_cpus();

// Sets how many CPUs' time a cgroup gives the process; 0: as much as there is.
void set_cpu_quota(int cpus);

// "openmp" or "own": whose threads would run the next call.
const char* thread_source();

}  // namespace cpumoe
