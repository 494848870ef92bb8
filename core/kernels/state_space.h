// State spaces (Mamba): their steps and the pass over the state.
//
// The pass is sequential, token by token. In chunks (as attention inside of a chunk) a token would cost 2 products per
// value of the state and half of a chunk per row, here it costs 3; a prompt cut in pieces, and one token at a time,
// give the same bits as all at once.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/recurrent.h"

namespace cpumoe {
namespace {

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

}  // namespace
}  // namespace cpumoe
