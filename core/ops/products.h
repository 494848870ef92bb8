// Products of one chunk of rows with consecutive blocks of a packed matrix: what the fused layer and the linear share.
#pragma once

#include <cstring>

#include "kernels/table.h"
#include "ops/expert_plan.h"
#include "packed/layout.h"

namespace cpumoe {

// Blocks whose accumulators are kept at once when the inputs of a chunk do not fit the L2 cache, and when a chunk is a
// small tile: finishing a block there interrupts the stream of weights for longer than it takes, because what waits for
// its last numbers fills the reorder buffer and no loads follow. One interruption for many blocks costs as much.
constexpr int kBlocksPerPass = 4, kBlocksOfSmallTile = 16;
static_assert(kBlocksOfSmallTile <= kBlocksPerPass * kMaxRowTiles, "the accumulators of a small tile fill a whole one");

// Blocks that the chunks of a cut take in turn: so few that their weights stay in the caches, all if there is one
// chunk.
inline int blocks_in_turn(const RowCut& cut, int blocks) { return cut.chunks == 1 ? blocks : kBlocksPerPass; }

// What one thread needs to multiply.
struct ProductScratch {
  Workspace workspace;
  alignas(4096) float acc[kBlocksPerPass][kMaxRowTiles * kAccTileFloats];
};

// A chunk of prepared rows in the layout of Product::a, with the scales and zero point of each row of activations:
// scales for the first 16 columns of a block and for the second, and those of records where rows have them.
struct ChunkInput {
  RowChunk chunk;
  const std::uint8_t* a;
  const float *row_scale, *row_scale_up;
  const std::int32_t* row_zero;
  const float* record_scales;
};

// How the rows of activations lie that are multiplied with a matrix: by themselves, with `half` bytes for each half of
// a record and each plane of the format, or in the layout of a chunk (Product::a). There a row of activations is `rows`
// rows: its planes, for each order or scale of its own in which gate and up columns have their inputs. The strides are
// those of PrepareRow.
struct RowLayout {
  RowKind kind;
  std::int64_t half;
  int planes, rows;

  explicit RowLayout(const PackedSpec& spec)
      : kind(traits_of(spec.rows).kind),
        half(traits_of(spec.rows).half_bytes()),
        planes(traits_of(spec.rows).planes),
        rows(planes * (spec.input_orders == 2 || spec.input_scales == 2 ? 2 : 1)) {}

  std::int64_t half_bytes() const { return planes * half; }
  // Of a row of activations by itself, and of a row of a product.
  std::int64_t row_bytes(std::int64_t padded_depth) const { return planes * product_row_bytes(padded_depth); }
  std::int64_t product_row_bytes(std::int64_t padded_depth) const { return padded_depth / (kRecordDepth / 2) * half; }
  // Where row `row` of the expert goes, a row of a product, counted from the first of the chunk.
  std::int64_t offset(const RowChunk& chunk, int row) const {
    const int in_chunk = row - chunk.first_row;
    return (in_chunk / chunk.tile_rows * (2 * chunk.tile_rows) + in_chunk % chunk.tile_rows) * half;
  }
  std::ptrdiff_t record_stride(const RowChunk& chunk) const {
    return static_cast<std::ptrdiff_t>(chunk.tiles) * chunk.tile_rows * 2 * half;
  }
  std::ptrdiff_t half_stride(const RowChunk& chunk) const { return chunk.tile_rows * half; }
};

// Copies a prepared row that lies by itself to `dst` in a chunk, input i of which is input order[i] of the row.
inline void copy_in_order(const RowLayout& layout, const std::uint8_t* row, const InputOrder& order, std::int64_t depth,
                          const RowChunk& chunk, std::uint8_t* dst) {
  constexpr std::int64_t kInputs = kRecordDepth / 2;  // of a half
  const std::int64_t size = layout.half / kInputs, padded = (depth + kRecordDepth - 1) / kRecordDepth * kRecordDepth;
  for (std::int64_t first = 0; first < padded; first += kInputs) {
    const std::int64_t number = first / kInputs;
    std::uint8_t* to = dst + number / 2 * layout.record_stride(chunk) + number % 2 * layout.half_stride(chunk);
    for (int plane = 0; plane < layout.planes; ++plane, to += layout.half) {
      for (std::int64_t i = 0; i < kInputs; ++i) {
        std::uint8_t* value = to + place_in_half(layout.kind, i) * size;
        if (first + i >= depth) {
          std::memset(value, 0, static_cast<std::size_t>(size));
          continue;
        }
        const std::int64_t input = order[first + i];
        const std::uint8_t* half = row + input / kInputs * layout.half_bytes() + plane * layout.half;
        std::memcpy(value, half + place_in_half(layout.kind, input % kInputs) * size, static_cast<std::size_t>(size));
      }
    }
  }
}

// The largest magnitude in those of `rows` rows that hold no NaN and no infinity.
inline float largest_magnitude(const Kernels& kernels, const void* x, DType type, std::int64_t rows,
                               std::int64_t columns) {
  float largest = 0.0f;
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto* row = static_cast<const std::uint8_t*>(x) + r * columns * size_of(type);
    const float one = kernels.magnitude(row, type, columns);
    largest = one > largest ? one : largest;  // a broken row is left to itself
  }
  return largest;
}

