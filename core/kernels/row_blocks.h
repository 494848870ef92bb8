// The loop around the products that all vector kernels share: record by record, a few rows at a time. An `Isa` gives
//
//   kRowsAtOnce                 rows whose running sums fit the registers
//   kStraightRows               up to so many rows int4 weights are decoded on the way instead of into a buffer first
//   unpack_record(packed, dst)  int4 record -> int8 layout
//   record_product<M, format, packed>(args)  M rows with one record; `packed` where its int4 weights were not unpacked
//
// The order of the sub-group scales is that of packed.h. Internal linkage on purpose: see kernel.h.
#pragma once

#include "../kernel.h"

namespace cpumoe {
namespace {

// What to read ahead while multiplying `record`: the bytes `distance` further on, continuing at `next` beyond `end`.
// Where there is nothing to read ahead it is the record itself, whose prefetch costs next to nothing. Computed from the
// position in the loop: a cursor kept in memory gave almost no overlap.
inline const char* ahead_of(const ReadAhead& ahead, const std::uint8_t* record) {
  const std::uint8_t* p = record + ahead.distance;
  if (p >= ahead.end) return reinterpret_cast<const char*>(ahead.distance == 0 ? record : ahead.next + (p - ahead.end));
  return reinterpret_cast<const char*>(ahead.within ? p : record);
}

inline void read_record_ahead(const ReadAhead& ahead, const std::uint8_t* record, int bytes) {
  const char* p = ahead_of(ahead, record);
  if (p == reinterpret_cast<const char*>(record)) return;
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

struct RecordArgs {
  const std::uint8_t *weights, *a;
  std::ptrdiff_t half_bytes;  // from a row's first 64 inputs to its last 64
  const std::uint8_t* scales;
  ScaleType scale_type;
  float* acc;
};

template <class Isa, int M, WeightFormat format, bool packed>
inline void product_of_rows(int rows, const RecordArgs& args) {
  if constexpr (M > 1) {
    if (rows < M) return product_of_rows<Isa, M - 1, format, packed>(rows, args);
  }
  Isa::template record_product<M, format, packed>(args);
}

template <class Isa, WeightFormat format>
void multiply_rows(const Product& p) {
  const int stride = record_bytes(format, p.format.scales);
  const int scale_bytes = record_scale_bytes(format, p.format.scales);
  const std::ptrdiff_t half_bytes = static_cast<std::ptrdiff_t>(p.tile_rows) * 64;
  constexpr bool kInt4 = traits_of(format).bits == 4;
  const bool straight = kInt4 && p.rows <= Isa::kStraightRows;
  for (int g = 0; g < p.record_count; ++g) {
    const std::uint8_t* record = p.records + static_cast<std::ptrdiff_t>(g) * stride;
    read_record_ahead(p.ahead, record, stride);
    RecordArgs args{record + scale_bytes, nullptr, half_bytes, record, p.format.scales, nullptr};
    if (kInt4 && !straight) {
      Isa::unpack_record(args.weights, p.workspace->unpacked[0]);
      args.weights = p.workspace->unpacked[0];
    }
    for (int row = 0; row < p.rows;) {
      const int tile = row / p.tile_rows, r = row % p.tile_rows;
      const int left = p.tile_rows - r < p.rows - row ? p.tile_rows - r : p.rows - row;
      const int count = left < Isa::kRowsAtOnce ? left : Isa::kRowsAtOnce;
      args.a = p.a + g * p.a_record_stride + tile * 2 * half_bytes + r * 64;
      args.acc = p.acc + tile * kAccTileFloats + r * kTileColumns;
      if (straight) {
        product_of_rows<Isa, Isa::kRowsAtOnce, format, kInt4>(count, args);
      } else {
        product_of_rows<Isa, Isa::kRowsAtOnce, format, false>(count, args);
      }
      row += count;
    }
  }
}

// A record is met in four parts of 32 inputs, in the order of its scales: lines 0-7 of half 0 and of half 1, then lines
// 8-15; with one scale per half, all lines of half 0 first.
struct RecordPart {
  int line, half, slot;
  bool scale_ends;
};

template <int subgroup>
constexpr RecordPart record_part(int part) {
  if (subgroup == 64) return {part % 2 * 8, part / 2, part / 2, part % 2 == 1};
  return {part / 2 * 8, part % 2, subgroup == 32 ? part : 0, subgroup == 32 || (subgroup == 128 && part == 3)};
}

}  // namespace
}  // namespace cpumoe
