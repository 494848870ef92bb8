// Interface of the mixers: checks, sizes, KV cache layout, plans and the computation, in a file for each kind.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "decoder/schema.h"
#include "ops/kv_cache.h"
#include "runtime/threads.h"

namespace cpumoe {

class Step;

// One tensor of a layer's cache: what is kept of each token ([heads, width]) or of each sequence (any shape).
struct CachePart {
  enum Per { kToken, kSequence };

  const char* name;
  Per per;
  std::vector<std::int64_t> shape;
  DType type;
  bool may_be_int8;  // as int8 KV records: kv_record_table.h

  std::int64_t size() const {
    return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  }
  std::int64_t bytes() const { return size() * size_of(type); }
};

// The parts per token first.
struct CacheLayout {
  std::vector<CachePart> parts;

  int count(CachePart::Per per) const { return static_cast<int>(std::ranges::count(parts, per, &CachePart::per)); }
};

struct MixerSizes {
  std::int64_t scratch_bytes = 0;  // for the rows of a step
  std::int64_t thread_floats = 0;  // that each thread works with
  std::int64_t weight_bytes = 0;   // that a step reads
};

// Memory of a step, cut into arrays. Without memory it only counts, which is how a mixer tells its sizes.
class Scratch {
 public:
  explicit Scratch(std::uint8_t* memory = nullptr) : memory_(memory) {}

  std::uint8_t* take(std::int64_t elements, DType type) {
    std::uint8_t* const taken = memory_ == nullptr ? nullptr : memory_ + bytes_;
    bytes_ += (elements * size_of(type) + 63) / 64 * 64;
    return taken;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::uint8_t* memory_;
  std::int64_t bytes_ = 0;
};

// Reject fields that do not belong together or to the model.
void check_mixer(const Gqa& mixer, const DecoderModel& model);
void check_mixer(const Mla& mixer, const DecoderModel& model);
void check_mixer(const DeltaNet& mixer, const DecoderModel& model);
void check_mixer(const ShortConv& mixer, const DecoderModel& model);

MixerSizes sizes_of(const Gqa& mixer, DType type, std::int64_t rows);
MixerSizes sizes_of(const Mla& mixer, DType type, std::int64_t rows);
MixerSizes sizes_of(const DeltaNet& mixer, DType type, std::int64_t rows);
MixerSizes sizes_of(const ShortConv& mixer, DType type, std::int64_t rows);

CacheLayout cache_layout(const Gqa& mixer, DType type);
CacheLayout cache_layout(const Mla& mixer, DType type);
CacheLayout cache_layout(const DeltaNet& mixer, DType type);
CacheLayout cache_layout(const ShortConv& mixer, DType type);

// Plans the projections of a layer, by the first thread, while the layer before is computed.
void plan_projections(Step& step, const Gqa& mixer);
void plan_projections(Step& step, const Mla& mixer);
void plan_projections(Step& step, const DeltaNet& mixer);
void plan_projections(Step& step, const ShortConv& mixer);

// Plans the rest of the mixer, by the first thread, while others finish what comes before: see Step::plan_layer.
void plan_mixer(Step& step, const Gqa& mixer, const LayerCache& cache);
void plan_mixer(Step& step, const Mla& mixer, const LayerCache& cache);
void plan_mixer(Step& step, const DeltaNet& mixer, const LayerCache& cache);
void plan_mixer(Step& step, const ShortConv& mixer, const LayerCache& cache);

// From the normed rows of a layer to what its mixer adds to the residual stream, by all threads. Every kind: clears
// padding if it has a state (`clear_padding`), then `project`, its own computation, `plan_layer` by the first thread, a
// barrier (`end_stage`), and `finish_mixer`. Functions such as e^x come from the kernel table: their bits are portable.
void run_mixer(Step& step, Worker& worker, const Gqa& mixer, std::size_t layer);
void run_mixer(Step& step, Worker& worker, const Mla& mixer, std::size_t layer);
void run_mixer(Step& step, Worker& worker, const DeltaNet& mixer, std::size_t layer);
void run_mixer(Step& step, Worker& worker, const ShortConv& mixer, std::size_t layer);

inline CacheLayout cache_layout(const Mixer& mixer, DType type) {
  return std::visit([&](const auto& kind) { return cache_layout(kind, type); }, mixer);
}

}  // namespace cpumoe
