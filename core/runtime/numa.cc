#include "runtime/numa.h"

#include <algorithm>

#include "runtime/check.h"

namespace cpumoe {
namespace {

std::atomic<const Nodes*> nodes_in_use{nullptr};
std::atomic<bool> ever_several{false};  // whether a thread may be bound

cpu_set_t set_of(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  return set;
}

// What a thread of the team was allowed before, and for which nodes it was bound.
struct Settled {
  const Nodes* nodes = nullptr;
  int node = -1;
  bool known = false;
  cpu_set_t before;
};

Settled& of_this_thread() {
  static thread_local Settled settled;
  return settled;
}

// The CPUs of a node that a mask allows; false if there are none.
bool common_cpus(const cpu_set_t& mask, const cpu_set_t& node, cpu_set_t* common) {
  CPU_AND(common, &mask, &node);
  return CPU_COUNT(common) != 0;
}

void move_caller(const Nodes& nodes, int node) {
  const int cpu = sched_getcpu();
  if (cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(cpu, &nodes.cpus(node))) return;
  cpu_set_t before, common;
  if (sched_getaffinity(0, sizeof(before), &before) != 0) return;
  if (!common_cpus(before, nodes.cpus(node), &common)) return;
  if (sched_setaffinity(0, sizeof(common), &common) == 0) sched_setaffinity(0, sizeof(before), &before);
}

}  // namespace

Nodes::Nodes(std::vector<NodePlace> places) : places_(std::move(places)) {
  std::int64_t cpus = 0;
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const NodePlace& place : places_) {
    CPUMOE_REQUIRE(!place.cpus.empty(), "a node has no CPUs");
    for (const int cpu : place.cpus) {
      CPUMOE_REQUIRE(cpu >= 0 && cpu < CPU_SETSIZE, "CPU ", cpu, "; 0 to ", CPU_SETSIZE - 1, " are accepted");
      CPUMOE_REQUIRE(!CPU_ISSET(cpu, &all), "CPU ", cpu, " belongs to two nodes");
      CPU_SET(cpu, &all);
    }
    cpus += static_cast<std::int64_t>(place.cpus.size());
    sets_.push_back(set_of(place.cpus));
    ends_.push_back(cpus);
  }
}

int Nodes::of(std::int64_t index, std::int64_t count) const {
  int node = 0;
  while (node + 1 < this->count() && index >= first(node + 1, count)) ++node;
  return node;
}

std::int64_t Nodes::first(int node, std::int64_t count) const {
  if (node == 0) return 0;
  if (node == this->count()) return count;
  // The smallest i with (2 i + 1) / (2 count) at or behind before / all.
  const std::int64_t before = ends_[static_cast<std::size_t>(node) - 1], all = ends_.back();
  return (2 * count * before - all + 2 * all - 1) / (2 * all);
}

void set_nodes(std::vector<NodePlace> places) {
  // Old ones stay: a call may still use them, and they are few. They outlive all threads of the process.
  static std::mutex changing;
  static auto& all = *new std::vector<std::unique_ptr<const Nodes>>();
  const std::lock_guard lock(changing);
  const Nodes* fresh = nullptr;
  if (places.size() >= 2) {
    fresh = all.emplace_back(std::make_unique<const Nodes>(std::move(places))).get();
    ever_several.store(true);
  }
  nodes_in_use.store(fresh, std::memory_order_release);
}

const Nodes* nodes() { return nodes_in_use.load(std::memory_order_acquire); }

void settle_thread(int index, int count) {
  if (!ever_several.load(std::memory_order_relaxed)) return;
  const Nodes* now = nodes();
  if (index == 0) {
    if (now != nullptr && count > 1) move_caller(*now, 0);
    return;
  }
  Settled& settled = of_this_thread();
  const int node = now == nullptr ? -1 : now->of(index, count);
  if (settled.nodes == now && settled.node == node) return;
  if (!settled.known) settled.known = sched_getaffinity(0, sizeof(settled.before), &settled.before) == 0;
  settled.nodes = now;
  settled.node = node;
  cpu_set_t common;
  const bool some = now != nullptr && settled.known && common_cpus(settled.before, now->cpus(node), &common);
  if (settled.known) sched_setaffinity(0, sizeof(cpu_set_t), some ? &common : &settled.before);
}

void WorkQueue::clear() {
  nodes_ = nodes();
  items_ = 0;
  next_.store(0, std::memory_order_relaxed);
  if (nodes_ == nullptr) return;
  rows_.clear();
  if (counters_size_ != nodes_->count())
    counters_ = std::make_unique<Counter[]>(static_cast<std::size_t>(nodes_->count()));
  counters_size_ = nodes_->count();
  for (int node = 0; node < counters_size_; ++node) {
    counters_[static_cast<std::size_t>(node)].next.store(0, std::memory_order_relaxed);
    counters_[static_cast<std::size_t>(node)].end = 0;
  }
}

void WorkQueue::add(int parts, int repeats) {
  if (nodes_ != nullptr) {
    rows_.push_back({items_, parts, repeats});
    for (int node = 0; node < counters_size_; ++node) {
      counters_[static_cast<std::size_t>(node)].end +=
          static_cast<int>(nodes_->first(node + 1, parts) - nodes_->first(node, parts)) * repeats;
    }
  }
  items_ += parts * repeats;
}

int WorkQueue::take_near(int node) {
  for (;;) {
    Counter& counter = counters_[static_cast<std::size_t>(node)];
    const int turn = counter.next.fetch_add(1, std::memory_order_relaxed);
    if (turn < counter.end) return item_of(node, turn);
    int most = 0;
    for (int other = 0; other < counters_size_; ++other) {
      const Counter& c = counters_[static_cast<std::size_t>(other)];
      const int left = c.end - c.next.load(std::memory_order_relaxed);
      if (left > most) {
        most = left;
        node = other;
      }
    }
    if (most == 0) return items_;
  }
}

int WorkQueue::item_of(int node, int turn) const {
  for (const Row& row : rows_) {
    const auto first = static_cast<int>(nodes_->first(node, row.parts));
    const int own = static_cast<int>(nodes_->first(node + 1, row.parts)) - first;
    if (turn < own * row.repeats) return row.first_item + turn / own * row.parts + first + turn % own;
    turn -= own * row.repeats;
  }
  return items_;  // not reached: a node's turns are those of its rows
}

}  // namespace cpumoe
