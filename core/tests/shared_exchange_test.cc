// Threads as ranks: each opens the shared file itself, as processes do.
#include "ranks/shared_exchange.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ranks/row_traffic.h"
#include "tests/harness.h"
#include "tests/tests.h"

// ThreadSanitizer knows memory by its addresses. While a shared file is tested, all ranks get the same ones, so that it
// sees whether what they do to it is ordered.
namespace {
std::atomic<void*> common{nullptr};
}

extern "C" {
void* __real_mmap(void*, std::size_t, int, int, int, off_t);
int __real_munmap(void*, std::size_t);

void* __wrap_mmap(void* address, std::size_t bytes, int protection, int flags, int file, off_t offset) {
  if (void* same = common.load(); same != nullptr && (flags & MAP_SHARED) != 0) return same;
  return __real_mmap(address, bytes, protection, flags, file, offset);
}

int __wrap_munmap(void* address, std::size_t bytes) {
  return address == common.load() && address != nullptr ? 0 : __real_munmap(address, bytes);
}
}

namespace cpumoe::tests {
namespace {

constexpr std::int64_t kSlot = 4096;

// A file that all ranks of a test open.
class SharedFile {
 public:
  explicit SharedFile(int ranks) : bytes_(static_cast<std::size_t>(SharedExchange::file_bytes(ranks, kSlot))) {
    const char* folder = std::getenv("TMPDIR");
    path_ = std::string(folder == nullptr ? "/tmp" : folder) + "/cpumoe-ranks-XXXXXX";
    const int file = mkstemp(path_.data());
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes_)) != 0) throw std::runtime_error("no temporary file");
    void* mapped = __real_mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) throw std::runtime_error("the temporary file cannot be mapped");
    common = mapped;
  }
  ~SharedFile() {
    __real_munmap(common.exchange(nullptr), bytes_);
    unlink(path_.c_str());
  }

  std::unique_ptr<SharedExchange> join(int rank, int ranks, double seconds = 60) const {
    const int file = open(path_.c_str(), O_RDWR | O_CLOEXEC);
    auto exchange = std::make_unique<SharedExchange>(file, rank, ranks, kSlot, seconds);
    close(file);
    return exchange;
  }

  // Of the shared bytes; ranks begin at multiples of `file_bytes`.
  std::uint8_t* data() const { return static_cast<std::uint8_t*>(common.load()); }

 private:
  std::string path_;
  std::size_t bytes_;
};

// Runs every rank in a thread of its own; gives what each has raised, or nothing.
std::vector<std::string> run_ranks(int ranks, double seconds, const std::function<void(SharedExchange&)>& body) {
  const SharedFile file(ranks);
  std::vector<std::unique_ptr<SharedExchange>> exchanges;
  for (int r = 0; r < ranks; ++r) exchanges.push_back(file.join(r, ranks, seconds));
  std::vector<std::string> problems(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(*exchanges[static_cast<std::size_t>(r)]);
        exchanges[static_cast<std::size_t>(r)]->rethrow();
      } catch (const std::exception& problem) {
        problems[static_cast<std::size_t>(r)] = problem.what();
      }
      exchanges[static_cast<std::size_t>(r)].reset();  // as a process that ends
    });
  }
  for (std::thread& thread : threads) thread.join();
  return problems;
}

bool all_well(const std::vector<std::string>& problems) {
  for (const std::string& problem : problems) {
    if (!problem.empty()) std::printf("  %s\n", problem.c_str());
  }
  return std::all_of(problems.begin(), problems.end(), [](const std::string& problem) { return problem.empty(); });
}

// What rank `from` gives to rank `to` in a round, byte by byte.
std::uint8_t byte_of(int from, int to, std::int64_t round, std::int64_t index) {
  return static_cast<std::uint8_t>(from * 101 + to * 31 + round * 7 + index * 13 + index / 251);
}

using Sizes = std::vector<std::int64_t>;

Sizes begins_of(const Sizes& sizes) {
  Sizes begins(sizes.size() + 1);
  for (std::size_t i = 0; i < sizes.size(); ++i) begins[i + 1] = begins[i] + sizes[i];
  return begins;
}

