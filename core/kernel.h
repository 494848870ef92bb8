// The interface between the fused operators and the instruction-set kernels.
//
// Two axes: a weight format says how packed weights are read (packed.h describes the bytes, which are the same for
// every instruction set, decode and prefill), a row format how the rows that they are multiplied with are held. A
// kernel file implements one instruction set: `Kernels`, with one `FormatKernels` for each weight format and one
// `RowKernels` for each row format. It exports that one table; everything else in it has internal linkage. The same
// holds for every header that kernel files include: an inline function with external linkage, compiled once under
// -mavx512f and once for the baseline, would let the linker keep the AVX-512 copy for both, and older CPUs would die on
// it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention_kernels.h"
#include "cache_record_kernels.h"
#include "delta_kernels.h"

namespace cpumoe {

// A block is 32 columns (output features) of a matrix; a record is 128 consecutive inputs of a block.
static constexpr int kBlockColumns = 32;
static constexpr int kRecordDepth = 128;
static constexpr int kTileRows = 16;     // rows of a full row tile
static constexpr int kTileColumns = 16;  // a block is two column tiles
static constexpr int kMaxRowTiles = 8;   // row tiles that one product may take: 8 * 2 KB of accumulators stay in L1
static constexpr int kAccTileFloats = kTileRows * kBlockColumns;
static constexpr int kInt8RecordBytes = kRecordDepth * kBlockColumns;
static constexpr int kInt4RecordBytes = kInt8RecordBytes / 2;
static constexpr int kBlockVectorBytes = kBlockColumns * 4;  // one 32-bit value per column

enum class DType : std::uint8_t { kF32, kBF16, kF16 };

static constexpr int size_of(DType type) { return type == DType::kF32 ? 4 : 2; }

// How the weights of a record are held. The numbers stand in the headers of packed weights: a format keeps its number,
// and a number its format, for good.
enum class WeightFormat : std::uint32_t {
  kInt4 = 1,         // one scale per column
  kInt4Group32 = 2,  // 32, 64 or 128 inputs share a scale
  kInt4Group64 = 3,
  kInt4Group128 = 4,
  kInt8 = 5,  // one scale per column
  kInt8Group32 = 6,
  kInt8Group64 = 7,
  kInt8Group128 = 8,
  kInt4ZeroGroup32 = 9,  // int4 minus a zero point that the inputs of a group share, too
  kInt4ZeroGroup64 = 10,
  kInt4ZeroGroup128 = 11,
  kFp4Group16 = 12,   // e2m1, with e4m3 scales and a factor for the column: NVFP4
  kFp4Group32 = 13,   // e2m1, with E8M0 scales: MXFP4
  kE4M3 = 14,         // one scale per column: FP8
  kE4M3Tile128 = 15,  // 128 inputs of a tile of 16 columns share a scale: FP8 in blocks
  kE4M3Group32 = 16,  // with E8M0 scales: MXFP8
  kE3M2Group32 = 17,  // the two kinds of MXFP6
  kE2M3Group32 = 18,
  kInt8ZeroGroup32 = 19,  // int8 minus a zero point that the inputs of a group share
  kInt8ZeroGroup64 = 20,
  kInt8ZeroGroup128 = 21,
  kBF16 = 22,  // floats as they are
  kF16 = 23,
  kF32 = 24,
};

// How the scales inside the records are held (those of whole columns are fp32). Numbers of headers, as above.
enum class ScaleType : std::uint32_t {
  kF32 = 1,
  kBF16 = 2,
  kE8M0 = 3,  // the exponent of a power of two
  kE4M3 = 4,  // read as a 256th of its value: the bits of e4m3, 7 further left, are those of an fp16 number
  kF16 = 5,   // as they came, not divided by FormatTraits::unit, which would leave fp16 too few bits
  kNone = 6,  // of weights that are floats
};

static constexpr int kScaleTypeCount = 6;

static constexpr int size_of(ScaleType type) {
  return type == ScaleType::kF32 || type == ScaleType::kNone   ? 4
         : type == ScaleType::kBF16 || type == ScaleType::kF16 ? 2
                                                               : 1;
}

// How a row of activations is made and held in products, x = value * scale of the row. Numbers of headers, as above;
// but for the last three, which are what kFloat becomes for the weights and activations of a call.
enum class RowFormat : std::uint8_t {
  kBytes = 0,        // 8-bit integers less a zero point, both found as the row is seen
  kWords = 1,        // the same with 16 bits: finer than 16-bit floats, and exact to add
  kBytesStatic = 2,  // 8-bit integers with the scale that is stored with the weights
  kFp8 = 3,          // e4m3 with a scale for the row
  kFp8Static = 4,    // with the stored scale
  kFp8Tensor = 5,    // with one scale for all rows that a matrix is multiplied with
  kFp8Group128 = 6,  // with one for 128 inputs of the row
  kNvfp4 = 7,        // e2m1 with e4m3 scales for 16 inputs under a stored global scale
  kMxfp4 = 8,        // small floats with powers of two for 32 inputs
  kMxfp6E3M2 = 9,
  kMxfp6E2M3 = 10,
  kMxfp8 = 11,
  kFloat = 12,
  kBF16 = 13,
  kBF16Pair = 14,  // a bf16 number and one for what it leaves
  kF32 = 15,
};

static constexpr int kStoredRowFormatCount = 13;  // those of headers

// What the values of a prepared row are.
enum class RowKind : std::uint8_t {
  kBytes,  // unsigned, 64 bytes for half of a record
  kBF16,   // 128 bytes; of every four inputs in the order 0, 2, 1, 3
  kF32,    // 256 bytes
};

static constexpr int half_bytes_of(RowKind kind) {
  return kind == RowKind::kBytes ? 64 : kind == RowKind::kBF16 ? 128 : 256;
}

struct RowTraits {
  RowKind kind = RowKind::kBF16;
  int planes = 1;              // rows of a product that a row of activations takes
  bool stored_scale = false;   // the scale is that of the weights
  bool of_tensor = false;      // the scale is that of all rows
  bool record_scales = false;  // every record of a row has a scale of its own

