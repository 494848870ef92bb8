#include "ops/experts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "ops/expert_plan.h"
#include "ops/products.h"
#include "runtime/check.h"
#include "runtime/memory.h"
#include "runtime/numa.h"
#include "runtime/threads.h"

namespace cpumoe {
namespace {

// Intermediate values of more tokens than this are computed in several rounds, so that scratch memory stays bounded.
constexpr std::int64_t kMaxTokens = 4096, kMinTokens = 256, kHiddenBytes = 128 << 20;

// What a chunk's rows are multiplied with when the weights went to the input.
constexpr auto kOnes = [] {
  std::array<float, kMaxRowTiles * kTileRows> ones{};
  for (float& one : ones) one = 1.0f;
  return ones;
}();

// A prepared token: its row, then this, then the scales of its records.
struct PreparedTail {
  RowScale scale;
  float* records() { return reinterpret_cast<float*>(this + 1); }
  const float* records() const { return reinterpret_cast<const float*>(this + 1); }
};

std::int64_t prepared_bytes(const PackedMatrix& gate_up, std::int64_t row_bytes, const RowTraits& traits) {
  const std::int64_t tail = static_cast<std::int64_t>(sizeof(PreparedTail)) +
                            (traits.record_scales ? gate_up.records * static_cast<std::int64_t>(sizeof(float)) : 0);
  return row_bytes + (tail + 63) / 64 * 64;  // rows are read in whole lines
}

// Whether the scale of a row depends on all of its values.
bool needs_range(RowFormat format) {
  return format == RowFormat::kBytes || format == RowFormat::kWords || format == RowFormat::kFp8 ||
         format == RowFormat::kFp8Tensor;
}

struct ThreadScratch {
  ProductScratch product;
  Buffer gathered, hidden, ordered, slice, scales, scales_up, zeros, record_scales;
};

// Everything a calling thread keeps between calls.
struct Scratch {
  Plan plan;
  Buffer tokens, token_scale, token_record_scales, hidden, ranges, rows, row_scale, row_zero, row_record_scales;
  std::vector<std::unique_ptr<ThreadScratch>> threads;
  // Work items of the products. Each thread holds one item more than it works on, so that it knows which weights to
  // read ahead.
  WorkQueue first_queue, second_queue;
};

Scratch& scratch_of_this_thread() {
  static thread_local Scratch scratch;
  return scratch;
}

// Where part `index` of `parts` nearly equal parts of `total` begins.
int share(std::int64_t total, std::int64_t index, std::int64_t parts) {
  return static_cast<int>(total * index / parts);
}

// Into how many parts blocks are cut: so many, or a few more so that every memory node has as many of them.
int parts_of(std::int64_t wanted, int blocks, int nodes) {
  return static_cast<int>(std::min<std::int64_t>((wanted + nodes - 1) / nodes * nodes, blocks));
}

class Forward {
 public:
  Forward(const Kernels& kernels, const MoeCall& call, int threads, Scratch* s)
      : k_(kernels),
        c_(call),
        s_(*s),
        plan_(s->plan),
        first_(kernels.of(call.gate_up.layout.weights).with(call.gate_up.spec.rows)),
        second_(kernels.of(call.down.layout.weights).with(call.down.spec.rows)),
        rows_kernels_(kernels.of(call.gate_up.spec.rows)),
        row_traits_(traits_of(call.gate_up.spec.rows)),
        first_layout_(call.gate_up.spec),
        second_layout_(call.down.spec),
        token_bytes_(first_layout_.row_bytes(call.gate_up.padded_depth)),
        first_row_bytes_(first_layout_.product_row_bytes(call.gate_up.padded_depth)),
        second_row_bytes_(second_layout_.product_row_bytes(call.down.padded_depth)),
        first_queue_(s->first_queue),
        second_queue_(s->second_queue) {
    make_plan({call.ids, call.weights, call.tokens, call.topk}, call.gate_up.spec.experts, first_layout_.rows,
              second_layout_.rows, kernels.few_rows, &plan_);
    hidden_stride_ = call.down.padded_depth;
    const auto active = static_cast<std::int64_t>(plan_.experts.size());
    first_queue_.clear();
    second_queue_.clear();
    const int nodes = first_queue_.node_count();
    // With many experts a thread takes a whole one: its intermediate rows stay in that thread's cache and are quantised
    // at once. Otherwise threads share an expert and meet at a barrier in between; so they do where an expert lies on
    // several memory nodes, because most of a whole one would be read from afar.
    whole_experts_ =
        active >= 32 * threads && plan_.most_pairs * hidden_stride_ * 4 <= 32 << 20 && !shares_ranges() && nodes == 1;
    // Few items make long streams of weights, which DRAM serves best; but there must be enough for the threads to end
    // together: at least 16 a thread for the first product and 4 for the second, all of nearly the same size.
    const std::int64_t wanted = active == 0 ? 1 : (16 * threads + active - 1) / active;
    items_per_expert_ = whole_experts_ ? 1 : parts_of(wanted, call.gate_up.blocks, nodes);
    first_queue_.add(items_per_expert_, static_cast<int>(active));
    first_items_ = first_queue_.items();
    // A thread's slice of `out` stays in its L2 cache while all experts add to it.
    const int widest = call.tokens <= 64 ? 16 : 4;
    slices_ = parts_of(std::max(4 * threads, (call.down.blocks + widest - 1) / widest), call.down.blocks, nodes);
    second_queue_.add(slices_);
    blocks_per_slice_ = (call.down.blocks + slices_ - 1) / slices_;
    order_.resize(plan_.experts.size());
    for (std::size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<int>(i);
    if (whole_experts_) {  // longest first, so that the threads end together
      std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) {
        return plan_.experts[static_cast<std::size_t>(a)].first.slots >
               plan_.experts[static_cast<std::size_t>(b)].first.slots;
      });
    }
    if (!row_traits_.by_expert()) {
      token_stride_ = call.prepared == nullptr ? token_bytes_ : prepared_bytes(call.gate_up, token_bytes_, row_traits_);
      tokens_ = call.prepared;
      if (tokens_ == nullptr) tokens_ = made_ = s_.tokens.get<std::uint8_t>(call.tokens * token_bytes_);
      token_scale_ = s_.token_scale.get<RowScale>(call.tokens);
    }
    if (row_traits_.record_scales) {
      token_record_scales_ = s_.token_record_scales.get<float>(call.tokens * call.gate_up.records);
      row_record_scales_ = s_.row_record_scales.get<float>(static_cast<std::int64_t>(plan_.pairs) * call.down.records);
    }
    rows_ = s_.rows.get<std::uint8_t>(plan_.second_slots * second_row_bytes_);
    row_scale_ = s_.row_scale.get<float>(plan_.pairs);
    row_zero_ = s_.row_zero.get<std::int32_t>(plan_.pairs);
    if (!whole_experts_) hidden_ = s_.hidden.get<float>(plan_.pairs * hidden_stride_);
    if (shares_ranges()) ranges_ = s_.ranges.get<float>(2 * plan_.pairs);
    while (static_cast<int>(s_.threads.size()) < threads) s_.threads.push_back(std::make_unique<ThreadScratch>());
    for (int i = 0; i < threads; ++i) {
      ThreadScratch& t = *s_.threads[static_cast<std::size_t>(i)];
      t.gathered.get<std::uint8_t>(plan_.most_first_slots * first_row_bytes_);
      t.scales.get<float>(plan_.most_pairs);
      t.scales_up.get<float>(plan_.most_pairs);
      t.zeros.get<std::int32_t>(plan_.most_pairs);
      if (row_traits_.record_scales) {
        t.record_scales.get<float>(static_cast<std::int64_t>(plan_.most_pairs) * call.gate_up.records);
      }
      t.slice.get<float>(call.tokens * blocks_per_slice_ * kBlockColumns);
      if (whole_experts_) t.hidden.get<float>(plan_.most_pairs * hidden_stride_);
      if (call.down.spec.input_orders != 0) t.ordered.get<float>(hidden_stride_);
    }
  }

