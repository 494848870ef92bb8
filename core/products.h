// Products of one chunk of rows with consecutive blocks of a packed matrix: what the fused layer and the linear share.
#pragma once

#include "kernel.h"
#include "packed.h"
#include "plan.h"

namespace cpumoe {

// Blocks whose accumulators are kept at once when the inputs of a chunk do not fit the L2 cache.
constexpr int kBlocksPerPass = 4;

// What one thread needs to multiply.
struct ProductScratch {
  Workspace workspace;
  alignas(4096) float acc[kBlocksPerPass][kMaxRowTiles * kAccTileFloats];
};

// A chunk of prepared rows in the layout of Product::a, with the scale and zero point of each row of activations.
struct ChunkInput {
  RowChunk chunk;
  const std::uint8_t* a;
  const float* row_scale;
  const std::int32_t* row_zero;
};

// Where rows lie whose halves of records take 64 bytes for each of the format's planes: by themselves, or in the layout
// of a chunk (Product::a), in which a row of activations is `planes` rows. The strides are those of PrepareRow.
struct RowLayout {
  static constexpr std::int64_t kHalfBytes = kRecordDepth / 2;
  int planes;

  explicit RowLayout(RowFormat format) : planes(planes_of(format)) {}

  std::int64_t half_bytes() const { return planes * kHalfBytes; }
  std::int64_t row_bytes(std::int64_t padded_depth) const { return planes * padded_depth; }
  // `row` is one of activations, counted from the first of the chunk.
  std::int64_t offset(const RowChunk& chunk, int row) const {
    const int first = row * planes;
    return (first / chunk.tile_rows * (2 * chunk.tile_rows) + first % chunk.tile_rows) * kHalfBytes;
  }
  std::ptrdiff_t record_stride(const RowChunk& chunk) const {
    return static_cast<std::ptrdiff_t>(chunk.tiles) * chunk.tile_rows * 2 * kHalfBytes;
  }
  std::ptrdiff_t half_stride(const RowChunk& chunk) const { return chunk.tile_rows * kHalfBytes; }
};

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
  const std::ptrdiff_t stride = RowLayout(m.spec.rows).record_stride(in.chunk);
  const bool passes = stride * m.records > kPassBytes && in.chunk.tile_rows == kTileRows;
  const int step = passes ? static_cast<int>(kPassBytes / stride) : m.records;
  const int width = passes ? kBlocksPerPass : 1;
  const std::uint8_t* end = m.block(expert, last);
  for (int b0 = first; b0 < last; b0 += width) {
    const int count = last - b0 < width ? last - b0 : width;
    for (int r0 = 0; r0 < m.records; r0 += step) {
      for (int i = 0; i < count; ++i) {
        const std::uint8_t* block = m.block(expert, b0 + i);
        const int activation_rows = in.chunk.rows / planes_of(m.spec.rows);
        BlockRows rows{m.layout, block, scratch->acc[i], activation_rows, in.row_scale, in.row_zero};
        if (r0 == 0) format.with(m.spec.rows).start(rows);
        Product p{};
        p.layout = m.layout;
        p.records = block + m.head_bytes + r0 * m.record_bytes;
        p.record_count = m.records - r0 < step ? m.records - r0 : step;
        p.a = in.a + r0 * stride;
        p.a_record_stride = stride;
        p.tile_rows = in.chunk.tile_rows;
        p.tiles = in.chunk.tiles;
        p.rows = in.chunk.rows;
        p.acc = scratch->acc[i];
        p.ahead = {end, next != nullptr ? next : end, ahead ? kernels.tuning.read_ahead_bytes : 0,
                   in.chunk.rows > 1 || kernels.tuning.software_streams};
        // Every block fetches its share of them.
        const std::int64_t share = next_rows.bytes / (last - first);
        p.next_rows = next_rows.data + share * (b0 + i - first);
        p.next_rows_lines = static_cast<int>(share / (static_cast<std::int64_t>(m.records) * in.chunk.tiles * 64));
        p.workspace = &scratch->workspace;
        format.multiply(p);
        if (r0 + step >= m.records) finish(b0 + i, rows);
      }
    }
  }
}

}  // namespace cpumoe
