#include "runtime/numa.h"

#include <algorithm>
#include <numeric>

#include "runtime/threads.h"
#include "tests/harness.h"
#include "tests/tests.h"

namespace cpumoe::tests {
namespace {

// Nodes with so many CPUs each, which need not exist here.
std::vector<NodePlace> invented(const std::vector<int>& cpus) {
  std::vector<NodePlace> places;
  int next = 0;
  for (const int count : cpus) {
    NodePlace place{{}, static_cast<int>(places.size())};
    for (int i = 0; i < count; ++i) place.cpus.push_back(next++);
    places.push_back(place);
  }
  return places;
}

const std::vector<std::vector<int>> kMachines = {{2, 2}, {1, 3}, {1, 1, 1, 1}, {5, 1, 2}, {4, 4, 4, 4, 4, 4, 4, 4}};

// Every item is taken once, and a node's own first.
void take_all(const std::string& name, const std::vector<std::pair<int, int>>& rows) {
  WorkQueue queue;
  for (int round = 0; round < 2; ++round) {  // a queue is used again
    queue.clear();
    for (const auto& [parts, repeats] : rows) queue.add(parts, repeats);
    const auto owner = [&](int item) {
      for (const auto& [parts, repeats] : rows) {
        if (item < parts * repeats) return nodes()->of(item % parts, parts);
        item -= parts * repeats;
      }
      return -1;
    };
    for (int node = 0; node < queue.node_count(); ++node) {
      std::vector<int> taken(static_cast<std::size_t>(queue.items()), 0);
      queue.clear();
      for (const auto& [parts, repeats] : rows) queue.add(parts, repeats);
      bool ordered = true, strange = false;
      for (int item = queue.take(node); item < queue.items(); item = queue.take(node)) {
        ordered = ordered && !(strange && owner(item) == node);
        strange = strange || owner(item) != node;
        ++taken[static_cast<std::size_t>(item)];
      }
      check(std::all_of(taken.begin(), taken.end(), [](int n) { return n == 1; }), name + ": every item once");
      check(ordered, name + ": its own items first");
      check(queue.take(node) >= queue.items(), name + ": nothing is left");
    }
  }
}

}  // namespace

void test_nodes() {
  for (const std::vector<int>& cpus : kMachines) {
    const int all = std::accumulate(cpus.begin(), cpus.end(), 0);
    const std::string name = std::to_string(cpus.size()) + " nodes";
    const Nodes machine(invented(cpus));
    for (std::int64_t count = 0; count <= 70; ++count) {
      bool same = machine.first(machine.count(), count) == count;
      for (std::int64_t i = 0; i < count; ++i) {
        const int node = machine.of(i, count);
        same = same && machine.first(node, count) <= i && i < machine.first(node + 1, count);
      }
      check(same, name + ": ranges and owners agree");
      for (int node = 0; node < machine.count(); ++node) {
        const auto own = static_cast<double>(machine.first(node + 1, count) - machine.first(node, count));
        const double fair = static_cast<double>(count) * cpus[static_cast<std::size_t>(node)] / all;
        check(std::abs(own - fair) <= 1.0, name + ": shares are fair");
      }
    }
  }
  set_nodes(invented({4}));
  check(nodes() == nullptr, "one node is none");
  for (const auto& bad : {std::vector<NodePlace>{{{0}, 0}, {{}, 1}}, {{{0}, 0}, {{0}, 1}}, {{{0}, 0}, {{5000}, 1}}}) {
    bool refused = false;
    try {
      set_nodes(bad);
    } catch (const std::exception&) {
      refused = true;
    }
    check(refused && nodes() == nullptr, "nodes that make no sense are refused");
  }
}

void test_work_queues() {
  for (const std::vector<int>& cpus : kMachines) {
    const std::string name = std::to_string(cpus.size()) + " nodes";
    set_nodes(invented(cpus));
    take_all(name, {{7, 1}});
    take_all(name, {{1, 5}});
    take_all(name, {{16, 3}, {5, 1}, {1, 1}, {0, 4}, {8, 2}});
    take_all(name, {});
    WorkQueue queue;
    queue.clear();
    queue.add(64, 20);
    std::atomic<int> sum{0};
    run_on_threads(5, [&](Worker& worker) {
      const int node = queue.node_of(worker.index, worker.count);
      for (int item = queue.take(node); item < queue.items(); item = queue.take(node)) sum.fetch_add(item + 1);
    });
    check(sum == 1280 * 1281 / 2, name + ": threads take every item once");
  }
  set_nodes({});
}

}  // namespace cpumoe::tests
