// Attention of any rows of any sequences over keys and values in a cache: decoding, prompts and pieces of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/table.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

namespace cpumoe {

// One sequence's keys and values in a layer: head h and token t at h * head stride + t * token stride. `key_ends`: see
// CachedAttentionCall.
struct CachedSequence {
  const void *keys, *values, *key_ends = nullptr;
};

// The tokens that a row sees, [first, last): causality, windows and padding are all in these. None: the result is 0.
struct AttentionRow {
  std::int32_t sequence;
  std::int64_t first, last;
};

// Converts an additive mask [batch, queries, tokens] to the range of tokens that each row sees; null: all tokens.
// Returns false if the mask is not made of ranges. In a mask of ranges each row is 0 for one range of tokens and
// -60,000 or less elsewhere, a row that sees nothing is -inf, and neither first nor last tokens fall from row to row.
bool find_rows(const float* mask, std::int64_t batch, std::int64_t queries, std::int64_t tokens,
               std::vector<AttentionRow>& rows);

struct CachedAttentionCall {
  DType type;                          // of query, keys, values and out
  std::int64_t rows, heads, kv_heads;  // heads / kv_heads neighbours share keys and values
  std::int64_t depth, value_depth;
  const void* query;  // [rows, heads, depth], rows query_stride elements apart and heads query_head_stride
  std::int64_t query_stride, query_head_stride;
  const CachedSequence* sequences;
  const AttentionRow* row;  // [rows]; rows of one sequence lie side by side, first and last not falling
  std::int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;  // elements
  // Keys and values are records in int8 (kv_record_table.h), and all of their strides are in bytes. Where both are
  // the same memory, values are the first numbers of keys.
  bool records;
  // If not 0, the last `key_end` numbers of keys lie at CachedSequence::key_ends, key_end_stride elements from token to
  // token, for all heads: MLA's RoPE part, in a cache of its own. Neither for records nor for pages.
  std::int64_t key_end, key_end_stride;
  // Keys and values of bf16 may hold numbers below 2^-60, which count as 0: caches that other code writes.
  bool flushes;
  // 0: tokens lie one after the other. Else a power of two from 16 on: token t of sequence s is number t % page_tokens
  // of page pages[s][t / page_tokens], and pages are so far apart.
  std::int64_t page_tokens, key_page_stride, value_page_stride;
  const std::int32_t* const* pages;
  float scale;         // of the scores
  float softcap;       // scores become softcap * tanh(score / softcap); 0: they stay
  const float* sinks;  // [heads], a score that every row has besides those of its keys, without a value; or null
  void* out;           // [rows, heads, value_depth], rows out_stride elements apart
  std::int64_t out_stride;
};

// Rejects numbers of heads that do not divide, and sizes of heads that are not supported.
void check_heads(const CachedAttentionCall& call);

// A stage of a team of threads. A row's result has the same bits on every instruction set, for any number of threads
// and whatever rows come with it. Keys and values of bf16 must hold nothing but zeros below 2^-60, unless the call
// flushes them. int8 records give the bits of a float cache that holds the dequantised numbers.
class CachedAttention {
 public:
  // By one thread, before others run. What the call points to must live until all have. Where threads share the tokens
  // of a row, what they leave for each other takes up to about `most_floats`; beyond it they meet more often.
  void plan(const Kernels& kernels, const CachedAttentionCall& call, int threads,
            std::int64_t most_floats = std::int64_t{4} << 20);
  // By all threads of a team of at most as many as planned for. The result is complete behind their next barrier.
  void run(Worker& worker);

 private:
  // Heads of neighbouring rows, which attend to the same keys and values. What they see together has no gaps.
  struct Tile {
    std::int64_t first_row, rows;
    std::int64_t first_head, heads;
    // Of rows that see anything, the first tokens and the ends, the lowest and the highest.
    std::int64_t lowest_first, highest_first, lowest_last, highest_last;
    bool some_see_nothing;
    std::int64_t lanes, stride;              // stride: with what whole vectors need besides
    std::int64_t first_part, last_part;      // that hold tokens which some row sees
    std::int64_t cost;                       // in no unit but its own
    std::int64_t state_offset, slot_offset;  // of a shared tile, in floats
  };
  // Parts [first, last) of a tile, of which all are attended at once, or which is shared.
  struct Item {
    const Tile* tile;
    std::int64_t first, last;
    bool shared;
  };
  class Attending;

  void add_tiles(std::int64_t first_row, std::int64_t last_row);
  void share_out(int threads, std::int64_t most_floats);

  const Kernels* kernels_ = nullptr;
  CachedAttentionCall call_{};
  std::vector<Tile> tiles_;
  std::vector<Tile*> shared_;  // tiles of which threads take parts: these are left in slots, then folded
  std::vector<Item> items_;    // round after round
  std::vector<std::int64_t> round_ends_;
  std::int64_t round_parts_ = 0;  // of each shared tile in a round
  Buffer scratch_, slots_, states_;
  std::atomic<std::int64_t> next_item_{0}, next_fold_{0};
};

// By itself, on a team of its own.
void attend_cached(const Kernels& kernels, const CachedAttentionCall& call);

}  // namespace cpumoe