  void run(Worker& worker) {
    ThreadScratch& t = *s_.threads[static_cast<std::size_t>(worker.index)];
    k_.thread_begin();
    const int node = first_queue_.node_of(worker.index, worker.count);
    const int item = first_queue_.take(node), slice = second_queue_.take(node);
    read_ahead_of(item);
    prepare_tokens(worker);
    worker.barrier->wait();
    first_product(node, item, slice, t);
    worker.barrier->wait();
    if (shares_ranges()) share_ranges(worker);
    if (!whole_experts_) {
      prepare_hidden_rows(worker, t);
      worker.barrier->wait();
    }
    second_product(node, slice, t);
    k_.thread_end();
  }

 private:
  struct FirstItem {
    const ExpertRows* rows;
    int first, last;
  };

  FirstItem first_item(int index) const {
    const ExpertRows& rows =
        plan_.experts[static_cast<std::size_t>(order_[static_cast<std::size_t>(index / items_per_expert_)])];
    const int part = index % items_per_expert_;
    return {&rows, share(c_.gate_up.blocks, part, items_per_expert_),
            share(c_.gate_up.blocks, part + 1, items_per_expert_)};
  }

  // The first weights come from DRAM while the tokens are being prepared.
  void read_ahead_of(int index) const {
    if (index >= first_items_) return;
    const std::uint8_t* weights = first_weights(index);
    for (int i = 0; i < k_.tuning.read_ahead_bytes; i += 64) __builtin_prefetch(weights + i, 0, 2);
  }

