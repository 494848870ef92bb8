// Products with rows of floats, written once: the loop over records and rows, and what every instruction set can do
// that has no dot product of bf16 numbers, over a vector type V.
//
// The sum over a run of inputs (32, or 16 where those share a scale) begins at 0, then meets its scale and the running
// sum in one fma. Inside of a run, of every four inputs those come in the order 2, 0, 3, 1, one addition each: what
// vdpbf16ps does with pairs (0, 2) and (1, 3). Products of bf16 numbers are exact in fp32, so it does not matter
// whether a multiplication is fused with the addition. fp32 numbers are taken in their own order, each with one fma.
//
// AMX has another order inside of a run, where many rows are multiplied and a run has 32 inputs: tdpbf16ps sums inputs
// 0 and 1 of every four from 0 on, inputs 2 and 3 likewise, then adds the two sums. What differs is rounding only, a
// few units in the last place of the sum of a run; runs meet their scales and the running sum as everywhere.
//
// An `Isa` gives
//
//   kRowsAtOnce<format>                    rows whose running sums fit the registers
//   kStraightRows                          up to so many rows weights are decoded on the way instead of into a buffer
//   kUnpacks<format>                       whether records need decoding at all
//   unpack<format>(record, dst)            the numbers of a record, in the layout of wide_index
//   multiply<M, format, kind, packed>(args)  M rows with a record; `packed` where it was not unpacked
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/elementary.h"
#include "kernels/prepare_floats.h"
#include "kernels/row_blocks.h"