  constexpr int half_bytes() const { return half_bytes_of(kind); }
  // Whether a token is prepared for every expert anew.
  constexpr bool by_expert() const { return stored_scale || of_tensor; }
};

static constexpr RowTraits traits_of(RowFormat format) {
  switch (format) {
    case RowFormat::kBytes: return {.kind = RowKind::kBytes};
    case RowFormat::kWords: return {.kind = RowKind::kBytes, .planes = 2};
    case RowFormat::kBytesStatic: return {.kind = RowKind::kBytes, .stored_scale = true};
    case RowFormat::kFp8Static:
    case RowFormat::kNvfp4: return {.stored_scale = true};
    case RowFormat::kFp8Tensor: return {.of_tensor = true};
    case RowFormat::kFp8Group128: return {.record_scales = true};
    case RowFormat::kBF16Pair: return {.planes = 2};
    case RowFormat::kF32: return {.kind = RowKind::kF32};
    default: return {};
  }
}

// Where input `i` of half of a record stands in a row of a kind.
static constexpr std::int64_t place_in_half(RowKind kind, std::int64_t i) {
  return kind == RowKind::kBF16 ? (i & ~3) | (i & 1) << 1 | (i & 2) >> 1 : i;
}

// How the bits of a record become the numbers that are multiplied.
enum class Decoding : std::uint8_t {
  kBytes,          // int8, as they are
  kNibbles,        // int4, times 16: the high nibble then needs no shift, and the low one a single one
  kNibblesOfZero,  // 0..15, less the zero point of their group: -15..15
  kFp4,            // e2m1, times 2: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives
  kBytesOfZero,    // int8 less the zero point of their group: -255..255
  kE4M3,
  kE3M2,
  kE2M3,
  kBF16,
  kF16,
  kF32,
};

// What can be said of a weight format without an instruction set.
struct FormatTraits {
  Decoding decoding;
  int bits;         // of a weight
  int subgroup;     // inputs that share a scale of a record; 0: one scale per column for all inputs
  int unit;         // the numbers that are multiplied are this times the weights; scales are divided by it
  int largest;      // magnitude of these, if they are integers
  bool has_factor;  // besides the scales of records, a column has a factor

