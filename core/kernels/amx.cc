// AMX-INT8 and AMX-BF16: tdpbusd on 16 x 16 x 64 and tdpbf16ps on 16 x 16 x 32 tiles for many rows, AVX512-VNNI and
// AVX512-BF16 for few.
//
// Grouped weights. A pass holds four weight tiles (two column tiles x two halves of a record) in registers and walks
// the row tiles. A step multiplies one row tile into the result tiles of both column tiles; the results are stored just
// before their registers are needed again, one step later, and scaled and added another step later, while the tile unit
// works on the next products. Tile registers are not renamed, so stores right after the products would stall.
//
// Many rows of bf16 numbers are the one case whose bits are not those of the scalar kernel: tdpbf16ps has an order of
// sums of its own (float_products.h). Few rows have those of the scalar kernel, so the bits of a token depend on
// whether more than kMaxFewRows rows meet the same weights; never on threads, or on what the other rows hold.
#include "kernels/amx_tiles.h"
#include "kernels/avx512_rows.h"
#include "kernels/bf16_attention.h"
#include "kernels/bf16_products.h"
#include "kernels/rowwise.h"
#include "kernels/vector_avx512.h"

namespace cpumoe {
namespace {

constexpr int kTileBytes = 1024;
constexpr int kTileInts = kTileRows * kTileColumns;

// Lines [first, first + count) of the 32 (or 64 of bytes, taken in pairs 32 apart) of a packed record, spread to weight
// tiles in the order (column tile 0, half 0), (0, 1), (1, 0), (1, 1). With subgroup 32 lines 0-7 and 8-15 of a column
// tile go to tiles of their own, whose other rows stay zero: a product with such a tile sums 32 inputs only. These are
// taken in two passes, in the order of the scales: of nibbles first lines 0-7 of both halves, of bytes first half 0.
constexpr bool pass_is_half(WeightFormat format) { return traits_of(format).bits == 8; }

template <WeightFormat format>
inline __attribute__((always_inline)) void unpack_lines(const Record& record, std::uint8_t* tiles, int first,
                                                        int count) {
  constexpr FormatTraits traits = traits_of(format);
  // The 8x8 bit matrix that moves the low nibble of every byte to the high one.
  const __m512i to_high = _mm512_set1_epi64(0x0000000001020408ll);
  NibbleReader<format> reader;
#pragma GCC unroll 32
  for (int i = 0; i < count; ++i) {
    const int line = first + i;
    if (line >= 32) break;
    const __m512i v = _mm512_loadu_si512(record.weights + line * 64);
    std::uint8_t* dst = tiles + (line & 1) * (2 * kTileBytes) + (line >> 1) * 64;
    std::uint8_t* other_half = dst + kTileBytes;
    if constexpr (traits.subgroup == 32) {
      const int late = line >= 16 ? 1 : 0;
      other_half = dst + (pass_is_half(format) ? 4 + late : 4 * late + 1) * kTileBytes;
      dst += (pass_is_half(format) ? late : 4 * late) * kTileBytes;
    }
    if constexpr (traits.decoding == Decoding::kBytes) {
      _mm512_store_si512(dst, v);
      _mm512_store_si512(other_half, _mm512_loadu_si512(record.weights + (line + 32) * 64));
    } else if constexpr (traits.decoding == Decoding::kNibbles) {
      _mm512_store_si512(dst, _mm512_gf2p8affine_epi64_epi8(v, to_high, 0));
      _mm512_store_si512(other_half, high_nibbles(v));
    } else {
      reader.begin(record, line >> 1);
      _mm512_store_si512(dst, reader.decode(v, 0, line & 1));
      _mm512_store_si512(other_half, reader.decode(v, 1, line & 1));
    }
  }
}

// The results of steps on their way from tiles 6 and 7 to the accumulators. A `Step` says how its results are added.
template <class Step>
struct Results {
  std::int32_t *ready, *stored;  // those of the step before the last; where those of the last are stored
  Step before_last, last;

  // Steps -2 and -1: results of zero, which `nothing` adds.
  Results(Workspace* workspace, const Step& nothing)
      : ready(workspace->tiles[0]), stored(workspace->tiles[2]), before_last(nothing), last(nothing) {
    CPUMOE_TILE_ZERO(6);
    CPUMOE_TILE_ZERO(7);
    __builtin_memset(workspace->tiles, 0, sizeof(workspace->tiles));
  }

