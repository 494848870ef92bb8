#include "ops/latent_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "runtime/check.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

namespace cpumoe {
namespace {

// Work items: small enough that threads finish together, large enough that what is loaded is used many times.
constexpr std::int64_t kTokensAtOnce = 64;     // of scores
constexpr std::int64_t kRowsAtOnce = 24;       // rows (heads of a query) of scores and sums
constexpr std::int64_t kColumnsAtOnce = 64;    // latent numbers of sums
constexpr std::int64_t kAbsorbedAtOnce = 512;  // latent numbers of a query that is taken to the latents
constexpr std::int64_t kValuesAtOnce = 64;     // values of a head

// Most scores that are held at a time; more queries are computed in rounds.
constexpr std::int64_t kMostScores = std::int64_t{1} << 24;

constexpr std::int64_t parts_of(std::int64_t count, std::int64_t part) { return (count + part - 1) / part; }

struct Scratch {
  Buffer query, absorbed, scores, sums, values;
};

// The queries [first, last) of all sequences, numbered through: those of a sequence follow each other. Its rows are the
// heads of each of them. The threads go through five steps, each with work items from a counter.
class Round {
 public:
  Round(const Kernels& kernels, const LatentAttentionCall& call, Scratch& scratch, std::int64_t first,
        std::int64_t last)
      : k_(kernels),
        c_(call),
        first_(first),
        count_(last - first),
        depth_(call.nope + call.rotary),
        stride_((call.tokens + 31) / 16 * 16),  // room for a sink; scoring works in whole vectors
        query_(scratch.query.get<float>(count_ * call.heads * depth_ + 32)),
        absorbed_(scratch.absorbed.get<float>(count_ * call.heads * call.rank)),
        scores_(scratch.scores.get<float>(count_ * call.heads * stride_)),
        sums_(scratch.sums.get<float>(count_ * call.heads * call.rank)),
        values_(scratch.values.get<float>(count_ * call.heads * call.value_depth)) {}

  void run() {
    load_queries();
    run_on_threads(thread_count(), [this](Worker& worker) {
      const std::int64_t slices = parts_of(c_.rank, kAbsorbedAtOnce);
      each(next_[0], c_.heads * slices, [&](std::int64_t i) { absorb(i / slices, i % slices * kAbsorbedAtOnce); });
      worker.barrier->wait();
      each_group(next_[1], parts_of(c_.tokens, kTokensAtOnce), &Round::score);
      worker.barrier->wait();
      each(next_[2], count_ * c_.heads, [&](std::int64_t row) { weigh(row); });
      worker.barrier->wait();
      each_group(next_[3], parts_of(c_.rank, kColumnsAtOnce), &Round::sum);
      worker.barrier->wait();
      const std::int64_t pieces = parts_of(c_.value_depth, kValuesAtOnce);
      each(next_[4], c_.heads * pieces, [&](std::int64_t i) { make_values(i / pieces, i % pieces * kValuesAtOnce); });
    });
    auto* out = static_cast<std::uint8_t*>(c_.out) + first_ * c_.heads * c_.value_depth * size_of(c_.type);
    k_.store_row(values_, count_ * c_.heads * c_.value_depth, c_.type, out);
  }

 private:
  // Rows [first, last) of one sequence.
  struct Rows {
    std::int64_t sequence, first, last;
  };
  using Step = void (Round::*)(const Rows&, std::int64_t part);

  template <class Item>
  static void each(std::atomic<std::int64_t>& next, std::int64_t items, Item&& item) {
    for (std::int64_t i = next.fetch_add(1); i < items; i = next.fetch_add(1)) item(i);
  }

  // `step` for each group of rows and each of `parts`.
  void each_group(std::atomic<std::int64_t>& next, std::int64_t parts, Step step) {
    const std::int64_t sequences = (first_ + count_ - 1) / c_.queries - first_ / c_.queries + 1;
    const std::int64_t groups = parts_of(std::min(count_, c_.queries) * c_.heads, kRowsAtOnce);
    each(next, sequences * groups * parts, [&](std::int64_t i) {
      const std::int64_t sequence = first_ / c_.queries + i / (groups * parts);
      const std::int64_t begin = std::max(sequence * c_.queries - first_, std::int64_t{0}) * c_.heads;
      const std::int64_t end = std::min((sequence + 1) * c_.queries - first_, count_) * c_.heads;
      const std::int64_t row = begin + i / parts % groups * kRowsAtOnce;
      if (row < end) (this->*step)({sequence, row, std::min(row + kRowsAtOnce, end)}, i % parts);
    });
  }

  // Scaled queries in fp32 [query][head][depth]; few enough for the calling thread.
  void load_queries() {
    for (std::int64_t q = 0; q < count_; ++q) {
      const std::int64_t sequence = (first_ + q) / c_.queries, position = (first_ + q) % c_.queries;
      for (std::int64_t head = 0; head < c_.heads; ++head) {
        const std::int64_t at = ((sequence * c_.heads + head) * c_.queries + position) * depth_;
        float* row = query_ + (q * c_.heads + head) * depth_;
        k_.load_row(static_cast<const std::uint8_t*>(c_.query) + at * size_of(c_.type), c_.type,
                    static_cast<int>(depth_), row);
        for (std::int64_t i = 0; i < depth_; ++i) row[i] *= c_.scale;
      }
    }
  }

