// Kernels that all layers with a recurrent state share: causal convolutions, gated norms and decays.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/functions.h"
#include "kernels/table.h"

namespace cpumoe {
namespace {

// Transposes [channels][taps] of any type to [tap][channel] in fp32, padded with zeros. `fixed`: taps, where the
// compiler knows them, so that its loops have no remainder; or 0.
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
  if (a.bias != nullptr) load_row<V>(a.bias, a.bias_type, a.channels, bias);
  for (int t = 0; t < a.tokens; ++t) {
    const std::ptrdiff_t offset = t * a.stride;
    load_input<V, type>(a, offset, window[t % taps]);
    const float* inputs[kMostTaps];
    for (int j = 0; j < taps; ++j) inputs[j] = window[(t + 1 + j) % taps];
    for (int c = 0; c < a.channels; c += V::kWidth) {
      V sum = V::load(bias + c);
      for (int j = 0; j < taps; ++j) sum = V::fma(V::load(weight[j] + c), V::load(inputs[j] + c), sum);
      if (a.silu) sum = sum * sigmoid_of(sum);
      if (a.mask != nullptr) sum = sum * V::set(a.mask[t]);
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
  with_type(a.type, [&]<DType type>() { convolve_typed<V, type>(a); });
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

// body<vector type>(index) for [first, last): whole vectors, then single values.
template <class V, class Body>
inline void for_vectors(std::int64_t first, std::int64_t last, const Body& body) {
  std::int64_t i = first;
  for (; i + V::kWidth <= last; i += V::kWidth) body.template operator()<V>(i);
  for (; i < last; ++i) body.template operator()<F32x1>(i);
}

template <class V, DType type>
void gate_typed(const GateRow& a) {
  using Element = typename V::template Element<type>;
  const auto* gates = static_cast<const Element*>(a.gate);
  auto* out = static_cast<Element*>(a.out);
  const auto gate_at = [&]<class W>(W x, std::int64_t i) __attribute__((always_inline)) {
    const W gate = W::template load_as<type>(gates + i), sigmoid = sigmoid_of(gate);
    return x * (a.sigmoid ? sigmoid : gate * sigmoid);
  };
  for (std::int64_t first = 0; first < a.count; first += a.group) {
    const std::int64_t last = first + a.group < a.count ? first + a.group : a.count;
    if (!a.gate_last) {
      for_vectors<V>(first, last, [&]<class W>(std::int64_t i) { W::store(a.x + i, gate_at(W::load(a.x + i), i)); });
    }
    float factor = 1.0f;
    if (a.weight != nullptr) {
      const auto count = static_cast<int>(last - first);
      factor = inverse_root(squares_of<V>(a.x + first, count) / static_cast<float>(count) + a.epsilon);
    }
    for_vectors<V>(first, last, [&]<class W>(std::int64_t i) {
      W v = W::load(a.x + i);
      if (a.weight != nullptr) v = v * W::set(factor) * W::load(a.weight + i);
      if (a.gate_last) v = gate_at(v, i);
      W::template store_as<type>(out + i, v);
    });
  }
}

template <class V>
void gate_row(const GateRow& a) {
  with_type(a.type, [&]<DType type>() { gate_typed<V, type>(a); });
}

// e^x, 0 below -87: a state that is multiplied by it again and again should not end among subnormal numbers.
template <class V>
inline V decay_of(V x) {
  return V::select_less(x, V::set(-87.0f), V::set(0.0f), exp_of(x));
}

template <class V>
void decay_rates(const void* logarithms, DType type, std::int64_t count, float* rates) {
  constexpr int kAtOnce = 64;
  const auto* src = static_cast<const std::uint8_t*>(logarithms);
  for (std::int64_t i = 0; i < count; i += kAtOnce) {
    const int some = count - i < kAtOnce ? static_cast<int>(count - i) : kAtOnce;
    float line[kAtOnce] = {};
    load_row<V>(src + i * size_of(type), type, some, line);
    for (int j = 0; j < kAtOnce; j += V::kWidth) V::store(line + j, V::set(0.0f) - exp_of(V::load(line + j)));
    store_row<V>(line, some, DType::kF32, rates + i);
  }
}

}  // namespace
}  // namespace cpumoe