  void after(const Step& step) {
    before_last = last;
    last = step;
    std::int32_t* swap = ready;
    ready = stored;
    stored = swap;
  }

  // add(tiles, step) for the last two: the results of the very last are still in registers.
  template <class Add>
  void finish(const Add& add) {
    CPUMOE_TILE_STORE(6, stored);
    CPUMOE_TILE_STORE(7, stored + kTileInts);
    add(ready, before_last);
    add(stored, last);
  }
};

// What a product has to fetch for each record and row tile of the rows that come next.
inline const std::uint8_t* read_next_rows(const Product& p, const std::uint8_t* at) {
  for (int i = 0; i < p.next_rows_lines; ++i, at += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
  }
  return at;
}

struct ScaledStep {
  float* acc;
  const std::uint8_t* scales;
};

inline __attribute__((always_inline)) void add_scaled_rows(const std::int32_t* sums, float* acc, __m512 scale,
                                                           int first, int last) {
#pragma GCC unroll 16
  for (int r = first; r < last; ++r) {
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums + r * kTileColumns));
    _mm512_storeu_ps(acc + r * kTileColumns, _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(acc + r * kTileColumns)));
  }
}

template <WeightFormat format, int tiles>
void multiply_grouped(const Product& p) {
  constexpr int subgroup = traits_of(format).subgroup;
  constexpr int kPasses = subgroup == 32 ? 2 : 1;         // per record
  constexpr int kStepsPerTile = subgroup == 128 ? 1 : 2;  // one per half unless both halves share a scale
  // Where the scales of a step stand.
  constexpr auto slot_of = [](int pass, int step) {
    return pass_is_half(format) && kPasses == 2 ? scale_slot(format, pass * 64 + step * 32)
                                                : scale_slot(format, step * 64 + pass * 32);
  };
  constexpr int kSlots = kPasses * tiles;  // where unpacking and reading ahead are spread over
  constexpr int kLinesPerSlot = (32 + kSlots - 1) / kSlots;
  static constexpr std::uint8_t kZeroScales[kBlockVectorBytes] = {};
  const ScaleType type = p.layout.scales;
  const int stride = record_bytes(format, type);
  const int slot_bytes = kBlockColumns * size_of(type);
  const ReadAhead ahead = p.ahead;
  const std::uint8_t* next_rows = p.next_rows;
  // Two sets of unpacked tiles: one in use, one being filled for the next record.
  constexpr int kSetBytes = subgroup == 32 ? 8 * kTileBytes : 4 * kTileBytes;
  std::uint8_t *current = p.workspace->unpacked[0], *coming = p.workspace->unpacked[0] + kSetBytes;
  if (subgroup == 32) __builtin_memset(p.workspace->unpacked, 0, 2 * kSetBytes);
  unpack_lines<format>(record_at<format>(p.records, type), current, 0, 32);
  Results<ScaledStep> results(p.workspace, {p.acc, kZeroScales});
  for (int g = 0; g < p.record_count; ++g) {
    const std::uint8_t* record = p.records + static_cast<std::ptrdiff_t>(g) * stride;
    const Record next = record_at<format>(g + 1 < p.record_count ? record + stride : record, type);
    const char* far = ahead_of(ahead, record);
    const std::uint8_t* a = p.a + g * p.a_record_stride;
    const int lines_ahead = (stride + 63) / 64;
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::uint8_t* weights = current + pass * (4 * kTileBytes);
      CPUMOE_TILE_LOAD(0, weights, 64);
      CPUMOE_TILE_LOAD(1, weights + 2 * kTileBytes, 64);
      CPUMOE_TILE_LOAD(2, weights + kTileBytes, 64);
      CPUMOE_TILE_LOAD(3, weights + 3 * kTileBytes, 64);
#pragma GCC unroll 8
      for (int m = 0; m < tiles; ++m) {
        const int slot = pass * tiles + m;
        const int first_ahead = lines_ahead * slot / kSlots, last_ahead = lines_ahead * (slot + 1) / kSlots;
        const int middle_ahead = (first_ahead + last_ahead) / 2;
#pragma GCC unroll 2
        for (int step = 0; step < kStepsPerTile; ++step) {
          const int half = pass_is_half(format) && kPasses == 2 ? pass : step;
          const std::uint8_t* rows = a + m * (2 * kTileBytes) + half * kTileBytes;
          const __m512 s0 = scales_at<F32x16, format>(results.before_last.scales, type, 0).v;
          const __m512 s1 = scales_at<F32x16, format>(results.before_last.scales, type, kTileColumns).v;
          float* acc = results.before_last.acc;
          const std::int32_t* ready = results.ready;
          CPUMOE_TILE_LOAD_ONCE(4, rows, 64);
          CPUMOE_TILE_STORE(6, results.stored);
          CPUMOE_TILE_ZERO(6);
          if (step == 0) {
            CPUMOE_TILE_DOT(6, 4, 0);
          } else {
            CPUMOE_TILE_DOT(6, 4, 2);
          }
          if (step == 0) {
            for (int i = first_ahead; i < middle_ahead; ++i) _mm_prefetch(far + i * 64, _MM_HINT_T1);
          }
          add_scaled_rows(ready, acc, s0, 0, 8);
          if (kStepsPerTile == 1) {
            CPUMOE_TILE_LOAD_ONCE(5, rows + kTileBytes, 64);
            CPUMOE_TILE_DOT(6, 5, 2);
          }
          add_scaled_rows(ready, acc, s0, 8, 16);
          CPUMOE_TILE_STORE(7, results.stored + kTileInts);
          CPUMOE_TILE_ZERO(7);
          if (step == 0) {
            CPUMOE_TILE_DOT(7, 4, 1);
          } else {
            CPUMOE_TILE_DOT(7, 4, 3);
          }
          if (step == 0) {
            for (int i = middle_ahead; i < last_ahead; ++i) _mm_prefetch(far + i * 64, _MM_HINT_T1);
          }
          add_scaled_rows(ready + kTileInts, acc + kTileInts, s1, 0, 8);
          if (kStepsPerTile == 1) CPUMOE_TILE_DOT(7, 5, 3);
          add_scaled_rows(ready + kTileInts, acc + kTileInts, s1, 8, 16);
          results.after({p.acc + m * kAccTileFloats, record + slot_of(pass, step) * slot_bytes});
        }
        if (pass == 0) next_rows = read_next_rows(p, next_rows);
        unpack_lines<format>(next, coming, slot * kLinesPerSlot, kLinesPerSlot);
      }
    }
    std::uint8_t* swap = current;
    current = coming;
    coming = swap;
  }
  results.finish([&](const std::int32_t* sums, const ScaledStep& step) {
    add_scaled_rows(sums, step.acc, scales_at<F32x16, format>(step.scales, type, 0).v, 0, 16);
    add_scaled_rows(sums + kTileInts, step.acc + kTileInts,
                    scales_at<F32x16, format>(step.scales, type, kTileColumns).v, 0, 16);
  });
}

