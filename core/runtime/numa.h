// Memory nodes: threads, packed weights and work items are cut into one range for each node, all by the same rule, so
// that a node's threads multiply with what lies on their own node.
//
// Which node a thread, a column block or a work item belongs to follows from its index alone: index i of n stands at
// (2 i + 1) / 2 n of the machine, and every node has a stretch of it that is as long as it has CPUs. So threads may be
// as many as they like, and weights stay where they are when their number changes.
//
// With one node (or none set) nothing of this is done: no thread and no page moves, and there is one counter of work.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace cpumoe {

// What is known of a node: CPUs whose threads belong together, and where their part of the weights lies.
struct NodePlace {
  std::vector<int> cpus;
  int memory_node = 0;
};

// The nodes in use; never changed once it is made.
class Nodes {
 public:
  explicit Nodes(std::vector<NodePlace> places);

  int count() const { return static_cast<int>(places_.size()); }
  const NodePlace& place(int node) const { return places_[static_cast<std::size_t>(node)]; }
  const cpu_set_t& cpus(int node) const { return sets_[static_cast<std::size_t>(node)]; }
  // The node of index `index` of `count`; ascends with the index.
  int of(std::int64_t index, std::int64_t count) const;
  // The first index of `count` that belongs to a node; `count` behind the last one.
  std::int64_t first(int node, std::int64_t count) const;

 private:
  std::vector<NodePlace> places_;
  std::vector<cpu_set_t> sets_;
  std::vector<std::int64_t> ends_;  // CPUs up to and with each node
};

// Uses these nodes from the next call on; fewer than two mean none. Refuses nodes without CPUs or with common ones.
void set_nodes(std::vector<NodePlace> places);
// The nodes in use; null where there are not several.
const Nodes* nodes();

// Brings the calling thread, which is `index` of a team of `count`, to the CPUs of its node. Threads of the team stay
// bound to them. The first one is the caller's own: it is moved there, and may run wherever it was allowed to before.
// Binding it would take CPUs from all threads that it makes, and from PyTorch's count of them.
void settle_thread(int index, int count);

// The work items of a stage, from which threads take: their node's own first, then those of the node that has most
// left. Items are numbered row by row; a row is `repeats` times the same parts, which are ranges of column blocks in
// ascending order.
class WorkQueue {
 public:
  // Removes all items. No thread may take meanwhile.
  void clear();
  void add(int parts, int repeats = 1);

  int items() const { return items_; }
  int node_count() const { return nodes_ == nullptr ? 1 : nodes_->count(); }
  // The node that a thread of a team takes items for.
  int node_of(int index, int count) const { return nodes_ == nullptr ? 0 : nodes_->of(index, count); }
  // The next item, or a number from items() on if there is none.
  int take(int node) {
    if (nodes_ == nullptr) return next_.fetch_add(1, std::memory_order_relaxed);
    return take_near(node);
  }

 private:
  struct Row {
    int first_item, parts, repeats;
  };
  struct alignas(64) Counter {
    std::atomic<int> next{0};
    int end = 0;
  };

  int take_near(int node);
  int item_of(int node, int turn) const;

  const Nodes* nodes_ = nullptr;
  int items_ = 0, counters_size_ = 0;
  std::vector<Row> rows_;  // only where there are several nodes
  std::unique_ptr<Counter[]> counters_;
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace cpumoe
