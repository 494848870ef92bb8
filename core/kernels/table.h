// The interface between the fused operators and the instruction-set kernels.
//
// Two axes: a weight format says how packed weights are read (packed/layout.h describes the bytes, which are the same
// for every instruction set, decode and prefill), a row format how the rows that they are multiplied with are held. A
// kernel file implements one instruction set: `Kernels`, with one `FormatKernels` for each weight format and one
// `RowKernels` for each row format. It exports that one table; everything else in it has internal linkage. The same
// holds for every header that kernel files include: an inline function with external linkage, compiled once under
// -mavx512f and once for the baseline, would let the linker keep the AVX-512 copy for both, and older CPUs would die on
// it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention_table.h"
#include "kernels/formats.h"
#include "kernels/kv_record_table.h"
#include "kernels/recurrent_table.h"

namespace cpumoe {

enum class Activation : std::uint8_t { kSilu, kSwigluOai, kSwigluStep, kGelu, kGeluTanh, kRelu2 };
enum class Scoring : std::uint8_t { kNone, kSoftmax, kSigmoid, kSqrtSoftplus };

struct ActivationSpec {
  Activation kind = Activation::kSilu;
  bool gated = true;
  float alpha = 1.702f;  // kSwigluOai; kSwigluStep: the most that silu(gate) becomes
  float limit = 7.0f;    // kSwigluOai, kSwigluStep: of up, and of gate for the first
};

// What a prepared row must be multiplied with, and what zero is held as.
struct RowScale {
  float scale;
  std::int32_t zero;
};

// Prepares `count` values and pads with zeros to `padded` (a multiple of 128). The row consists of halves of records,
// 64 inputs each: half h of record r goes to dst + r * record_stride + h * half_stride. Where a row takes two rows of
// a product, those of the second follow RowTraits::half_bytes behind those of the first.
struct PrepareRow {
  const void* src;
  DType type;
  std::int64_t count, padded;
  std::uint8_t* dst;
  std::ptrdiff_t record_stride, half_stride;
  float scale = 0.0f;              // where the row format does not find it in the row
  float* record_scales = nullptr;  // [padded / 128], where every record has one
  // The smallest and the largest value, 0 among them, of a row of which this is a part; null: this is all of it.
  const float* range = nullptr;
};

// A row format on one instruction set.
struct RowKernels {
  RowFormat format;
  RowScale (*prepare)(const PrepareRow&);
};

// Where the weights continue after the ones being multiplied, so that reading ahead never stops at
// the end of a block, an expert or a phase.
struct ReadAhead {
  const std::uint8_t* end = nullptr;   // end of the contiguous bytes now being read
  const std::uint8_t* next = nullptr;  // what is read after them
  int distance = 0;                    // bytes ahead of the reader; 0 turns it off
  bool within = true;                  // also before `end`; false leaves that to the hardware's stream prefetcher
};

// Per-thread buffers of the kernels. The 4 KB alignment keeps their distances known: tile loads that share
// their low 12 address bits with tile stores in flight would wait for them.
struct alignas(4096) Workspace {
  std::uint8_t unpacked[4][kInt8RecordBytes];
  std::int32_t tiles[4][kTileRows * kTileColumns];
};

// acc += A x block, over `record_count` records.
//   A is [record][row tile][half][tile_rows] halves of records; tile_rows is 16, or below 16 with one tile.
//   acc is [row tile][column tile][16][16]: float, but int32 for integers with per-column scales.
struct Product {
  BlockLayout layout;
  const std::uint8_t* records;
  int record_count;
  const std::uint8_t* a;
  std::ptrdiff_t a_record_stride;
  int tile_rows, tiles, rows;
  float* acc;
  // Scales of the rows' records, or null: that of row r and record g at [r * record_scale_stride + g].
  const float* record_scales;
  std::ptrdiff_t record_scale_stride;
  ReadAhead ahead;
  // Rows that will be multiplied next lie here; a kernel may fetch `next_rows_lines` cache lines of them per record and
  // row tile. (AMX does: its rows come from L3 faster than it can ask for them one tile at a time.)
  const std::uint8_t* next_rows;
  int next_rows_lines;
  Workspace* workspace;
};

// What the epilogues need of one block and of the rows it was multiplied with.
struct BlockRows {
  BlockLayout layout;
  const std::uint8_t* head;  // column sums, then scales or factors of columns, then biases (has_bias)
  float* acc;
  int rows;          // of activations
  int rows_of_each;  // rows of sums in `acc` that each of them has
  int rows_of_up;    // where among these the row begins that the second 16 columns are multiplied with
  const float *row_scale, *row_scale_up;  // of the first 16 columns and of the second
  const std::int32_t* row_zero;
};

// out[query * out_stride + row] = sum over depth of queries[query * query_stride + i] * rows[row * depth + i], for rows
// [first, last). Sums run in 16 interleaved lanes, which are then added in halves.
struct DotRows {
  const float* queries;
  int query_count;
  std::ptrdiff_t query_stride;
  const void* rows;  // [.., depth], contiguous
  DType type;
  std::int64_t depth, first, last;
  float* out;
  std::ptrdiff_t out_stride;
};

// out[query * out_stride + column] = sum over rows of weights[query * weight_stride + row] * rows[row * depth +
// column], rows in ascending order.
struct SumRows {
  const float* weights;
  int query_count;
  std::ptrdiff_t weight_stride;
  const void* rows;  // [count, depth], contiguous
  DType type;
  std::int64_t depth, count;
  float* out;
  std::ptrdiff_t out_stride;
};

// dst[i] = src[i] / sqrt(mean of squares + epsilon) * weight[i], with `plus_one` times 1 + weight[i]; with
// `round_first` rounded to the type before the product with the weight too, as models do whose norm is computed in fp32
// and scaled in their own type.
struct NormalizeRow {
  const void* src;
  const float* weight;
  DType type;  // of src and dst
  std::int64_t count;
  float epsilon;
  bool round_first, plus_one;
  void* dst;
};

// The first `rotated` values of a head turned by the angles of a position, in place: x[i] = x[i] * cos[i] + y * sin[i],
// where y is what x[i] is turned with: the value half of `rotated` further on, negated, or as far back; or,
// interleaved, its neighbour in a pair.
struct RotateHead {
  float* x;
  std::int64_t rotated;
  const float *cos, *sin;  // [rotated]
  bool interleaved;
};

// dst[i] = a[i] + factor * b[i], rounded to the type; may be in place.
struct AddRow {
  const void *a, *b;
  DType type;
  std::int64_t count;
  float factor;
  void* dst;
};

// out[i] = activation of gate[i] and up[i], or of gate[i] alone; in place, too. There must be room for whole vectors of
// 16 values.
struct ActivateRow {
  const float *gate, *up;
  std::int64_t count;
  const ActivationSpec* activation;
  float* out;
};

// What comes before and after the products of a weight format with rows of one row format.
struct Epilogues {
  // acc = the contribution of the zero points of rows, 0 where they have none.
  void (*start)(const BlockRows&);
  // values[row * stride + column] = the finished product, `columns` (<= 32) of them.
  void (*finish)(const BlockRows&, float* values, std::ptrdiff_t stride, int columns);
  // hidden[row * stride + column] = activation of the finished product (16 columns when gated, else 32).
  void (*activate)(const BlockRows&, const ActivationSpec&, float* hidden, std::ptrdiff_t stride);
  // out[token[row] * stride + column] += weight[row] * the finished product.
  void (*combine)(const BlockRows&, const float* weight, const std::int32_t* token, float* out, std::ptrdiff_t stride);
};

// One row of the table: a weight format on one instruction set, and all that packs, unpacks and reads it.
struct FormatKernels {
  WeightFormat weights;
  const RecordCodec* codec;                         // null for weights of 16 and 32 bits (wide_index)
  void (*products[kRowKindCount])(const Product&);  // null where the format does not take such rows
  Epilogues epilogues[kRowKindCount][kMaxPlanes];