  const std::uint8_t* token(std::int64_t index) const {
    return static_cast<const std::uint8_t*>(c_.x) + index * c_.gate_up.spec.depth * size_of(c_.type);
  }

  void prepare_tokens(const Worker& worker) {
    if (row_traits_.by_expert()) return;  // gather does
    const std::int64_t hidden = c_.gate_up.spec.depth, padded = c_.gate_up.padded_depth;
    for (std::int64_t t = worker.share(c_.tokens); t < worker.next_share(c_.tokens); ++t) {
      float* record_scales = row_traits_.record_scales ? token_record_scales_ + t * c_.gate_up.records : nullptr;
      if (c_.prepared != nullptr) {
        const auto* tail = reinterpret_cast<const PreparedTail*>(tokens_ + t * token_stride_ + token_bytes_);
        token_scale_[t] = tail->scale;
        if (record_scales != nullptr) std::copy_n(tail->records(), c_.gate_up.records, record_scales);
        continue;
      }
      token_scale_[t] =
          rows_kernels_.prepare({token(t), c_.type, hidden, padded, made_ + t * token_bytes_,
                                 2 * first_layout_.half_bytes(), first_layout_.half_bytes(), 0.0f, record_scales});
    }
  }

  // What a pair's scale is multiplied with.
  float input_weight(const ExpertRows& e, int pair) const {
    return c_.weight_on_input ? plan_.pair_weight[static_cast<std::size_t>(e.first_pair + pair)] : 1.0f;
  }

  // The tokens of an expert, prepared with the scales that are stored with it, or with one for all of them.
  const std::uint8_t* prepare_for_expert(const ExpertRows& e, ThreadScratch& t) const {
    float* scale[2] = {t.scales.get<float>(e.pairs), t.scales_up.get<float>(e.pairs)};
    auto* zero = t.zeros.get<std::int32_t>(e.pairs);
    const std::int32_t* tokens = plan_.pair_token.data() + e.first_pair;
    const std::int64_t hidden = c_.gate_up.spec.depth;
    float largest = 0.0f;
    for (int r = 0; row_traits_.of_tensor && r < e.pairs; ++r) {
      largest = std::max(largest, largest_magnitude(k_, token(tokens[r]), c_.type, 1, hidden));
    }
    auto* gathered = t.gathered.get<std::uint8_t>(e.first.slots * first_row_bytes_);
    const int copies =
        first_layout_.rows / first_layout_.planes;  // of gate and up, where these have scales of their own
    for (int r = 0; r < e.pairs; ++r) {
      const RowChunk chunk = e.first.chunk_of(r * first_layout_.rows);
      for (int copy = 0; copy < copies; ++copy) {
        const int row = r * first_layout_.rows + copy * first_layout_.planes;
        const float stored = row_traits_.of_tensor ? fp8_scale(largest) : c_.gate_up.input_scale(e.expert, copy);
        const RowScale q = rows_kernels_.prepare(
            {token(tokens[r]), c_.type, hidden, c_.gate_up.padded_depth,
             gathered + chunk.first_row * first_row_bytes_ + first_layout_.offset(chunk, row),
             first_layout_.record_stride(chunk), first_layout_.half_stride(chunk), stored, nullptr});
        scale[copy][r] = q.scale * input_weight(e, r);
        zero[r] = q.zero;
      }
    }
    return gathered;
  }

