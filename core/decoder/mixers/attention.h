// Parts of a step that GQA and MLA share: RoPE, writing the KV cache, gates, and the heads of other ranks.
#pragma once

#include <cstdint>

#include "decoder/step.h"

namespace cpumoe {

// Turns the first values of a head by the angles of the row's position.
void rotate(const Step& step, const Rope& rope, const StepRow& row, float* x);

// Multiplies the `count` values of a query head by the factor of the row's position, if there are factors.
void scale_query(const Attention& a, const StepRow& row, float* query, std::int64_t count);

// Writes `dim` numbers of a head to the cache; `rounded` has room for them in the step's type.
void write_cache(const Step& step, const LayerCache& cache, const CachedHeads& heads, const StepRow& row,
                 std::int64_t head, float* values, std::int64_t dim, std::uint8_t* rounded);

// The part of an attention call that the kinds share, for the rows of the step: positions that each row sees,
// sequences, strides of the cache. The caller adds queries, sizes and outputs.
CachedAttentionCall attention_call(Step& step, const Attention& a, const LayerCache& cache, const CachedHeads& keys,
                                   const CachedHeads& values);

// Multiplies heads [count, heads * value_dim] by the sigmoids of `columns` gates of a row; load(row, floats) reads
// these.
template <class Load>
void apply_gates(const Step& step, const Worker& worker, const Attention& a, std::int64_t columns, std::uint8_t* heads,
                 Load&& load) {
  const Kernels& k = step.kernels();
  const std::int64_t width = a.heads * a.value_dim, each = width / columns;
  step.each_row(worker, [&](std::int64_t r) {
    std::uint8_t* row = at(heads, r * width, step.type());
    float *values = step.values_of(worker), *factors = values + (width + 15) / 16 * 16;
    load(r, factors);
    k.load_row(row, step.type(), static_cast<int>(width), values);
    k.score(factors, static_cast<int>(columns), Scoring::kSigmoid);
    for (std::int64_t i = 0; i < width; ++i) values[i] *= factors[i / each];
    k.store_row(values, width, step.type(), row);
  });
}

// Arrays from the outputs of attention to the inputs of the output product.
struct HeadArrays {
  void take(Scratch& scratch, const Attention& a, DType type, std::int64_t rows);
  // Input rows of the output product.
  std::uint8_t* result(const Attention& a) const { return a.ranks > 1 ? all_heads : heads; }

  std::uint8_t *gates, *heads;         // [rows, gate.columns], [rows, heads * value_dim]
  std::uint8_t *gathered, *all_heads;  // of all ranks, if there are several
};

// Floats that a thread needs to apply gates.
inline std::int64_t gate_floats(const Attention& a) { return 2 * (a.heads * a.value_dim + 16); }

// Applies the gates of `gate`, gathers the heads of all ranks, and computes the output product.
void finish_heads(Step& step, Worker& worker, const Attention& a, const HeadArrays& arrays);

void check_attention(const Attention& a, const DecoderModel& model);
void check_rope(const Attention& a, const DecoderModel& model, std::int64_t max_width);

}  // namespace cpumoe