template <WeightFormat format>
void multiply_grouped_by_tiles(const Product& p) {
  static constexpr void (*kByTiles[kMaxRowTiles])(const Product&) = {
      multiply_grouped<format, 1>, multiply_grouped<format, 2>, multiply_grouped<format, 3>,
      multiply_grouped<format, 4>, multiply_grouped<format, 5>, multiply_grouped<format, 6>,
      multiply_grouped<format, 7>, multiply_grouped<format, 8>};
  kByTiles[p.tiles - 1](p);
}

// One scale per column: the sums stay in tiles over several records, 2 x 2 tiles at a time. `weights` are the tiles of
// `records` records, rows `row_stride` bytes apart.
template <int row_tiles, bool packed>
inline void multiply_columns(const Product& p, const std::uint8_t* weights, int first_record, int records, int m) {
  constexpr int kRowStride = packed ? 64 : 128;
  constexpr int kColumnTile = packed ? 2 * kTileBytes : 64, kHalf = packed ? kTileBytes : 2 * kTileBytes;
  float* acc = p.acc + m * kAccTileFloats;
  CPUMOE_TILE_LOAD(4, acc, 64);
  CPUMOE_TILE_LOAD(5, acc + kTileInts, 64);
  if (row_tiles == 2) {
    CPUMOE_TILE_LOAD(6, acc + kAccTileFloats, 64);
    CPUMOE_TILE_LOAD(7, acc + kAccTileFloats + kTileInts, 64);
  }
  for (int g = 0; g < records; ++g) {
    const std::uint8_t* rows = p.a + (first_record + g) * p.a_record_stride + m * (2 * kTileBytes);
    for (int half = 0; half < 2; ++half) {
      const std::uint8_t* w = weights + g * kInt8RecordBytes + half * kHalf;
      CPUMOE_TILE_LOAD_ONCE(0, rows + half * kTileBytes, 64);
      CPUMOE_TILE_LOAD(2, w, kRowStride);
      CPUMOE_TILE_DOT(4, 0, 2);
      CPUMOE_TILE_LOAD(3, w + kColumnTile, kRowStride);
      CPUMOE_TILE_DOT(5, 0, 3);
      if (row_tiles == 2) {
        CPUMOE_TILE_LOAD_ONCE(1, rows + 2 * kTileBytes + half * kTileBytes, 64);
        CPUMOE_TILE_DOT(6, 1, 2);
        CPUMOE_TILE_DOT(7, 1, 3);
      }
    }
  }
  CPUMOE_TILE_STORE(4, acc);
  CPUMOE_TILE_STORE(5, acc + kTileInts);
  if (row_tiles == 2) {
    CPUMOE_TILE_STORE(6, acc + kAccTileFloats);
    CPUMOE_TILE_STORE(7, acc + kAccTileFloats + kTileInts);
  }
}