  // The tokens of an expert, in the layout its chunks are multiplied in. A single one is used where it lies.
  const std::uint8_t* gather(const ExpertRows& e, ThreadScratch& t) const {
    if (row_traits_.by_expert()) return prepare_for_expert(e, t);
    auto* scale = t.scales.get<float>(e.pairs);
    auto* zero = t.zeros.get<std::int32_t>(e.pairs);
    const std::int32_t* token = plan_.pair_token.data() + e.first_pair;
    for (int r = 0; r < e.pairs; ++r) {
      const RowScale q = token_scale_[token[r]];
      scale[r] = q.scale * input_weight(e, r);
      zero[r] = q.zero;
    }
    if (row_traits_.record_scales) {
      const std::int64_t records = c_.gate_up.records;
      auto* of_records = t.record_scales.get<float>(e.pairs * records);
      for (int r = 0; r < e.pairs; ++r) {
        std::memcpy(of_records + r * records, token_record_scales_ + token[r] * records,
                    static_cast<std::size_t>(records) * sizeof(float));
      }
    }
    const bool in_order = c_.gate_up.spec.input_orders != 0;
    if (e.pairs == 1 && e.first.tile_rows == e.first.rows && !in_order) return tokens_ + token[0] * token_stride_;
    auto* gathered = t.gathered.get<std::uint8_t>(e.first.slots * first_row_bytes_);
    for (int index = 0; index < e.first.chunks; ++index) {
      const RowChunk chunk = e.first.chunk(index);
      const std::int32_t base = chunk.first_row / first_layout_.rows;
      for (int r = base; r < base + chunk.rows / first_layout_.rows; ++r) {
        const std::uint8_t* src = tokens_ + token[r] * token_stride_;
        const std::uint8_t* later = tokens_ + token[std::min(r + 2, e.pairs - 1)] * token_stride_;
        if (in_order) {
          gather_in_order(e.expert, src, chunk, r, gathered);
        } else {
          gather_row(src, later, chunk, gathered + chunk.first_row * first_row_bytes_ + offset_in(chunk, r));
        }
      }
    }
    return gathered;
  }

  // Where the rows of the r-th pair of an expert begin inside of their chunk.
  std::int64_t offset_in(const RowChunk& chunk, int pair) const {
    return first_layout_.offset(chunk, pair * first_layout_.rows);
  }

  void gather_row(const std::uint8_t* src, const std::uint8_t* later, const RowChunk& chunk, std::uint8_t* dst) const {
    const std::int64_t half = first_layout_.half_bytes();
    for (std::int64_t i = 0; i < token_bytes_; i += 2 * half, dst += first_layout_.record_stride(chunk)) {
      for (std::int64_t line = 0; line < 2 * half; line += 64) __builtin_prefetch(later + i + line);
      std::memcpy(dst, src + i, static_cast<std::size_t>(half));
      std::memcpy(dst + first_layout_.half_stride(chunk), src + i + half, static_cast<std::size_t>(half));
    }
  }

  // One copy for each order that the inputs of the expert's columns have.
  void gather_in_order(std::int32_t expert, const std::uint8_t* src, const RowChunk& chunk, int pair,
                       std::uint8_t* gathered) const {
    for (int index = 0; index < c_.gate_up.spec.input_orders; ++index) {
      const int row = pair * first_layout_.rows + index * first_layout_.planes;
      copy_in_order(first_layout_, src, c_.gate_up.input_order(expert, index), c_.gate_up.spec.depth, chunk,
                    gathered + chunk.first_row * first_row_bytes_ + first_layout_.offset(chunk, row));
    }
  }

