// What attention over cached keys and values asks of an instruction set; kernels/attention_parts.h has the arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/formats.h"

namespace cpumoe {

static constexpr int kPartTokens = 128;  // tokens are attended in parts that begin at multiples of this
static constexpr int kRunTokens = 16;    // those of a part lie side by side in runs of so many
static constexpr int kPartRuns = kPartTokens / kRunTokens;
static constexpr int kMostLanes = 48;               // lanes, each a head of a row, that are attended at once
static constexpr float kSmallestCached = 0x1p-60f;  // keys and values of bf16 have this magnitude or more, or are 0
// So few lanes are done with keys and values before the next ones have come from memory.
static constexpr int kFewLanes = 16;

// Queries as lanes: numbers [depth][stride], or of bf16 where the instruction set multiplies pairs, pairs of them
// [depth / 2][stride]. There are zeros behind the lanes.
struct LoadLanes {
  DType type;
  int depth, lanes, stride;
  const void* query[kMostLanes];
  std::uint8_t* out;
};

// The keys and values of a part. Places are those of tokens in the part.
struct CachedPart {
  DType type;
  int depth, value_depth;
  int begin, end;  // places that some lane sees, at least one; no other is read
  bool few_lanes;  // no more than kFewLanes attend
  // For each run where its first token stands, or would.
  const std::uint8_t *keys[kPartRuns], *values[kPartRuns];
  std::ptrdiff_t key_stride, value_stride;  // bytes from token to token
  // What will be read next, laid out like this; null where nothing is to be fetched ahead.
  const std::uint8_t *next_keys[kPartRuns], *next_values[kPartRuns];
  // Written by `load_part`: kPartTokens rows of depth + 1 and of value_depth floats.
  std::uint8_t *key_panel, *value_panel;
};

// What lanes make of a part.
struct PartLanes {
  int lanes, stride;
  const std::uint8_t* queries;
  // The places [first, last) that each lane sees, or null: all of the part's. Whole numbers.
  const float *first, *last;
  float scale, softcap;
  float* scores;           // scratch, [kPartTokens][stride]
  float *highest, *total;  // [stride]
  float* sums;             // [value_depth][stride]
};

// Lanes after some parts, with one more: columns [first, last) of the sums. `highest` and `total` are moved on.
struct FoldPart {
  int stride, first, last;
  float *highest, *total, *sums;
  const float *part_highest, *part_total, *part_sums;
};

// Results: columns [first, last) of lanes after all parts.
struct FinishLanes {
  DType type;
  int lanes, stride, first, last;
  const float *highest, *total, *sums;
  const float* sinks;  // [stride] or null
  void* out[kMostLanes];
};

struct AttentionKernels {
  int lane_unit[3];  // by type: lanes come in multiples of this
  void (*load_lanes)(const LoadLanes&);
  // Brings keys and values into the form in which they are multiplied; then lanes may attend to them.
  void (*load_part)(const CachedPart&);
  void (*attend_part)(const CachedPart&, const PartLanes&);
  void (*fold_part)(const FoldPart&);
  void (*finish_lanes)(const FinishLanes&);
};

}  // namespace cpumoe
