// The gated delta rule (recurrent_table.h), written once over a vector type.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/recurrent.h"

namespace cpumoe {
namespace {

template <class V>
void normalize_lengths(const NormalizeLengths& a) {
  for (std::int64_t r = 0; r < a.rows; ++r) {
    float* x = a.x + r * a.depth;
    const float factor = inverse_root(squares_of<V>(x, a.depth) + a.epsilon) * a.factor;
    int i = 0;
    for (; i + V::kWidth <= a.depth; i += V::kWidth) V::store(x + i, V::load(x + i) * V::set(factor));
    for (; i < a.depth; ++i) x[i] *= factor;
  }
}

template <class V>
void decay_row(const DecayRow& a) {
  float bias[kPaddedLanes] = {}, rate[kPaddedLanes] = {};
  for (int i = 0; i < a.count; i += V::kWidth) {
    for (int j = 0; j < V::kWidth && i + j < a.count; ++j) {
      bias[j] = a.bias[i + j];
      rate[j] = a.rate[a.shared_rate ? 0 : i + j];
    }
    const V x = V::load(a.x + i) + V::load(bias), r = V::load(rate);
    V::store(a.x + i,
             decay_of(a.bound == 0.0f ? r * softplus_of(x) : V::set(a.bound) * sigmoid_of((V::set(0.0f) - r) * x)));
  }
}

// body(vector type, vectors at once, first column) for all columns; each has sums of its own, so that any width gives
// the same bits. Two vectors of 512 bits have chains of sums enough to keep two units for fma busy, and so do four of
// 128 bits; narrower ones take no more registers than AVX2 has.
template <class V, class Body>
inline void for_columns(int columns, const Body& body) {
  constexpr int kParts = V::kWidth == 4 ? 4 : 2;
  int c = 0;
  for (; c + kParts * V::kWidth <= columns; c += kParts * V::kWidth) body.template operator()<V, kParts>(c);
  for (; c + V::kWidth <= columns; c += V::kWidth) body.template operator()<V, 1>(c);
  for (; c < columns; ++c) body.template operator()<F32x1, 1>(c);
}

// sums[column] += sum over rows of weights[row] * state[row][column].
template <class V, int parts>
inline void read_state(const float* state, std::ptrdiff_t stride, int rows, const float* weights, float* sums) {
  V sum[parts];
  for (int p = 0; p < parts; ++p) sum[p] = V::load(sums + p * V::kWidth);
  for (int r = 0; r < rows; ++r, state += stride) {
    const V weight = V::set(weights[r]);
    for (int p = 0; p < parts; ++p) sum[p] = V::fma(weight, V::load(state + p * V::kWidth), sum[p]);
  }
  for (int p = 0; p < parts; ++p) V::store(sums + p * V::kWidth, sum[p]);
}

struct StateRows {
  const float *key, *query, *decay;
  std::ptrdiff_t decay_step;
  const float* next;  // what the next token reads with; or null
};

// The update of a token, what its query recalls of the new state (added to `out`), and in the same pass what the next
// token will read of it (`sums`): the state is loaded and stored once a token.
template <class V, int parts, bool reads>
inline void update_state(float* state, std::ptrdiff_t stride, int rows, const StateRows& a, const float* change,
                         float* out, float* sums) {
  V delta[parts], recalled[parts], sum[parts];
  for (int p = 0; p < parts; ++p) {
    delta[p] = V::load(change + p * V::kWidth);
    recalled[p] = V::load(out + p * V::kWidth);
    if constexpr (reads) sum[p] = V::load(sums + p * V::kWidth);
  }
  for (int r = 0; r < rows; ++r, state += stride) {
    const V decay = V::set(a.decay[r * a.decay_step]), key = V::set(a.key[r]), query = V::set(a.query[r]);
    for (int p = 0; p < parts; ++p) {
      const V kept = V::load(state + p * V::kWidth) * decay;
      const V now = V::fma(key, delta[p], kept);
      V::store(state + p * V::kWidth, now);
      recalled[p] = V::fma(query, now, recalled[p]);
      if constexpr (reads) sum[p] = V::fma(V::set(a.next[r]), now, sum[p]);
    }
  }
  for (int p = 0; p < parts; ++p) {
    V::store(out + p * V::kWidth, recalled[p]);
    if constexpr (reads) V::store(sums + p * V::kWidth, sum[p]);
  }
}

// What token t reads the state with: its key times its decay.
template <class V>
inline void decayed_key(const DeltaSteps& a, int t, float* out) {
  const float* key = a.keys + static_cast<std::ptrdiff_t>(t) * a.rows;
  const float* decay = a.decays + t * a.decay_stride;
  for (int r = 0; r < a.rows; ++r) out[r] = key[r] * decay[a.shared_decay ? 0 : r];
}

inline StateRows rows_of(const DeltaSteps& a, int t, const float* next) {
  const std::ptrdiff_t offset = static_cast<std::ptrdiff_t>(t) * a.rows;
  return {a.keys + offset, a.queries + offset, a.decays + t * a.decay_stride, a.shared_decay ? 0 : 1, next};
}

// change = (value - read) * beta.
inline void changes(const float* values, const float* reads, float beta, int columns, float* out) {
  for (int c = 0; c < columns; ++c) out[c] = (values[c] - reads[c]) * beta;
}

// One token: the state comes from memory, a few whole rows at a time, and is read once more from the L2 cache.
template <class V>
void advance_once(const DeltaSteps& a) {
  constexpr int kRows = 16;
  float* key = a.scratch;
  decayed_key<V>(a, 0, key);
  for (int first = 0; first < a.columns; first += kTapChannels) {
    const int columns = a.columns - first < kTapChannels ? a.columns - first : kTapChannels;
    float sums[kTapChannels] = {}, delta[kTapChannels], out[kTapChannels] = {};
    for (int r = 0; r < a.rows; r += kRows) {
      const int rows = a.rows - r < kRows ? a.rows - r : kRows;
      const float* state = a.state + r * a.state_stride + first;
      for_columns<V>(columns, [&]<class W, int parts>(int c) {
        read_state<W, parts>(state + c, a.state_stride, rows, key + r, sums + c);
      });
    }
    changes(a.values + first, sums, a.betas[0], columns, delta);
    const StateRows all = rows_of(a, 0, nullptr);
    for (int r = 0; r < a.rows; r += kRows) {
      const int rows = a.rows - r < kRows ? a.rows - r : kRows;
      const StateRows part{all.key + r, all.query + r, all.decay + r * all.decay_step, all.decay_step, nullptr};
      float* state = a.state + r * a.state_stride + first;
      for_columns<V>(columns, [&]<class W, int parts>(int c) {
        update_state<W, parts, false>(state + c, a.state_stride, rows, part, delta + c, out + c, nullptr);
      });
    }
    for (int c = 0; c < columns; ++c) a.values[first + c] = out[c];
  }
}

// Several tokens: a slice of the state is copied to where it is contiguous (rows of a state are a power of two of bytes
// apart, which few lines of the L1 cache are for) and stays in L1.
template <class V>
void advance_slice(const DeltaSteps& a, int first, int columns) {
  float* slice = a.scratch;
  float* keys[2] = {slice + a.rows * kStateColumns, slice + a.rows * (kStateColumns + 1)};
  for (int r = 0; r < a.rows; ++r) {
    for (int c = 0; c < columns; ++c) slice[r * kStateColumns + c] = a.state[r * a.state_stride + first + c];
  }
  float sums[kStateColumns] = {}, delta[kStateColumns];
  decayed_key<V>(a, 0, keys[0]);
  for_columns<V>(columns, [&]<class W, int parts>(int c) {
    read_state<W, parts>(slice + c, kStateColumns, a.rows, keys[0], sums + c);
  });
  for (int t = 0; t < a.tokens; ++t) {
    float* values = a.values + t * a.value_stride + first;
    const bool more = t + 1 < a.tokens;
    changes(values, sums, a.betas[t * a.beta_stride], columns, delta);
    if (more) decayed_key<V>(a, t + 1, keys[(t + 1) % 2]);
    const StateRows rows = rows_of(a, t, keys[(t + 1) % 2]);
    for (int c = 0; c < columns; ++c) values[c] = sums[c] = 0.0f;
    for_columns<V>(columns, [&]<class W, int parts>(int c) {
      const auto update = more ? update_state<W, parts, true> : update_state<W, parts, false>;
      update(slice + c, kStateColumns, a.rows, rows, delta + c, values + c, sums + c);
    });
  }
  for (int r = 0; r < a.rows; ++r) {
    for (int c = 0; c < columns; ++c) a.state[r * a.state_stride + first + c] = slice[r * kStateColumns + c];
  }
}

template <class V>
void advance_state(const DeltaSteps& a) {
  if (a.tokens == 1) return advance_once<V>(a);
  for (int first = 0; first < a.columns; first += kStateColumns) {
    advance_slice<V>(a, first, a.columns - first < kStateColumns ? a.columns - first : kStateColumns);
  }
}

}  // namespace
}  // namespace cpumoe