  void first_product(int node, int index, int first_slice, ThreadScratch& t) {
    const int block_outputs = c_.activation.gated ? kTileColumns : kBlockColumns;
    const ExpertRows* gathered_for = nullptr;
    const std::uint8_t* a = nullptr;
    while (index < first_items_) {
      const int next_index = first_queue_.take(node);
      const FirstItem item = first_item(index);
      const ExpertRows& e = *item.rows;
      const std::uint8_t* next = next_index < first_items_ ? first_weights(next_index) : second_weights(first_slice, 0);
      if (gathered_for != &e) a = gather(e, t);
      gathered_for = &e;
      // Rows of `hidden` are counted from the expert's first pair.
      float* hidden =
          whole_experts_ ? t.hidden.get<float>(e.pairs * hidden_stride_) : hidden_ + e.first_pair * hidden_stride_;
      const int in_turn = blocks_in_turn(e.first, item.last - item.first);
      for (int block = item.first; block < item.last; block += in_turn) {
        const int block_end = std::min(block + in_turn, item.last);
        for (int chunk_index = 0; chunk_index < e.first.chunks; ++chunk_index) {
          const RowChunk chunk = e.first.chunk(chunk_index);
          const std::int32_t pair = chunk.first_row / first_layout_.rows;
          ChunkInput in{chunk,
                        a + chunk.first_row * first_row_bytes_,
                        t.scales.get<float>(e.pairs) + pair,
                        (c_.gate_up.spec.input_scales == 2 ? t.scales_up : t.scales).get<float>(e.pairs) + pair,
                        t.zeros.get<std::int32_t>(e.pairs) + pair,
                        nullptr};
          if (row_traits_.record_scales) {
            const std::int64_t records = c_.gate_up.records;
            in.record_scales = t.record_scales.get<float>(e.pairs * records) + pair * records;
          }
          const std::uint8_t* after = block_end < item.last ? nullptr : next;
          multiply_blocks(k_, c_.gate_up, e.expert, block, block_end, in, chunk_index == 0, after, NextRows{},
                          &t.product, [&](int b, const BlockRows& rows) {
                            first_.activate(rows, c_.activation, hidden + pair * hidden_stride_ + b * block_outputs,
                                            hidden_stride_);
                          });
        }
      }
      if (whole_experts_) {
        const float stored = hidden_scale(e, hidden);
        for (int r = 0; r < e.pairs; ++r) prepare_hidden_row(e, r, stored, hidden + r * hidden_stride_, t);
      }
      index = next_index;
    }
  }

  const std::uint8_t* first_weights(int index) const {
    const FirstItem item = first_item(index);
    return c_.gate_up.block(item.rows->expert, item.first);
  }

  int first_block(int slice) const { return share(c_.down.blocks, slice, slices_); }

  // Where a slice's weights of the i-th active expert begin; null when there is none.
  const std::uint8_t* second_weights(int slice, std::size_t i) const {
    if (slice >= slices_ || i >= plan_.experts.size()) return nullptr;
    return c_.down.block(plan_.experts[i].expert, first_block(slice));
  }

  // The scale of an expert's intermediate rows that is not found in each of them.
  float hidden_scale(const ExpertRows& e, const float* hidden) const {
    if (!row_traits_.of_tensor) return c_.down.input_scale(e.expert, 0);
    float largest = 0.0f;
    if (const float* range = range_of(e.first_pair)) {
      for (int i = 0; i < 2 * e.pairs; ++i) largest = std::max(largest, std::abs(range[i]));
    }
    for (int r = 0; r < e.pairs; ++r) {
      const float* row = hidden + r * hidden_stride_;
      largest = std::max(largest, largest_magnitude(k_, row, DType::kF32, 1, c_.down.spec.depth));
    }
    return fp8_scale(largest);
  }

  // ---- slices of experts on other ranks ----------------------------------------------------------------------------

  bool shares_ranges() const { return c_.slices != nullptr && needs_range(c_.down.spec.rows); }

  const float* range_of(std::int64_t pair) const { return ranges_ == nullptr ? nullptr : ranges_ + 2 * pair; }

