#include "ops/attention.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "runtime/check.h"

namespace cpumoe {
namespace {

constexpr std::int64_t kTileBlocks = 2;  // of lanes that take turns with the keys and values of a part once loaded
constexpr std::int64_t kTileLanes = kTileBlocks * kMostLanes;
constexpr std::int64_t kItemsOfThread = 4;  // at least, where there is so much to share out
constexpr std::int64_t kFoldColumns = 32;

constexpr std::int64_t parts_of(std::int64_t count, std::int64_t part) { return (count + part - 1) / part; }

// Lanes [first, first + count) of a tile; rows of `stride`.
struct Block {
  std::int64_t first;
  int count, stride;
};

// Whether parts of the cache are copied to rows of numbers before they are attended.
bool is_copied(const CachedAttentionCall& c) {
  return c.records || c.key_end > 0 || (c.flushes && c.type == DType::kBF16);
}

// Copies numbers; those of bf16 below kSmallestCached become 0.
void copy_flushed(const std::uint8_t* from, std::int64_t count, DType type, std::uint8_t* to) {
  if (type != DType::kBF16) {
    std::memcpy(to, from, static_cast<std::size_t>(count * size_of(type)));
    return;
  }
  constexpr int kSmallest = static_cast<int>(std::bit_cast<std::uint32_t>(kSmallestCached) >> 16);
  const auto* numbers = reinterpret_cast<const std::uint16_t*>(from);
  auto* copies = reinterpret_cast<std::uint16_t*>(to);
  for (std::int64_t i = 0; i < count; ++i) {
    const int magnitude = numbers[i] & 0x7FFF;
    copies[i] = magnitude < kSmallest ? std::uint16_t{0} : numbers[i];
  }
}

// Where the parts of a thread's scratch memory begin, in floats.
struct ScratchPlaces {
  std::int64_t floats = 0;
  std::int64_t queries, scores, running, part, apart, first, last, key_panel, value_panel, key_rows, value_rows;

  explicit ScratchPlaces(const CachedAttentionCall& c)
      : queries(take(kTileLanes * (c.depth + 1))),
        scores(take(kPartTokens * kMostLanes)),
        running(take(kTileLanes * (c.value_depth + 2))),
        part(take(kMostLanes * (c.value_depth + 2))),
        apart(take(kMostLanes * (c.value_depth + 2))),
        first(take(kMostLanes)),
        last(take(kMostLanes)),
        key_panel(take(kPartTokens * (c.depth + 1))),
        value_panel(take(kPartTokens * c.value_depth)),
        key_rows(take(is_copied(c) ? kPartTokens * c.depth : 0)),
        value_rows(take(is_copied(c) ? kPartTokens * c.value_depth : 0)) {}

 private:
  std::int64_t take(std::int64_t count) {
    const std::int64_t taken = floats;
    floats += parts_of(count, 1024) * 1024;
    return taken;
  }
};

int block_stride(std::int64_t lanes, int unit) { return static_cast<int>(parts_of(lanes, unit) * unit); }

std::int64_t tile_stride(std::int64_t lanes, int unit) {
  return lanes / kMostLanes * kMostLanes + block_stride(lanes % kMostLanes, unit);
}

}  // namespace

// One thread's view of the work.
class CachedAttention::Attending {
 public:
  Attending(CachedAttention& all, int thread)
      : all_(all),
        k_(*all.kernels_),
        c_(all.call_),
        element_(size_of(all.call_.type)),
        cached_element_(all.call_.records ? 1 : element_),
        unit_(all.kernels_->attention.lane_unit[static_cast<int>(all.call_.type)]) {
    const ScratchPlaces places(c_);
    float* scratch = all.scratch_.get<float>(0) + thread * places.floats;
    queries_ = scratch + places.queries;
    scores_ = scratch + places.scores;
    running_ = scratch + places.running;
    part_ = scratch + places.part;
    apart_ = scratch + places.apart;
    first_ = scratch + places.first;
    last_ = scratch + places.last;
    key_panel_ = scratch + places.key_panel;
    value_panel_ = scratch + places.value_panel;
    key_rows_ = reinterpret_cast<std::uint8_t*>(scratch + places.key_rows);
    value_rows_ = reinterpret_cast<std::uint8_t*>(scratch + places.value_rows);
  }

