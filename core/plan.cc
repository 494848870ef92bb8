#include "plan.h"

#include <algorithm>

#include "kernel.h"

namespace cpumoe {

RowChunk Plan::chunk(const ExpertRows& e, std::int32_t index) {
  const std::int32_t step = e.chunk_tiles * e.tile_rows;
  const std::int32_t rows = std::min(step, e.rows - index * step);
  return {e.first_slot + index * step, rows, e.tile_rows, (rows + e.tile_rows - 1) / e.tile_rows};
}

ExpertRows cut_rows(std::int32_t expert, std::int32_t rows, std::int32_t first_slot, int few_rows) {
  ExpertRows entry{expert, rows, first_slot, rows, rows, 1, 1};
  if (rows > few_rows) {
    // Chunks of equal size: 9 tiles are 5 + 4, not 8 + 1.
    const std::int32_t tiles = (rows + kTileRows - 1) / kTileRows;
    entry.tile_rows = kTileRows;
    entry.chunks = (tiles + kMaxRowTiles - 1) / kMaxRowTiles;
    entry.chunk_tiles = (tiles + entry.chunks - 1) / entry.chunks;
    entry.chunks = (tiles + entry.chunk_tiles - 1) / entry.chunk_tiles;
    entry.slots = tiles * kTileRows;
  }
  return entry;
}

void make_plan(const Routing& routing, std::int64_t experts, int planes, int few_rows, Plan* plan) {
  std::vector<std::int32_t> rows(static_cast<std::size_t>(experts), 0);
  const std::int64_t pairs = routing.tokens * routing.topk;
  for (std::int64_t i = 0; i < pairs; ++i) {
    if (routing.ids[i] >= 0) ++rows[static_cast<std::size_t>(routing.ids[i])];
  }
  plan->experts.clear();
  plan->slots = 0;
  plan->most_slots = 0;
  std::vector<std::int32_t>& next_pair = rows;  // from here on: where an expert's next pair goes
  for (std::int32_t e = 0; e < experts; ++e) {
    const std::int32_t n = rows[static_cast<std::size_t>(e)];
    if (n == 0) continue;
    const ExpertRows entry = cut_rows(e, n * planes, plan->slots, few_rows);
    next_pair[static_cast<std::size_t>(e)] = plan->slots / planes;
    plan->slots += entry.slots;
    plan->most_slots = std::max(plan->most_slots, entry.slots);
    plan->experts.push_back(entry);
  }
  plan->pair_token.assign(static_cast<std::size_t>(plan->slots / planes), 0);
  plan->pair_weight.assign(static_cast<std::size_t>(plan->slots / planes), 0.0f);
  for (std::int64_t i = 0; i < pairs; ++i) {
    if (routing.ids[i] < 0) continue;
    const std::int32_t pair = next_pair[static_cast<std::size_t>(routing.ids[i])]++;
    plan->pair_token[static_cast<std::size_t>(pair)] = static_cast<std::int32_t>(i / routing.topk);
    plan->pair_weight[static_cast<std::size_t>(pair)] = routing.weights[i];
  }
}

}  // namespace cpumoe
