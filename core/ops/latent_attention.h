// Multi-head latent attention (MLA) in its absorbed form: queries are multiplied by kv_b_proj's key part and attend to
// the cached latents, one KV head for all; the weighted sums of latents are then multiplied by its value part.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention.h"

namespace cpumoe {

struct LatentAttentionCall {
  // Attention over the cached latents, each followed by the RoPE part of the key: rows, heads, sequences, strides,
  // scale. The stage adds queries, sizes and outputs.
  CachedAttentionCall cached;
  const void* expansion;  // kv_b_proj: [heads, nope_dim + value_dim, rank], keys first
  std::int64_t rank, rope_dim, nope_dim, value_dim;
  void* out;  // [rows, heads, value_dim]
  // Scratch for up to kRowsAtOnce rows: [rows, heads, cached_dim()] and [rows, heads, rank].
  void *absorbed, *latent_sums;

  std::int64_t head_dim() const { return nope_dim + rope_dim; }
  std::int64_t cached_dim() const { return rank + rope_dim; }
};

// A stage of a team of threads.
class LatentAttention {
 public:
  // Rows attended at a time, because absorbed queries take memory.
  static constexpr std::int64_t kRowsAtOnce = 256;
  // Floats that a thread works with.
  static std::int64_t thread_floats(std::int64_t head_dim, std::int64_t rank, std::int64_t value_dim) {
    return kItemRows * (head_dim + rank + value_dim + 48);
  }

  // By one thread. What the call points to must live until all threads have run.
  void plan(const Kernels& kernels, const LatentAttentionCall& call, int threads);

  // By all threads. `load_query(row, head, out)` reads a query head in fp32, RoPE applied; `floats` are the thread's;
  // `end_stage(worker)` waits at the team's barrier; it is also called last, so results are complete on return.
  template <class LoadQuery, class EndStage>
  void run(Worker& worker, float* floats, const LoadQuery& load_query, const EndStage& end_stage) {
    for (std::int64_t first = 0; first < call_.cached.rows; first += kRowsAtOnce) {
      const std::int64_t rows = std::min(kRowsAtOnce, call_.cached.rows - first);
      each_item(worker, rows, [&](std::int64_t head, std::int64_t row, std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) load_query(first + row + i, head, floats + i * call_.head_dim());
        absorb(head, row, count, floats);
      });
      if (worker.index == 0) plan_rows(first, rows);
      end_stage(worker);
      attention_.run(worker);
      end_stage(worker);
      each_item(worker, rows, [&](std::int64_t head, std::int64_t row, std::int64_t count) {
        make_values(head, first, row, count, floats);
      });
      end_stage(worker);
    }
  }

 private:
  static constexpr std::int64_t kItemRows = 16;

  // Shares out rows of a head: body(head, first row, rows).
  template <class Body>
  void each_item(const Worker& worker, std::int64_t rows, const Body& body) const {
    const std::int64_t pieces = (rows + kItemRows - 1) / kItemRows, items = call_.cached.heads * pieces;
    for (std::int64_t i = worker.share(items); i < worker.next_share(items); ++i) {
      const std::int64_t row = i % pieces * kItemRows;
      body(i / pieces, row, std::min(kItemRows, rows - row));
    }
  }
  const std::uint8_t* expansion_of(std::int64_t head) const;
  void absorb(std::int64_t head, std::int64_t row, std::int64_t count, float* queries) const;
  void plan_rows(std::int64_t first, std::int64_t rows);
  void make_values(std::int64_t head, std::int64_t first, std::int64_t row, std::int64_t count, float* sums) const;

  const Kernels* kernels_ = nullptr;
  int threads_ = 1;
  LatentAttentionCall call_{};
  CachedAttention attention_;
};

// Queries [batch, heads, queries, head_dim]: row r of the call is query r % queries of sequence r / queries.
struct LatentQueries {
  const void* data;
  std::int64_t queries, batch_stride, head_stride, query_stride;  // elements
};

// On a team of its own, with scratch of its own.
void attend_latents(const Kernels& kernels, const LatentAttentionCall& call, const LatentQueries& queries);

}  // namespace cpumoe
