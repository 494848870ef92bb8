#include "runtime/crowding.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "tests/harness.h"
#include "tests/tests.h"

namespace cpumoe::tests {

namespace {

// Whether a thread of this process sleeps, as the kernel says.
bool sleeps(int thread) {
  char path[64], text[512];
  std::snprintf(path, sizeof(path), "/proc/self/task/%d/stat", thread);
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) return false;
  text[std::fread(text, 1, sizeof(text) - 1, file)] = 0;
  std::fclose(file);
  const char* behind_name = std::strrchr(text, ')');
  return behind_name != nullptr && behind_name[1] != 0 && behind_name[2] == 'S';
}

// Waits until all threads sleep; false after a minute.
bool all_sleep(const std::vector<std::atomic<int>>& threads) {
  for (int look = 0; look < 60000; ++look) {
    if (std::all_of(threads.begin(), threads.end(), [](const auto& t) { return t != 0 && sleeps(t); })) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

void test_waiting() {
  bool slept_in_barrier = false, slept_between = false;
  std::vector<std::atomic<int>> others(2);
  std::vector<double> asleep(3);
  run_on_threads(3, [&](Worker& worker) {
    const auto index = static_cast<std::size_t>(worker.index);
    const double before = seconds_asleep();
    if (worker.index != 0) others[index - 1] = static_cast<int>(syscall(SYS_gettid));
    if (worker.index == 0 && worker.count == 3) slept_in_barrier = all_sleep(others);
    worker.barrier->wait();
    asleep[index] = seconds_asleep() - before;
  });
  check(slept_in_barrier, "threads that wait long for another one do not spin");
  check(asleep[0] == 0.0 && asleep[1] > 0.0 && asleep[2] > 0.0, "a thread knows how long it has slept");
  slept_between = all_sleep(others);
  check(slept_between, "nor do they between calls");
  // Many short waits, of which some sleep: none is missed.
  std::atomic<int> passed{0};
  for (int call = 0; call < 20; ++call) {
    run_on_threads(4, [&](Worker& worker) {
      for (int i = 0; i < 50; ++i) {
        if (i % 10 == 0 && worker.index == i / 10 % worker.count) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        worker.barrier->wait();
        if (worker.index == 0) ++passed;
        worker.barrier->wait();
      }
    });
  }
  check(passed == 1000, "all barriers are passed");
}

}  // namespace

void test_crowding() {
  constexpr double kNone = 0.01, kMuch = 0.5;
  Crowding crowding;
  check(crowding.threads(4) == 4, "all threads at first");
  crowding.note(4, kNone);
  check(crowding.threads(4) == 4, "all threads where nothing is lost");
  crowding.note(4, kMuch);
  check(crowding.threads(4) == 3 && crowding.threads(2) == 2, "one thread less where one has lost its core");
  crowding.note(3, kMuch);
  check(crowding.threads(4) == 2, "and one less again");
  int runs = 0;
  for (; crowding.threads(4) != 4; ++runs) crowding.note(2, kNone);
  check(runs == 16, "all are tried again, later than after the first time");
  crowding.note(4, kNone);
  crowding.note(4, kMuch);
  for (runs = 0; crowding.threads(4) != 4; ++runs) crowding.note(3, kNone);
  check(runs == 8, "where all could work in between, it begins anew");
  crowding.note(1, kMuch);
  check(crowding.threads(1) == 1, "one thread stays");
  // Threads that do nothing but wait in their barrier have not lost anything.
  int seen = 0;
  crowding.run(3, [&](Worker& worker) {
    worker.barrier->wait();
    if (worker.index == 0) seen = worker.count;
  });
  check(seen >= 1 && seen <= 3, "a run has its threads");
  test_waiting();
}

}  // namespace cpumoe::tests