  // The extremes of every intermediate row over all ranks. A row that is broken on one of them stays so there, and the
  // sum of all is broken by it.
  void share_ranges(Worker& worker) {
    for (std::int64_t pair = worker.share(plan_.pairs); pair < worker.next_share(plan_.pairs); ++pair) {
      constexpr int kLanes = 16;  // `hidden_stride_` is a multiple of it, but what is behind the row may be anything
      const float* row = hidden_ + pair * hidden_stride_;
      const std::int64_t depth = c_.down.spec.depth;
      float low[kLanes] = {}, high[kLanes] = {};
      for (std::int64_t i = 0; i < depth; i += kLanes) {  // depth is a multiple of 32
        for (int j = 0; j < kLanes; ++j) {
          low[j] = row[i + j] < low[j] ? row[i + j] : low[j];
          high[j] = row[i + j] > high[j] ? row[i + j] : high[j];
        }
      }
      ranges_[2 * pair] = -*std::min_element(low, low + kLanes);
      ranges_[2 * pair + 1] = *std::max_element(high, high + kLanes);
    }
    worker.barrier->wait();
    if (worker.index == 0) {
      c_.slices->largest(ranges_, 2 * static_cast<std::int64_t>(plan_.pairs));
      for (std::int64_t pair = 0; pair < plan_.pairs; ++pair) ranges_[2 * pair] = -ranges_[2 * pair];
    }
    worker.barrier->wait();
  }

  // `pair` is counted from the expert's first one.
  void prepare_hidden_row(const ExpertRows& e, int pair, float stored, const float* hidden, ThreadScratch& t) {
    const std::int64_t depth = c_.down.spec.depth;
    if (const InputOrder order = c_.down.input_order(e.expert, 0)) {
      auto* ordered = t.ordered.get<float>(hidden_stride_);
      for (std::int64_t i = 0; i < depth; ++i) ordered[i] = hidden[order[i]];
      hidden = ordered;
    }
    const int row = pair * second_layout_.rows;
    const RowChunk chunk = e.second.chunk_of(row);
    const RowScale q = rows_kernels_.prepare(
        {hidden, DType::kF32, depth, c_.down.padded_depth,
         rows_ + (e.second_slot + chunk.first_row) * second_row_bytes_ + second_layout_.offset(chunk, row),
         second_layout_.record_stride(chunk), second_layout_.half_stride(chunk), stored,
         hidden_record_scales(e.first_pair + pair), range_of(e.first_pair + pair)});
    row_scale_[e.first_pair + pair] = q.scale;
    row_zero_[e.first_pair + pair] = q.zero;
  }

  void prepare_hidden_rows(const Worker& worker, ThreadScratch& t) {
    int turn = 0;
    for (const ExpertRows& e : plan_.experts) {
      const float stored = hidden_scale(e, hidden_ + e.first_pair * hidden_stride_);
      for (int r = 0; r < e.pairs; ++r, ++turn) {
        if (turn % worker.count == worker.index) {
          prepare_hidden_row(e, r, stored, hidden_ + (e.first_pair + r) * hidden_stride_, t);
        }
      }
    }
  }

  // Every slice of output columns belongs to one thread, which adds the experts in ascending order: no two threads
  // write one value, and the order of the sum never depends on the threads.
  void second_product(int node, int slice, ThreadScratch& t) {
    const std::int64_t hidden = c_.down.spec.columns;
    while (slice < slices_) {
      const int next_slice = second_queue_.take(node);
      const int first = first_block(slice), last = first_block(slice + 1);
      const std::int64_t stride = blocks_per_slice_ * kBlockColumns;
      auto* out = t.slice.get<float>(c_.tokens * stride);
      std::memset(out, 0, static_cast<std::size_t>(c_.tokens * stride) * sizeof(float));
      for (std::size_t i = 0; i < plan_.experts.size(); ++i) {
        const ExpertRows& e = plan_.experts[i];
        const std::uint8_t* next =
            i + 1 < plan_.experts.size() ? second_weights(slice, i + 1) : second_weights(next_slice, 0);
        for (int index = 0; index < e.second.chunks; ++index) {
          const RowChunk chunk = e.second.chunk(index);
          const std::int32_t pair = e.first_pair + chunk.first_row / second_layout_.rows;
          const ChunkInput in{chunk,
                              chunk_rows(e, chunk),
                              row_scale_ + pair,
                              row_scale_ + pair,
                              row_zero_ + pair,
                              hidden_record_scales(pair)};
          multiply_blocks(k_, c_.down, e.expert, first, last, in, index == 0, next, rows_after(i, index), &t.product,
                          [&](int block, const BlockRows& rows) {
                            second_.combine(rows, combine_weight(pair), plan_.pair_token.data() + pair,
                                            out + (block - first) * kBlockColumns, stride);
                          });
        }
      }
      const std::int64_t column = static_cast<std::int64_t>(first) * kBlockColumns;
      const std::int64_t columns = std::min(hidden, static_cast<std::int64_t>(last) * kBlockColumns) - column;
      for (std::int64_t token = 0; token < c_.tokens; ++token) {
        k_.store_row(out + token * stride, columns, c_.out_type,
                     static_cast<std::uint8_t*>(c_.out) + (token * hidden + column) * size_of(c_.out_type));
      }
      slice = next_slice;
    }
  }

