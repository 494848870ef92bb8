// Weight formats, row formats and the bytes of a block: what packing, the operators and the kernels share.
//
// packed/layout.h describes packed weights as a whole. Everything here has internal linkage: see kernels/table.h.
#pragma once

#include <cstddef>
#include <cstdint>

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

static constexpr int kFormatCount = 24, kRowFormatCount = 16, kRowKindCount = 3, kMaxPlanes = 2;

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

// One block's weights of up to 8 bits as they are stored, [column][input of the record]: integers, or the codes of
// small floats. Missing inputs and columns are zero.
using RecordValues = std::int8_t[kBlockColumns][kRecordDepth];

// Packing and unpacking the weights of one record. Part of every row of the table, so that what packs and what reads
// cannot be chosen apart.
struct RecordCodec {
  void (*write)(const RecordValues& values, std::uint8_t* dst);
  void (*read)(const std::uint8_t* src, RecordValues& values);
};

extern const RecordCodec kInt4Codec, kOffsetNibblesCodec, kFp4Codec, kInt8Codec,
    kSixBitsCodec;  // packed/format_list.cc

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
