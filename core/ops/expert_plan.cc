#include "ops/expert_plan.h"

#include <algorithm>

#include "kernels/formats.h"

namespace cpumoe {

RowChunk RowCut::chunk(std::int32_t index) const {
  const std::int32_t step = chunk_tiles * tile_rows;
  const std::int32_t count = std::min(step, rows - index * step);
  return {index * step, count, tile_rows, (count + tile_rows - 1) / tile_rows};
}

RowCut cut_rows(std::int32_t rows, int few_rows) {
  RowCut cut{rows, rows, rows, 1, 1};
  if (rows > few_rows) {
    // Chunks of equal size: 9 tiles are 5 + 4, not 8 + 1.
    const std::int32_t tiles = (rows + kTileRows - 1) / kTileRows;
    cut.tile_rows = kTileRows;
    cut.chunks = (tiles + kMaxRowTiles - 1) / kMaxRowTiles;
    cut.chunk_tiles = (tiles + cut.chunks - 1) / cut.chunks;
    cut.chunks = (tiles + cut.chunk_tiles - 1) / cut.chunk_tiles;
    cut.slots = tiles * kTileRows;
  }
  return cut;
}

void make_plan(const Routing& routing, std::int64_t experts, int first_rows, int second_rows, int few_rows,
               Plan* plan) {
  std::vector<std::int32_t> pairs(static_cast<std::size_t>(experts), 0);
  const std::int64_t choices = routing.tokens * routing.topk;
  for (std::int64_t i = 0; i < choices; ++i) {
    if (routing.ids[i] >= 0) ++pairs[static_cast<std::size_t>(routing.ids[i])];
  }
  plan->experts.clear();
  plan->pairs = plan->second_slots = plan->most_pairs = plan->most_first_slots = 0;
  std::vector<std::int32_t>& next_pair = pairs;  // from here on: where an expert's next pair goes
  for (std::int32_t e = 0; e < experts; ++e) {
    const std::int32_t n = pairs[static_cast<std::size_t>(e)];
    if (n == 0) continue;
    const ExpertRows entry{
        e, plan->pairs, n, cut_rows(n * first_rows, few_rows), cut_rows(n * second_rows, few_rows), plan->second_slots};
    next_pair[static_cast<std::size_t>(e)] = plan->pairs;
    plan->pairs += n;
    plan->second_slots += entry.second.slots;
    plan->most_pairs = std::max(plan->most_pairs, n);
    plan->most_first_slots = std::max(plan->most_first_slots, entry.first.slots);
    plan->experts.push_back(entry);
  }
  plan->pair_token.resize(static_cast<std::size_t>(plan->pairs));
  plan->pair_weight.resize(static_cast<std::size_t>(plan->pairs));
  for (std::int64_t i = 0; i < choices; ++i) {
    if (routing.ids[i] < 0) continue;
    const std::int32_t pair = next_pair[static_cast<std::size_t>(routing.ids[i])]++;
    plan->pair_token[static_cast<std::size_t>(pair)] = static_cast<std::int32_t>(i / routing.topk);
    plan->pair_weight[static_cast<std::size_t>(pair)] = routing.weights[i];
  }
}

}  // namespace cpumoe
