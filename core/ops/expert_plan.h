// From (token, expert) pairs to rows grouped by expert. Integers only.
#pragma once

#include <cstdint>
#include <vector>

namespace cpumoe {

// Rows that go through a product together, counted from the first of their expert.
struct RowChunk {
  std::int32_t first_row, rows, tile_rows, tiles;
};

// How the rows of one expert are cut into chunks: one chunk of one tile of `rows` rows when they are few, else chunks
// of up to `chunk_tiles` tiles of 16, the last of which may be filled up. These are rows of a product: a pair of token
// and expert has one, or several in a row (RowLayout).
struct RowCut {
  std::int32_t rows, slots, tile_rows, chunk_tiles, chunks;

  RowChunk chunk(std::int32_t index) const;
  RowChunk chunk_of(std::int32_t row) const { return chunk(row / (chunk_tiles * tile_rows)); }
};

// Up to `few_rows` rows stay in one small tile.
RowCut cut_rows(std::int32_t rows, int few_rows);

// The pairs of one expert, and their rows in the first and in the second product.
struct ExpertRows {
  std::int32_t expert, first_pair, pairs;
  RowCut first, second;
  std::int32_t second_slot;  // where its rows of the second product begin among those of all experts
};

struct Plan {
  std::vector<ExpertRows> experts;       // ascending by expert, only those with rows
  std::vector<std::int32_t> pair_token;  // [pairs]
  std::vector<float> pair_weight;
  std::int32_t pairs = 0, second_slots = 0;           // of all experts
  std::int32_t most_pairs = 0, most_first_slots = 0;  // of one
};

// Routing of `tokens` tokens as the caller gave it: ids [tokens, topk] and their weights, already converted.
struct Routing {
  const std::int32_t* ids;
  const float* weights;
  std::int64_t tokens, topk;
};

// Groups the pairs; within an expert they are in the order of tokens, then of choice. Id -1 is skipped. The ids have
// been checked to be below `experts`. A pair has `first_rows` rows in the first product and `second_rows` in the
// second.
void make_plan(const Routing& routing, std::int64_t experts, int first_rows, int second_rows, int few_rows, Plan* plan);

}  // namespace cpumoe
