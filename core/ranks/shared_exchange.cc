#include "ranks/shared_exchange.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "runtime/check.h"

namespace cpumoe {

namespace {

// Bytes of the numbers, so that a message of one kind cannot be taken for one of another.
enum class Message : std::uint32_t {
  kGather = 0x47415448,
  kTrade = 0x54524144,
  kSum = 0x53554D00,
  kLargest = 0x4C524754
};

const char* name_of(Message message) {
  switch (message) {
    case Message::kGather: return "a gather";
    case Message::kTrade: return "a trade";
    case Message::kSum: return "a sum";
    case Message::kLargest: return "a maximum";
  }
  return "an unknown message";
}

// What a rank says of one of its two slots.
struct alignas(64) Line {
  std::atomic<std::uint64_t> turn;  // of what the slot holds; it is whole when this is stored
  Message message;
  std::int64_t total, piece;  // bytes of the message, of which so many are in the slot
};

constexpr std::int64_t kReasonBytes = 960;

struct alignas(64) Farewell {
  std::atomic<std::uint32_t> said;
  char reason[kReasonBytes];
};

constexpr std::int64_t kPage = 4096, kLine = 64;

std::int64_t pages(std::int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
std::int64_t lines(std::int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

std::int64_t head_bytes(int ranks) {
  return pages(ranks * static_cast<std::int64_t>(2 * sizeof(Line) + sizeof(Farewell)));
}

struct flock lock_of(int rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

// Every rank has two slots, used in turn. A rank may write a slot again two turns later without asking: it has seen
// the turn between them of all others, and they gave that only after they had read this one. So a turn takes one
// wait.
//
// A rank holds a lock on a byte of the file for as long as its process lives: the kernel lets go of it, however the
// process ends.
struct SharedExchange::Region {
  Region(int file_, int rank_, int ranks_, std::int64_t slot_bytes_, double seconds_, int first_rank_)
      : rank(rank_), ranks(ranks_), first_rank(first_rank_), slot_bytes(slot_bytes_), seconds(seconds_) {
    CPUMOE_REQUIRE(slot_bytes > 0 && slot_bytes % kPage == 0, "slot_bytes=", slot_bytes, "; a multiple of ", kPage,
                   " is accepted");
    CPUMOE_REQUIRE(seconds > 0, "seconds=", seconds, "; a number above 0 is accepted");
    CPUMOE_REQUIRE(traded_part() > 0, "slot_bytes=", slot_bytes, " for ", ranks,
                   " ranks; a slot must have room for something of each");
    bytes = file_bytes(ranks, slot_bytes);
    const off_t found = lseek(file_, 0, SEEK_END);
    CPUMOE_REQUIRE(found == bytes, "the shared file has ", found, " bytes; ", bytes, " are accepted");
    file = fcntl(file_, F_DUPFD_CLOEXEC, 0);
    if (file < 0) throw RankFailure(concat("the shared file cannot be kept open: ", std::strerror(errno)));
    void* mapped = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {
      close(file);
      throw RankFailure(concat("the shared file cannot be mapped: ", std::strerror(errno)));
    }
    data = static_cast<std::uint8_t*>(mapped);
    struct flock lock = lock_of(rank);
    if (fcntl(file, F_OFD_SETLK, &lock) != 0) {
      munmap(data, static_cast<std::size_t>(bytes));
      close(file);
      throw RankFailure(concat(name(rank), " is taken by another process: ", std::strerror(errno)));
    }
  }

  ~Region() {
    munmap(data, static_cast<std::size_t>(bytes));
    close(file);
  }

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  Line& line(int of) const { return reinterpret_cast<Line*>(data)[2 * of + static_cast<int>(turn & 1)]; }
  Farewell& farewell(int of) const {
    return reinterpret_cast<Farewell*>(data + 2 * ranks * static_cast<std::int64_t>(sizeof(Line)))[of];
  }
  std::uint8_t* slot(int of) const {
    return data + head_bytes(ranks) + (2 * of + static_cast<int>(turn & 1)) * slot_bytes;
  }

  // In a trade a slot begins with the bytes of the whole trade for each rank; then as many bytes for each.
  std::int64_t traded_head() const { return lines(ranks * static_cast<std::int64_t>(sizeof(std::int64_t))); }
  std::int64_t traded_part() const { return (slot_bytes - traded_head()) / ranks / kLine * kLine; }

  // Begins a turn: `write` fills this rank's slot.
  template <class Write>
  void give(Message message, std::int64_t total, std::int64_t piece, Write&& write) {
    ++turn;
    write(slot(rank));
    Line& mine = line(rank);
    mine.message = message;
    mine.total = total;
    mine.piece = piece;
    mine.turn.store(turn, std::memory_order_release);
  }

  // Waits for what another rank gives in this turn.
  const Line& wait_for(int other, Message message) {
    const Line& theirs = line(other);
    if (theirs.turn.load(std::memory_order_acquire) != turn) wait(theirs, other);
    if (theirs.message != message) {
      throw RankFailure(concat(name(other), " gave ", name_of(theirs.message), " of ", theirs.total, " bytes where ",
                               name(rank), " was at ", name_of(message),
                               "; all ranks must run the same model with the same layout"));
    }
    return theirs;
  }

  void wait(const Line& theirs, int other) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point started = Clock::now();
    Clock::time_point looked = started;
    for (std::int64_t round = 0;; ++round) {
      // As long as an exchange takes, the core is kept; then it is left to others, such as the rank that is waited for.
      for (int i = 0; i < 64; ++i) {
        const std::uint64_t found = theirs.turn.load(std::memory_order_acquire);
        if (found == turn) {
          waited_seconds += std::chrono::duration<double>(Clock::now() - started).count();
          return;
        }
        if (found != 0 && found != turn - 2) {  // what a slot holds before
          throw RankFailure(concat("what ", name(other), " gives is not readable: its turn is ", found, " where ",
                                   name(rank), " is at ", turn));
        }
        relax_core();
      }
      const Clock::time_point now = Clock::now();
      const double waited = std::chrono::duration<double>(now - started).count();
      if (std::chrono::duration<double>(now - looked).count() >= 0.01) {
        looked = now;
        refuse_failed();
        refuse_ended(other, &theirs);
        if (waited > seconds) {
          throw RankFailure(
              concat(name(other), " has given nothing for ", seconds, " s; ", name(rank), " does not wait any longer"));
        }
      }
      if (waited > 1e-3) {  // a scheduler need not listen to who yields; it does to who sleeps
        const timespec pause{0, waited > 1.0 ? 2000000 : 20000};
        nanosleep(&pause, nullptr);
      } else if (waited > 1e-4) {
        sched_yield();
      }
    }
  }

  // Raises if a rank has said that it will give nothing more: it is the reason why others do not come.
  void refuse_failed() const {
    for (int of = 0; of < ranks; ++of) {
      if (of == rank) continue;
      const Farewell& last = farewell(of);
      if (last.said.load(std::memory_order_acquire) != 0) {
        throw RankFailure(
            concat(name(of), " has failed: ", std::string(last.reason, strnlen(last.reason, kReasonBytes))));
      }
    }
  }

  // Raises if a rank's process has ended, unless it has given what is waited for.
  void refuse_ended(int other, const Line* awaited) const {
    struct flock lock = lock_of(other);
    if (fcntl(file, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK) return;
    if (awaited != nullptr && awaited->turn.load(std::memory_order_acquire) == turn) return;  // its last words
    throw RankFailure(concat(name(other), " has ended; ", name(rank), " cannot go on without it"));
  }

  // Values of all ranks, some at a time: take(rank, its values, those of this one, count) for every rank in order.
  template <class Take>
  void fold(Message message, float* values, std::int64_t count, Take&& take) {
    const std::int64_t at_once = slot_bytes / static_cast<std::int64_t>(sizeof(float));
    const std::int64_t total = count * static_cast<std::int64_t>(sizeof(float));
    std::int64_t done = 0;
    do {  // nothing is a message too
      float* some = values + done;
      const std::int64_t n = std::min(at_once, count - done), piece = n * static_cast<std::int64_t>(sizeof(float));
      give(message, total, piece, [&](std::uint8_t* slot) {
        if (piece > 0) std::memcpy(slot, some, static_cast<std::size_t>(piece));
      });
      for (int r = 0; r < ranks; ++r) {
        const Line& theirs = wait_for(r, message);
        if (theirs.total != total || theirs.piece != piece) throw other_size(r, theirs.total, total);
        if (n > 0) take(r, reinterpret_cast<const float*>(slot(r)), some, n);
      }
      done += n;
    } while (done < count);
  }

  RankFailure other_size(int other, std::int64_t given, std::int64_t expected) const {
    return RankFailure(concat(name(other), " gave ", given, " bytes where ", name(rank), " expected ", expected,
                              "; all ranks must run the same model with the same layout"));
  }

  std::string name(int of) const { return concat("rank ", first_rank + of); }

  static void relax_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  int rank, ranks, first_rank, file = -1;
  std::int64_t slot_bytes, bytes = 0;
  double seconds;
  std::uint8_t* data = nullptr;
  std::uint64_t turn = 0;
  double waited_seconds = 0.0;
};

std::int64_t SharedExchange::file_bytes(int ranks, std::int64_t slot_bytes) {
  return head_bytes(ranks) + 2 * ranks * slot_bytes;
}

SharedExchange::SharedExchange(int file, int rank, int ranks, std::int64_t slot_bytes, double seconds, int first_rank)
    : RankExchange(rank, ranks),
      region_(std::make_unique<Region>(file, rank, ranks, slot_bytes, seconds, first_rank)) {}

SharedExchange::~SharedExchange() = default;

double SharedExchange::waited_seconds() const { return region_->waited_seconds; }

void SharedExchange::check() const {
  region_->refuse_failed();
  for (int of = 0; of < ranks(); ++of) {
    if (of != rank()) region_->refuse_ended(of, nullptr);
  }
}

void SharedExchange::fail(const std::string& reason) noexcept {
  Farewell& last = region_->farewell(rank());
  if (last.said.load(std::memory_order_relaxed) != 0) return;
  const std::size_t length = std::min<std::size_t>(reason.size(), kReasonBytes - 1);
  std::memcpy(last.reason, reason.data(), length);
  last.reason[length] = 0;
  last.said.store(1, std::memory_order_release);
}

void SharedExchange::do_gather(const void* mine, const std::int64_t* begins, void* all) {
  Region& region = *region_;
  const auto* from = static_cast<const std::uint8_t*>(mine);
  auto* to = static_cast<std::uint8_t*>(all);
  std::int64_t longest = 0;
  for (int r = 0; r < ranks(); ++r) longest = std::max(longest, begins[r + 1] - begins[r]);
  const auto piece_at = [&](std::int64_t done, int r) {
    return std::clamp<std::int64_t>(begins[r + 1] - begins[r] - done, 0, region.slot_bytes);
  };
  std::int64_t done = 0;
  do {  // nothing is a message too
    const std::int64_t piece = piece_at(done, rank());
    region.give(Message::kGather, begins[rank() + 1] - begins[rank()], piece, [&](std::uint8_t* slot) {
      if (piece > 0) std::memcpy(slot, from + done, static_cast<std::size_t>(piece));
    });
    for (int r = 0; r < ranks(); ++r) {
      const std::int64_t wanted = piece_at(done, r);
      const Line& line = region.wait_for(r, Message::kGather);
      if (line.total != begins[r + 1] - begins[r] || line.piece != wanted) {
        throw region.other_size(r, line.total, begins[r + 1] - begins[r]);
      }
      if (wanted > 0) std::memcpy(to + begins[r] + done, region.slot(r), static_cast<std::size_t>(wanted));
    }
    done += region.slot_bytes;
  } while (done < longest);
}

void SharedExchange::do_trade(const void* mine, const std::int64_t* begins, void* all, const std::int64_t* given) {
  Region& region = *region_;
  const auto* from = static_cast<const std::uint8_t*>(mine);
  auto* to = static_cast<std::uint8_t*>(all);
  const std::int64_t head = region.traded_head(), part = region.traded_part();  // of a slot: sizes, for one rank
  const auto piece_at = [&](const std::int64_t* of, std::int64_t done, int r) {
    return std::clamp<std::int64_t>(of[r + 1] - of[r] - done, 0, part);
  };
  std::int64_t longest = 0;  // of what this rank gives
  for (int r = 0; r < ranks(); ++r) longest = std::max(longest, begins[r + 1] - begins[r]);
  bool more = true;
  for (std::int64_t done = 0; more; done += part) {
    // Nobody knows what others give to each other: all go on until nobody has anything left.
    region.give(Message::kTrade, std::max<std::int64_t>(0, longest - done), part, [&](std::uint8_t* slot) {
      for (int r = 0; r < ranks(); ++r) {
        reinterpret_cast<std::int64_t*>(slot)[r] = begins[r + 1] - begins[r];
        const std::int64_t piece = piece_at(begins, done, r);
        if (piece > 0) std::memcpy(slot + head + r * part, from + begins[r] + done, static_cast<std::size_t>(piece));
      }
    });
    more = false;
    for (int r = 0; r < ranks(); ++r) {
      const Line& line = region.wait_for(r, Message::kTrade);
      more = more || line.total > part;
      const std::int64_t expected = given[r + 1] - given[r];
      const std::int64_t found = reinterpret_cast<const std::int64_t*>(region.slot(r))[rank()];
      if (found != expected || line.piece != part) throw region.other_size(r, found, expected);
      const std::int64_t piece = piece_at(given, done, r);
      if (piece > 0) {
        std::memcpy(to + given[r] + done, region.slot(r) + head + rank() * part, static_cast<std::size_t>(piece));
      }
    }
  }
}

void SharedExchange::do_sum(float* values, std::int64_t count) {
  // In the order of the ranks. The first two may stand in either order, so ranks 0 and 1 begin with what they have.
  const int own = rank();
  const bool begins_with_own = own < 2;
  region_->fold(Message::kSum, values, count, [=](int r, const float* theirs, float* mine, std::int64_t n) {
    if (begins_with_own && r == own) return;
    if (!begins_with_own && r == 0) {
      std::memcpy(mine, theirs, static_cast<std::size_t>(n) * sizeof(float));
    } else {
      for (std::int64_t i = 0; i < n; ++i) mine[i] += theirs[i];
    }
  });
}

void SharedExchange::do_largest(float* values, std::int64_t count) {
  region_->fold(Message::kLargest, values, count, [](int r, const float* theirs, float* mine, std::int64_t n) {
    if (r == 0) {
      std::memcpy(mine, theirs, static_cast<std::size_t>(n) * sizeof(float));
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        const bool is_nan = mine[i] != mine[i];
        mine[i] = is_nan || theirs[i] > mine[i] ? theirs[i] : mine[i];
      }
    }
  });
}

}  // namespace cpumoe
