#include "ops/lightning_attention.h"

#include <algorithm>

#include "runtime/memory.h"
#include "runtime/threads.h"

namespace cpumoe {
namespace {

constexpr std::int64_t kTokensAtOnce = 64;   // of a head, in fp32: 96 KB at a depth of 128
constexpr std::int64_t kStateAtOnce = 4096;  // values of the state that go through all tokens before the next: 16 KB

struct HeadScratch {
  Buffer state, rows, line;
};

void transpose(const float* src, std::int64_t size, float* dst) {
  constexpr std::int64_t kSide = 16;  // of the squares that stay in L1
  for (std::int64_t i = 0; i < size; i += kSide) {
    for (std::int64_t j = 0; j < size; j += kSide) {
      for (std::int64_t r = i; r < std::min(i + kSide, size); ++r) {
        for (std::int64_t c = j; c < std::min(j + kSide, size); ++c) dst[c * size + r] = src[r * size + c];
      }
    }
  }
}

// One head of one sequence, all its tokens.
void attend_head(const Kernels& k, const LightningCall& c, std::int64_t sequence, std::int64_t head) {
  static thread_local HeadScratch scratch;
  const std::int64_t depth = c.depth, square = depth * depth, row = c.heads * 3 * depth;
  const std::int64_t element = size_of(c.type), state_at = (sequence * c.heads + head) * square * size_of(c.state_type);
  float* state = scratch.state.get<float>(square);
  float* line = scratch.line.get<float>(square);
  float* qkv =
      scratch.rows.get<float>(kTokensAtOnce * 3 * depth);  // of each token q, k and v, which becomes the output
  std::fill(state, state + square, 0.0f);
  if (c.state != nullptr) {
    const auto* found = static_cast<const std::uint8_t*>(c.state) + state_at;
    k.load_row(found, c.state_type, static_cast<int>(square), line);
    transpose(line, depth, state);
  }
  const float slope = -c.slopes[head], step = 1.0f, skip = 0.0f;
  float decay;
  k.decay_rates(&slope, DType::kF32, 1, &decay);
  decay = -decay;
  const std::int64_t rows_at_once = std::clamp<std::int64_t>(kStateAtOnce / depth, 1, depth);
  for (std::int64_t first = 0; first < c.tokens; first += kTokensAtOnce) {
    const std::int64_t tokens = std::min(kTokensAtOnce, c.tokens - first), at = sequence * c.tokens + first;
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int64_t from = (at + t) * row + head * 3 * depth;
      k.load_row(static_cast<const std::uint8_t*>(c.qkv) + from * element, c.type, static_cast<int>(3 * depth),
                 qkv + t * 3 * depth);
    }
    for (std::int64_t r = 0; r < depth; r += rows_at_once) {
      float* v = qkv + 2 * depth + r;
      k.scan_state({state + r * depth, std::min(rows_at_once, depth - r), depth, tokens, v, 3 * depth, qkv + depth, qkv,
                    3 * depth, &step, &decay, 0, nullptr, &skip, v, 3 * depth});
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      k.store_row(qkv + t * 3 * depth + 2 * depth, depth, c.type,
                  static_cast<std::uint8_t*>(c.out) + ((at + t) * c.heads + head) * depth * element);
    }
  }
  transpose(state, depth, line);
  k.store_row(line, square, c.state_type, static_cast<std::uint8_t*>(c.next_state) + state_at);
}

}  // namespace

void lightning_attention(const Kernels& kernels, const LightningCall& c) {
  if (c.depth == 0) return;
  const std::int64_t items = c.batch * c.heads;
  run_on_threads(threads_for(items * (c.tokens + 1) * c.depth * c.depth * 4), [&](Worker& w) {
    for (std::int64_t i = items * w.index / w.count; i < items * (w.index + 1) / w.count; ++i) {
      attend_head(kernels, c, i / c.heads, i % c.heads);
    }
  });
}

}  // namespace cpumoe
