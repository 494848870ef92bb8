// Products of one chunk of rows with consecutive blocks of a packed matrix: what the fused layer and the linear share.
#pragma once

#include <algorithm>

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

// How the rows of activations lie that are multiplied with a matrix: by themselves, with 64 bytes for each half of a
// record and each plane of the format, or in the layout of a chunk (Product::a). There a row of activations is `rows`
// rows: its planes, for each order in which the matrix has its inputs. The strides are those of PrepareRow.
struct RowLayout {
  static constexpr std::int64_t kHalfBytes = kRecordDepth / 2;
  int planes, rows;

  explicit RowLayout(const PackedSpec& spec)
      : planes(planes_of(spec.rows)), rows(planes * (spec.input_orders == 2 ? 2 : 1)) {}

  std::int64_t half_bytes() const { return planes * kHalfBytes; }
  std::int64_t row_bytes(std::int64_t padded_depth) const { return planes * padded_depth; }
  // Where row `row` of the expert goes, a row of a product, counted from the first of the chunk.
  std::int64_t offset(const RowChunk& chunk, int row) const {
    const int in_chunk = row - chunk.first_row;
    return (in_chunk / chunk.tile_rows * (2 * chunk.tile_rows) + in_chunk % chunk.tile_rows) * kHalfBytes;
  }
  std::ptrdiff_t record_stride(const RowChunk& chunk) const {
    return static_cast<std::ptrdiff_t>(chunk.tiles) * chunk.tile_rows * 2 * kHalfBytes;
  }
  std::ptrdiff_t half_stride(const RowChunk& chunk) const { return chunk.tile_rows * kHalfBytes; }
};

// Copies a prepared row that lies by itself to `dst` in a chunk, input i of which is input order[i] of the row.
inline void copy_in_order(const RowLayout& layout, const std::uint8_t* row, const InputOrder& order, std::int64_t depth,
                          const RowChunk& chunk, std::uint8_t* dst) {
  const std::int64_t half = RowLayout::kHalfBytes;
  for (std::int64_t first = 0; first < depth; first += half) {
    const std::int64_t count = std::min(half, depth - first), number = first / half;
    std::uint8_t* to = dst + number / 2 * layout.record_stride(chunk) + number % 2 * layout.half_stride(chunk);
    for (int plane = 0; plane < layout.planes; ++plane, to += half) {
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t input = order[first + i];
        to[i] = row[input / half * layout.half_bytes() + plane * half + input % half];
      }
      for (std::int64_t i = count; i < half; ++i) to[i] = 0;
    }
  }
  if (depth % kRecordDepth != 0 && depth % kRecordDepth <= half) {  // the last half of the last record
    std::uint8_t* to = dst + depth / kRecordDepth * layout.record_stride(chunk) + layout.half_stride(chunk);
    for (std::int64_t i = 0; i < layout.half_bytes(); ++i) to[i] = 0;
  }
}

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
  const int width = passes ? kBlocksPerPass : 1;
  const std::uint8_t* end = m.block(expert, last);
  for (int b0 = first; b0 < last; b0 += width) {
    const int count = last - b0 < width ? last - b0 : width;
    for (int r0 = 0; r0 < m.records; r0 += step) {
      for (int i = 0; i < count; ++i) {
        const std::uint8_t* block = m.block(expert, b0 + i);
        BlockRows rows{m.layout,        block,
                       scratch->acc[i], in.chunk.rows / layout.rows,
                       layout.rows,     layout.rows - layout.planes,
                       in.row_scale,    in.row_zero};
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
