#include "linear.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "check.h"
#include "memory.h"
#include "products.h"
#include "threads.h"

namespace cpumoe {
namespace {

constexpr std::int64_t kMaxRows = 4096;

struct ThreadScratch {
  ProductScratch product;
  Buffer row;
  float values[kMaxRowTiles * kTileRows * kBlockColumns];
};

struct Scratch {
  Buffer rows, scale, zero, record_scales;
  std::vector<std::unique_ptr<ThreadScratch>> threads;
};

// All rows belong to one matrix, so they are prepared straight in the layout of their chunk. `row_scale` is the one
// that the row format does not find in a row.
void forward_rows(const Kernels& k, const LinearCall& c, float row_scale, int threads, Scratch& s) {
  const PackedMatrix& m = c.weight;
  const auto rows = static_cast<std::int32_t>(c.rows);
  const RowLayout layout(m.spec);
  const int planes = layout.planes;
  const RowCut all = cut_rows(rows * planes, k.few_rows);
  const InputOrder order = m.input_order(0, 0);
  const Epilogues& epilogues = k.of(m.layout.weights).with(m.spec.rows);
  const RowKernels& row_format = k.of(m.spec.rows);
  const std::int64_t row_bytes = layout.product_row_bytes(m.padded_depth);
  const bool has_record_scales = traits_of(m.spec.rows).record_scales;
  float* record_scales = has_record_scales ? s.record_scales.get<float>(all.slots * m.records) : nullptr;
  const auto record_scales_of = [&](std::int32_t row) {
    return record_scales == nullptr ? nullptr : record_scales + static_cast<std::int64_t>(row) * m.records;
  };
  auto* prepared = s.rows.get<std::uint8_t>(all.slots * row_bytes);
  auto* scale = s.scale.get<float>(all.slots / planes);
  auto* zero = s.zero.get<std::int32_t>(all.slots / planes);
  while (static_cast<int>(s.threads.size()) < threads) s.threads.push_back(std::make_unique<ThreadScratch>());
  const int step = std::clamp(m.blocks / (16 * threads), 1, 64);
  std::atomic<int> queue{0};
  run_on_threads(threads, [&](Worker& worker) {
    ThreadScratch& t = *s.threads[static_cast<std::size_t>(worker.index)];
    k.thread_begin();
    for (std::int32_t r = rows * worker.index / worker.count; r < rows * (worker.index + 1) / worker.count; ++r) {
      const RowChunk chunk = all.chunk_of(r * planes);
      std::uint8_t* place = prepared + chunk.first_row * row_bytes + layout.offset(chunk, r * planes);
      PrepareRow row{static_cast<const std::uint8_t*>(c.x) + r * m.spec.depth * size_of(c.type),
                     c.type,
                     m.spec.depth,
                     m.padded_depth,
                     place,
                     layout.record_stride(chunk),
                     layout.half_stride(chunk),
                     row_scale,
                     record_scales_of(r)};
      if (order) {  // by itself first
        row.dst = t.row.get<std::uint8_t>(layout.row_bytes(m.padded_depth));
        row.record_stride = 2 * layout.half_bytes();
        row.half_stride = layout.half_bytes();
      }
      const RowScale q = row_format.prepare(row);
      if (order) copy_in_order(layout, row.dst, order, m.spec.depth, chunk, place);
      scale[r] = q.scale;
      zero[r] = q.zero;
    }
    int first = queue.fetch_add(step);
    worker.barrier->wait();
    while (first < m.blocks) {
      const int next_first = queue.fetch_add(step);
      const std::uint8_t* next = next_first < m.blocks ? m.block(0, next_first) : nullptr;
      const int last = std::min(first + step, m.blocks);
      for (int block = first; block < last; block += kBlocksPerPass) {
        const int block_end = std::min(block + kBlocksPerPass, last);
        for (int index = 0; index < all.chunks; ++index) {
          const RowChunk chunk = all.chunk(index);
          const std::int32_t first_row = chunk.first_row / planes;
          const ChunkInput in{chunk,
                              prepared + chunk.first_row * row_bytes,
                              scale + first_row,
                              scale + first_row,
                              zero + first_row,
                              record_scales_of(first_row)};
          multiply_blocks(k, m, 0, block, block_end, in, index == 0, block_end < last ? nullptr : next, NextRows{},
                          &t.product, [&](int b, const BlockRows& finished) {
                            const std::int64_t column = static_cast<std::int64_t>(b) * kBlockColumns;
                            const auto columns =
                                static_cast<int>(std::min<std::int64_t>(kBlockColumns, m.spec.columns - column));
                            epilogues.finish(finished, t.values, kBlockColumns, columns);
                            for (int r = 0; r < finished.rows; ++r) {
                              const std::int64_t at = (first_row + r) * m.spec.columns + column;
                              k.store_row(t.values + r * kBlockColumns, columns, c.out_type,
                                          static_cast<std::uint8_t*>(c.out) + at * size_of(c.out_type));
                            }
                          });
        }
      }
      first = next_first;
    }
    k.thread_end();
  });
}

}  // namespace

void linear_forward(const Kernels& kernels, const LinearCall& call) {
  CPUMOE_REQUIRE(call.weight.spec.experts == 1, "weight holds ", call.weight.spec.experts,
                 " experts; a linear takes one matrix");
  CPUMOE_REQUIRE(!call.weight.spec.gated, "weight was packed with gate and up rows; pack it as a plain matrix");
  static thread_local Scratch scratch;
  LinearCall resolved = call;
  resolved.weight.spec.rows = rows_for(call.weight.spec, call.type);
  float row_scale = call.weight.input_scale(0, 0);
  if (traits_of(resolved.weight.spec.rows).of_tensor) {
    row_scale = fp8_scale(largest_magnitude(kernels, call.x, call.type, call.rows, call.weight.spec.depth));
  }
  for (std::int64_t first = 0; first < call.rows; first += kMaxRows) {
    LinearCall part = resolved;
    part.rows = std::min(kMaxRows, call.rows - first);
    const int threads = threads_for(product_work(call.weight, 1, part.rows));
    part.x = static_cast<const std::uint8_t*>(call.x) + first * call.weight.spec.depth * size_of(call.type);
    part.out = static_cast<std::uint8_t*>(call.out) + first * call.weight.spec.columns * size_of(call.out_type);
    forward_rows(kernels, part, row_scale, threads, scratch);
  }
}

}  // namespace cpumoe