bool gathers(RankExchange& exchange, const Sizes& sizes, std::int64_t round) {
  const Sizes begins = begins_of(sizes);
  std::vector<std::uint8_t> mine(static_cast<std::size_t>(sizes[static_cast<std::size_t>(exchange.rank())]));
  for (std::size_t i = 0; i < mine.size(); ++i) {
    mine[i] = byte_of(exchange.rank(), 0, round, static_cast<std::int64_t>(i));
  }
  std::vector<std::uint8_t> all(static_cast<std::size_t>(begins.back()) + 1, 0xEE);
  exchange.gather_parts(mine.data(), begins.data(), all.data());
  bool same = all.back() == 0xEE;
  for (int r = 0; r < exchange.ranks(); ++r) {
    for (std::int64_t i = 0; i < sizes[static_cast<std::size_t>(r)]; ++i) {
      same &= all[static_cast<std::size_t>(begins[static_cast<std::size_t>(r)] + i)] == byte_of(r, 0, round, i);
    }
  }
  return same;
}

// sizes[from * ranks + to].
bool trades(RankExchange& exchange, const Sizes& sizes, std::int64_t round) {
  const auto ranks = static_cast<std::size_t>(exchange.ranks()), rank = static_cast<std::size_t>(exchange.rank());
  Sizes sent(ranks), given(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    sent[r] = sizes[rank * ranks + r];
    given[r] = sizes[r * ranks + rank];
  }
  const Sizes from = begins_of(sent), to = begins_of(given);
  std::vector<std::uint8_t> mine(static_cast<std::size_t>(from.back()) + 1);
  std::vector<std::uint8_t> all(static_cast<std::size_t>(to.back()) + 1, 0xEE);
  for (std::size_t r = 0; r < ranks; ++r) {
    for (std::int64_t i = 0; i < sent[r]; ++i) {
      mine[static_cast<std::size_t>(from[r] + i)] = byte_of(exchange.rank(), static_cast<int>(r), round, i);
    }
  }
  exchange.trade(mine.data(), from.data(), all.data(), to.data());
  bool same = all.back() == 0xEE;
  for (std::size_t r = 0; r < ranks; ++r) {
    for (std::int64_t i = 0; i < given[r]; ++i) {
      same &= all[static_cast<std::size_t>(to[r] + i)] == byte_of(static_cast<int>(r), exchange.rank(), round, i);
    }
  }
  return same;
}

float value_of(int rank, std::int64_t round, std::size_t index) {
  Random random(static_cast<std::uint64_t>(rank * 7919 + round * 31 + static_cast<std::int64_t>(index)));
  const float share = random.uniform(-0.5f, 0.5f);
  return share * static_cast<float>(1 << random.below(24));
}

// In the order of the ranks: what the sum is to the bit.
bool sums(RankExchange& exchange, std::size_t count, std::int64_t round) {
  std::vector<float> values(count), expected(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = value_of(exchange.rank(), round, i);
    expected[i] = value_of(0, round, i);
    for (int r = 1; r < exchange.ranks(); ++r) expected[i] += value_of(r, round, i);
  }
  exchange.sum(values.data(), static_cast<std::int64_t>(count));
  return same_bits(values.data(), expected.data(), count * sizeof(float));
}

bool finds_largest(RankExchange& exchange, std::size_t count, std::int64_t round) {
  std::vector<float> values(count), expected(count, -std::numeric_limits<float>::infinity());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (std::size_t i = 0; i < count; ++i) {
    for (int r = 0; r < exchange.ranks(); ++r) {
      // One of the ranks has NaN now and then, each of them at some place.
      const bool has_nan = i % 3 == 0 && static_cast<int>(i / 3) % exchange.ranks() == r && exchange.ranks() > 1;
      const float value = has_nan ? nan : value_of(r, round, i);
      if (r == exchange.rank()) values[i] = value;
      if (value > expected[i]) expected[i] = value;
    }
  }
  exchange.largest(values.data(), static_cast<std::int64_t>(count));
  return same_bits(values.data(), expected.data(), count * sizeof(float));
}