  void multiply(RowFormat rows, const Product& p) const { products[static_cast<int>(traits_of(rows).kind)](p); }
  const Epilogues& with(RowFormat rows) const {
    const RowTraits traits = traits_of(rows);
    return epilogues[static_cast<int>(traits.kind)][traits.planes - 1];
  }
};

// What depends on the processor rather than on its instruction set.
struct Tuning {
  // How far to read ahead of the weights being multiplied, in bytes. Nearer leaves DRAM idle, farther falls out of the
  // caches: 4 KB was best on Sapphire Rapids, 8 KB on Zen 4.
  int read_ahead_bytes = 8192;
  // Whether a single row should prefetch inside its stream of weights, or only across the breaks of it. Intel cores
  // gain much from it; on AMD Zen 4 the hardware's prefetcher alone is faster (30 instead of 22 GB/s a core).
  bool software_streams = false;
};

// Which results have the bits of the scalar kernels, whatever the instruction set. Integer products always have.
struct Arithmetic {
  bool portable_floats = true;  // products of float rows; false: more than `few_rows` rows are summed in another order
};

struct Kernels {
  const char* name;
  Tuning tuning;
  Arithmetic arithmetic;
  FormatKernels formats[kFormatCount];
  RowKernels row_formats[kRowFormatCount];

  // Largest number of rows for which `multiply` is given one tile of exactly that many rows and reads
  // the packed weights straight; above it rows come in tiles of 16. Both give the same bits, but for rows of bf16
  // numbers on AMX (float_products.h): there a token's result may differ in rounding with the number of its neighbours.
  int few_rows;

  // Called by every thread around a sequence of `multiply` calls (AMX tile configuration).
  void (*thread_begin)();
  void (*thread_end)();

  // dst[i] = src[i] in fp32.
  void (*load_row)(const void* src, DType type, int count, float* dst);
  // dst[i] = src[i] in the given type, rounded to nearest even.
  void (*store_row)(const float* src, std::int64_t count, DType type, void* dst);
  // Scores of logits, in their place. There must be room for whole vectors of 16 values.
  void (*score)(float* logits, int count, Scoring scoring);

  void (*dot_rows)(const DotRows&);
  void (*sum_rows)(const SumRows&);
  void (*normalize_row)(const NormalizeRow&);
  void (*rotate_head)(const RotateHead&);
  void (*add_row)(const AddRow&);
  void (*activate_row)(const ActivateRow&);

  RecurrentKernels recurrent;
  AttentionKernels attention;
  CacheRecordKernels cache_records;

  // The largest magnitude of a row; NaN if it holds a NaN or an infinity.
  float (*magnitude)(const void* src, DType type, std::int64_t count);

  // For measuring the machine: operations done by `iterations` rounds of register-only dot products of int8, and of the
  // numbers that float rows are multiplied as; and a read of `bytes` (a multiple of 4096) that keeps nothing but a
  // checksum.
  double (*dot_peak)(std::int64_t iterations);
  double (*float_dot_peak)(std::int64_t iterations);
  std::uint64_t (*read_bytes)(const std::uint8_t* data, std::int64_t bytes);

  const FormatKernels& of(WeightFormat format) const { return formats[static_cast<int>(format) - 1]; }
  const RowKernels& of(RowFormat format) const { return row_formats[static_cast<int>(format)]; }
};

}  // namespace cpumoe