  // `next()`: the item that this thread is likely to take after this one, or null.
  template <class Next>
  void attend(const Item& item, const Next& next) {
    const Tile& tile = *item.tile;
    if (loaded_ != &tile) load_queries(tile);
    if (!item.shared) {
      each_block(tile, [&](const Block& b) { clear(lanes_at(running_, b), b, 0, c_.value_depth); });
    }
    for (std::int64_t p = item.first; p < item.last; ++p) {
      CachedPart part = part_of(tile, p);
      if (is_copied(c_)) {
        copy_part(tile, p, part);
      } else if (p + 1 < item.last) {
        fetch_next(tile, p + 1, part);
      } else if (const Item* other = next(); other != nullptr) {
        fetch_next(*other->tile, other->first, part);
      }
      const bool apart = has_special_edge(tile, p, part);
      if (!apart) k_.attention.load_part(part);
      each_block(tile, [&](const Block& b) {
        const Lanes to = item.shared ? lanes_at(slot(tile, p), b) : lanes_at(part_, {0, b.count, b.stride});
        if (apart) {
          attend_rows_apart(tile, p, part, b, to);
        } else {
          attend_block(tile, p, part, b, to);
        }
        if (!item.shared) fold(lanes_at(running_, b), to, b, 0, c_.value_depth);
      });
    }
    if (!item.shared) {
      each_block(tile, [&](const Block& b) { finish(tile, b, lanes_at(running_, b), 0, c_.value_depth); });
    }
  }

  // Columns from `first` on of a shared tile: what the parts of a round are folded into is kept for the next one.
  void fold_shared(const Tile& tile, std::int64_t round, std::int64_t first) {
    const std::int64_t last = std::min(first + kFoldColumns, c_.value_depth);
    const std::int64_t first_part = tile.first_part + round * all_.round_parts_;
    const std::int64_t last_part = std::min(first_part + all_.round_parts_, tile.last_part);
    if (first_part >= last_part) return;
    each_block(tile, [&](const Block& b) {
      // Whoever folds other columns needs these two of the round before as well.
      Lanes lanes = lanes_at(state(tile), b);
      const float* before = folded_before(tile, round) + 2 * b.first;
      lanes.highest = first_;
      lanes.total = last_;
      if (round == 0) {
        clear(lanes, b, first, last);
      } else {
        std::copy_n(before, b.stride, lanes.highest);
        std::copy_n(before + b.stride, b.stride, lanes.total);
      }
      for (std::int64_t p = first_part; p < last_part; ++p) fold(lanes, lanes_at(slot(tile, p), b), b, first, last);
      if (last_part == tile.last_part) {
        finish(tile, b, lanes, first, last);
      } else if (first == 0) {
        float* after = folded_before(tile, round + 1) + 2 * b.first;
        std::copy_n(lanes.highest, b.stride, after);
        std::copy_n(lanes.total, b.stride, after + b.stride);
      }
    });
  }

 private:
  // Lanes of a block after some parts.
  struct Lanes {
    float *highest, *total, *sums;
  };

  // A tile's lanes hold for each of its blocks the sums, then the rest.
  Lanes lanes_at(float* base, const Block& b) const {
    float* at = base + b.first * (c_.value_depth + 2);
    return {at + b.stride * c_.value_depth, at + b.stride * (c_.value_depth + 1), at};
  }

  float* slot(const Tile& tile, std::int64_t part) {
    const std::int64_t place = (part - tile.first_part) % all_.round_parts_;
    return all_.slots_.get<float>(0) + tile.slot_offset + place * tile.stride * (c_.value_depth + 2);
  }
  // The highest scores and totals of all blocks after the rounds before one.
  float* folded_before(const Tile& tile, std::int64_t round) {
    return state(tile) + tile.stride * (c_.value_depth + 2 + 2 * (round % 2));
  }
  float* state(const Tile& tile) { return all_.states_.get<float>(0) + tile.state_offset; }

  template <class Body>
  void each_block(const Tile& tile, Body&& body) {
    for (std::int64_t lane = 0; lane < tile.lanes; lane += kMostLanes) {
      const auto count = static_cast<int>(std::min<std::int64_t>(kMostLanes, tile.lanes - lane));
      body(Block{lane, count, block_stride(count, unit_)});
    }
  }

