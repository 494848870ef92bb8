// State spaces (Mamba): their steps, the pass over the state, and the gate and norm behind it.
//
// The pass is sequential, token by token. In chunks (as attention inside of a chunk) a token would cost 2 products per
// value of the state and half of a chunk per row, here it costs 3; a prompt cut in pieces, and one token at a time,
// give the same bits as all at once.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/convolve_channels.h"
#include "kernels/functions.h"

namespace cpumoe {
namespace {

// e^x, 0 below -87: a state that is multiplied by it again and again should not end among subnormal numbers.
template <class V>
inline V decay_of(V x) {
  return V::select_less(x, V::set(-87.0f), V::set(0.0f), exp_of(x));
}

template <class V>
void time_steps(const TimeSteps& a) {
  constexpr int kAtOnce = 16;
  const auto* raw = static_cast<const std::uint8_t*>(a.raw);
  for (std::int64_t i = 0; i < a.count; i += kAtOnce) {
    const int count = a.count - i < kAtOnce ? static_cast<int>(a.count - i) : kAtOnce;
    float step[kAtOnce] = {}, other[kAtOnce] = {};
    load_row<V>(raw + i * size_of(a.type), a.type, count, step);
    if (a.bias != nullptr) load_row<V>(a.bias + i, DType::kF32, count, other);
    for (int j = 0; j < kAtOnce; j += V::kWidth) {
      const V sum = V::load(step + j) + V::load(other + j);
      V::store(step + j, clamp_to(a.low, a.high, softplus_of(sum)));
    }
    store_row<V>(step, count, DType::kF32, a.steps + i);
    if (a.rates == nullptr) continue;
    load_row<V>(a.rates + i, DType::kF32, count, other);
    for (int j = 0; j < kAtOnce; j += V::kWidth) {
      V::store(other + j, decay_of(V::load(step + j) * V::load(other + j)));
    }
    store_row<V>(other, count, DType::kF32, a.decays + i);
  }
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

// `rows` rows of the state through one token. The depths of most models are compiled in (`fixed_depth`, else 0), and no
// call stands between tokens: a prompt of depth 128 takes half of the time.
template <class V, bool of_rows, int fixed_depth, int rows>
[[gnu::always_inline]] inline void scan_token(const ScanState& a, std::int64_t row, std::int64_t t) {
  constexpr int kLanes = LaneSum<V>::kLanes, kParts = kLanes / V::kWidth;
  const std::int64_t depth = fixed_depth == 0 ? a.depth : fixed_depth;
  const std::int64_t whole = depth / kLanes * kLanes;
  const int rest = static_cast<int>(depth - whole);
  const float *b = a.b + t * a.bc_stride, *c = a.c + t * a.bc_stride;
  const float *x = a.x + t * a.x_stride + row, *steps = a.steps + t * a.step_stride;
  const V decay = V::set(of_rows ? 0.0f : a.decays[t * a.step_stride]);
  V step[rows], input[rows];
  for (int r = 0; r < rows; ++r) {
    step[r] = V::set(steps[of_rows ? row + r : 0]);
    input[r] = V::set(x[r]) * step[r];
  }
  LaneSum<V> sums[rows];
  // One vector of a row: its new value, which is also added to the row's sum.
  const auto advance = [&](int r, int part, V state, const float* rates, V b_part, V c_part) {
    const V kept = of_rows ? state * decay_of(step[r] * V::load(rates)) : state * decay;
    const V next = V::fma(input[r], b_part, kept);
    sums[r].part[part] = V::fma(next, c_part, sums[r].part[part]);
    return next;
  };
  for (std::int64_t n = 0; n < whole; n += kLanes) {
    for (int p = 0; p < kParts; ++p) {
      const std::int64_t i = n + p * V::kWidth;
      const V b_part = V::load(b + i), c_part = V::load(c + i);
      for (int r = 0; r < rows; ++r) {
        float* state = a.state + (row + r) * depth + i;
        const float* rates = of_rows ? a.rates + (row + r) * depth + i : nullptr;
        V::store(state, advance(r, p, V::load(state), rates, b_part, c_part));
      }
    }
  }
  if (rest > 0) {
    float b_rest[kLanes] = {}, c_rest[kLanes] = {}, state_rest[kLanes] = {}, rate_rest[kLanes] = {};
    for (int i = 0; i < rest; ++i) b_rest[i] = b[whole + i];
    for (int i = 0; i < rest; ++i) c_rest[i] = c[whole + i];
    for (int r = 0; r < rows; ++r) {
      float* state = a.state + (row + r) * depth + whole;
      for (int i = 0; i < rest; ++i) state_rest[i] = state[i];
      for (int i = 0; of_rows && i < rest; ++i) rate_rest[i] = a.rates[(row + r) * depth + whole + i];
      for (int p = 0; p < kParts; ++p) {
        const int i = p * V::kWidth;
        const V next = advance(r, p, V::load(state_rest + i), rate_rest + i, V::load(b_rest + i), V::load(c_rest + i));
        V::store(state_rest + i, next);
      }
      for (int i = 0; i < rest; ++i) state[i] = state_rest[i];
    }
  }
  float* out = a.out + t * a.out_stride + row;
  for (int r = 0; r < rows; ++r) out[r] = __builtin_fmaf(a.skip[of_rows ? row + r : 0], x[r], sums[r].total());
}

template <class V, bool of_rows, int fixed_depth>
void scan_all(const ScanState a) {  // a copy, which stores to the state cannot change
  constexpr int kRows = 4;          // share what is loaded of b and c
  for (std::int64_t t = 0; t < a.tokens; ++t) {
    std::int64_t row = 0;
    for (; row + kRows <= a.rows; row += kRows) scan_token<V, of_rows, fixed_depth, kRows>(a, row, t);
    for (; row < a.rows; ++row) scan_token<V, of_rows, fixed_depth, 1>(a, row, t);
  }
}

template <class V>
void scan_state(const ScanState& a) {
  if (a.rates != nullptr) return a.depth == 16 ? scan_all<V, true, 16>(a) : scan_all<V, true, 0>(a);
  if (a.depth == 128) return scan_all<V, false, 128>(a);
  return a.depth == 64 ? scan_all<V, false, 64>(a) : scan_all<V, false, 0>(a);
}

template <class V>
void gate_row(const GateRow& a) {
  constexpr int kAtOnce = 64;
  const auto* gates = static_cast<const std::uint8_t*>(a.gate);
  const auto* weights = static_cast<const std::uint8_t*>(a.weight);
  auto* out = static_cast<std::uint8_t*>(a.out);
  float x[kAtOnce] = {}, gate[kAtOnce] = {}, weight[kAtOnce] = {};
  for (std::int64_t first = 0; first < a.count; first += a.group) {
    const std::int64_t last = first + a.group < a.count ? first + a.group : a.count;
    LaneSum<V> squares;
    const auto some = [&](std::int64_t i) { return last - i < kAtOnce ? static_cast<int>(last - i) : kAtOnce; };
    const auto load_gate = [&](std::int64_t i, int count) {
      load_row<V>(gates + i * size_of(a.type), a.type, count, gate);
      for (int j = 0; j < count; j += V::kWidth) {
        const V g = V::load(gate + j);
        V::store(gate + j, g * sigmoid_of(g));
      }
    };
    for (std::int64_t i = first; i < last; i += kAtOnce) {
      const int count = some(i);
      for (int j = count; j < kAtOnce; ++j) x[j] = gate[j] = 0.0f;
      load_row<V>(a.x + i, DType::kF32, count, x);
      if (!a.gate_last) load_gate(i, count);
      for (int j = 0; j < kAtOnce; j += V::kWidth) {
        V v = V::load(x + j);
        if (!a.gate_last) v = v * V::load(gate + j);
        V::store(x + j, v);
        V& part = squares.part[j % LaneSum<V>::kLanes / V::kWidth];
        part = V::fma(v, v, part);
      }
      store_row<V>(x, count, DType::kF32, a.x + i);
    }
    const float mean = squares.total() / static_cast<float>(last - first);
    const V factor = V::divide(V::set(1.0f), V::square_root(V::set(mean + a.epsilon)));
    for (std::int64_t i = first; i < last; i += kAtOnce) {
      const int count = some(i);
      load_row<V>(a.x + i, DType::kF32, count, x);
      if (weights != nullptr) load_row<V>(weights + i * size_of(a.weight_type), a.weight_type, count, weight);
      if (a.gate_last) load_gate(i, count);
      for (int j = 0; j < count; j += V::kWidth) {
        V v = V::load(x + j);
        if (weights != nullptr) v = v * factor * V::load(weight + j);
        if (a.gate_last) v = v * V::load(gate + j);
        V::store(x + j, v);
      }
      store_row<V>(x, count, a.type, out + i * size_of(a.type));
    }
  }
}

template <class V>
constexpr void add_state_space(Kernels& k) {
  k.convolve_channels = convolve_channels<V>;
  k.time_steps = time_steps<V>;
  k.decay_rates = decay_rates<V>;
  k.scan_state = scan_state<V>;
  k.gate_row = gate_row<V>;
}

}  // namespace
}  // namespace cpumoe