  const std::uint8_t* weight_of(std::int64_t head) const {
    return static_cast<const std::uint8_t*>(c_.weight) + head * (c_.nope + c_.value_depth) * c_.rank * size_of(c_.type);
  }

  const std::uint8_t* latents_of(std::int64_t sequence) const {
    return static_cast<const std::uint8_t*>(c_.latents) + sequence * c_.latent_stride * size_of(c_.type);
  }

  // What the keys' weights of a head would multiply latents with for each query: columns from `first` on.
  void absorb(std::int64_t head, std::int64_t first) {
    const auto begin = static_cast<int>(first);
    const auto end = static_cast<int>(std::min(first + kAbsorbedAtOnce, c_.rank));
    k_.sum_rows({query_ + head * depth_, static_cast<int>(count_), c_.heads * depth_, weight_of(head), c_.type, c_.rank,
                 c_.nope, begin, end, absorbed_ + head * c_.rank, c_.heads * c_.rank});
  }

  void score(const Rows& rows, std::int64_t part) {
    const std::int64_t first = part * kTokensAtOnce, last = std::min(first + kTokensAtOnce, c_.tokens);
    const auto count = static_cast<int>(rows.last - rows.first);
    float* out = scores_ + rows.first * stride_;
    k_.dot_rows({absorbed_ + rows.first * c_.rank, count, c_.rank, latents_of(rows.sequence), c_.type, c_.rank, first,
                 last, out, stride_});
    if (c_.rotary == 0) return;
    const auto* rotated = static_cast<const std::uint8_t*>(c_.rotated);
    k_.dot_rows({query_ + rows.first * depth_ + c_.nope, count, depth_,
                 rotated + rows.sequence * c_.rotated_stride * size_of(c_.type), c_.type, c_.rotary, first, last, out,
                 stride_, true});
  }

  // Scores become weights, in their place.
  void weigh(std::int64_t row) {
    float* scores = scores_ + row * stride_;
    const std::int64_t query = row / c_.heads, head = row % c_.heads;
    bool sees = c_.mask == nullptr;
    if (c_.mask != nullptr) {
      const float* mask = c_.mask + (first_ + query) * c_.tokens;
      for (std::int64_t t = 0; t < c_.tokens; ++t) {
        sees |= mask[t] != -INFINITY;
        scores[t] += mask[t];
      }
    }
    if (c_.sinks != nullptr) scores[c_.tokens] = c_.sinks[head];
    if (sees || c_.sinks != nullptr) {
      k_.score(scores, static_cast<int>(c_.tokens + (c_.sinks == nullptr ? 0 : 1)), Scoring::kSoftmax);
    } else {
      std::fill_n(scores, c_.tokens, 0.0f);
    }
  }

  // The latents' sums, each row with its own weights.
  void sum(const Rows& rows, std::int64_t part) {
    const std::int64_t first = part * kColumnsAtOnce;
    k_.sum_rows({scores_ + rows.first * stride_, static_cast<int>(rows.last - rows.first), stride_,
                 latents_of(rows.sequence), c_.type, c_.rank, c_.tokens, static_cast<int>(first),
                 static_cast<int>(std::min(first + kColumnsAtOnce, c_.rank)), sums_ + rows.first * c_.rank, c_.rank});
  }

  // Values of a head from `first` on, for each query.
  void make_values(std::int64_t head, std::int64_t first) {
    const std::uint8_t* rows = weight_of(head) + c_.nope * c_.rank * size_of(c_.type);
    k_.dot_rows({sums_ + head * c_.rank, static_cast<int>(count_), c_.heads * c_.rank, rows, c_.type, c_.rank, first,
                 std::min(first + kValuesAtOnce, c_.value_depth), values_ + head * c_.value_depth,
                 c_.heads * c_.value_depth});
  }

  const Kernels& k_;
  const LatentAttentionCall& c_;
  std::int64_t first_, count_, depth_, stride_;
  float *query_, *absorbed_, *scores_, *sums_, *values_;
  std::atomic<std::int64_t> next_[5] = {};
};

}  // namespace

void attend_latents(const Kernels& kernels, const LatentAttentionCall& c) {
  CPUMOE_REQUIRE(c.tokens >= 1, "latents has no tokens");
  CPUMOE_REQUIRE(c.tokens < (std::int64_t{1} << 30), "latents has ", c.tokens, " tokens; fewer than 2^30 are accepted");
  CPUMOE_REQUIRE(c.rank >= 1 && c.rank < (std::int64_t{1} << 24), "latents has ", c.rank,
                 " numbers a token; 1 to 2^24 - 1 are accepted");
  const std::int64_t queries = c.batch * c.queries;
  if (queries * c.heads * c.value_depth == 0) return;
  static thread_local Scratch scratch;
  const std::int64_t at_once = std::clamp<std::int64_t>(kMostScores / (c.heads * c.tokens), 1, queries);
  for (std::int64_t first = 0; first < queries; first += at_once) {
    Round(kernels, c, scratch, first, std::min(first + at_once, queries)).run();
  }
}

}  // namespace cpumoe