  // The scales of records of an intermediate row, where it has them.
  float* hidden_record_scales(std::int64_t pair) const {
    return row_traits_.record_scales ? row_record_scales_ + pair * c_.down.records : nullptr;
  }

  // The prepared rows of a chunk of the second product.
  const std::uint8_t* chunk_rows(const ExpertRows& e, const RowChunk& chunk) const {
    return rows_ + (e.second_slot + chunk.first_row) * second_row_bytes_;
  }

  // The chunk that a slice multiplies after chunk `index` of the i-th active expert.
  NextRows rows_after(std::size_t i, int index) const {
    const bool same = index + 1 < plan_.experts[i].second.chunks;
    const ExpertRows& e = plan_.experts[same ? i : (i + 1) % plan_.experts.size()];
    const RowChunk chunk = e.second.chunk(same ? index + 1 : 0);
    return {chunk_rows(e, chunk), chunk.tiles * chunk.tile_rows * second_row_bytes_};
  }

  const float* combine_weight(int pair) const {
    return c_.weight_on_input ? kOnes.data() : plan_.pair_weight.data() + pair;
  }

  const Kernels& k_;
  const MoeCall& c_;
  Scratch& s_;
  Plan& plan_;
  const Epilogues &first_, &second_;
  const RowKernels& rows_kernels_;
  const RowTraits row_traits_;
  const RowLayout first_layout_, second_layout_;
  // Of a prepared token, and of rows of the products.
  const std::int64_t token_bytes_, first_row_bytes_, second_row_bytes_;
  WorkQueue &first_queue_, &second_queue_;
  std::int64_t token_stride_ = 0;   // from one prepared token to the next
  std::int64_t hidden_stride_ = 0;  // fp32 values of an intermediate row before it is prepared
  bool whole_experts_ = false;
  int items_per_expert_ = 0, first_items_ = 0, blocks_per_slice_ = 0, slices_ = 0;
  std::vector<int> order_;
  const std::uint8_t* tokens_ = nullptr;
  std::uint8_t* made_ = nullptr;  // the same where they are prepared here
  RowScale* token_scale_ = nullptr;
  std::uint8_t* rows_ = nullptr;
  float* hidden_ = nullptr;
  float* ranges_ = nullptr;  // smallest and largest value of every intermediate row, of all ranks
  float* row_scale_ = nullptr;
  std::int32_t* row_zero_ = nullptr;
  float *token_record_scales_ = nullptr, *row_record_scales_ = nullptr;
};

// How rows are held is known with the type of the tokens.
MoeCall resolved(const MoeCall& call) {
  MoeCall out = call;
  out.gate_up.spec.rows = rows_for(call.gate_up.spec, call.type);
  out.down.spec.rows = rows_for(call.down.spec, call.type);
  return out;
}

}  // namespace

void check_experts(const PackedSpec& g, const PackedSpec& d, const ActivationSpec& activation) {
  CPUMOE_REQUIRE(g.experts == d.experts, "gate_up holds ", g.experts, " experts, down holds ", d.experts);
  CPUMOE_REQUIRE(g.rows == d.rows && (g.rows != RowFormat::kFloat || g.weights == d.weights),
                 "gate_up and down were packed for activations of different kinds");
  CPUMOE_REQUIRE(g.gated == activation.gated, "gate_up was packed ", g.gated ? "with" : "without",
                 " gate and up rows, but the activation is ", activation.gated ? "gated" : "not gated");
  CPUMOE_REQUIRE(!d.gated, "down was packed with gate and up rows; pack it as a plain matrix");
  const std::int64_t inner = g.gated ? g.columns / 2 : g.columns;
  CPUMOE_REQUIRE(d.depth == inner, "down takes ", d.depth, " inputs, but gate_up gives ", inner);
  CPUMOE_REQUIRE(d.columns == g.depth, "down gives ", d.columns, " outputs, but hidden_states have ", g.depth);
}