  const AttentionRow& row_of(const Tile& tile, std::int64_t lane) const {
    return c_.row[tile.first_row + lane / tile.heads];
  }

  void load_queries(const Tile& tile) {
    each_block(tile, [&](const Block& b) {
      LoadLanes load{c_.type, static_cast<int>(c_.depth), b.count, b.stride, {}, queries_of(b)};
      for (int i = 0; i < b.count; ++i) {
        const std::int64_t row = tile.first_row + (b.first + i) / tile.heads;
        const std::int64_t head = tile.first_head + (b.first + i) % tile.heads;
        load.query[i] = static_cast<const std::uint8_t*>(c_.query) +
                        (row * c_.query_stride + head * c_.query_head_stride) * element_;
      }
      k_.attention.load_lanes(load);
    });
    loaded_ = &tile;
  }

  std::uint8_t* queries_of(const Block& b) {
    return reinterpret_cast<std::uint8_t*>(queries_ + b.first * (c_.depth + 1));
  }

  // Where the runs of a part begin, as far as they hold tokens of [begin, end); else where the nearest does.
  void find_runs(const Tile& tile, std::int64_t p, int begin, int end, const std::uint8_t** keys,
                 const std::uint8_t** values) const {
    const AttentionRow& row = c_.row[tile.first_row];
    const CachedSequence& sequence = c_.sequences[row.sequence];
    const std::int64_t kv_head = tile.first_head / (c_.heads / c_.kv_heads);
    const auto* key = static_cast<const std::uint8_t*>(sequence.keys) + kv_head * c_.key_head_stride * cached_element_;
    const auto* value =
        static_cast<const std::uint8_t*>(sequence.values) + kv_head * c_.value_head_stride * cached_element_;
    for (int run = 0; run < kPartRuns; ++run) {
      const int present = std::clamp(run, begin / kRunTokens, (end - 1) / kRunTokens);
      std::int64_t token = p * kPartTokens + present * kRunTokens, page = 0;
      if (c_.page_tokens != 0) {
        page = c_.pages[row.sequence][token / c_.page_tokens];
        token %= c_.page_tokens;
      }
      keys[run] = key + (page * c_.key_page_stride + token * c_.key_token_stride) * cached_element_;
      values[run] = value + (page * c_.value_page_stride + token * c_.value_token_stride) * cached_element_;
    }
  }

  static int place_in(std::int64_t token, std::int64_t part) {
    return static_cast<int>(std::clamp<std::int64_t>(token - part * kPartTokens, 0, kPartTokens));
  }

  CachedPart part_of(const Tile& tile, std::int64_t p) const {
    CachedPart part{};
    part.type = c_.type;
    part.depth = static_cast<int>(c_.depth);
    part.value_depth = static_cast<int>(c_.value_depth);
    part.begin = place_in(tile.lowest_first, p);
    part.end = place_in(tile.highest_last, p);
    part.few_lanes = tile.lanes <= kFewLanes;
    part.key_stride = c_.key_token_stride * cached_element_;
    part.value_stride = c_.value_token_stride * cached_element_;
    part.key_panel = reinterpret_cast<std::uint8_t*>(key_panel_);
    part.value_panel = reinterpret_cast<std::uint8_t*>(value_panel_);
    find_runs(tile, p, part.begin, part.end, part.keys, part.values);
    return part;
  }

  // Copies the keys and values of a part to rows of numbers, where it has them from then on.
  void copy_part(const Tile& tile, std::int64_t p, CachedPart& part) {
    const bool joined =
        part.keys[0] == part.values[0] && part.key_stride == part.value_stride && part.value_depth <= part.depth;
    const int beginning = part.depth - static_cast<int>(c_.key_end);
    copy_rows(part, beginning, part.depth, part.keys, part.key_stride, key_rows_);
    if (c_.key_end > 0) {
      const std::uint8_t* ends[kPartRuns];
      std::ptrdiff_t stride = c_.key_end_stride * element_;
      for (int run = 0; run < kPartRuns; ++run) {
        ends[run] = static_cast<const std::uint8_t*>(c_.sequences[c_.row[tile.first_row].sequence].key_ends) +
                    (p * kPartTokens + run * kRunTokens) * stride;
      }
      copy_rows(part, static_cast<int>(c_.key_end), part.depth, ends, stride, key_rows_ + beginning * element_);
    }
    if (joined) {
      std::copy(part.keys, part.keys + kPartRuns, part.values);
      part.value_stride = part.key_stride;
    } else {
      copy_rows(part, part.value_depth, part.value_depth, part.values, part.value_stride, value_rows_);
    }
  }

