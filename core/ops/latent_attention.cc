#include "ops/latent_attention.h"

#include "ops/elements.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

namespace cpumoe {

void LatentAttention::plan(const Kernels& kernels, const LatentAttentionCall& call, int threads) {
  kernels_ = &kernels;
  threads_ = threads;
  call_ = call;
}

const std::uint8_t* LatentAttention::expansion_of(std::int64_t head) const {
  return at(call_.expansion, head * (call_.nope_dim + call_.value_dim) * call_.rank, call_.cached.type);
}

// Multiplies queries of a head by kv_b_proj's key part: `count` rows from `row` on of those attended at a time.
void LatentAttention::absorb(std::int64_t head, std::int64_t row, std::int64_t count, float* queries) const {
  const LatentAttentionCall& c = call_;
  const DType type = c.cached.type;
  const std::int64_t dim = c.head_dim();
  float* absorbed = queries + count * dim + 16;
  kernels_->sum_rows(
      {queries, static_cast<int>(count), dim, expansion_of(head), type, c.rank, c.nope_dim, absorbed, c.rank});
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint8_t* out = at(c.absorbed, ((row + i) * c.cached.heads + head) * c.cached_dim(), type);
    kernels_->store_row(absorbed + i * c.rank, c.rank, type, out);
    kernels_->store_row(queries + i * dim + c.nope_dim, c.rope_dim, type, at(out, c.rank, type));
  }
}

void LatentAttention::plan_rows(std::int64_t first, std::int64_t rows) {
  CachedAttentionCall call = call_.cached;
  call.rows = rows;
  call.row += first;
  call.kv_heads = 1;
  call.depth = call_.cached_dim();
  call.value_depth = call_.rank;
  call.query = call_.absorbed;
  call.query_stride = call.heads * call.depth;
  call.query_head_stride = call.depth;
  call.out = call_.latent_sums;
  call.out_stride = call.heads * call.value_depth;
  attention_.plan(*kernels_, call, threads_);
}

// Multiplies weighted sums of latents by kv_b_proj's value part.
void LatentAttention::make_values(std::int64_t head, std::int64_t first, std::int64_t row, std::int64_t count,
                                  float* sums) const {
  const LatentAttentionCall& c = call_;
  const DType type = c.cached.type;
  float* values = sums + count * c.rank + 16;
  for (std::int64_t i = 0; i < count; ++i) {
    kernels_->load_row(at(c.latent_sums, ((row + i) * c.cached.heads + head) * c.rank, type), type,
                       static_cast<int>(c.rank), sums + i * c.rank);
  }
  kernels_->dot_rows({sums, static_cast<int>(count), c.rank, at(expansion_of(head), c.nope_dim * c.rank, type), type,
                      c.rank, 0, c.value_dim, values, c.value_dim});
  for (std::int64_t i = 0; i < count; ++i) {
    kernels_->store_row(values + i * c.value_dim, c.value_dim, type,
                        at(c.out, ((first + row + i) * c.cached.heads + head) * c.value_dim, type));
  }
}

void attend_latents(const Kernels& kernels, const LatentAttentionCall& call, const LatentQueries& queries) {
  struct State {
    LatentAttention stage;
    Buffer absorbed, latent_sums, floats;
  };
  static thread_local State state_of_this_thread;
  State& state = state_of_this_thread;  // whichever thread uses it
  const CachedAttentionCall& cached = call.cached;
  const DType type = cached.type;
  if (cached.rows * cached.heads * call.value_dim == 0) return;
  const std::int64_t dim = call.head_dim();
  const std::int64_t heads = std::min(cached.rows, LatentAttention::kRowsAtOnce) * cached.heads;
  std::int64_t work = cached.heads * (call.nope_dim + call.value_dim) * call.rank;
  for (std::int64_t r = 0; r < cached.rows; ++r) work += (cached.row[r].last - cached.row[r].first) * call.cached_dim();
  const int threads = threads_for(work * size_of(type));
  const std::int64_t floats = LatentAttention::thread_floats(dim, call.rank, call.value_dim);
  float* memory = state.floats.get<float>(threads * floats);
  LatentAttentionCall own = call;
  own.absorbed = state.absorbed.get<std::uint8_t>(heads * call.cached_dim() * size_of(type));
  own.latent_sums = state.latent_sums.get<std::uint8_t>(heads * call.rank * size_of(type));
  state.stage.plan(kernels, own, threads);
  const auto load = [&](std::int64_t row, std::int64_t head, float* out) {
    const std::int64_t element = row / queries.queries * queries.batch_stride + head * queries.head_stride +
                                 row % queries.queries * queries.query_stride;
    kernels.load_row(at(queries.data, element, type), type, static_cast<int>(dim), out);
  };
  run_on_threads(threads, [&](Worker& worker) {
    state.stage.run(worker, memory + worker.index * floats, load, [](Worker& w) { w.barrier->wait(); });
  });
}

}  // namespace cpumoe