std::int64_t tokens_at_once(const PackedMatrix& down, std::int64_t topk) {
  const std::int64_t row_bytes = std::max<std::int64_t>(1, topk) * down.padded_depth * 4;
  return std::clamp(kHiddenBytes / row_bytes, kMinTokens, kMaxTokens);
}

std::int64_t prepared_token_bytes(const PackedMatrix& gate_up, DType type) {
  PackedSpec spec = gate_up.spec;
  spec.rows = rows_for(spec, type);
  const RowTraits traits = traits_of(spec.rows);
  return traits.by_expert() ? 0 : prepared_bytes(gate_up, RowLayout(spec).row_bytes(gate_up.padded_depth), traits);
}

void prepare_token(const Kernels& kernels, const PackedMatrix& gate_up, const void* x, DType type, std::uint8_t* out) {
  PackedSpec spec = gate_up.spec;
  spec.rows = rows_for(spec, type);
  const RowLayout layout(spec);
  const RowTraits traits = traits_of(spec.rows);
  const std::int64_t row_bytes = layout.row_bytes(gate_up.padded_depth);
  // What is between rows may be sent, too.
  std::memset(out, 0, static_cast<std::size_t>(prepared_bytes(gate_up, row_bytes, traits)));
  auto* tail = reinterpret_cast<PreparedTail*>(out + row_bytes);
  tail->scale = kernels.of(spec.rows).prepare({static_cast<const std::uint8_t*>(x), type, spec.depth,
                                               gate_up.padded_depth, out, 2 * layout.half_bytes(), layout.half_bytes(),
                                               0.0f, traits.record_scales ? tail->records() : nullptr});
}

struct MoeStage::State {
  Scratch scratch;
  MoeCall call{};
  std::optional<Forward> forward;
};

MoeStage::MoeStage() : state_(std::make_unique<State>()) {}
MoeStage::~MoeStage() = default;

void MoeStage::plan(const Kernels& kernels, const MoeCall& call, int threads) {
  state_->call = resolved(call);
  state_->forward.emplace(kernels, state_->call, threads, &state_->scratch);
}

void MoeStage::run(Worker& worker) { state_->forward->run(worker); }

void moe_forward(const Kernels& kernels, const MoeCall& call) {
  const PackedSpec& g = call.gate_up.spec;
  check_experts(g, call.down.spec, call.activation);
  for (std::int64_t i = 0; i < call.tokens * call.topk; ++i) {
    CPUMOE_REQUIRE(call.ids[i] >= -1 && call.ids[i] < g.experts, "topk_ids[", i / call.topk, ", ", i % call.topk,
                   "]=", call.ids[i], "; 0 to ", g.experts - 1, " are experts and -1 means none");
  }
  const std::int64_t width = call.gate_up.spec.depth;
  const MoeCall whole = resolved(call);
  std::int64_t step = call.slices == nullptr ? tokens_at_once(call.down, call.topk) : kSpreadTokens;
  // A scale for all rows of an expert needs all of them at once.
  if (traits_of(whole.gate_up.spec.rows).of_tensor) step = std::max<std::int64_t>(call.tokens, 1);
  for (std::int64_t first = 0; first < call.tokens; first += step) {
    MoeCall part = whole;
    part.tokens = std::min(step, call.tokens - first);
    const std::int64_t rows = part.tokens * call.topk, experts = std::min(rows, call.gate_up.spec.experts);
    const int threads = threads_for(product_work(call.gate_up, experts, rows) + product_work(call.down, experts, rows));
    if (call.prepared != nullptr) {
      part.prepared = call.prepared + first * prepared_token_bytes(call.gate_up, call.type);
    } else {
      part.x = static_cast<const std::uint8_t*>(call.x) + first * width * size_of(call.type);
    }
    part.out = static_cast<std::uint8_t*>(call.out) + first * width * size_of(call.out_type);
    part.ids = call.ids + first * call.topk;
    part.weights = call.weights + first * call.topk;
    Forward forward(kernels, part, threads, &scratch_of_this_thread());
    run_on_threads(threads, [&](Worker& worker) { forward.run(worker); });
  }
  if (call.slices != nullptr) call.slices->rethrow();
}

}  // namespace cpumoe