  // `count` numbers of each token, to rows that are `width` numbers apart.
  void copy_rows(const CachedPart& part, int count, int width, const std::uint8_t** runs, std::ptrdiff_t& stride,
                 std::uint8_t* rows) {
    const std::ptrdiff_t row_bytes = static_cast<std::ptrdiff_t>(width) * element_;
    for (int run = 0; run < kPartRuns; ++run) {
      const int first = run * kRunTokens;
      const int begin = std::max(part.begin, first), end = std::min(part.end, first + kRunTokens);
      const std::uint8_t* from = runs[run] + (begin - first) * stride;
      if (begin < end && c_.records) {
        k_.cache_records.read({from, stride, end - begin, count, c_.type, rows + begin * row_bytes});
      } else {
        for (int t = begin; t < end; ++t, from += stride) copy_flushed(from, count, c_.type, rows + t * row_bytes);
      }
      runs[run] = rows + first * row_bytes;
    }
    stride = row_bytes;
  }

  // What is read after `part`: few lanes are done with it before the next has come.
  void fetch_next(const Tile& next, std::int64_t p, CachedPart& part) const {
    if (!part.few_lanes || next.first_part == next.last_part) return;
    find_runs(next, p, place_in(next.lowest_first, p), place_in(next.highest_last, p), part.next_keys,
              part.next_values);
  }

  // Whether a value that some rows see and others do not is no number: times their weight of 0 it would not be 0.
  bool has_special_edge(const Tile& tile, std::int64_t p, const CachedPart& part) const {
    if (tile.rows == 1) return false;
    int all_begin = place_in(tile.highest_first, p), all_end = place_in(tile.lowest_last, p);
    if (tile.some_see_nothing || all_begin >= all_end) all_begin = all_end = part.end;
    for (int place = part.begin; place < part.end; ++place) {
      if (place == all_begin) place = all_end;
      if (place >= part.end) break;
      const std::uint8_t* value = part.values[place / kRunTokens] + place % kRunTokens * part.value_stride;
      const float magnitude = k_.magnitude(value, c_.type, c_.value_depth);
      if (magnitude != magnitude) return true;
    }
    return false;
  }

  PartLanes part_lanes(const Block& b, const Lanes& to) {
    return {b.count,    b.stride, queries_of(b), nullptr,  nullptr, c_.scale,
            c_.softcap, scores_,  to.highest,    to.total, to.sums};
  }

  void attend_block(const Tile& tile, std::int64_t p, const CachedPart& part, const Block& b, const Lanes& to) {
    PartLanes lanes = part_lanes(b, to);
    const bool all_see_all = !tile.some_see_nothing && place_in(tile.highest_first, p) <= part.begin &&
                             place_in(tile.lowest_last, p) >= part.end;
    if (!all_see_all) {
      for (int i = 0; i < b.stride; ++i) {
        const AttentionRow& row = row_of(tile, b.first + std::min(i, b.count - 1));
        first_[i] = static_cast<float>(place_in(row.first, p));
        last_[i] = static_cast<float>(place_in(row.last, p));
      }
      lanes.first = first_;
      lanes.last = last_;
    }
    k_.attention.attend_part(part, lanes);
  }

