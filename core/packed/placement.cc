#include "packed/placement.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "runtime/numa.h"

namespace cpumoe {
namespace {

constexpr int kMoveFlag = 1 << 1;  // MPOL_MF_MOVE: pages of this process alone
constexpr std::int64_t kHugePage = 2 << 20;
constexpr std::uintptr_t kSmallestPage = 4096;
constexpr int kPagesAtOnce = 512, kPlacingThreads = 4;

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

Placement place_packed(const PackedMatrix& matrix, std::uint8_t* data) {
  const Nodes* now = nodes();
  return now == nullptr ? Placement{} : Placing(*now, matrix, data).run();
}

}  // namespace cpumoe
