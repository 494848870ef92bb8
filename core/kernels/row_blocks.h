// The order in which a record is read, and the loop around the products that all vector kernels share: record by
// record, a few rows at a time. An `Isa` gives
//
//   kRowsAtOnce                       rows whose running sums fit the registers
//   kStraightRows<format>             up to so many rows nibbles are decoded on the way instead of into a buffer first
//   unpack_record<format>(record, dst)  the nibbles of a record -> int8 layout
//   record_product<M, format, packed>(args)  M rows with one record; `packed` where its nibbles were not unpacked
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/elementary.h"
#include "kernels/table.h"

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

// A record as it lies there.
struct Record {
  const std::uint8_t *scales, *zeros, *weights;
  ScaleType scale_type;
};

template <WeightFormat format>
inline Record record_at(const std::uint8_t* bytes, ScaleType scales) {
  const std::uint8_t* zeros = bytes + record_scale_bytes(format, scales);
  return {bytes, zeros, zeros + record_zero_bytes(format), scales};
}

// The scales of kWidth columns, the first of them scale `index` of a record. Small floats in groups of 16 (NVFP4) have
// e4m3 scales, those in groups of 32 (mx formats) E8M0 scales.
template <class V, WeightFormat format>
inline V scales_at(const std::uint8_t* scales, ScaleType type, int index) {
  constexpr FormatTraits traits = traits_of(format);
  constexpr bool kSmallFloats = traits.decoding == Decoding::kFp4 || !(traits.has_integers() || traits.has_zeros());
  if constexpr (traits.decoding == Decoding::kFp4 && traits.subgroup == 16) {
    return V::load_e4m3(scales + index);
  } else if constexpr (kSmallFloats && traits.subgroup == 32) {
    return max_of(V::set(0x1p-127f), V::shift_left(V::load_bytes(scales + index), 23));  // 2^-127 is subnormal
  } else {
    const auto* words = reinterpret_cast<const std::uint16_t*>(scales) + index;
    if (type == ScaleType::kBF16) return V::template load_as<DType::kBF16>(words);
    if (type == ScaleType::kF32) return V::load(reinterpret_cast<const float*>(scales) + index);
    return V::template load_as<DType::kF16>(words) * V::set(1.0f / static_cast<float>(traits.unit));
  }
}

struct RecordArgs {
  Record record;
  const std::uint8_t *weights, *a;  // weights: those of the record, or unpacked
  std::ptrdiff_t half_bytes;        // from a row's first 64 inputs to its last 64
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
  const int stride = record_bytes(format, p.layout.scales);
  const std::ptrdiff_t half_bytes = static_cast<std::ptrdiff_t>(p.tile_rows) * 64;
  constexpr bool kNibbles = traits_of(format).bits == 4;
  const bool straight = kNibbles && p.rows <= Isa::template kStraightRows<format>;
  for (int g = 0; g < p.record_count; ++g) {
    const std::uint8_t* bytes = p.records + static_cast<std::ptrdiff_t>(g) * stride;
    read_record_ahead(p.ahead, bytes, stride);
    const Record record = record_at<format>(bytes, p.layout.scales);
    RecordArgs args{record, record.weights, nullptr, half_bytes, nullptr};
    if constexpr (kNibbles) {
      if (!straight) {
        Isa::template unpack_record<format>(record, p.workspace->unpacked[0]);
        args.weights = p.workspace->unpacked[0];
      }
    }
    for (int row = 0; row < p.rows;) {
      const int tile = row / p.tile_rows, r = row % p.tile_rows;
      const int left = p.tile_rows - r < p.rows - row ? p.tile_rows - r : p.rows - row;
      const int count = left < Isa::kRowsAtOnce ? left : Isa::kRowsAtOnce;
      args.a = p.a + g * p.a_record_stride + tile * 2 * half_bytes + r * 64;
      args.acc = p.acc + tile * kAccTileFloats + r * kTileColumns;
      if constexpr (Isa::template kStraightRows<format> > 0) {
        if (straight) {
          product_of_rows<Isa, Isa::kRowsAtOnce, format, kNibbles>(count, args);
          row += count;
          continue;
        }
      }
      product_of_rows<Isa, Isa::kRowsAtOnce, format, false>(count, args);
      row += count;
    }
  }
}

// A record is met in parts of `lines` lines (4 inputs each) of one half, in the order of its scales (scale_slot): of
// nibbles whose halves have scales of their own within 64 inputs, the halves in turn; else one half after the other.
struct RecordPart {
  int line, half, slot;
  bool scale_ends;
};

template <WeightFormat format, int lines>
constexpr RecordPart place_of_part(int part) {
  constexpr FormatTraits traits = traits_of(format);
  RecordPart at{part * lines % 16, part * lines / 16, 0, false};
  if (traits.bits < 8 && traits.subgroup != 64) {
    constexpr int kRun = traits.subgroup == 16 ? 4 : 8;  // lines of a half before it is the other one's turn
    constexpr int kPartsOfRun = kRun / lines;
    const int run = part / kPartsOfRun;
    at.line = run / 2 * kRun + part % kPartsOfRun * lines;
    at.half = run % 2;
  }
  at.slot = scale_slot(format, at.half * 64 + at.line * 4);
  return at;
}

template <WeightFormat format, int lines>
constexpr RecordPart record_part(int part) {
  constexpr int kParts = 2 * 16 / lines;
  RecordPart at = place_of_part<format, lines>(part);
  at.scale_ends =
      traits_of(format).subgroup != 0 && (part + 1 == kParts || place_of_part<format, lines>(part + 1).slot != at.slot);
  return at;
}

}  // namespace
}  // namespace cpumoe