  // Every row with nothing but the tokens it sees.
  void attend_rows_apart(const Tile& tile, std::int64_t p, const CachedPart& all, const Block& b, const Lanes& to) {
    const Lanes alone = lanes_at(apart_, {0, b.count, b.stride});
    clear(to, b, 0, c_.value_depth);
    for (std::int64_t i = 0; i < b.count;) {
      const std::int64_t first = i;
      const AttentionRow& row = row_of(tile, b.first + i);
      while (i < b.count && &row_of(tile, b.first + i) == &row) ++i;
      CachedPart part = all;
      part.begin = place_in(row.first, p);
      part.end = place_in(row.last, p);
      if (part.begin >= part.end) continue;
      k_.attention.load_part(part);
      k_.attention.attend_part(part, part_lanes(b, alone));
      std::copy(alone.highest + first, alone.highest + i, to.highest + first);
      std::copy(alone.total + first, alone.total + i, to.total + first);
      for (std::int64_t column = 0; column < c_.value_depth; ++column) {
        const float* sums = alone.sums + column * b.stride;
        std::copy(sums + first, sums + i, to.sums + column * b.stride + first);
      }
    }
  }

  void clear(const Lanes& lanes, const Block& b, std::int64_t first, std::int64_t last) {
    std::fill_n(lanes.highest, b.stride, -FLT_MAX);
    std::fill_n(lanes.total, b.stride, 0.0f);
    std::fill(lanes.sums + first * b.stride, lanes.sums + last * b.stride, 0.0f);
  }

  void fold(const Lanes& lanes, const Lanes& part, const Block& b, std::int64_t first, std::int64_t last) {
    k_.attention.fold_part({b.stride, static_cast<int>(first), static_cast<int>(last), lanes.highest, lanes.total,
                            lanes.sums, part.highest, part.total, part.sums});
  }

  void finish(const Tile& tile, const Block& b, const Lanes& lanes, std::int64_t first, std::int64_t last) {
    float sinks[kMostLanes] = {};
    FinishLanes finish{
        c_.type,    b.count, b.stride, static_cast<int>(first), static_cast<int>(last), lanes.highest, lanes.total,
        lanes.sums, nullptr, {}};
    for (int i = 0; i < b.count; ++i) {
      const std::int64_t row = tile.first_row + (b.first + i) / tile.heads;
      const std::int64_t head = tile.first_head + (b.first + i) % tile.heads;
      finish.out[i] = static_cast<std::uint8_t*>(c_.out) + (row * c_.out_stride + head * c_.value_depth) * element_;
      if (c_.sinks != nullptr) sinks[i] = c_.sinks[head];
    }
    if (c_.sinks != nullptr) finish.sinks = sinks;
    k_.attention.finish_lanes(finish);
  }

