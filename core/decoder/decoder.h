// A whole decoder, from tokens to logits, in one parallel region with barriers between its stages.
//
// schema.h has the layers as values. The rows of a step are one token of each of several sequences, a
// few tokens of one, or a piece of a prompt; they differ only in where their keys and values go and what they see.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "decoder/mixer.h"
#include "decoder/schema.h"
#include "kernels/table.h"
#include "ops/kv_cache.h"

namespace cpumoe {

struct StepRow {
  std::int32_t sequence;
  std::int64_t place;     // where its keys and values go; it sees what lies before, and itself
  std::int64_t position;  // for the rotation
};

struct StepInput {
  std::vector<StepRow> rows;             // those of a sequence side by side, in the order of their places
  std::vector<std::int64_t> seen;        // by sequence: the first place that is seen (what lies before is padding)
  const std::int64_t* tokens = nullptr;  // [rows], or
  const void* hidden = nullptr;          // [rows, hidden]
  std::vector<LayerCache> caches;        // by layer
  std::vector<std::int64_t> wanted;      // ascending: rows whose results are asked for
  bool clears_states = false;            // of sequences whose first place is among the rows
  void* hidden_out = nullptr;            // [wanted, hidden] after the last norm, or null
  void* logits_out = nullptr;            // [wanted, vocabulary], of the type, or null
};

// The parts of a step that seconds are counted for.
enum class StepPart { kRows, kProducts, kAttention, kRouting, kExperts, kHead, kExchange };
constexpr int kStepParts = 7;

class Decoder {
 public:
  // Refuses parts that do not belong together.
  explicit Decoder(DecoderModel model);
  ~Decoder();

  const DecoderModel& model() const;
  // The cache layout of each layer.
  const std::vector<CacheLayout>& cache_layouts() const;
  // Refuses rows and caches that do not belong together, naming them. Where groups of ranks have rows of their own,
  // each of them runs every step, also one in which it has none: others need its experts. Returns how many rows the
  // groups had, all together. Several threads may call it at once, with different caches: they take turns.
  std::int64_t step(const Kernels& kernels, const StepInput& input);
  // Seconds of each part since the last call.
  void take_seconds(double (&seconds)[kStepParts]);

 private:
  struct State;

  std::vector<std::int64_t> rows_of_ranks(const StepInput& input) const;
  void clear_states(const StepInput& input) const;

  std::unique_ptr<State> state_;
};

}  // namespace cpumoe