template <WeightFormat format>
void multiply_per_column(const Product& p) {
  constexpr bool packed = traits_of(format).bits == 4;
  constexpr int kRecordsAtOnce = 4;                              // 16 KB of weight tiles stay in L1
  constexpr int stride = record_bytes(format, ScaleType::kF32);  // it has no scales in its records
  for (int first = 0; first < p.record_count; first += kRecordsAtOnce) {
    const int count = p.record_count - first < kRecordsAtOnce ? p.record_count - first : kRecordsAtOnce;
    const std::uint8_t* weights = p.records + static_cast<std::ptrdiff_t>(first) * stride;
    for (int g = 0; g < count; ++g) {
      const std::uint8_t* record = weights + static_cast<std::ptrdiff_t>(g) * stride;
      read_record_ahead(p.ahead, record, stride);
      if (packed) unpack_lines<format>(record_at<format>(record, p.layout.scales), p.workspace->unpacked[g], 0, 32);
    }
    if (packed) weights = p.workspace->unpacked[0];
    int m = 0;
    for (; m + 2 <= p.tiles; m += 2) multiply_columns<2, packed>(p, weights, first, count, m);
    if (m < p.tiles) multiply_columns<1, packed>(p, weights, first, count, m);
  }
}

// A step of rows of floats: the sums of two runs, for 16 rows and 16 columns.
struct RunsStep {
  float* acc;
  F32x16 scales[2];         // of the runs
  const float* row_scales;  // of the rows in the record
};

template <WeightFormat format>
inline __attribute__((always_inline)) void add_runs(const std::int32_t* tiles, const RunsStep& step, int first,
                                                    int last) {
  const auto* sums = reinterpret_cast<const float*>(tiles);
  FloatArgs args{};
  args.record_scales = step.row_scales;
  args.record_scale_stride = 1;
#pragma GCC unroll 8
  for (int r = first; r < last; ++r) {
    float* acc = step.acc + r * kTileColumns;
    F32x16 total = F32x16::load(acc);
    for (int i = 0; i < 2; ++i) {
      const F32x16 sum = F32x16::load(sums + i * kTileInts + r * kTileColumns);
      total = with_run<F32x16, format>(args, r, total, sum, step.scales[i]);
    }
    F32x16::store(acc, total);
  }
}

