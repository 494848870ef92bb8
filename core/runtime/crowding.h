// How many threads work best beside other programs.
//
// The threads of a team wait for each other many times in a step. Where one of them shares its core with another
// program, all wait whenever that program runs: a step took four times as long on two cores, one of which was busy. One
// thread fewer, and nobody waits.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

#include "runtime/threads.h"

namespace cpumoe {

class Crowding {
 public:
  // Of so many threads those to be used for the next run.
  int threads(int wanted) const { return std::min(wanted, limit_); }

  // Runs body(worker) on so many threads, and sees whether all of them had their cores.
  template <class Body>
  void run(int threads, Body&& body) {
    lost_.assign(static_cast<std::size_t>(threads), 0.0);
    run_on_threads(threads, [&](Worker& worker) {
      // A thread that sleeps in a barrier has not lost its core; the one that it waits for may have.
      const double wall = wall_seconds(), busy = busy_seconds() + seconds_asleep();
      body(worker);
      const double passed = wall_seconds() - wall;
      const double used = busy_seconds() + seconds_asleep() - busy;
      lost_[static_cast<std::size_t>(worker.index)] = (passed - used) / std::max(passed, 1e-9);
    });
    note(threads, *std::max_element(lost_.begin(), lost_.end()));
  }

  // What a run on so many threads has shown: the most that one of them has lost of its time.
  void note(int threads, double lost) {
    if (lost > kMostLost && threads > 1) {
      limit_ = threads - 1;
      runs_left_ = runs_;
      runs_ = std::min(2 * runs_, kMostRuns);  // the longer it lasts, the more seldom all are tried again
    } else if (limit_ == kAll) {
      runs_ = kLeastRuns;
    } else if (--runs_left_ <= 0) {
      limit_ = kAll;
    }
  }

 private:
  static constexpr double kMostLost = 0.2;  // of the time of a run, sleep in barriers aside
  static constexpr int kLeastRuns = 8, kMostRuns = 64;

  static double wall_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  static double busy_seconds() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }

  static constexpr int kAll = std::numeric_limits<int>::max();
  int limit_ = kAll, runs_left_ = 0, runs_ = kLeastRuns;
  std::vector<double> lost_;
};

}  // namespace cpumoe