void test_sizes() {
  for (const int ranks : {1, 2, 4}) {
    std::atomic<int> wrong{0};
    const auto problems = run_ranks(ranks, 60, [&](SharedExchange& exchange) {
      const auto n = static_cast<std::size_t>(ranks);
      std::int64_t round = 0;
      for (const std::int64_t size : {std::int64_t{0}, std::int64_t{1}, kSlot - 1, kSlot, kSlot + 1, 5 * kSlot + 3}) {
        wrong += !gathers(exchange, Sizes(n, size), ++round);
        Sizes uneven(n, size);
        uneven[n - 1] = 3;
        wrong += !gathers(exchange, uneven, ++round);
        wrong += !trades(exchange, Sizes(n * n, size), ++round);
        Sizes one(n * n);
        one[n - 1] = size;  // from the first to the last alone
        wrong += !trades(exchange, one, ++round);
        wrong += !sums(exchange, static_cast<std::size_t>(size), ++round);
        wrong += !finds_largest(exchange, static_cast<std::size_t>(size), ++round);
      }
    });
    check(all_well(problems) && wrong == 0, "messages of every size between " + std::to_string(ranks) + " ranks");
  }
}

void test_many_turns() {
  constexpr int kRanks = 4, kRounds = 1500;
  std::atomic<int> wrong{0};
  const auto problems = run_ranks(kRanks, 60, [&](SharedExchange& exchange) {
    Random shared(17);                                              // what all ranks do
    Random own(static_cast<std::uint64_t>(exchange.rank() + 100));  // when
    const auto size = [&] { return std::int64_t{shared.below(shared.below(3) == 0 ? 9000 : 70)}; };
    for (int round = 0; round < kRounds; ++round) {
      const unsigned kind = shared.below(4);
      Sizes sizes(kind == 1 ? kRanks * kRanks : kRanks);
      for (std::int64_t& one : sizes) one = size();
      if (own.below(32) == 0) std::this_thread::sleep_for(std::chrono::microseconds(own.below(500)));
      if (kind == 0) wrong += !gathers(exchange, sizes, round);
      if (kind == 1) wrong += !trades(exchange, sizes, round);
      if (kind == 2) wrong += !sums(exchange, static_cast<std::size_t>(sizes[0] / 4), round);
      if (kind == 3) wrong += !finds_largest(exchange, static_cast<std::size_t>(sizes[0] / 4), round);
    }
  });
  check(all_well(problems) && wrong == 0, "many turns of all kinds, with delays");
}

bool each_names(const std::vector<std::string>& problems, int left_out, const std::string& text) {
  bool named = true;
  for (std::size_t r = 0; r < problems.size(); ++r) {
    if (static_cast<int>(r) == left_out) continue;
    named &= problems[r].find(text) != std::string::npos;
    if (problems[r].find(text) == std::string::npos) std::printf("  rank %zu: %s\n", r, problems[r].c_str());
  }
  return named;
}