  constexpr bool has_zeros() const {
    return decoding == Decoding::kNibblesOfZero || decoding == Decoding::kBytesOfZero;
  }
  constexpr bool has_scales() const { return bits <= 8; }
  // Whether it can be multiplied with rows of integers.
  constexpr bool has_integers() const { return largest != 0; }
  // Whether it can be multiplied with rows of this kind.
  constexpr bool takes(RowKind rows) const {
    if (rows == RowKind::kBytes) return has_integers();
    if (bits > 8) return (rows == RowKind::kBF16) == (decoding == Decoding::kBF16);
    return rows == RowKind::kBF16 && decoding != Decoding::kNibblesOfZero && decoding != Decoding::kBytes;
  }
};

static constexpr FormatTraits traits_of(WeightFormat format) {
  constexpr auto int4 = [](int subgroup) { return FormatTraits{Decoding::kNibbles, 4, subgroup, 16, 128, false}; };
  constexpr auto int8 = [](int subgroup) { return FormatTraits{Decoding::kBytes, 8, subgroup, 1, 128, false}; };
  constexpr auto zero = [](int subgroup) { return FormatTraits{Decoding::kNibblesOfZero, 4, subgroup, 1, 15, false}; };
  constexpr auto fp4 = [](int subgroup) { return FormatTraits{Decoding::kFp4, 4, subgroup, 2, 12, true}; };
  constexpr auto floats = [](Decoding decoding, int bits, int subgroup) {
    return FormatTraits{decoding, bits, subgroup, 1, 0, false};
  };
  switch (format) {
    case WeightFormat::kInt4: return int4(0);
    case WeightFormat::kInt4Group32: return int4(32);
    case WeightFormat::kInt4Group64: return int4(64);
    case WeightFormat::kInt4Group128: return int4(128);
    case WeightFormat::kInt8: return int8(0);
    case WeightFormat::kInt8Group32: return int8(32);
    case WeightFormat::kInt8Group64: return int8(64);
    case WeightFormat::kInt8Group128: return int8(128);
    case WeightFormat::kInt4ZeroGroup32: return zero(32);
    case WeightFormat::kInt4ZeroGroup64: return zero(64);
    case WeightFormat::kInt4ZeroGroup128: return zero(128);
    case WeightFormat::kFp4Group16: return fp4(16);
    case WeightFormat::kFp4Group32: return fp4(32);
    case WeightFormat::kE4M3: return floats(Decoding::kE4M3, 8, 0);
    case WeightFormat::kE4M3Tile128: return floats(Decoding::kE4M3, 8, 128);
    case WeightFormat::kE4M3Group32: return floats(Decoding::kE4M3, 8, 32);
    case WeightFormat::kE3M2Group32: return floats(Decoding::kE3M2, 6, 32);
    case WeightFormat::kE2M3Group32: return floats(Decoding::kE2M3, 6, 32);
    case WeightFormat::kInt8ZeroGroup32: return floats(Decoding::kBytesOfZero, 8, 32);
    case WeightFormat::kInt8ZeroGroup64: return floats(Decoding::kBytesOfZero, 8, 64);
    case WeightFormat::kInt8ZeroGroup128: return floats(Decoding::kBytesOfZero, 8, 128);
    case WeightFormat::kBF16: return floats(Decoding::kBF16, 16, 0);
    case WeightFormat::kF16: return floats(Decoding::kF16, 16, 0);
    case WeightFormat::kF32: return floats(Decoding::kF32, 32, 0);
  }
  return {};
}

// Twice the values of e2m1, by their code.
static constexpr std::int8_t kFp4Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

enum class Activation : std::uint8_t { kSilu, kSwigluOai, kSwigluStep, kGelu, kGeluTanh, kRelu2 };
enum class Scoring : std::uint8_t { kNone, kSoftmax, kSigmoid, kSqrtSoftplus };

struct ActivationSpec {
  Activation kind = Activation::kSilu;
  bool gated = true;
  float alpha = 1.702f;  // kSwigluOai; kSwigluStep: the most that silu(gate) becomes
  float limit = 7.0f;    // kSwigluOai, kSwigluStep: of up, and of gate for the first
};

// How the bytes of one block are to be read.
struct BlockLayout {
  WeightFormat weights;
  ScaleType scales;
  bool has_bias;
};

// Where in a record the scale (and zero point) of input `i` stands: in the order in which a record is read. Of nibbles,
// an input of the first half is met together with the one 64 further on; bytes come one half after the other.
static constexpr int scale_slot(WeightFormat format, int i) {
  const FormatTraits traits = traits_of(format);
  if (traits.subgroup == 0 || traits.subgroup == kRecordDepth) return 0;
  if (traits.bits >= 8 || traits.subgroup == 64) return i / traits.subgroup;
  return i % 64 / traits.subgroup * 2 + i / 64;
}

// Where the scale of a tile and 128 inputs stands: these records begin with the two of their tiles, on a line of its
// own.
static constexpr bool has_tile_scales(WeightFormat format) { return format == WeightFormat::kE4M3Tile128; }
static constexpr int kTileScaleBytes = 64;

// Where the weight of an input (of a record) and a column stands in records of 16 or 32 bits a weight, in weights:
// lines of 16 columns. Those of bf16 have two inputs side by side, in the order that the rows of activations have.
static constexpr int wide_index(WeightFormat format, int input, int column) {
  const int line = input / 4, i = input % 4, tile = column / kTileColumns, c = column % kTileColumns;
  if (format != WeightFormat::kBF16) return ((line * 4 + i) * 2 + tile) * kTileColumns + c;
  return (((line * 2 + i % 2) * 2 + tile) * kTileColumns + c) * 2 + i / 2;
}

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
  bool add = false;  // to what is in `out`
};

