#include "../crowding.h"

#include "harness.h"
#include "tests.h"

namespace cpumoe::tests {

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
}

}  // namespace cpumoe::tests