void test_faults() {
  float value[8] = {};
  const auto rounds = [](SharedExchange& exchange, int count) {
    float own[8] = {};
    for (int i = 0; i < count && !exchange.has_failed(); ++i) exchange.sum(own, 8);
  };
  check(each_names(run_ranks(4, 60, [&](SharedExchange& e) { rounds(e, e.rank() == 2 ? 5 : 50); }), 2,
                   "rank 2 has ended"),
        "a rank that ends is named");
  check(each_names(run_ranks(3, 60,
                             [&](SharedExchange& e) {
                               rounds(e, 3);
                               if (e.rank() == 1) {
                                 e.fail("it is out of paper");
                                 e.fail("something that follows from it");
                                 throw RankFailure("out");
                               }
                               rounds(e, 3);
                             }),
                   1, "rank 1 has failed: it is out of paper"),
        "a rank that fails says why");
  check(each_names(run_ranks(3, 0.2,
                             [&](SharedExchange& e) {
                               rounds(e, 3);
                               if (e.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
                               rounds(e, 3);
                             }),
                   1, "rank 1 has given nothing for 0.2 s"),
        "a rank that hangs is named");
  check(each_names(run_ranks(3, 5,
                             [&](SharedExchange& e) {
                               float own[8] = {};
                               e.rank() == 2 ? e.largest(own, 8) : e.sum(own, 8);
                             }),
                   2, "rank 2 gave a maximum"),
        "a rank that does something else is named");
  check(each_names(run_ranks(3, 5,
                             [&](SharedExchange& e) {
                               float own[8] = {};
                               e.sum(own, e.rank() == 2 ? 7 : 8);
                             }),
                   2, "rank 2 gave 28 bytes"),
        "a rank that gives less is named");
  check(each_names(run_ranks(3, 5,
                             [&](SharedExchange& e) {
                               std::vector<std::uint8_t> some(100);
                               // Rank 2 gives rank 0 and 1 one byte more than they take.
                               const std::int64_t more[] = {0, 9, 18, 26}, begins[] = {0, 8, 16, 24};
                               const std::int64_t given[] = {0, 8, 16, 24};
                               e.trade(some.data(), e.rank() == 2 ? more : begins, some.data() + 50, given);
                             }),
                   2, "rank 2 gave 9 bytes"),
        "a trade of other sizes is refused");
  const SharedFile file(2);
  const auto first = file.join(0, 2, 5);
  bool taken = false;
  try {
    file.join(0, 2, 5);
  } catch (const RankFailure&) {
    taken = true;
  }
  check(taken, "two processes cannot be the same rank");
  bool absent = false;
  try {
    first->check();
  } catch (const RankFailure& problem) {
    absent = std::string(problem.what()).find("rank 1 has ended") != std::string::npos;
  }
  check(absent, "a look at the others finds the one that is not there");
  std::memset(file.data(), 0xA5, 4096);
  first->sum(value, 8);
  bool unreadable = false;
  try {
    first->rethrow();
  } catch (const RankFailure& problem) {
    unreadable = std::string(problem.what()).find("rank 1") != std::string::npos;
  }
  check(unreadable, "garbage in the shared file is an error");
  check(refused([&] { SharedExchange(0, 2, 2, kSlot, 1); }) && refused([&] { SharedExchange(0, 0, 2, 100, 1); }) &&
            refused([&] { SharedExchange(0, 0, 2, kSlot, -1); }) &&
            refused([&] { SharedExchange(0, 0, 500, kSlot, 1); }),
        "impossible exchanges are refused");
}

// ---- rows that travel ----------------------------------------------------------------------------------------------

constexpr std::int64_t kWidth = 5, kTopk = 3;
constexpr int kCopies = 7;

// What row `row` of a rank has, and what a rank answers to it: numbers whose sums depend on their order.
float row_value(int rank, std::int64_t row, std::int64_t i) { return static_cast<float>(rank * 100 + row * 10 + i); }
std::int32_t copy_of(int rank, std::int64_t row, std::int64_t k) {
  return static_cast<std::int32_t>((rank * 3 + row * 5 + k * 2) % kCopies);
}
float answer(int rank, float value) { return value * (0.1f + static_cast<float>(rank)) + 1e-7f; }

// Every rank sends some rows, perhaps none, and gets the sums of those that were to compute them, to the bit. Ranks may
// have to ask each other for the counts, and every third row may have no expert.
bool travels(RankExchange& exchange, RowTravel travel, const Sizes& counts, bool asks = false, bool skips = false) {
  const int rank = exchange.rank(), ranks = exchange.ranks();
  const std::int64_t count = counts[static_cast<std::size_t>(rank)];
  const auto expert_of = [&](int from, std::int64_t row, std::int64_t k) {
    return skips && row % 3 == 0 ? -1 : copy_of(from, row, k);
  };
  std::vector<float> x, weights;
  std::vector<std::int32_t> ids, begins, owners;
  for (std::int64_t row = 0; row < count; ++row) {
    for (std::int64_t i = 0; i < kWidth; ++i) x.push_back(row_value(rank, row, i));
    for (std::int64_t k = 0; k < kTopk; ++k) {
      ids.push_back(expert_of(rank, row, k));
      weights.push_back(static_cast<float>(row + k));
    }
  }
  for (int copy = 0; copy < kCopies; ++copy) owners.push_back(copy * copy % ranks);
  for (int copy = 0; copy <= kCopies; ++copy) begins.push_back(copy);  // one of each expert
  PackedExperts experts;
  experts.travel = travel;
  experts.copies = Copies{begins, owners, owners};
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(x.data());
  const ChosenRows rows{&experts, bytes, DType::kF32, kWidth, count, kTopk, ids.data(), weights.data(), 0};
  RowTraffic traffic;
  traffic.plan(active_kernels(), rows, exchange, asks ? nullptr : counts.data());
  traffic.pack(0, traffic.entries());
  traffic.send();
  traffic.unpack(0, traffic.received());
  const MoeCall call = traffic.call();
  // Those of each rank come in their order, with all that belongs to them.
  const auto goes_to = [&](int from, std::int64_t row, int to) {
    bool goes = travel == RowTravel::kToAll;
    for (std::int64_t k = 0; k < kTopk; ++k) {
      const std::int32_t expert = expert_of(from, row, k);
      goes |= expert >= 0 && owners[static_cast<std::size_t>(expert)] == to;
    }
    return goes;
  };
  bool right = true;
  std::int64_t next = 0;
  for (int from = 0; from < ranks; ++from) {
    for (std::int64_t row = 0; row < counts[static_cast<std::size_t>(from)]; ++row) {
      if (!goes_to(from, row, rank)) continue;
      if (next == traffic.received()) return false;
      const auto* came = static_cast<const float*>(call.x) + next * kWidth;
      for (std::int64_t i = 0; i < kWidth; ++i) {
        right &= came[i] == row_value(from, row, i);
        static_cast<float*>(call.out)[next * kWidth + i] = answer(rank, came[i]);
      }
      for (std::int64_t k = 0; k < kTopk; ++k) {
        right &= call.ids[next * kTopk + k] == expert_of(from, row, k);
        right &= call.weights[next * kTopk + k] == static_cast<float>(row + k);
      }
      ++next;
    }
  }
  right &= next == traffic.received();
  traffic.send_back();
  for (std::int64_t row = 0; row < count; ++row) {
    float sum[kWidth];
    traffic.add(row, sum);
    for (std::int64_t i = 0; i < kWidth; ++i) {
      float expected = 0.0f;
      for (int to = 0; to < ranks; ++to) {
        if (goes_to(rank, row, to)) expected += answer(to, row_value(rank, row, i));
      }
      right &= sum[i] == expected;
    }
  }
  return right;
}

void test_row_traffic() {
  for (const int ranks : {1, 2, 4}) {
    for (const RowTravel travel : {RowTravel::kToAll, RowTravel::kToExperts}) {
      std::atomic<int> wrong{0};
      const auto problems = run_ranks(ranks, 60, [&](SharedExchange& exchange) {
        Random shared(23);
        for (int round = 0; round < 60; ++round) {
          Sizes counts(static_cast<std::size_t>(ranks));
          for (std::int64_t& count : counts) count = shared.below(3) == 0 ? 0 : shared.below(round % 10 == 9 ? 300 : 5);
          wrong += !travels(exchange, travel, counts, round % 2 == 1, round % 4 > 1);
        }
      });
      check(all_well(problems) && wrong == 0,
            std::string("rows of ") + std::to_string(ranks) + " ranks go " +
                (travel == RowTravel::kToAll ? "to all of them" : "where their experts are") + ", and sums come back");
    }
  }
  const auto problems = run_ranks(3, 60, [&](SharedExchange& exchange) {
    if (exchange.rank() == 1) throw RankFailure("gone");
    check(!travels(exchange, RowTravel::kToExperts, {2, 2, 2}), "rows do not come from a rank that has ended");
  });
  check(each_names(problems, 1, "rank 1 has ended"), "a rank that ends while rows travel is named");
  for (const RowTravel travel : {RowTravel::kToAll, RowTravel::kToExperts}) {
    const auto differ = run_ranks(2, 60, [&](SharedExchange& exchange) {
      const float zeros[2 * kWidth] = {};
      const std::int32_t ids[kTopk] = {};
      const std::int32_t begins[] = {0, 1}, owners[] = {0};
      PackedExperts experts;
      experts.travel = travel;
      experts.copies = Copies{begins, owners, owners};
      const bool odd = exchange.rank() == 1;
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(zeros);
      RowTraffic traffic;  // rows have as many bytes
      traffic.plan(
          active_kernels(),
          {&experts, bytes, odd ? DType::kF16 : DType::kF32, odd ? 2 * kWidth : kWidth, 1, kTopk, ids, zeros, 0},
          exchange);
      check(traffic.received() == 0, "rows of another type are not received");
      exchange.rethrow();
    });
    check(differ[0] ==
                  "the tokens of rank 1 are float16, 20 bytes and 3 experts each, and those of rank 0 float32, "
                  "20 and 3; one kind for all is accepted" &&
              differ[1].find("the tokens of rank 0 are float32") == 0,
          "rows of another type are refused by all ranks, with both types");
  }
}

}  // namespace

void test_rank_exchange() {
  test_sizes();
  test_many_turns();
  test_faults();
  test_row_traffic();
}

}  // namespace cpumoe::tests
