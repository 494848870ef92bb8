#include "ops/decode_attention.h"

#include <algorithm>
#include <atomic>

#include "runtime/check.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

namespace cpumoe {
namespace {

constexpr std::int64_t kTokensAtOnce = 128;  // keys of one work item: 32 KB at 128 inputs in bf16, which L1 holds
constexpr int kColumnsAtOnce = 32;           // values of one work item

struct Scratch {
  Buffer query, scores, sums;
};

}  // namespace

void attend(const Kernels& k, const AttentionCall& c) {
  CPUMOE_REQUIRE(c.kv_heads >= 1 && c.heads % c.kv_heads == 0, "query has ", c.heads, " heads for ", c.kv_heads,
                 " heads of keys; a multiple is accepted");
  CPUMOE_REQUIRE(c.tokens >= 1, "keys has no tokens");
  CPUMOE_REQUIRE(c.tokens < (std::int64_t{1} << 30), "keys has ", c.tokens, " tokens; fewer than 2^30 are accepted");
  if (c.batch * c.heads * c.value_depth == 0) return;
  static thread_local Scratch scratch;
  const std::int64_t groups = c.batch * c.kv_heads, queries = c.heads / c.kv_heads, rows = c.batch * c.heads;
  const std::int64_t stride = (c.tokens + 31) / 16 * 16;  // room for a sink; scoring works in whole vectors
  const std::int64_t element = size_of(c.type);
  auto* query = scratch.query.get<float>(rows * c.depth + 32);
  auto* scores = scratch.scores.get<float>(rows * stride);  // and then, in their place, the weights
  auto* sums = scratch.sums.get<float>(rows * c.value_depth);
  const auto count = static_cast<int>(queries);
  const auto* keys = static_cast<const std::uint8_t*>(c.keys);
  const auto* values = static_cast<const std::uint8_t*>(c.values);
  const std::int64_t key_bytes = c.tokens * c.depth * element, value_bytes = c.tokens * c.value_depth * element;

  // Scaled queries in fp32; few enough for the calling thread.
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = query + r * c.depth;
    k.load_row(static_cast<const std::uint8_t*>(c.query) + r * c.depth * element, c.type, static_cast<int>(c.depth),
               row);
    for (std::int64_t i = 0; i < c.depth; ++i) row[i] *= c.scale;
  }

  const std::int64_t parts = (c.tokens + kTokensAtOnce - 1) / kTokensAtOnce;
  const std::int64_t slices = (c.value_depth + kColumnsAtOnce - 1) / kColumnsAtOnce;
  std::atomic<std::int64_t> next_scores{0}, next_rows{0}, next_sums{0};
  const std::int64_t useful = groups * std::max(parts, slices);
  const auto threads = static_cast<int>(std::min<std::int64_t>(thread_count(), useful));
  run_on_threads(threads, [&](Worker& worker) {
    for (std::int64_t i = next_scores.fetch_add(1); i < groups * parts; i = next_scores.fetch_add(1)) {
      const std::int64_t group = i / parts, first = i % parts * kTokensAtOnce;
      k.dot_rows({query + group * queries * c.depth, count, c.depth, keys + group * key_bytes, c.type, c.depth, first,
                  std::min(first + kTokensAtOnce, c.tokens), scores + group * queries * stride, stride});
    }
    worker.barrier->wait();
    for (std::int64_t r = next_rows.fetch_add(1); r < rows; r = next_rows.fetch_add(1)) {
      float* row = scores + r * stride;
      if (c.mask != nullptr) {
        const float* mask = c.mask + r / c.heads * c.tokens;
        for (std::int64_t t = 0; t < c.tokens; ++t) row[t] += mask[t];
      }
      if (c.sinks != nullptr) row[c.tokens] = c.sinks[r % c.heads];
      const auto scored = static_cast<int>(c.tokens + (c.sinks == nullptr ? 0 : 1));
      k.score(row, scored, Scoring::kSoftmax);
    }
    worker.barrier->wait();
    for (std::int64_t i = next_sums.fetch_add(1); i < groups * slices; i = next_sums.fetch_add(1)) {
      const std::int64_t group = i / slices;
      const int first = static_cast<int>(i % slices) * kColumnsAtOnce;
      const int last = std::min(first + kColumnsAtOnce, static_cast<int>(c.value_depth));
      k.sum_rows({scores + group * queries * stride, count, stride, values + group * value_bytes, c.type, c.value_depth,
                  c.tokens, first, last, sums + group * queries * c.value_depth, c.value_depth});
    }
  });
  k.store_row(sums, rows * c.value_depth, c.type, c.out);
}

}  // namespace cpumoe