// Multiplies tiles 4 and 5, the rows of two runs, with their weights of a column tile.
template <WeightFormat format, int tile>
inline __attribute__((always_inline)) void multiply_two_runs(Results<RunsStep>& results, const RunsStep& step) {
  CPUMOE_TILE_STORE(6, results.stored);
  CPUMOE_TILE_ZERO(6);
  if constexpr (tile == 0) {
    CPUMOE_TILE_FLOAT_DOT(6, 4, 0);
  } else {
    CPUMOE_TILE_FLOAT_DOT(6, 4, 2);
  }
  add_runs<format>(results.ready, results.before_last, 0, 8);
  CPUMOE_TILE_STORE(7, results.stored + kTileInts);
  CPUMOE_TILE_ZERO(7);
  if constexpr (tile == 0) {
    CPUMOE_TILE_FLOAT_DOT(7, 5, 1);
  } else {
    CPUMOE_TILE_FLOAT_DOT(7, 5, 3);
  }
  add_runs<format>(results.ready, results.before_last, 8, 16);
  results.after(step);
}

// The scales of a record's rows side by side for every row of the tiles: 1 where rows have none.
struct RowScales {
  float of_rows[2][kMaxRowTiles * kTileRows];  // steps of the record before may still wait

  RowScales() {
    for (auto& record : of_rows) {
      for (float& scale : record) scale = 1.0f;
    }
  }

  const float* load(const Product& p, int record) {
    float* scales = of_rows[record % 2];
    if (p.record_scales == nullptr) return scales;
    for (int r = 0; r < p.rows; ++r) scales[r] = p.record_scales[r * p.record_scale_stride + record];
    return scales;
  }
};

// Rows of bf16 numbers in tiles. The inputs of a run are just as many as a tile is deep. A pass takes two of a record's
// four runs and holds their weights of both column tiles in registers; a step multiplies a row tile with those of one
// column tile, each run into a result tile of its own: both are added while an accumulator is in a register.
template <WeightFormat format>
void multiply_runs(const Product& p) {
  constexpr int kLines = run_lines(format), kLinesOfHalf = 16, kPasses = 2;
  constexpr int kRowBytes = 128, kHalfBytes = kTileRows * kRowBytes;
  constexpr bool kUnpacks = Bf16Dots::kUnpacks<format>;
  const int stride = record_bytes(format, p.layout.scales), lines_ahead = (stride + 63) / 64;
  // Where unpacking and reading ahead are spread over.
  const int slots = kPasses * p.tiles;
  const int lines_of_slot = (kLinesOfHalf + slots - 1) / slots, ahead_of_slot = (lines_ahead + slots - 1) / slots;
  const ReadAhead ahead = p.ahead;
  const std::uint8_t* next_rows = p.next_rows;
  // Two unpacked records: one in use, one being filled.
  std::uint8_t *current = p.workspace->unpacked[0], *coming = p.workspace->unpacked[2];
  const LineReader<format> reader;
  if constexpr (kUnpacks) Bf16Dots::unpack<format>(record_at<format>(p.records, p.layout.scales), current);
  RowScales scales_of_rows;
  const float* row_scales = scales_of_rows.of_rows[0];
  Results<RunsStep> results(p.workspace, {p.acc, {F32x16::set(0.0f), F32x16::set(0.0f)}, row_scales});
  for (int g = 0; g < p.record_count; ++g) {
    const std::uint8_t* bytes = p.records + static_cast<std::ptrdiff_t>(g) * stride;
    const Record record = record_at<format>(bytes, p.layout.scales);
    const Record next = record_at<format>(bytes + stride, p.layout.scales);
    const char* far = ahead_of(ahead, bytes);
    const std::uint8_t* weights = kUnpacks ? current : record.weights;
    if constexpr (has_tile_scales(format)) row_scales = scales_of_rows.load(p, g);
    int line = g + 1 < p.record_count ? 0 : kLinesOfHalf, line_ahead = 0;
#pragma GCC unroll 2
    for (int pass = 0; pass < kPasses; ++pass) {
      const RecordPart first = place_of_part<format, kLines>(2 * pass);
      const RecordPart second = place_of_part<format, kLines>(2 * pass + 1);
      CPUMOE_TILE_LOAD(0, weights + Bf16Dots::place(first.half, first.line, 0), Bf16Dots::kPairBytes);
      CPUMOE_TILE_LOAD(1, weights + Bf16Dots::place(second.half, second.line, 0), Bf16Dots::kPairBytes);
      CPUMOE_TILE_LOAD(2, weights + Bf16Dots::place(first.half, first.line, 1), Bf16Dots::kPairBytes);
      CPUMOE_TILE_LOAD(3, weights + Bf16Dots::place(second.half, second.line, 1), Bf16Dots::kPairBytes);
      const auto step = [&](int m, int column) -> RunsStep {
        return {p.acc + acc_index(m * kTileRows, column),
                {run_scales<F32x16, format>(record, first.slot, column),
                 run_scales<F32x16, format>(record, second.slot, column)},
                row_scales + m * kTileRows};
      };
      for (int m = 0; m < p.tiles; ++m) {
        const std::uint8_t* rows = p.a + g * p.a_record_stride + m * (2 * kHalfBytes);
        CPUMOE_TILE_LOAD_ONCE(4, rows + first.half * kHalfBytes + first.line * 8, kRowBytes);
        CPUMOE_TILE_LOAD_ONCE(5, rows + second.half * kHalfBytes + second.line * 8, kRowBytes);
        multiply_two_runs<format, 0>(results, step(m, 0));
        multiply_two_runs<format, 1>(results, step(m, kTileColumns));
        if (pass == 0) next_rows = read_next_rows(p, next_rows);
        for (int i = 0; i < ahead_of_slot && line_ahead < lines_ahead; ++i, ++line_ahead) {
          _mm_prefetch(far + line_ahead * 64, _MM_HINT_T1);
        }
        if constexpr (kUnpacks) {
          for (int i = 0; i < lines_of_slot && line < kLinesOfHalf; ++i, ++line) {
            Bf16Dots::unpack_line<format>(reader, next, line, coming);
          }
        }
      }
    }
    std::uint8_t* swap = current;
    current = coming;
    coming = swap;
  }
  results.finish([](const std::int32_t* sums, const RunsStep& step) { add_runs<format>(sums, step, 0, 16); });
}