// out[query * out_stride + column] = sum over rows of weights[query * weight_stride + row] * rows[row * depth +
// column], for columns [first, last), rows in ascending order.
struct SumRows {
  const float* weights;
  int query_count;
  std::ptrdiff_t weight_stride;
  const void* rows;  // [count, depth], contiguous
  DType type;
  std::int64_t depth, count;
  int first, last;
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

// Channels, each convolved with its inputs up to a token's own:
// out[t, c] = silu(bias[c] + sum over k < width of weight[c, k] * input[t - width + 1 + k, c]) * mask[t].
// `state` holds the `width` inputs before x and then those up to the last of x: any cut of the tokens gives the same
// bits.
struct ConvolveChannels {
  DType type;     // of x and state
  const void* x;  // [tokens, channels], rows x_stride elements apart
  std::int64_t x_stride, tokens;
  int channels, width;  // at most kConvolvedChannels and kConvolutionWidth
  void* state;          // [channels, width]
  DType weight_type;
  const void* weight;  // [channels, width]
  DType bias_type;
  const void* bias;   // [channels] or null
  const float* mask;  // [tokens] or null
  DType out_type;
  void* out;  // [tokens, channels], rows out_stride elements apart
  std::int64_t out_stride;
};

static constexpr int kConvolvedChannels = 64, kConvolutionWidth = 16;

// Steps of a state space: steps[i] = log(1 + e^(raw[i] + bias[i])) within [low, high], and decays[i] = e^(steps[i] *
// rates[i]) if there are rates.
struct TimeSteps {
  const void* raw;
  DType type;
  const float *bias, *rates;  // or null
  std::int64_t count;
  float low, high;
  float *steps, *decays;
};

// A state space with `rows` rows of `depth` values, over tokens:
//   state[r, n] = state[r, n] * decay + step * x[t, r] * b[t, n]
//   out[t, r] = sum over n of state[r, n] * c[t, n] + skip * x[t, r]
// where the sum runs in 16 interleaved lanes, which are then added in halves. The decay and the step are those of the
// token; or, with `rates`, every row has a step of its own and decays by e^(step * rates[r, n]).
struct ScanState {
  float* state;  // [rows, depth]
  std::int64_t rows, depth, tokens;
  const float* x;  // [tokens, rows]; may be `out`
  std::int64_t x_stride;
  const float *b, *c;  // [tokens, depth]
  std::int64_t bc_stride;
  const float *steps, *decays;  // [tokens], or steps [tokens, rows] and no decays
  std::int64_t step_stride;
  const float* rates;  // [rows, depth] or null
  const float* skip;   // [1] or, with rates, [rows]
  float* out;          // [tokens, rows]
  std::int64_t out_stride;
};

// out[i] = normed(x[i] * silu(gate[i])), or normed(x[i]) * silu(gate[i]) with `gate_last`. Every `group` values are
// divided by the root of their mean square + epsilon and multiplied by the weight; without a weight there is no norm.
// x is overwritten.
struct GateRow {
  float* x;
  const void* gate;
  DType type;  // of gate and out
  std::int64_t count, group;
  const void* weight;  // [count] or null
  DType weight_type;
  float epsilon;
  bool gate_last;
  void* out;
};

// One block's weights of up to 8 bits as they are stored, [column][input of the record]: integers, or the codes of
// small floats. Missing inputs and columns are zero.
using RecordValues = std::int8_t[kBlockColumns][kRecordDepth];

// Packing and unpacking the weights of one record. Part of every row of the table, so that what packs and what reads
// cannot be chosen apart.
struct RecordCodec {
  void (*write)(const RecordValues& values, std::uint8_t* dst);
  void (*read)(const std::uint8_t* src, RecordValues& values);
};

extern const RecordCodec kInt4Codec, kOffsetNibblesCodec, kFp4Codec, kInt8Codec, kSixBitsCodec;  // formats.cc

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

static constexpr int kFormatCount = 24, kRowFormatCount = 16, kRowKindCount = 3, kMaxPlanes = 2;

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

struct Kernels {
  const char* name;
  Tuning tuning;
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

