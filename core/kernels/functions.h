// Functions of whole vectors, and sums over them, that have the same bits for every vector type.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/elementary.h"

namespace cpumoe {
namespace {

// e^x = mantissa * 2^exponent, with a mantissa from 0.7 to 1.42, relative error below 2e-7; for |x| up to 104.
template <class V>
struct Power {
  V mantissa, exponent;
};

template <class V>
inline Power<V> power_of_e(V x) {
  const V magic = V::set(12582912.0f);  // 1.5 * 2^23: adding and subtracting it rounds to nearest even
  const V n = (V::fma(x, V::set(1.44269504f), magic)) - magic;
  V r = V::fma(n, V::set(-0.693145751953125f), x);
  r = V::fma(n, V::set(-1.428606820309417e-6f), r);
  V p = V::set(1.9875691500e-4f);
  p = V::fma(p, r, V::set(1.3981999507e-3f));
  p = V::fma(p, r, V::set(8.3334519073e-3f));
  p = V::fma(p, r, V::set(4.1665795894e-2f));
  p = V::fma(p, r, V::set(1.6666665459e-1f));
  p = V::fma(p, r, V::set(5.0000001201e-1f));
  p = V::fma(r * r, p, r + V::set(1.0f));
  return {p, n};
}

// e^x for x in [-87, 87], and the value at the nearer end beyond.
template <class V>
inline V exp_of(V x) {
  const Power<V> e = power_of_e(clamp_to(-87.0f, 87.0f, x));
  return e.mantissa * V::power_of_two(e.exponent);
}

// 1 / d for d in [1, 2^126): a guess by integer subtraction (|1 - d r| < 0.13), then the geometric
// series to the seventh power (0.13^8 < 1e-7). A division costs three times as much.
template <class V>
inline V reciprocal(V d) {
  const V r = V::reciprocal_guess(d);
  const V e = V::fma(V::set(0.0f) - d, r, V::set(1.0f));
  const V e2 = e * e;
  V s = e + V::set(1.0f);
  s = V::fma(e2, s, s);
  s = V::fma(e2 * e2, s, s);
  return r * s;
}

// 1 / (1 + e^-x), down to the smallest subnormal; exactly 0 from x = -104 on, where the truth is below half of that,
// so that x * sigmoid(x) ends in 0 too. `reciprocal` takes less than 2^126: powers of two beyond 2^125, where the 1 has
// long been rounded away, are kept back and multiplied in at the end.
template <class V>
inline V sigmoid_of(V x) {
  const Power<V> e = power_of_e(clamp_to(-87.0f, 104.0f, V::set(0.0f) - x));
  const V bounded = min_of(V::set(125.0f), e.exponent);
  const V quotient = reciprocal(e.mantissa * V::power_of_two(bounded) + V::set(1.0f));
  return quotient * V::power_of_two(bounded - e.exponent);
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|) for x from -87 on; the logarithm of y in [1, 2] as 2 atanh((y - 1) / (y +
// 1)).
template <class V>
inline V softplus_of(V x) {
  const V e = exp_of(V::set(0.0f) - V::abs(x));
  const V z = e * reciprocal(e + V::set(2.0f));
  const V z2 = z * z;
  V p = V::set(1.0f / 13.0f);
  p = V::fma(p, z2, V::set(1.0f / 11.0f));
  p = V::fma(p, z2, V::set(1.0f / 9.0f));
  p = V::fma(p, z2, V::set(1.0f / 7.0f));
  p = V::fma(p, z2, V::set(1.0f / 5.0f));
  p = V::fma(p, z2, V::set(1.0f / 3.0f));
  p = V::fma(p, z2, V::set(1.0f));
  return V::fma(z * p, V::set(2.0f), max_of(V::set(0.0f), x));
}

// (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x; near 0, where that has few bits left, the first terms of its
// series.
template <class V>
inline V tanh_of(V x) {
  const V magnitude = V::abs(x);
  const V e = exp_of(magnitude * V::set(-2.0f));
  const V far = V::copy_sign((V::set(1.0f) - e) * reciprocal(V::set(1.0f) + e), x);
  const V x2 = x * x;
  V p = V::set(-1382.0f / 155925.0f);
  p = V::fma(p, x2, V::set(62.0f / 2835.0f));
  p = V::fma(p, x2, V::set(-17.0f / 315.0f));
  p = V::fma(p, x2, V::set(2.0f / 15.0f));
  p = V::fma(p, x2, V::set(-1.0f / 3.0f));
  return V::select_less(magnitude, V::set(0.4f), V::fma(p * x2, x, x), far);
}

// Sums in 16 interleaved lanes whatever the width of V, so that every instruction set rounds alike.
template <class V>
struct LaneSum {
  static constexpr int kLanes = 16;
  V part[kLanes / V::kWidth];
  LaneSum() {
    for (auto& p : part) p = V::set(0.0f);
  }
  void add(int index, V v) { part[index % kLanes / V::kWidth] = part[index % kLanes / V::kWidth] + v; }
  float total() const {
    V sum[kLanes / V::kWidth];
    for (int i = 0; i < kLanes / V::kWidth; ++i) sum[i] = part[i];
    for (int half = kLanes / V::kWidth / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) sum[i] = sum[i] + sum[i + half];
    }
    return V::sum_of_halves(sum[0]);
  }
};

}  // namespace
}  // namespace cpumoe