  CachedAttention& all_;
  const Kernels& k_;
  const CachedAttentionCall& c_;
  const int element_, cached_element_, unit_;  // bytes of a number, and of what strides in the cache count; lanes
  const Tile* loaded_ = nullptr;               // whose queries are
  float *queries_, *scores_, *running_, *part_, *apart_, *first_, *last_, *key_panel_, *value_panel_;
  std::uint8_t *key_rows_, *value_rows_;  // copies of a part's keys and values, where is_copied
};

void check_heads(const CachedAttentionCall& c) {
  CPUMOE_REQUIRE(c.kv_heads >= 1 && c.heads % c.kv_heads == 0, "query has ", c.heads, " heads for ", c.kv_heads,
                 " heads of keys; a multiple is accepted");
  CPUMOE_REQUIRE(c.depth >= 1 && c.depth <= 65536 && c.value_depth >= 0 && c.value_depth <= 65536, "heads have ",
                 c.depth, " numbers and values ", c.value_depth, "; 1 to 65536 are accepted");
}

void CachedAttention::plan(const Kernels& kernels, const CachedAttentionCall& c, int threads,
                           std::int64_t most_floats) {
  check_heads(c);
  CPUMOE_REQUIRE(c.page_tokens == 0 ||
                     (c.page_tokens >= kRunTokens && std::has_single_bit(static_cast<std::uint64_t>(c.page_tokens))),
                 "pages have ", c.page_tokens, " tokens; a power of two from ", kRunTokens, " on is accepted");
  CPUMOE_REQUIRE(c.key_end == 0 || (!c.records && c.page_tokens == 0 && c.key_end <= c.depth), "key_end=", c.key_end,
                 "; 0 is accepted for records and pages, and at most ", c.depth, " otherwise");
  kernels_ = &kernels;
  call_ = c;
  tiles_.clear();
  for (std::int64_t first = 0, last = 0; first < c.rows && c.heads * c.value_depth != 0; first = last) {
    while (last < c.rows && c.row[last].sequence == c.row[first].sequence) ++last;
    add_tiles(first, last);
  }
  scratch_.get<float>(ScratchPlaces(c).floats * threads);
  share_out(threads, most_floats);
}

// Rows of one sequence.
void CachedAttention::add_tiles(std::int64_t first_row, std::int64_t last_row) {
  const CachedAttentionCall& c = call_;
  const std::int64_t group = c.heads / c.kv_heads, heads_at_once = std::min<std::int64_t>(group, kTileLanes);
  const std::int64_t rows_at_once = kTileLanes / heads_at_once;
  const int unit = kernels_->attention.lane_unit[static_cast<int>(c.type)];
  for (std::int64_t row = first_row; row < last_row;) {
    Tile tile{};
    tile.first_row = row;
    bool sees = false;
    for (; row < last_row && row - tile.first_row < rows_at_once; ++row) {
      const auto [sequence, first, last] = c.row[row];
      if (first >= last) {
        tile.some_see_nothing = true;
      } else if (!sees) {
        sees = true;
        tile.lowest_first = tile.highest_first = first;
        tile.lowest_last = tile.highest_last = last;
      } else if (first > tile.highest_last) {
        break;
      } else {
        tile.lowest_first = std::min(tile.lowest_first, first);
        tile.highest_first = std::max(tile.highest_first, first);
        tile.lowest_last = std::min(tile.lowest_last, last);
        tile.highest_last = std::max(tile.highest_last, last);
      }
    }
    tile.rows = row - tile.first_row;
    if (sees) {
      tile.first_part = tile.lowest_first / kPartTokens;
      tile.last_part = parts_of(tile.highest_last, kPartTokens);
    }
    for (std::int64_t head = 0; head < c.heads; head += tile.heads) {
      tile.first_head = head;
      tile.heads = std::min(heads_at_once, group - head % group);
      tile.lanes = tile.rows * tile.heads;
      tile.stride = tile_stride(tile.lanes, unit);
      constexpr std::int64_t kCostOfLoading = 16;  // as many lanes as would take as long
      tile.cost = std::max<std::int64_t>(tile.highest_last - tile.lowest_first, 1) * (tile.stride + kCostOfLoading);
      tiles_.push_back(tile);
    }
  }
}

// Items of which the threads can be busy until the end: the most expensive ones first, and parts of those tiles that
// would keep a thread longer than others.
void CachedAttention::share_out(int threads, std::int64_t most_floats) {
  const std::int64_t lane_floats = call_.value_depth + 2;
  shared_.clear();
  items_.clear();
  round_ends_.clear();
  next_item_.store(0, std::memory_order_relaxed);
  next_fold_.store(0, std::memory_order_relaxed);
  std::int64_t total = 0, slot_floats = 0, state_floats = 0, most_parts = 0;
  for (const Tile& tile : tiles_) total += tile.cost;
  const std::int64_t item_cost = std::max<std::int64_t>(total / (threads * kItemsOfThread), 1);
  for (Tile& tile : tiles_) {
    const std::int64_t parts = tile.last_part - tile.first_part;
    if (threads == 1 || parts <= 1 || tile.cost <= item_cost) {
      items_.push_back({&tile, tile.first_part, tile.last_part, false});
      continue;
    }
    shared_.push_back(&tile);
    slot_floats += tile.stride * lane_floats;
    most_parts = std::max(most_parts, parts);
    tile.state_offset = state_floats;
    state_floats += tile.stride * (lane_floats + 4);
  }
  if (!shared_.empty()) {
    round_parts_ = std::clamp<std::int64_t>(most_floats / slot_floats, 1, most_parts);
    std::int64_t slot_offset = 0;
    for (Tile* tile : shared_) {
      tile->slot_offset = slot_offset;
      slot_offset += tile->stride * lane_floats * std::min(round_parts_, tile->last_part - tile->first_part);
    }
    slots_.get<float>(slot_offset);
    states_.get<float>(state_floats);
  }
  const auto cost_of = [](const Item& item) {
    return item.tile->cost * std::max<std::int64_t>(item.last - item.first, 1) /
           std::max<std::int64_t>(item.tile->last_part - item.tile->first_part, 1);
  };
  std::int64_t begin = 0;
  for (std::int64_t round = 0; round == 0 || (!shared_.empty() && round * round_parts_ < most_parts); ++round) {
    for (const Tile* tile : shared_) {
      const std::int64_t parts = tile->last_part - tile->first_part;
      const std::int64_t at_once = std::max<std::int64_t>(item_cost * parts / tile->cost, 1);
      const std::int64_t first = tile->first_part + round * round_parts_;
      const std::int64_t last = std::min(first + round_parts_, tile->last_part);
      for (std::int64_t p = first; p < last; p += at_once) {
        items_.push_back({tile, p, std::min(p + at_once, last), true});
      }
    }
    std::stable_sort(items_.begin() + begin, items_.end(),
                     [&](const Item& a, const Item& b) { return cost_of(a) > cost_of(b); });
    begin = static_cast<std::int64_t>(items_.size());
    round_ends_.push_back(begin);
  }
}

void CachedAttention::run(Worker& worker) {
  Attending attending(*this, worker.index);
  const std::int64_t columns = parts_of(call_.value_depth, kFoldColumns);
  const auto folds = static_cast<std::int64_t>(shared_.size()) * columns;
  for (std::size_t round = 0; round < round_ends_.size(); ++round) {
    const std::int64_t begin = round == 0 ? 0 : round_ends_[round - 1], end = round_ends_[round];
    const auto next = [&]() -> const Item* {
      const std::int64_t i = begin + next_item_.load(std::memory_order_relaxed);
      return i < end ? items_.data() + i : nullptr;
    };
    for (std::int64_t i = begin + next_item_.fetch_add(1); i < end; i = begin + next_item_.fetch_add(1)) {
      attending.attend(items_[static_cast<std::size_t>(i)], next);
    }
    if (shared_.empty()) return;
    worker.barrier->wait();
    if (worker.index == 0) next_item_.store(0, std::memory_order_relaxed);
    for (std::int64_t f = next_fold_.fetch_add(1); f < folds; f = next_fold_.fetch_add(1)) {
      attending.fold_shared(*shared_[static_cast<std::size_t>(f / columns)], static_cast<std::int64_t>(round),
                            f % columns * kFoldColumns);
    }
    if (round + 1 == round_ends_.size()) return;
    worker.barrier->wait();
    if (worker.index == 0) next_fold_.store(0, std::memory_order_relaxed);
  }
}

bool find_rows(const float* mask, std::int64_t batch, std::int64_t queries, std::int64_t tokens,
               std::vector<AttentionRow>& rows) {
  constexpr float kHidden = -60000.0f;  // masks of fp16 have -65,504, their lowest number
  rows.clear();
  AttentionRow before{-1, 0, 0};  // the last one that sees anything
  for (std::int64_t r = 0; r < batch * queries; ++r) {
    AttentionRow row{static_cast<std::int32_t>(r / queries), 0, tokens};
    if (mask != nullptr) {
      const float* at = mask + r * tokens;
      std::int64_t t = 0;
      while (t < tokens && at[t] <= kHidden) ++t;
      row.first = t;
      while (t < tokens && at[t] == 0.0f) ++t;
      row.last = t;
      while (t < tokens && at[t] <= kHidden) ++t;
      if (t < tokens) return false;
      const bool is_empty = row.first == row.last;
      if (is_empty && std::any_of(at, at + tokens, [](float x) { return x != -INFINITY; })) return false;
      if (is_empty) row.first = row.last = 0;
    }
    if (row.first < row.last) {
      if (row.sequence == before.sequence && (row.first < before.first || row.last < before.last)) return false;
      before = row;
    }
    rows.push_back(row);
  }
  return true;
}

void attend_cached(const Kernels& kernels, const CachedAttentionCall& call) {
  static thread_local CachedAttention attention;
  CachedAttention& stage = attention;
  std::int64_t seen = 0;
  for (std::int64_t i = 0; i < call.rows; ++i) seen += std::max<std::int64_t>(call.row[i].last - call.row[i].first, 0);
  const int threads = threads_for(seen * call.kv_heads * (call.depth + call.value_depth) * size_of(call.type));
  stage.plan(kernels, call, threads);
  run_on_threads(threads, [&stage](Worker& worker) { stage.run(worker); });
}

}  // namespace cpumoe