  // State spaces (kernels/state_space.h).
  void (*convolve_channels)(const ConvolveChannels&);
  void (*time_steps)(const TimeSteps&);
  void (*decay_rates)(const void* logarithms, DType type, std::int64_t count, float* rates);  // -e^x
  void (*scan_state)(const ScanState&);
  void (*gate_row)(const GateRow&);
  DeltaKernels delta;
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

// Where the accumulator of (row, column of the block) stands in [row tile][column tile][16][16].
static constexpr std::ptrdiff_t acc_index(int row, int column) {
  return static_cast<std::ptrdiff_t>(row / kTileRows) * kAccTileFloats +
         column / kTileColumns * (kTileRows * kTileColumns) + row % kTileRows * kTileColumns + column % kTileColumns;
}

static constexpr int block_head_bytes(const BlockLayout& layout) {
  const FormatTraits traits = traits_of(layout.weights);
  const bool of_columns = traits.subgroup == 0 || traits.has_factor;
  return kBlockVectorBytes * (1 + (of_columns ? 1 : 0) + (layout.has_bias ? 1 : 0));
}

// A record is its scales, its zero points (a byte each) and its weights. In kernels `format` is a constant, and so is
// what these give but for the type of the scales.
static constexpr int record_scale_bytes(WeightFormat format, ScaleType scales) {
  const int subgroup = traits_of(format).subgroup;
  if (has_tile_scales(format)) return kTileScaleBytes;
  return subgroup == 0 ? 0 : kRecordDepth / subgroup * kBlockColumns * size_of(scales);
}

static constexpr int record_zero_bytes(WeightFormat format) {
  const FormatTraits traits = traits_of(format);
  return traits.has_zeros() ? kRecordDepth / traits.subgroup * kBlockColumns : 0;
}

static constexpr int record_bytes(WeightFormat format, ScaleType scales) {
  return record_scale_bytes(format, scales) + record_zero_bytes(format) +
         kRecordDepth * kBlockColumns * traits_of(format).bits / 8;
}

}  // namespace cpumoe