namespace cpumoe {
namespace {

constexpr int run_lines(WeightFormat format) { return traits_of(format).subgroup == 16 ? 4 : 8; }

struct FloatArgs {
  Record record;
  const std::uint8_t *weights, *a;  // weights: those of the record, or unpacked
  std::ptrdiff_t half_bytes;        // from a row's first 64 inputs to its last 64
  float* acc;
  const float* record_scales;  // of the rows in this record, or null
  std::ptrdiff_t record_scale_stride;
};

// What a scale of a record is multiplied with for a row.
inline float scale_of_row(const FloatArgs& args, int row) {
  return args.record_scales == nullptr ? 1.0f : args.record_scales[row * args.record_scale_stride];
}

template <class Isa, int M, WeightFormat format, RowKind kind, bool packed>
inline void record_with_rows(int rows, const FloatArgs& args) {
  if constexpr (M > 1) {
    if (rows < M) return record_with_rows<Isa, M - 1, format, kind, packed>(rows, args);
  }
  Isa::template multiply<M, format, kind, packed>(args);
}

template <class Isa, WeightFormat format, RowKind kind>
void multiply_float_rows(const Product& p) {
  constexpr int kRowBytes = half_bytes_of(kind);
  const int stride = record_bytes(format, p.layout.scales);
  const std::ptrdiff_t half_bytes = static_cast<std::ptrdiff_t>(p.tile_rows) * kRowBytes;
  const bool straight = Isa::template kUnpacks<format> && p.rows <= Isa::kStraightRows;
  for (int g = 0; g < p.record_count; ++g) {
    const std::uint8_t* bytes = p.records + static_cast<std::ptrdiff_t>(g) * stride;
    ReadAhead ahead = p.ahead;
    // Records with many scales, which are read back and forth, are no stream for the hardware's prefetcher.
    if (traits_of(format).subgroup == 16) ahead.within = true;
    read_record_ahead(ahead, bytes, stride);
    const Record record = record_at<format>(bytes, p.layout.scales);
    FloatArgs args{record, record.weights, nullptr, half_bytes, nullptr, nullptr, p.record_scale_stride};
    if constexpr (Isa::template kUnpacks<format>) {
      if (!straight) {
        Isa::template unpack<format>(record, p.workspace->unpacked[0]);
        args.weights = p.workspace->unpacked[0];
      }
    }
    for (int row = 0; row < p.rows;) {
      const int tile = row / p.tile_rows, r = row % p.tile_rows;
      const int left = p.tile_rows - r < p.rows - row ? p.tile_rows - r : p.rows - row;
      constexpr int kRowsAtOnce = Isa::template kRowsAtOnce<format>;
      const int count = left < kRowsAtOnce ? left : kRowsAtOnce;
      args.a = p.a + g * p.a_record_stride + tile * 2 * half_bytes + r * kRowBytes;
      args.acc = p.acc + tile * kAccTileFloats + r * kTileColumns;
      if (p.record_scales != nullptr) args.record_scales = p.record_scales + row * p.record_scale_stride + g;
      if constexpr (Isa::kStraightRows > 0 && Isa::template kUnpacks<format>) {
        if (straight) {
          record_with_rows<Isa, Isa::kStraightRows, format, kind, true>(count, args);
          row += count;
          continue;
        }
      }
      record_with_rows<Isa, kRowsAtOnce, format, kind, false>(count, args);
      row += count;
    }
  }
}

// The value of a small float from its code, in the low bits of a lane. Exponents are moved to where fp32 has them; a
// subnormal code then reads 2^e (1 + m), where 2^(e + 1) m is meant.
template <class V, const SmallFloat& format>
inline V small_float(V code) {
  constexpr int kExponents = format.largest == 448.0f ? 4 : format.largest == 28.0f ? 3 : 2;
  constexpr int kSign = kExponents + format.mantissa;
  constexpr std::uint32_t kBias = 127 - ((1 << (kExponents - 1)) - 1);
  const V smallest = V::set(format.smallest_normal);
  const V moved = V::shift_left(V::and_bits(code, (1u << kSign) - 1), 23 - format.mantissa);
  const V normal = V::add_bits(moved, kBias << 23);
  const V value = V::select_less(normal, smallest, normal + normal - smallest, normal);
  return V::or_bits(value, V::shift_left(V::and_bits(code, 1u << kSign), 31 - kSign));
}

// A whole number below 2^23 in the bits of a lane, as a float.
template <class V>
inline V whole_number(V bits) {
  return V::or_bits(bits, V::set(8388608.0f)) - V::set(8388608.0f);
}

// The numbers of input 64 half + 4 line + i and kWidth columns from `column` on, as they are multiplied.
template <class V, WeightFormat format>
inline V decoded(const Record& record, int half, int line, int i, int column) {
  constexpr FormatTraits traits = traits_of(format);
  constexpr int kLineBytes = traits.bits == 6 ? 192 : 128;
  const int at = line * kLineBytes + column / kTileColumns * 64 + column % kTileColumns * 4;
  if constexpr (traits.bits == 8) {
    const V quads = V::load_bits32(record.weights + half * (kInt8RecordBytes / 2) + at);
    const V code = V::and_bits(V::shift_right(quads, 8 * i), 0xFF);
    if constexpr (traits.decoding == Decoding::kE4M3) return small_float<V, kE4M3>(code);
    // Both are held, or made, 128 larger.
    const std::uint8_t* zeros = record.zeros + scale_slot(format, half * 64 + line * 4) * kBlockColumns + column;
    return whole_number(V::flip_bits(code, 0x80)) - whole_number(V::load_bytes(zeros));
  } else {
    const V quads = V::load_bits32(record.weights + at);
    const V nibble = V::and_bits(V::shift_right(quads, 8 * i + 4 * half), 0xF);
    if constexpr (traits.decoding == Decoding::kNibbles) {
      return (whole_number(V::flip_bits(nibble, 8)) - V::set(8.0f)) * V::set(16.0f);
    } else if constexpr (traits.decoding == Decoding::kFp4) {
      const V value = small_float<V, kE2M1>(nibble);
      return value + value;
    } else {
      const int tile = column / kTileColumns;
      const V upper = V::load_bits32(record.weights + line * kLineBytes + 128 + column % kTileColumns * 4);
      const V two = V::and_bits(V::shift_right(upper, 8 * i + 4 * tile + 2 * half), 3);
      const V code = V::or_bits(nibble, V::shift_left(two, 4));
      return traits.decoding == Decoding::kE3M2 ? small_float<V, kE3M2>(code) : small_float<V, kE2M3>(code);
    }
  }
}

// The scales of a run for kWidth columns from `column` on; 1 where columns have one for all inputs.
template <class V, WeightFormat format>
inline V run_scales(const Record& record, int slot, int column) {
  if constexpr (has_tile_scales(format)) {
    float scale;
    __builtin_memcpy(&scale, record.scales + column / kTileColumns * 4, 4);
    return V::set(scale);
  } else if constexpr (traits_of(format).subgroup == 0) {
    return V::set(1.0f);
  } else {
    return scales_at<V, format>(record.scales, record.scale_type, slot * kBlockColumns + column);
  }
}

// The running sum with the sum of a run added.
template <class V, WeightFormat format>
inline V with_run(const FloatArgs& args, int row, V total, V sum, V scale) {
  if constexpr (traits_of(format).subgroup == 0) return total + sum;
  if constexpr (has_tile_scales(format)) scale = scale * V::set(scale_of_row(args, row));
  return V::fma(sum, scale, total);
}

template <class V>
struct FloatVectors {
  static constexpr int kVectors = kBlockColumns / V::kWidth;
  template <WeightFormat format>
  static constexpr int kRowsAtOnce = kVectors == 2 ? 8 : 2;
  static constexpr int kStraightRows = 0;
  template <WeightFormat format>
  static constexpr bool kUnpacks = format != WeightFormat::kF32;

