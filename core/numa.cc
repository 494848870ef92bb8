#include "numa.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <thread>

#include "check.h"

namespace cpumoe {
namespace {

constexpr int kMoveFlag = 1 << 1;  // MPOL_MF_MOVE: pages of this process alone
constexpr std::int64_t kHugePage = 2 << 20;
constexpr std::uintptr_t kSmallestPage = 4096;
constexpr int kPagesAtOnce = 512, kPlacingThreads = 4;

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

// Where the pages of one node begin and end in one expert: those whose middle is in its blocks.
struct PageRange {
  std::uintptr_t begin, end;
};

class Placing {
 public:
  Placing(const Nodes& nodes, const PackedMatrix& m, std::uint8_t* data) : nodes_(nodes), m_(m) {
    // Huge pages where a node's part of an expert has several of them. In smaller parts most pages would lie on a wrong
    // node, and reading that costs more than small pages do.
    const bool huge = m.expert_bytes / nodes.count() >= 2 * kHugePage;
    unit_ = static_cast<std::uintptr_t>(huge ? kHugePage : sysconf(_SC_PAGESIZE));
    begin_ = (reinterpret_cast<std::uintptr_t>(data) + unit_ - 1) / unit_ * unit_;
    end_ = (reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(m.total_bytes)) / unit_ * unit_;
    if (!huge && begin_ < end_) madvise(reinterpret_cast<void*>(begin_), end_ - begin_, MADV_NOHUGEPAGE);
  }

  Placement run() {
    std::vector<std::thread> threads;
    for (int node = 0; begin_ < end_ && node < nodes_.count(); ++node) {
      const int count = std::min<int>(kPlacingThreads, static_cast<int>(nodes_.place(node).cpus.size()));
      for (int i = 0; i < count; ++i) {
        try {
          threads.emplace_back([this, node, i, count] {
            sched_setaffinity(0, sizeof(cpu_set_t), &nodes_.cpus(node));  // where it fails, pages are moved
            work(node, i, count);
          });
        } catch (const std::system_error&) {  // no more threads
          work(node, i, count);
        }
      }
    }
    for (std::thread& thread : threads) thread.join();
    return result_;
  }

 private:
  // Every page belongs to one node: what is before an expert's blocks goes with the first one.
  PageRange pages_of(std::int64_t expert, int node) const {
    const auto edge = [&](std::int64_t e, int n) {
      if (n == 0 && e == 0) return begin_;
      const auto at = reinterpret_cast<std::uintptr_t>(n == 0 ? m_.block(e, 0) - m_.input_bytes
                                                              : m_.block(e, nodes_.first(n, m_.blocks)));
      return std::clamp((at + unit_ / 2 - 1) / unit_ * unit_, begin_, end_);
    };
    if (node + 1 < nodes_.count()) return {edge(expert, node), edge(expert, node + 1)};
    return {edge(expert, node), expert + 1 < m_.spec.experts ? edge(expert + 1, 0) : end_};
  }

  // The pages of a node, in turns with the other threads that place them.
  void work(int node, int index, int count) {
    Placement mine;
    std::vector<void*> pages;
    int turn = 0;
    for (std::int64_t expert = 0; expert < m_.spec.experts; ++expert) {
      const PageRange range = pages_of(expert, node);
      for (std::uintptr_t page = range.begin; page < range.end;) {
        const bool own = turn++ % count == index;
        for (int i = 0; i < kPagesAtOnce && page < range.end; ++i, page += unit_) {
          if (own) pages.push_back(reinterpret_cast<void*>(page));
        }
        if (own) place(pages, nodes_.place(node).memory_node, &mine);
        pages.clear();
      }
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    result_.pages += mine.pages;
    result_.elsewhere += mine.elsewhere;
    if (result_.problem == 0) result_.problem = mine.problem;
  }

  void place(const std::vector<void*>& pages, int memory_node, Placement* result) const {
    for (void* page : pages) {  // all small pages of a huge one, which the system may not have given
      for (std::uintptr_t i = 0; i < unit_; i += kSmallestPage) {
        reinterpret_cast<std::atomic<std::uint8_t>*>(static_cast<std::uint8_t*>(page) + i)
            ->fetch_or(0, std::memory_order_relaxed);
      }
    }
    result->pages += static_cast<std::int64_t>(pages.size());
    if (result->problem != 0) return;
    const std::vector<int> wanted(pages.size(), memory_node);
    std::vector<int> found(pages.size(), -1);
    if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), wanted.data(), found.data(), kMoveFlag) < 0) {
      result->problem = errno;
      return;
    }
    result->elsewhere += std::count_if(found.begin(), found.end(), [&](int node) { return node != memory_node; });
  }

  const Nodes& nodes_;
  const PackedMatrix& m_;
  std::uintptr_t unit_ = 0, begin_ = 0, end_ = 0;
  std::mutex mutex_;
  Placement result_;
};

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

Placement place_packed(const PackedMatrix& matrix, std::uint8_t* data) {
  const Nodes* now = nodes();
  return now == nullptr ? Placement{} : Placing(*now, matrix, data).run();
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