// Rounds of four register-only products of `operations` each.
template <class FourProducts>
double tile_peak(std::int64_t iterations, double operations, const FourProducts& four_products) {
  configure_tiles();
  for (std::int64_t i = 0; i < iterations; ++i) four_products();
  release_tiles();
  return static_cast<double>(iterations) * 4 * operations;
}

struct Amx {
  template <WeightFormat format>
  static void multiply(const Product& p) {
    if (p.tile_rows <= kMaxFewRows) return multiply_few_rows<format>(p);
    if constexpr (traits_of(format).subgroup == 0) {
      multiply_per_column<format>(p);
    } else if constexpr (traits_of(format).subgroup == 16) {
      multiply_rows<Avx512Rows, format>(p);  // a tile for every 16 inputs would be three quarters empty
    } else {
      multiply_grouped_by_tiles<format>(p);
    }
  }

  template <WeightFormat format, RowKind kind>
  static void multiply_floats(const Product& p) {
    if constexpr (kind == RowKind::kBF16 && traits_of(format).subgroup != 16) {
      if (p.tile_rows == kTileRows) return multiply_runs<format>(p);
    }
    multiply_floats_by_pairs<format, kind>(p);  // with groups of 16 inputs tiles would be half empty
  }

  static double dot_peak(std::int64_t iterations) {
    return tile_peak(iterations, 32768.0, [] {
      CPUMOE_TILE_DOT(0, 4, 6);
      CPUMOE_TILE_DOT(1, 4, 7);
      CPUMOE_TILE_DOT(2, 5, 6);
      CPUMOE_TILE_DOT(3, 5, 7);
    });
  }
};

double float_dot_peak(std::int64_t iterations) {
  return tile_peak(iterations, 16384.0, [] {
    CPUMOE_TILE_FLOAT_DOT(0, 4, 6);
    CPUMOE_TILE_FLOAT_DOT(1, 4, 7);
    CPUMOE_TILE_FLOAT_DOT(2, 5, 6);
    CPUMOE_TILE_FLOAT_DOT(3, 5, 7);
  });
}

constexpr Kernels make_kernels() {
  Kernels k = kernels_of<F32x16, Amx>("amx");
  k.arithmetic.portable_floats = false;
  add_bf16_attention(k);
  k.few_rows = kMaxFewRows;  // from 7 rows on a padded tile of 16 is faster
  k.thread_begin = configure_tiles;
  k.thread_end = release_tiles;
  k.float_dot_peak = float_dot_peak;
  return k;
}

}  // namespace

extern const Kernels kAmxKernels;
constexpr Kernels kAmxKernels = make_kernels();

}  // namespace cpumoe