  template <WeightFormat format>
  static void unpack(const Record& record, std::uint8_t* dst) {
    auto* to = reinterpret_cast<float*>(dst);
    for (int line = 0; line < 32; ++line) {
      for (int i = 0; i < 4; ++i) {
        for (int column = 0; column < kBlockColumns; column += V::kWidth) {
          V::store(to + wide_index(WeightFormat::kF32, line * 4 + i, column), number<format>(record, line, i, column));
        }
      }
    }
  }

  template <int M, WeightFormat format, RowKind kind, bool packed>
  static void multiply(const FloatArgs& args) {
    constexpr int kLines = run_lines(format);
    for (int i = 0; i < 2 * 16 / kLines; ++i) run<M, format, kind>(args, place_of_part<format, kLines>(i));
  }

 private:
  template <int M, WeightFormat format, RowKind kind>
  static void run(const FloatArgs& args, const RecordPart& part) {
    V sum[M][kVectors];
    for (auto& row : sum) {
      for (V& v : row) v = V::set(0.0f);
    }
    constexpr bool kPairs = kind == RowKind::kBF16;
    const auto* weights = reinterpret_cast<const float*>(args.weights);
    const std::uint8_t* rows = args.a + part.half * args.half_bytes;
    for (int line = part.line; line < part.line + run_lines(format); ++line) {
      for (int turn = 0; turn < 4; ++turn) {
        constexpr int kOrder[4] = {2, 0, 3, 1};
        const int i = kPairs ? kOrder[turn] : turn;
        const float* w = weights + wide_index(WeightFormat::kF32, (part.half * 16 + line) * 4 + i, 0);
        for (int r = 0; r < M; ++r) {
          const V x =
              V::set(kPairs ? bf16_input(rows + r * 128 + line * 8, i) : fp32_input(rows + r * 256 + line * 16, i));
          for (int v = 0; v < kVectors; ++v) {
            const V weight = V::load(w + wide_index(WeightFormat::kF32, 0, v * V::kWidth));
            if constexpr (kPairs && V::kWidth == 1) {
              sum[r][v] = sum[r][v] + x * weight;  // the same, without a call of fmaf where there is no instruction
            } else {
              sum[r][v] = V::fma(x, weight, sum[r][v]);
            }
          }
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const V scale = run_scales<V, format>(args.record, part.slot, v * V::kWidth);
      for (int r = 0; r < M; ++r) {
        float* acc = args.acc + acc_index(r, v * V::kWidth);
        V::store(acc, with_run<V, format>(args, r, V::load(acc), sum[r][v], scale));
      }
    }
  }

  template <WeightFormat format>
  static V number(const Record& record, int line, int i, int column) {
    if constexpr (format == WeightFormat::kBF16) {  // pairs of inputs, in the order of wide_index
      const V both = V::load_bits32(record.weights + wide_index(format, line * 4 + i % 2, column) * 2);
      return i < 2 ? V::shift_left(both, 16) : V::and_bits(both, 0xFFFF0000u);
    } else if constexpr (format == WeightFormat::kF16) {
      const auto* words = reinterpret_cast<const std::uint16_t*>(record.weights);
      return V::template load_as<DType::kF16>(words + wide_index(format, line * 4 + i, column));
    } else if constexpr (format == WeightFormat::kF32) {
      return V::load(reinterpret_cast<const float*>(record.weights) + wide_index(format, line * 4 + i, column));
    } else {
      return decoded<V, format>(record, line / 16, line % 16, i, column);
    }
  }

  static float bf16_input(const std::uint8_t* four, int i) {
    std::uint16_t word;
    __builtin_memcpy(&word, four + (i % 2 * 2 + i / 2) * 2, 2);
    return bfloat_to_float(word);
  }
  static float fp32_input(const std::uint8_t* four, int i) {
    float value;
    __builtin_memcpy(&value, four + i * 4, 4);
    return value;
  }
};

// Base of an `Isa` of rowwise.h without instructions for bf16 products: multiplies rows of floats with its vectors.
template <class V>
struct FloatProducts {
  template <WeightFormat format, RowKind kind>
  static void multiply_floats(const Product& p) {
    multiply_float_rows<FloatVectors<V>, format, kind>(p);
  }
};

}  // namespace
}  // namespace cpumoe