// The scale of e4m3 numbers the largest of which stands for `magnitude`.
inline float fp8_scale(float magnitude) { return magnitude / 448.0f; }

// Prepared rows that will be multiplied after these.
struct NextRows {
  const std::uint8_t* data = nullptr;
  std::int64_t bytes = 0;
};

// Multiplies and calls finish(block index, BlockRows) for each of the blocks [first, last) of an expert. `next` is what
// will be read after these weights (null: nothing); `ahead` is false when they have been read before.
template <class Finish>
void multiply_blocks(const Kernels& kernels, const PackedMatrix& m, std::int64_t expert, int first, int last,
                     const ChunkInput& in, bool ahead, const std::uint8_t* next, const NextRows& next_rows,
                     ProductScratch* scratch, Finish&& finish) {
  // Inputs that outgrow their share of the L2 cache are taken in several passes over the records, a few blocks at a
  // time.
  constexpr std::ptrdiff_t kPassBytes = 384 << 10;
  const FormatKernels& format = kernels.of(m.layout.weights);
  const RowLayout layout(m.spec);
  const std::ptrdiff_t stride = layout.record_stride(in.chunk);
  const bool passes = stride * m.records > kPassBytes && in.chunk.tile_rows == kTileRows;
  const int step = passes ? static_cast<int>(kPassBytes / stride) : m.records;
  const bool small_tile = in.chunk.tile_rows < kTileRows;
  const int width = passes ? kBlocksPerPass : small_tile ? kBlocksOfSmallTile : 1;
  const auto rows_of = [&](int block, int index) {
    float* acc = small_tile ? &scratch->acc[0][0] + index * kAccTileFloats : scratch->acc[index];
    return BlockRows{m.layout,    m.block(expert, block),      acc,          in.chunk.rows / layout.rows,
                     layout.rows, layout.rows - layout.planes, in.row_scale, in.row_scale_up,
                     in.row_zero};
  };
  const std::uint8_t* end = m.block(expert, last);
  for (int b0 = first; b0 < last; b0 += width) {
    const int count = last - b0 < width ? last - b0 : width;
    for (int r0 = 0; r0 < m.records; r0 += step) {
      for (int i = 0; i < count; ++i) {
        const BlockRows rows = rows_of(b0 + i, i);
        if (r0 == 0) format.with(m.spec.rows).start(rows);
        Product p{};
        p.layout = m.layout;
        p.records = rows.head + m.head_bytes + r0 * m.record_bytes;
        p.record_count = m.records - r0 < step ? m.records - r0 : step;
        p.a = in.a + r0 * stride;
        p.a_record_stride = stride;
        p.tile_rows = in.chunk.tile_rows;
        p.tiles = in.chunk.tiles;
        p.rows = in.chunk.rows;
        p.acc = rows.acc;
        if (in.record_scales != nullptr) p.record_scales = in.record_scales + r0;
        p.record_scale_stride = m.records;
        p.ahead = {end, next != nullptr ? next : end, ahead ? kernels.tuning.read_ahead_bytes : 0,
                   in.chunk.rows > 1 || kernels.tuning.software_streams};
        // Every block fetches its share of them.
        const std::int64_t share = next_rows.bytes / (last - first);
        p.next_rows = next_rows.data + share * (b0 + i - first);
        p.next_rows_lines = static_cast<int>(share / (static_cast<std::int64_t>(m.records) * in.chunk.tiles * 64));
        p.workspace = &scratch->workspace;
        format.multiply(m.spec.rows, p);
      }
    }
    for (int i = 0; i < count; ++i) finish(b0 + i, rows_of(b0 + i, i));
  }
}

}  // namespace cpumoe
