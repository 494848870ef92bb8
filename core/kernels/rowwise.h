// Everything that works along rows in fp32, written once over a vector type V and instantiated by each
// kernel file. Every step is an IEEE operation with a fixed order (no contraction: -ffp-contract=off),
// so the results have the same bits for every V. V provides: kWidth, load, store, set, + - *,
// fma(a, b, c) = a * b + c, select_less, load_as<type>, store_as<type>, load_int, int bit helpers.
//
// Internal linkage on purpose: see kernel.h.
#pragma once

#include "../kernel.h"
#include "vector_scalar.h"

namespace cpumoe {
namespace {

template <class V>
inline V min_of(V a, V b) {  // b when unordered: min_of(bound, x) keeps a NaN in x
  return V::select_less(a, b, a, b);
}
template <class V>
inline V max_of(V a, V b) {
  return V::select_less(b, a, a, b);
}

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

// x within [low, high]; a NaN stays.
template <class V>
inline V clamp_to(float low, float high, V x) {
  return max_of(V::set(low), min_of(V::set(high), x));
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

// erf by Abramowitz and Stegun 7.1.26, |error| < 2e-7.
template <class V>
inline V erf_of(V x) {
  const V a = min_of(V::set(10.0f), V::abs(x));  // erf(10) is 1 in fp32
  const V t = reciprocal(V::fma(a, V::set(0.3275911f), V::set(1.0f)));
  V p = V::set(1.061405429f);
  p = V::fma(p, t, V::set(-1.453152027f));
  p = V::fma(p, t, V::set(1.421413741f));
  p = V::fma(p, t, V::set(-0.284496736f));
  p = V::fma(p, t, V::set(0.254829592f));
  const V tail = p * t * exp_of(V::set(0.0f) - a * a);
  return V::copy_sign(V::set(1.0f) - tail, x);
}

template <class V, Activation kind>
inline V activation_of(V g, const ActivationSpec& spec) {
  if constexpr (kind == Activation::kGelu) {
    return g * V::set(0.5f) * (erf_of(g * V::set(0.70710678f)) + V::set(1.0f));
  } else if constexpr (kind == Activation::kGeluTanh) {
    // x * (1 + tanh(y)) / 2 = x * sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x^3)
    const V cubic = V::fma(g * g, g * V::set(0.044715f), g);
    return g * sigmoid_of(cubic * V::set(1.5957691216f));
  } else if constexpr (kind == Activation::kRelu2) {
    const V positive = max_of(V::set(0.0f), g);
    return positive * positive;
  } else if constexpr (kind == Activation::kSwigluOai) {
    const V bounded = min_of(V::set(spec.limit), g);
    return bounded * sigmoid_of(bounded * V::set(spec.alpha));
  } else if constexpr (kind == Activation::kSwigluStep) {
    return min_of(V::set(spec.limit), g * sigmoid_of(g));
  } else {
    return g * sigmoid_of(g);
  }
}

template <class V, Activation kind>
inline V gate_times_up(V gate, V up, const ActivationSpec& spec) {
  if constexpr (kind == Activation::kSwigluOai || kind == Activation::kSwigluStep) {
    up = max_of(V::set(-spec.limit), min_of(V::set(spec.limit), up));
  }
  if constexpr (kind == Activation::kSwigluOai) up = up + V::set(1.0f);
  return activation_of<V, kind>(gate, spec) * up;
}

// What the running sums of a block are.
enum class Sums {
  kIntegers,  // of weights and inputs: a column has a scale
  kScaled,    // in fp32, scaled record by record
  kFactored,  // that, and a column has a factor
};

constexpr Sums sums_of(WeightFormat format) {
  const FormatTraits traits = traits_of(format);
  return traits.subgroup == 0 ? Sums::kIntegers : traits.has_factor ? Sums::kFactored : Sums::kScaled;
}

// One block's head and rows, giving finished values V at (row, column).
template <class V, Sums sums, int planes>
struct FinishedRows {
  static constexpr bool kOfColumns = sums != Sums::kScaled;  // scales or factors of columns stand in the head
  const float *scale, *bias, *acc;
  int rows_of_each, rows_of_up;
  const float* row_scale;

  explicit FinishedRows(const BlockRows& b)
      : scale(reinterpret_cast<const float*>(b.head + kBlockVectorBytes)),
        bias(b.layout.has_bias ? reinterpret_cast<const float*>(b.head + kBlockVectorBytes * (kOfColumns ? 2 : 1))
                               : nullptr),
        acc(b.acc),
        rows_of_each(b.rows_of_each),
        rows_of_up(b.rows_of_up),
        row_scale(b.row_scale) {}

  V sum_at(int row, int column) const {
    const float* p = acc + acc_index(row, column);
    return sums == Sums::kIntegers ? V::load_int(reinterpret_cast<const std::int32_t*>(p)) : V::load(p);
  }

  V at(int row, int column) const {
    const int first = row * rows_of_each + (column < kTileColumns ? 0 : rows_of_up);
    V value = sum_at(first, column);
    if constexpr (planes == 2) value = V::fma(value, V::set(256.0f), sum_at(first + 1, column));
    if constexpr (kOfColumns) value = value * V::load(scale + column);
    value = value * V::set(row_scale[row]);
    return bias == nullptr ? value : value + V::load(bias + column);
  }
};

template <class V, Sums sums, int planes>
void start_rows(const BlockRows& b) {
  for (int row = 0; row < b.rows * b.rows_of_each; ++row) {
    // The zero point of two bytes is shared out like the values.
    std::int32_t zero = b.row_zero[row / b.rows_of_each];
    if constexpr (planes == 2) zero = row % 2 == 0 ? zero >> 8 : zero & 0xFF;
    for (int column = 0; column < kBlockColumns; column += V::kWidth) {
      float* p = b.acc + acc_index(row, column);
      if constexpr (sums == Sums::kIntegers) {
        V::store_scaled_int(reinterpret_cast<const std::int32_t*>(b.head) + column, -zero,
                            reinterpret_cast<std::int32_t*>(p));
      } else {
        const V column_sums = V::load(reinterpret_cast<const float*>(b.head) + column);
        // + 0: never -0, so that adding a product of zero changes no bit.
        V::store(p, column_sums * V::set(-static_cast<float>(zero)) + V::set(0.0f));
      }
    }
  }
}

template <class V, Sums sums, int planes>
void finish_rows(const BlockRows& b, float* values, std::ptrdiff_t stride, int columns) {
  const FinishedRows<V, sums, planes> finished(b);
  for (int row = 0; row < b.rows; ++row) {
    float line[kBlockColumns];
    for (int column = 0; column < kBlockColumns; column += V::kWidth) {
      V::store(line + column, finished.at(row, column));
    }
    for (int column = 0; column < columns; ++column) values[row * stride + column] = line[column];
  }
}

template <class V, Sums sums, int planes, Activation kind>
void activate_kind(const BlockRows& b, const ActivationSpec& spec, float* hidden, std::ptrdiff_t stride) {
  const FinishedRows<V, sums, planes> finished(b);
  for (int row = 0; row < b.rows; ++row) {
    float* h = hidden + row * stride;
    if (spec.gated) {
      for (int c = 0; c < kTileColumns; c += V::kWidth) {
        const V gate = finished.at(row, c);
        const V up = finished.at(row, kTileColumns + c);
        V::store(h + c, gate_times_up<V, kind>(gate, up, spec));
      }
    } else {
      for (int c = 0; c < kBlockColumns; c += V::kWidth) {
        V::store(h + c, activation_of<V, kind>(finished.at(row, c), spec));
      }
    }
  }
}

template <class V, Sums sums, int planes>
void activate_rows(const BlockRows& b, const ActivationSpec& spec, float* hidden, std::ptrdiff_t stride) {
  switch (spec.kind) {
    case Activation::kSilu: return activate_kind<V, sums, planes, Activation::kSilu>(b, spec, hidden, stride);
    case Activation::kSwigluOai: return activate_kind<V, sums, planes, Activation::kSwigluOai>(b, spec, hidden, stride);
    case Activation::kSwigluStep:
      return activate_kind<V, sums, planes, Activation::kSwigluStep>(b, spec, hidden, stride);
    case Activation::kGelu: return activate_kind<V, sums, planes, Activation::kGelu>(b, spec, hidden, stride);
    case Activation::kGeluTanh: return activate_kind<V, sums, planes, Activation::kGeluTanh>(b, spec, hidden, stride);
    case Activation::kRelu2: return activate_kind<V, sums, planes, Activation::kRelu2>(b, spec, hidden, stride);
  }
}

template <class V, Sums sums, int planes>
void combine_rows(const BlockRows& b, const float* weight, const std::int32_t* token, float* out,
                  std::ptrdiff_t stride) {
  const FinishedRows<V, sums, planes> finished(b);
  constexpr int kRowsAhead = 6;  // the rows of `out` lie apart: fetch them before they are due
  for (int row = 0; row < b.rows; ++row) {
    const int later = row + kRowsAhead < b.rows ? row + kRowsAhead : b.rows - 1;
    __builtin_prefetch(out + token[later] * stride, 1);
    __builtin_prefetch(out + token[later] * stride + kTileColumns, 1);
    float* o = out + token[row] * stride;
    const V w = V::set(weight[row]);
    for (int column = 0; column < kBlockColumns; column += V::kWidth) {
      V::store(o + column, V::fma(w, finished.at(row, column), V::load(o + column)));
    }
  }
}

// What turns a value of a row into quanta: (x * lift) * factor.
struct RowFactors {
  float lift, factor;
};

// Range, scale and zero point of a row, from its extremes (asymmetric int8 as PyTorch's dynamic quantisation has it,
// here shifted by 128 so that the bytes are unsigned; or the same with 16 bits), and the factors to multiply with
// before rounding.
template <int bits>
inline RowFactors row_parameters(float low, float high, RowScale* q) {
  constexpr float kLargest = 3.40282347e+38f, kLift = 0x1p100f;
  constexpr auto kSteps = static_cast<float>((1 << bits) - 1), kMiddle = static_cast<float>(1 << (bits - 1));
  const float range = high - low;
  RowFactors f{1.0f, 1.0f};
  if (range == 0.0f) {
    q->scale = 0.0f;  // zeros must give zero, not what rounding leaves of the zero point's share
  } else if (range > kLargest) {
    f.factor = kSteps * 0.5f / (high * 0.5f - low * 0.5f);  // the range overflows, its half does not
    q->scale = 1.0f / f.factor;
  } else if (f.factor = kSteps / range; f.factor <= kLargest) {
    q->scale = 1.0f / f.factor;
  } else {
    // A range below 1e-36 (1e-34), whose factor overflows. The scale is subnormal, with few bits: it is rounded up, so
    // that the range fits the steps, and values are counted in the scale as it came out.
    q->scale = range / kSteps;
    if (q->scale * kSteps < range) q->scale += 0x1p-149f;
    f = {kLift, 1.0f / (q->scale * kLift)};
  }
  const float scaled_low = low * f.lift * f.factor, scaled_high = high * f.lift * f.factor;
  constexpr float kFirst = -kMiddle, kLast = kMiddle - 1.0f;
  float z = (kFirst + scaled_low) + (kLast + scaled_high) > 0.0f ? kFirst - scaled_low : kLast - scaled_high;
  z = z < kFirst ? kFirst : z > kLast ? kLast : z;
  const float rounded = (z + 12582912.0f) - 12582912.0f;  // to nearest even
  q->zero = static_cast<std::int32_t>(rounded) + (1 << (bits - 1));
  return f;
}

template <class V, int bits, DType type>
RowScale quantize_typed(const PrepareRow& args) {
  using Element = typename V::template Element<type>;
  const auto* x = static_cast<const Element*>(args.src);
  const std::int64_t whole = args.count / V::kWidth * V::kWidth;
  V low = V::set(0.0f), high = low, broken = low;
  for (std::int64_t i = 0; i < whole; i += V::kWidth) {
    const V v = V::template load_as<type>(x + i);
    low = min_of(v, low);
    high = max_of(v, high);
    broken = broken + (v - v);  // 0, or NaN from an infinity or a NaN on
  }
  float lows[V::kWidth], highs[V::kWidth], brokens[V::kWidth];
  V::store(lows, low);
  V::store(highs, high);
  V::store(brokens, broken);
  float rmin = 0.0f, rmax = 0.0f, bad = 0.0f;
  for (int i = 0; i < V::kWidth; ++i) {
    rmin = lows[i] < rmin ? lows[i] : rmin;
    rmax = highs[i] > rmax ? highs[i] : rmax;
    bad += brokens[i];
  }
  Element rest[V::kWidth] = {};  // the last, partial vector
  for (std::int64_t i = whole; i < args.count; ++i) rest[i - whole] = x[i];
  if (whole < args.count) {
    const V v = V::template load_as<type>(rest);
    V::store(lows, v);
    V::store(brokens, v - v);
    for (int i = 0; i < V::kWidth; ++i) {
      rmin = lows[i] < rmin ? lows[i] : rmin;
      rmax = lows[i] > rmax ? lows[i] : rmax;
      bad += brokens[i];
    }
  }
  RowScale q{};
  RowFactors factors{};
  if (bad == 0.0f) {
    factors = row_parameters<bits>(rmin, rmax, &q);
  } else {
    // This row's products become 0 * NaN: the token comes out as NaN and touches no other.
    q.scale = __builtin_nanf("");
    q.zero = 0;
  }
  const V lift = V::set(factors.lift), factor = V::set(factors.factor);
  const bool clean = bad == 0.0f;
  for (std::int64_t chunk = 0; chunk < args.padded / 64; ++chunk) {
    std::uint8_t* dst = args.dst + chunk / 2 * args.record_stride + chunk % 2 * args.half_stride;
    for (int j = 0; j < 64; j += V::kWidth) {
      const std::int64_t i = chunk * 64 + j;
      std::int64_t filled = clean ? args.count - i : 0;
      if (filled > 0) {
        const V value = V::template load_as<type>(filled >= V::kWidth ? x + i : rest) * lift * factor;
        if constexpr (bits == 8) {
          V::store_rounded(dst + j, value, q.zero);
        } else {
          V::store_rounded_words(dst + j, dst + 64 + j, value, q.zero);
        }
      } else {
        filled = 0;
      }
      for (std::int64_t b = filled; b < V::kWidth; ++b) {
        dst[j + b] = 0;
        if constexpr (bits == 16) dst[64 + j + b] = 0;
      }
    }
  }
  return q;
}

template <class V, int bits>
RowScale quantize_row(const PrepareRow& args) {
  switch (args.type) {
    case DType::kF32: return quantize_typed<V, bits, DType::kF32>(args);
    case DType::kBF16: return quantize_typed<V, bits, DType::kBF16>(args);
    case DType::kF16: return quantize_typed<V, bits, DType::kF16>(args);
  }
  return RowScale{};
}

template <class V, DType type>
void store_typed(const float* src, std::int64_t count, void* dst) {
  using Element = typename V::template Element<type>;
  auto* out = static_cast<Element*>(dst);
  std::int64_t i = 0;
  for (; i + V::kWidth <= count; i += V::kWidth) V::template store_as<type>(out + i, V::load(src + i));
  if (i < count) {
    float rest[V::kWidth] = {};
    Element converted[V::kWidth];
    for (std::int64_t j = i; j < count; ++j) rest[j - i] = src[j];
    V::template store_as<type>(converted, V::load(rest));
    for (std::int64_t j = i; j < count; ++j) out[j] = converted[j - i];
  }
}

template <class V>
void store_row(const float* src, std::int64_t count, DType type, void* dst) {
  switch (type) {
    case DType::kF32: return store_typed<V, DType::kF32>(src, count, dst);
    case DType::kBF16: return store_typed<V, DType::kBF16>(src, count, dst);
    case DType::kF16: return store_typed<V, DType::kF16>(src, count, dst);
  }
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

// sqrt(log(1 + e^x)), which is e^(x/2) to the last bit where softplus_of ends; 0 from x = -208 on.
template <class V>
inline V sqrt_softplus_of(V x) {
  const V quarter = exp_of(x * V::set(0.25f));
  return V::select_less(x, V::set(-87.0f), quarter * quarter, V::square_root(softplus_of(x)));
}

template <class V>
void score_logits(float* scores, int count, Scoring scoring) {
  if (scoring == Scoring::kNone) return;
  if (scoring != Scoring::kSoftmax) {
    for (int i = 0; i < count; i += V::kWidth) {
      const V x = V::load(scores + i);
      const V value = scoring == Scoring::kSigmoid ? sigmoid_of(x) : sqrt_softplus_of(x);
      V::store(scores + i, V::keep_nan(value, x));  // with the bits it came with, on every CPU
    }
    return;
  }
  float highest = scores[0];
  for (int i = 1; i < count; ++i) highest = scores[i] > highest ? scores[i] : highest;
  const int padded = (count + LaneSum<V>::kLanes - 1) / LaneSum<V>::kLanes * LaneSum<V>::kLanes;
  for (int i = count; i < padded; ++i) scores[i] = -__builtin_inff();
  LaneSum<V> sum;
  for (int i = 0; i < padded; i += V::kWidth) {
    const V x = V::load(scores + i) - V::set(highest);
    // Below e^-87 of the highest a probability is 0: no subnormal weights, which would slow the sums of attention.
    V e = V::select_less(x, V::set(-87.0f), V::set(0.0f), exp_of(x));
    e = V::keep_nan(e, x);
    V::store(scores + i, e);
    sum.add(i, e);
  }
  const V total = V::set(sum.total());
  for (int i = 0; i < padded; i += V::kWidth) V::store(scores + i, V::divide(V::load(scores + i), total));
}

template <class V, DType type>
void load_typed(const void* src, int count, float* dst) {
  using Element = typename V::template Element<type>;
  const auto* x = static_cast<const Element*>(src);
  int i = 0;
  for (; i + V::kWidth <= count; i += V::kWidth) V::store(dst + i, V::template load_as<type>(x + i));
  if (i < count) {
    Element rest[V::kWidth] = {};
    float converted[V::kWidth];
    for (int j = i; j < count; ++j) rest[j - i] = x[j];
    V::store(converted, V::template load_as<type>(rest));
    for (int j = i; j < count; ++j) dst[j] = converted[j - i];
  }
}

template <class V>
void load_row(const void* src, DType type, int count, float* dst) {
  switch (type) {
    case DType::kF32: return load_typed<V, DType::kF32>(src, count, dst);
    case DType::kBF16: return load_typed<V, DType::kBF16>(src, count, dst);
    case DType::kF16: return load_typed<V, DType::kF16>(src, count, dst);
  }
}

template <class V, DType type>
void normalize_typed(const NormalizeRow& a) {
  using Element = typename V::template Element<type>;
  constexpr int kLanes = LaneSum<V>::kLanes;
  const auto* x = static_cast<const Element*>(a.src);
  const auto* w = static_cast<const Element*>(a.weight);
  auto* out = static_cast<Element*>(a.dst);
  const std::int64_t whole = a.count / kLanes * kLanes;
  Element x_rest[kLanes] = {}, w_rest[kLanes] = {}, out_rest[kLanes];
  for (std::int64_t i = whole; i < a.count; ++i) {
    x_rest[i - whole] = x[i];
    w_rest[i - whole] = w[i];
  }
  LaneSum<V> squares;
  const auto add = [&](const Element* at) {
    for (int i = 0; i < kLanes; i += V::kWidth) {
      const V v = V::template load_as<type>(at + i);
      V& part = squares.part[i / V::kWidth];
      part = V::fma(v, v, part);
    }
  };
  for (std::int64_t i = 0; i < whole; i += kLanes) add(x + i);
  add(x_rest);
  const float mean = squares.total() / static_cast<float>(a.count);
  const V factor = V::divide(V::set(1.0f), V::square_root(V::set(mean + a.epsilon)));
  const auto scale = [&](const Element* from, const Element* weight, Element* to) {
    for (int i = 0; i < kLanes; i += V::kWidth) {
      V v = V::template load_as<type>(from + i) * factor;
      if (a.round_first) {
        Element rounded[V::kWidth];
        V::template store_as<type>(rounded, v);
        v = V::template load_as<type>(rounded);
      }
      V::template store_as<type>(to + i, v * V::template load_as<type>(weight + i));
    }
  };
  for (std::int64_t i = 0; i < whole; i += kLanes) scale(x + i, w + i, out + i);
  if (whole < a.count) {
    scale(x_rest, w_rest, out_rest);
    for (std::int64_t i = whole; i < a.count; ++i) out[i] = out_rest[i - whole];
  }
}

template <class V>
void normalize_row(const NormalizeRow& a) {
  switch (a.type) {
    case DType::kF32: return normalize_typed<V, DType::kF32>(a);
    case DType::kBF16: return normalize_typed<V, DType::kBF16>(a);
    case DType::kF16: return normalize_typed<V, DType::kF16>(a);
  }
}

// Several queries share each row that is loaded.
constexpr int kQueriesAtOnce = 4;

template <class V, DType type>
void dot_rows_typed(const DotRows& a) {
  using Element = typename V::template Element<type>;
  constexpr int kLanes = LaneSum<V>::kLanes, kParts = kLanes / V::kWidth;
  const std::int64_t whole = a.depth / kLanes * kLanes;
  for (std::int64_t r = a.first; r < a.last; ++r) {
    const Element* row = static_cast<const Element*>(a.rows) + r * a.depth;
    Element row_rest[kLanes] = {};
    for (std::int64_t i = whole; i < a.depth; ++i) row_rest[i - whole] = row[i];
    for (int first = 0; first < a.query_count; first += kQueriesAtOnce) {
      const float* query[kQueriesAtOnce];
      for (int q = 0; q < kQueriesAtOnce; ++q) {  // the last query again where there are fewer
        const int index = first + q < a.query_count ? first + q : a.query_count - 1;
        query[q] = a.queries + index * a.query_stride;
      }
      LaneSum<V> sum[kQueriesAtOnce];
      for (std::int64_t i = 0; i < whole; i += kLanes) {
        for (int p = 0; p < kParts; ++p) {
          const V value = V::template load_as<type>(row + i + p * V::kWidth);
          for (int q = 0; q < kQueriesAtOnce; ++q) {
            sum[q].part[p] = V::fma(V::load(query[q] + i + p * V::kWidth), value, sum[q].part[p]);
          }
        }
      }
      for (int q = 0; q < kQueriesAtOnce && first + q < a.query_count; ++q) {
        if (whole < a.depth) {
          float query_rest[kLanes] = {};
          for (std::int64_t i = whole; i < a.depth; ++i) query_rest[i - whole] = query[q][i];
          for (int p = 0; p < kParts; ++p) {
            const V value = V::template load_as<type>(row_rest + p * V::kWidth);
            sum[q].part[p] = V::fma(V::load(query_rest + p * V::kWidth), value, sum[q].part[p]);
          }
        }
        a.out[(first + q) * a.out_stride + r] = sum[q].total();
      }
    }
  }
}

// Columns [first, last), a multiple of `columns` apart; each sum has its own order, so any width gives the same bits.
template <class V, DType type, int columns>
int sum_columns(const SumRows& a, int first) {
  using Element = typename V::template Element<type>;
  constexpr int kParts = columns / V::kWidth;
  for (; first + columns <= a.last; first += columns) {
    for (int base = 0; base < a.query_count; base += kQueriesAtOnce) {
      const float* weight[kQueriesAtOnce];
      for (int q = 0; q < kQueriesAtOnce; ++q) {
        const int index = base + q < a.query_count ? base + q : a.query_count - 1;
        weight[q] = a.weights + index * a.weight_stride;
      }
      V sum[kQueriesAtOnce][kParts];
      for (auto& parts : sum) {
        for (V& part : parts) part = V::set(0.0f);
      }
      const Element* row = static_cast<const Element*>(a.rows) + first;
      for (std::int64_t r = 0; r < a.count; ++r, row += a.depth) {
        for (int p = 0; p < kParts; ++p) {
          const V value = V::template load_as<type>(row + p * V::kWidth);
          for (int q = 0; q < kQueriesAtOnce; ++q) sum[q][p] = V::fma(V::set(weight[q][r]), value, sum[q][p]);
        }
      }
      for (int q = 0; q < kQueriesAtOnce && base + q < a.query_count; ++q) {
        for (int p = 0; p < kParts; ++p) {
          V::store(a.out + (base + q) * a.out_stride + first + p * V::kWidth, sum[q][p]);
        }
      }
    }
  }
  return first;
}

template <class V, DType type>
void sum_rows_typed(const SumRows& a) {
  int first = a.first;
  if constexpr (V::kWidth > 1) first = sum_columns<V, type, 16>(a, first);
  sum_columns<F32x1, type, 1>(a, first);
}

template <class V>
void dot_rows(const DotRows& a) {
  switch (a.type) {
    case DType::kF32: return dot_rows_typed<V, DType::kF32>(a);
    case DType::kBF16: return dot_rows_typed<V, DType::kBF16>(a);
    case DType::kF16: return dot_rows_typed<V, DType::kF16>(a);
  }
}

template <class V>
void sum_rows(const SumRows& a) {
  switch (a.type) {
    case DType::kF32: return sum_rows_typed<V, DType::kF32>(a);
    case DType::kBF16: return sum_rows_typed<V, DType::kBF16>(a);
    case DType::kF16: return sum_rows_typed<V, DType::kF16>(a);
  }
}

template <class V, Sums sums, int planes>
constexpr Epilogues epilogues_of() {
  return {start_rows<V, sums, planes>, finish_rows<V, sums, planes>, activate_rows<V, sums, planes>,
          combine_rows<V, sums, planes>};
}

constexpr const RecordCodec* codec_of(Decoding decoding) {
  switch (decoding) {
    case Decoding::kBytes: return &kInt8Codec;
    case Decoding::kNibbles: return &kInt4Codec;
    case Decoding::kNibblesOfZero: return &kOffsetNibblesCodec;
    case Decoding::kFp4: return &kFp4Codec;
  }
  return nullptr;
}

// A row of the table but for its product: the epilogues of a weight format on vectors V.
template <class V, WeightFormat format>
constexpr FormatKernels format_kernels(void (*multiply)(const Product&)) {
  return {format,
          codec_of(traits_of(format).decoding),
          multiply,
          {epilogues_of<V, sums_of(format), 1>(), epilogues_of<V, sums_of(format), 2>()}};
}

// The rows of all formats, in the order of their numbers, in which Kernels::of looks them up. `Isa::multiply<format>`
// is all that a weight format needs from an instruction set.
template <class V, class Isa, int number = 1>
constexpr void add_formats(Kernels& k) {
  constexpr auto kFormat = static_cast<WeightFormat>(number);
  k.formats[number - 1] = format_kernels<V, kFormat>(Isa::template multiply<kFormat>);
  if constexpr (number < kFormatCount) add_formats<V, Isa, number + 1>(k);
}

// The whole table of an instruction set but for what it alone has.
template <class V, class Isa>
constexpr Kernels kernels_of(const char* name) {
  Kernels k{};
  k.name = name;
  add_formats<V, Isa>(k);
  k.row_formats[0] = {RowFormat::kBytes, quantize_row<V, 8>};
  k.row_formats[1] = {RowFormat::kWords, quantize_row<V, 16>};
  k.few_rows = kTileRows - 1;
  k.thread_begin = [] {};
  k.thread_end = [] {};
  k.load_row = load_row<V>;
  k.store_row = store_row<V>;
  k.score = score_logits<V>;
  k.dot_rows = dot_rows<V>;
  k.sum_rows = sum_rows<V>;
  k.normalize_row = normalize_row<V>;
  return k;
}

}  // namespace
}  // namespace cpumoe
