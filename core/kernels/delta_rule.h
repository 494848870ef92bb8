// Kernels of layers with a recurrent state (recurrent_table.h), written once over a vector type.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/functions.h"
#include "kernels/recurrent_table.h"

namespace cpumoe {
namespace {

// [channels][taps] of any type -> [tap][channel] in fp32, zeros behind the channels. `fixed`: taps, where the compiler
// knows them, so that its loops have no remainder; or 0.
template <class V, int fixed>
inline void load_taps(const void* src, DType type, int channels, int taps, float (*apart)[kTapChannels]) {
  taps = fixed == 0 ? taps : fixed;
  float flat[kTapChannels * kMostTaps];
  load_row<V>(src, type, channels * taps, flat);
  for (int j = 0; j < taps; ++j) {
    for (int c = 0; c < channels; ++c) apart[j][c] = flat[c * taps + j];
    for (int c = channels; c < kTapChannels; ++c) apart[j][c] = 0.0f;
  }
}

// And back; the oldest tap stands in row `oldest`.
template <class V, int fixed>
inline void store_taps(const float (*apart)[kTapChannels], int oldest, int channels, int taps, DType type, void* dst) {
  taps = fixed == 0 ? taps : fixed;
  float flat[kTapChannels * kMostTaps];
  const float* from[kMostTaps];
  for (int j = 0; j < taps; ++j) from[j] = apart[(oldest + j) % taps];
  for (int c = 0; c < channels; ++c) {
    for (int j = 0; j < taps; ++j) flat[c * taps + j] = from[j][c];
  }
  store_row<V>(flat, channels * taps, type, dst);
}

// row = x, or x * gate rounded to their type.
template <class V, DType type>
inline void load_input(const ConvolveRows& a, std::ptrdiff_t offset, float* row) {
  using Element = typename V::template Element<type>;
  load_typed<V, type>(static_cast<const Element*>(a.x) + offset, a.channels, row);
  if (a.gate == nullptr) return;
  float gate[kTapChannels];
  Element rounded[kTapChannels];
  load_typed<V, type>(static_cast<const Element*>(a.gate) + offset, a.channels, gate);
  for (int c = 0; c < a.channels; ++c) row[c] *= gate[c];
  store_typed<V, type>(row, a.channels, rounded);
  load_typed<V, type>(rounded, a.channels, row);
}

template <class V, DType type, int fixed>
void convolve_taps(const ConvolveRows& a) {
  using Element = typename V::template Element<type>;
  const int taps = fixed == 0 ? a.taps : fixed;
  // The inputs of the last tokens: that of token t stands in row t % taps, and the state is tokens -taps to -1.
  alignas(64) float window[kMostTaps][kTapChannels], weight[kMostTaps][kTapChannels];
  alignas(64) float bias[kTapChannels] = {}, row[kTapChannels];
  load_taps<V, fixed>(a.state, type, a.channels, taps, window);
  load_taps<V, fixed>(a.weight, a.weight_type, a.channels, taps, weight);
  if (a.bias != nullptr) load_row<V>(a.bias, a.weight_type, a.channels, bias);
  for (int t = 0; t < a.tokens; ++t) {
    const std::ptrdiff_t offset = t * a.stride;
    load_input<V, type>(a, offset, window[t % taps]);
    const float* inputs[kMostTaps];
    for (int j = 0; j < taps; ++j) inputs[j] = window[(t + 1 + j) % taps];
    for (int c = 0; c < a.channels; c += V::kWidth) {
      V sum = V::load(bias + c);
      for (int j = 0; j < taps; ++j) sum = V::fma(V::load(weight[j] + c), V::load(inputs[j] + c), sum);
      if (a.silu) sum = sum * sigmoid_of(sum);
      V::store(row + c, sum);
    }
    if (a.out_gate != nullptr) {
      float gate[kTapChannels];
      load_typed<V, type>(static_cast<const Element*>(a.out_gate) + offset, a.channels, gate);
      for (int c = 0; c < a.channels; ++c) row[c] *= gate[c];
    }
    auto* out = static_cast<std::uint8_t*>(a.out) + t * a.out_stride * size_of(a.out_type);
    store_row<V>(row, a.channels, a.out_type, out);
  }
  store_taps<V, fixed>(window, a.tokens % taps, a.channels, taps, type, a.state);
}

template <class V, DType type>
void convolve_typed(const ConvolveRows& a) {
  a.taps == 4 ? convolve_taps<V, type, 4>(a) : convolve_taps<V, type, 0>(a);
}

template <class V>
void convolve_rows(const ConvolveRows& a) {
  switch (a.type) {
    case DType::kF32: return convolve_typed<V, DType::kF32>(a);
    case DType::kBF16: return convolve_typed<V, DType::kBF16>(a);
    case DType::kF16: return convolve_typed<V, DType::kF16>(a);
  }
}

// Sum of squares in 16 interleaved lanes.
template <class V>
inline float squares_of(const float* x, int count) {
  constexpr int kLanes = LaneSum<V>::kLanes;
  LaneSum<V> squares;
  const auto add = [&](const float* at) {
    for (int i = 0; i < kLanes; i += V::kWidth) {
      const V v = V::load(at + i);
      V& part = squares.part[i / V::kWidth];
      part = V::fma(v, v, part);
    }
  };
  const int whole = count / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) add(x + i);
  if (whole < count) {
    float rest[kLanes] = {};
    for (int i = whole; i < count; ++i) rest[i - whole] = x[i];
    add(rest);
  }
  return squares.total();
}

inline float inverse_root(float x) { return 1.0f / F32x1::square_root(F32x1::set(x)).v; }

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
void exponential_row(float* x, int count) {
  for (int i = 0; i < count; i += V::kWidth) V::store(x + i, exp_of(V::load(x + i)));
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
    const V log = a.bound == 0.0f ? V::set(0.0f) - r * softplus_of(x) : V::set(a.bound) * sigmoid_of(r * x);
    V::store(a.x + i, V::select_less(log, V::set(-87.0f), V::set(0.0f), exp_of(log)));
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

template <class V, DType type>
void gate_typed(const GatedNormRow& a) {
  using Element = typename V::template Element<type>;
  const V factor = V::set(inverse_root(squares_of<V>(a.x, a.count) / static_cast<float>(a.count) + a.epsilon));
  const auto gate_vector = [&](const float* x, const float* weight, const Element* gate, Element* to) {
    const V g = V::template load_as<type>(gate), s = sigmoid_of(g);
    V::template store_as<type>(to, V::load(x) * factor * V::load(weight) * (a.sigmoid ? s : g * s));
  };
  const auto* gate = static_cast<const Element*>(a.gate);
  auto* dst = static_cast<Element*>(a.dst);
  int i = 0;
  for (; i + V::kWidth <= a.count; i += V::kWidth) gate_vector(a.x + i, a.weight + i, gate + i, dst + i);
  if (i < a.count) {
    float x[V::kWidth] = {}, weight[V::kWidth] = {};
    Element gates[V::kWidth] = {}, to[V::kWidth];
    for (int j = 0; i + j < a.count; ++j) {
      x[j] = a.x[i + j];
      weight[j] = a.weight[i + j];
      gates[j] = gate[i + j];
    }
    gate_vector(x, weight, gates, to);
    for (int j = 0; i + j < a.count; ++j) dst[i + j] = to[j];
  }
}

template <class V>
void gate_row(const GatedNormRow& a) {
  switch (a.type) {
    case DType::kF32: return gate_typed<V, DType::kF32>(a);
    case DType::kBF16: return gate_typed<V, DType::kBF16>(a);
    case DType::kF16: return gate_typed<V, DType::kF16>(a);
  }
}

template <class V>
constexpr void add_delta_kernels(Kernels& k) {
  k.delta = {exponential_row<V>, convolve_rows<V>, normalize_lengths<V>, decay_row<V>, advance_state<V>, gate_row<V>};
}

}  // namespace
}  // namespace cpumoe
