// From (token, expert) pairs to rows grouped by expert. Integers only.
#pragma once

#include <cstdint>
#include <vector>

namespace cpumoe {

// The rows of one expert. They occupy `slots` consecutive slots from `first_slot` on, cut into chunks that go
// through a product together: one chunk of one tile of `rows` rows when they are few, else chunks of up to
// `chunk_tiles` tiles of 16. These are rows of a product: a pair of token and expert has one, or two in a row where
// activations take two (planes_of).
struct ExpertRows {
  std::int32_t expert, rows, first_slot, slots, tile_rows, chunk_tiles, chunks;
};

// One chunk of an expert's rows.
struct RowChunk {
  std::int32_t first_slot, rows, tile_rows, tiles;
};

// How `rows` rows of an expert are cut, from `first_slot` on. Up to `few_rows` rows stay in one small tile.
ExpertRows cut_rows(std::int32_t expert, std::int32_t rows, std::int32_t first_slot, int few_rows);

struct Plan {
  std::vector<ExpertRows> experts;       // ascending by expert, only those with rows
  std::vector<std::int32_t> pair_token;  // [slots / planes]; padding holds token 0 and is never finished
  std::vector<float> pair_weight;
  std::int32_t slots = 0, most_slots = 0;  // of all experts, of one

  static RowChunk chunk(const ExpertRows& rows, std::int32_t index);
};

// Routing of `tokens` tokens as the caller gave it: ids [tokens, topk] and their weights, already converted.
struct Routing {
  const std::int32_t* ids;
  const float* weights;
  std::int64_t tokens, topk;
};

// Groups the pairs; within an expert rows are in the order of tokens, then of choice. Id -1 is skipped. The ids have
// been checked to be below `experts`. Up to `few_rows` rows stay in one small tile.
void make_plan(const Routing& routing, std::int64_t experts, int planes, int few_rows, Plan* plan);

}  // namespace cpumoe
