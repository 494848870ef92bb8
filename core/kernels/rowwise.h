// Everything that works along rows in fp32, written once over a vector type V and instantiated by each
// kernel file. Every step is an IEEE operation with a fixed order (no contraction: -ffp-contract=off),
// so the results have the same bits for every V. V provides: kWidth, load, store, set, + - *,
// fma(a, b, c) = a * b + c, select_less, load_as<type>, store_as<type>, load_int, int bit helpers.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/attention_parts.h"
#include "kernels/delta_rule.h"
#include "kernels/elementary.h"
#include "kernels/functions.h"
#include "kernels/kv_records.h"
#include "kernels/prepare_floats.h"
#include "kernels/prepare_integers.h"
#include "kernels/row_products.h"
#include "kernels/state_space.h"
#include "kernels/table.h"
#include "kernels/vector_scalar.h"

namespace cpumoe {
namespace {

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
    return min_of(V::set(spec.alpha), g * sigmoid_of(g));
  } else {
    return g * sigmoid_of(g);
  }
}

// Calls f<kind>() for the activation whose value is `kind`.
template <class F>
inline void with_activation(Activation kind, const F& f) {
  switch (kind) {
    case Activation::kSilu: return f.template operator()<Activation::kSilu>();
    case Activation::kSwigluOai: return f.template operator()<Activation::kSwigluOai>();
    case Activation::kSwigluStep: return f.template operator()<Activation::kSwigluStep>();
    case Activation::kGelu: return f.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh: return f.template operator()<Activation::kGeluTanh>();
    case Activation::kRelu2: return f.template operator()<Activation::kRelu2>();
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
  kFactored,  // in fp32, and a column has a factor, or all of its scale
};

constexpr Sums sums_of(WeightFormat format, RowKind rows) {
  const FormatTraits traits = traits_of(format);
  if (traits.subgroup == 0) return rows == RowKind::kBytes ? Sums::kIntegers : Sums::kFactored;
  return traits.has_factor ? Sums::kFactored : Sums::kScaled;
}

// One block's head and rows, giving finished values V at (row, column).
template <class V, Sums sums, RowKind kind, int planes>
struct FinishedRows {
  static constexpr bool kOfColumns = sums != Sums::kScaled;  // scales or factors of columns stand in the head
  const float *scale, *bias, *acc;
  int rows_of_each, rows_of_up;
  const float *row_scale, *row_scale_up;

  explicit FinishedRows(const BlockRows& b)
      : scale(reinterpret_cast<const float*>(b.head + kBlockVectorBytes)),
        bias(b.layout.has_bias ? reinterpret_cast<const float*>(b.head + kBlockVectorBytes * (kOfColumns ? 2 : 1))
                               : nullptr),
        acc(b.acc),
        rows_of_each(b.rows_of_each),
        rows_of_up(b.rows_of_up),
        row_scale(b.row_scale),
        row_scale_up(b.row_scale_up) {}

  V sum_at(int row, int column) const {
    const float* p = acc + acc_index(row, column);
    return sums == Sums::kIntegers ? V::load_int(reinterpret_cast<const std::int32_t*>(p)) : V::load(p);
  }

  V at(int row, int column) const {
    const bool is_up = column >= kTileColumns;
    const int first = row * rows_of_each + (is_up ? rows_of_up : 0);
    V value = sum_at(first, column);
    if constexpr (planes == 2 && kind == RowKind::kBytes) {
      value = V::fma(value, V::set(256.0f), sum_at(first + 1, column));
    } else if constexpr (planes == 2) {
      value = value + sum_at(first + 1, column);
    }
    if constexpr (kOfColumns) value = value * V::load(scale + column);
    value = value * V::set((is_up ? row_scale_up : row_scale)[row]);
    return bias == nullptr ? value : value + V::load(bias + column);
  }
};

template <class V, Sums sums, RowKind kind, int planes>
void start_rows(const BlockRows& b) {
  if constexpr (kind != RowKind::kBytes) {
    for (int row = 0; row < b.rows * b.rows_of_each; ++row) {
      for (int column = 0; column < kBlockColumns; column += V::kWidth) {
        V::store(b.acc + acc_index(row, column), V::set(0.0f));
      }
    }
    return;
  }
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

template <class V, Sums sums, RowKind kind, int planes>
void finish_rows(const BlockRows& b, float* values, std::ptrdiff_t stride, int columns) {
  const FinishedRows<V, sums, kind, planes> finished(b);
  for (int row = 0; row < b.rows; ++row) {
    float line[kBlockColumns];
    for (int column = 0; column < kBlockColumns; column += V::kWidth) {
      V::store(line + column, finished.at(row, column));
    }
    for (int column = 0; column < columns; ++column) values[row * stride + column] = line[column];
  }
}

template <class V, Sums sums, RowKind rows, int planes, Activation kind>
void activate_kind(const BlockRows& b, const ActivationSpec& spec, float* hidden, std::ptrdiff_t stride) {
  const FinishedRows<V, sums, rows, planes> finished(b);
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

template <class V, Sums sums, RowKind kind, int planes>
void activate_rows(const BlockRows& b, const ActivationSpec& spec, float* hidden, std::ptrdiff_t stride) {
  with_activation(spec.kind,
                  [&]<Activation of>() { activate_kind<V, sums, kind, planes, of>(b, spec, hidden, stride); });
}

template <class V, Sums sums, RowKind kind, int planes>
void combine_rows(const BlockRows& b, const float* weight, const std::int32_t* token, float* out,
                  std::ptrdiff_t stride) {
  const FinishedRows<V, sums, kind, planes> finished(b);
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

// sqrt(log(1 + e^x)), which is e^(x/2) to the last bit where softplus_of ends; 0 from x = -208 on.
template <class V>
inline V sqrt_softplus_of(V x) {
  const V quarter = exp_of(x * V::set(0.25f));
  return V::select_less(x, V::set(-87.0f), quarter * quarter, V::square_root(softplus_of(x)));
}

// The highest of `count` scores, a multiple of 16; a NaN may be passed over.
template <class V>
inline float highest_of(const float* scores, int count) {
  constexpr int kLanes = LaneSum<V>::kLanes;
  V part[kLanes / V::kWidth];
  for (int p = 0; p < kLanes / V::kWidth; ++p) part[p] = V::load(scores + p * V::kWidth);
  for (int i = kLanes; i < count; i += kLanes) {
    for (int p = 0; p < kLanes / V::kWidth; ++p) part[p] = max_of(V::load(scores + i + p * V::kWidth), part[p]);
  }
  float lanes[kLanes];
  for (int p = 0; p < kLanes / V::kWidth; ++p) V::store(lanes + p * V::kWidth, part[p]);
  float highest = lanes[0];
  for (int i = 1; i < kLanes; ++i) highest = lanes[i] > highest ? lanes[i] : highest;
  return highest;
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
  constexpr int kLanes = LaneSum<V>::kLanes;
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int i = count; i < padded; ++i) scores[i] = -__builtin_inff();
  const float highest = highest_of<V>(scores, padded);
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
void normalize_typed(const NormalizeRow& a) {
  using Element = typename V::template Element<type>;
  constexpr int kLanes = LaneSum<V>::kLanes;
  const auto* x = static_cast<const Element*>(a.src);
  auto* out = static_cast<Element*>(a.dst);
  const std::int64_t whole = a.count / kLanes * kLanes;
  Element x_rest[kLanes] = {}, out_rest[kLanes];
  float w_rest[kLanes] = {};
  for (std::int64_t i = whole; i < a.count; ++i) {
    x_rest[i - whole] = x[i];
    w_rest[i - whole] = a.weight[i];
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
  const V offset = V::set(a.plus_one ? 1.0f : 0.0f);
  const auto scale = [&](const Element* from, const float* weight, Element* to) {
    for (int i = 0; i < kLanes; i += V::kWidth) {
      V v = V::template load_as<type>(from + i) * factor;
      if (a.round_first) {
        Element rounded[V::kWidth];
        V::template store_as<type>(rounded, v);
        v = V::template load_as<type>(rounded);
      }
      V::template store_as<type>(to + i, v * (V::load(weight + i) + offset));
    }
  };
  for (std::int64_t i = 0; i < whole; i += kLanes) scale(x + i, a.weight + i, out + i);
  if (whole < a.count) {
    scale(x_rest, w_rest, out_rest);
    for (std::int64_t i = whole; i < a.count; ++i) out[i] = out_rest[i - whole];
  }
}

template <class V>
void normalize_row(const NormalizeRow& a) {
  with_type(a.type, [&]<DType type>() { normalize_typed<V, type>(a); });
}

template <class V>
void rotate_halves(const RotateHead& a, std::int64_t first, std::int64_t last) {
  const std::int64_t half = a.rotated / 2;
  for (std::int64_t i = first; i + V::kWidth <= last; i += V::kWidth) {
    const V x = V::load(a.x + i), y = V::load(a.x + half + i);
    V::store(a.x + i, V::fma(V::set(0.0f) - y, V::load(a.sin + i), x * V::load(a.cos + i)));
    V::store(a.x + half + i, V::fma(x, V::load(a.sin + half + i), y * V::load(a.cos + half + i)));
  }
}

template <class V>
void rotate_head(const RotateHead& a) {
  if (!a.interleaved) {
    const std::int64_t half = a.rotated / 2, whole = half / V::kWidth * V::kWidth;
    rotate_halves<V>(a, 0, whole);
    return rotate_halves<F32x1>(a, whole, half);
  }
  for (std::int64_t i = 0; i + 1 < a.rotated; i += 2) {
    const float x = a.x[i], y = a.x[i + 1];
    a.x[i] = __builtin_fmaf(-y, a.sin[i], x * a.cos[i]);
    a.x[i + 1] = __builtin_fmaf(x, a.sin[i + 1], y * a.cos[i + 1]);
  }
}

template <class V, DType type>
void add_row_typed(const AddRow& r) {
  using Element = typename V::template Element<type>;
  const auto *a = static_cast<const Element*>(r.a), *b = static_cast<const Element*>(r.b);
  auto* dst = static_cast<Element*>(r.dst);
  const auto add = [&]<class W>(W, std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; i += W::kWidth) {
      const W sum = W::fma(W::template load_as<type>(b + i), W::set(r.factor), W::template load_as<type>(a + i));
      W::template store_as<type>(dst + i, sum);
    }
  };
  const std::int64_t whole = r.count / V::kWidth * V::kWidth;
  add(V{}, 0, whole);
  add(F32x1{}, whole, r.count);
}

template <class V>
void add_row(const AddRow& r) {
  with_type(r.type, [&]<DType type>() { add_row_typed<V, type>(r); });
}

template <class V, Activation kind>
void activate_kind_of_row(const ActivateRow& a) {
  for (std::int64_t i = 0; i < a.count; i += V::kWidth) {
    const V gate = V::load(a.gate + i);
    V::store(a.out + i, a.activation->gated ? gate_times_up<V, kind>(gate, V::load(a.up + i), *a.activation)
                                            : activation_of<V, kind>(gate, *a.activation));
  }
}

template <class V>
void activate_row(const ActivateRow& a) {
  with_activation(a.activation->kind, [&]<Activation kind>() { activate_kind_of_row<V, kind>(a); });
}

template <class V, WeightFormat format, RowKind kind, int planes>
constexpr Epilogues epilogues_of() {
  constexpr Sums kSums = sums_of(format, kind);
  return {start_rows<V, kSums, kind, planes>, finish_rows<V, kSums, kind, planes>,
          activate_rows<V, kSums, kind, planes>, combine_rows<V, kSums, kind, planes>};
}

constexpr const RecordCodec* codec_of(WeightFormat format) {
  const FormatTraits traits = traits_of(format);
  switch (traits.decoding) {
    case Decoding::kNibbles: return &kInt4Codec;
    case Decoding::kNibblesOfZero: return &kOffsetNibblesCodec;
    case Decoding::kFp4: return &kFp4Codec;
    default: return traits.bits == 8 ? &kInt8Codec : traits.bits == 6 ? &kSixBitsCodec : nullptr;
  }
}

// What a weight format has for rows of one kind: `Isa::multiply<format>` for bytes, `Isa::multiply_floats<format,
// kind>` for others.
template <class V, class Isa, WeightFormat format, RowKind kind>
constexpr void add_rows(FormatKernels& k) {
  if constexpr (traits_of(format).takes(kind)) {
    if constexpr (kind == RowKind::kBytes) {
      k.products[static_cast<int>(kind)] = Isa::template multiply<format>;
    } else {
      k.products[static_cast<int>(kind)] = Isa::template multiply_floats<format, kind>;
    }
    k.epilogues[static_cast<int>(kind)][0] = epilogues_of<V, format, kind, 1>();
    if constexpr (kind != RowKind::kF32) k.epilogues[static_cast<int>(kind)][1] = epilogues_of<V, format, kind, 2>();
  }
}

// The rows of all formats, in the order of their numbers, in which Kernels::of looks them up.
template <class V, class Isa, int number = 1>
constexpr void add_formats(Kernels& k) {
  constexpr auto kFormat = static_cast<WeightFormat>(number);
  FormatKernels& row = k.formats[number - 1];
  row.weights = kFormat;
  row.codec = codec_of(kFormat);
  add_rows<V, Isa, kFormat, RowKind::kBytes>(row);
  add_rows<V, Isa, kFormat, RowKind::kBF16>(row);
  add_rows<V, Isa, kFormat, RowKind::kF32>(row);
  if constexpr (number < kFormatCount) add_formats<V, Isa, number + 1>(k);
}

// All row formats but kFloat, which stands for one of the last three.
template <class V>
constexpr void add_row_formats(Kernels& k) {
  constexpr RowScale (*kPrepare[kRowFormatCount])(const PrepareRow&) = {quantize_row<V, 8>,
                                                                        quantize_row<V, 16>,
                                                                        quantize_static<V>,
                                                                        fp8_row<V>,
                                                                        scaled_fp8_row<V>,
                                                                        scaled_fp8_row<V>,
                                                                        fp8_records<V>,
                                                                        nvfp4_row<V>,
                                                                        mx_row<V, kE2M1>,
                                                                        mx_row<V, kE3M2>,
                                                                        mx_row<V, kE2M3>,
                                                                        mx_row<V, kE4M3>,
                                                                        nullptr,
                                                                        bf16_row<V>,
                                                                        bf16_pair<V>,
                                                                        fp32_row<V>};
  for (int i = 0; i < kRowFormatCount; ++i) k.row_formats[i] = {static_cast<RowFormat>(i), kPrepare[i]};
}

// Register-only products, as FloatVectors does them.
template <class V>
double fma_peak(std::int64_t iterations) {
  constexpr int kChains = V::kWidth == 1 ? 4 : 12;
  V sum[kChains], w = V::set(1.0f), x = V::set(0.5f);
  for (V& s : sum) s = V::set(0.0f);
  for (std::int64_t i = 0; i < iterations; ++i) {
    asm volatile("" : : "g"(&w), "g"(&x) : "memory");  // keeps the products in the loop
    for (V& s : sum) s = V::kWidth == 1 ? s + w * x : V::fma(w, x, s);
  }
  volatile float sink = 0.0f;
  float lanes[V::kWidth];
  for (V& s : sum) {
    V::store(lanes, s);
    sink = sink + lanes[0];
  }
  return static_cast<double>(iterations) * kChains * V::kWidth * 2.0;
}

// Read-only pass for measuring DRAM: the loads and read-ahead of the kernels without their arithmetic.
template <class V>
std::uint64_t read_bytes(const std::uint8_t* data, std::int64_t bytes) {
  constexpr int kVectorBytes = V::kWidth > 1 ? V::kWidth * 4 : 8, kStep = 4 * kVectorBytes;
  typedef std::uint64_t Words __attribute__((vector_size(kVectorBytes)));
  Words sum[4] = {};
  for (std::int64_t i = 0; i < bytes; i += kStep) {
    for (int line = 0; line < kStep; line += 64) __builtin_prefetch(data + i + 4096 + line, 0, 2);
    for (int j = 0; j < 4; ++j) {
      Words words;
      __builtin_memcpy(&words, data + i + j * kVectorBytes, kVectorBytes);
      sum[j] += words;
    }
  }
  const Words total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  std::uint64_t lanes[kVectorBytes / 8], checksum = 0;
  __builtin_memcpy(lanes, &total, kVectorBytes);
  for (const std::uint64_t lane : lanes) checksum += lane;
  return checksum;
}

// The whole table of an instruction set except for what it alone has. Besides its products (add_rows), `Isa` has
// dot_peak.
template <class V, class Isa>
constexpr Kernels kernels_of(const char* name) {
  Kernels k{};
  k.name = name;
  add_formats<V, Isa>(k);
  add_row_formats<V>(k);
  k.magnitude = magnitude_of<V>;
  k.dot_peak = Isa::dot_peak;
  k.float_dot_peak = fma_peak<V>;
  k.read_bytes = read_bytes<V>;
  k.few_rows = kTileRows - 1;
  k.thread_begin = [] {};
  k.thread_end = [] {};
  k.load_row = load_row<V>;
  k.store_row = store_row<V>;
  k.score = score_logits<V>;
  k.dot_rows = dot_rows<V>;
  k.sum_rows = sum_rows<V>;
  k.normalize_row = normalize_row<V>;
  k.rotate_head = rotate_head<V>;
  k.add_row = add_row<V>;
  k.activate_row = activate_row<V>;
  k.recurrent = {convolve_rows<V>,     gate_row<V>,      decay_rates<V>, decay_row<V>,
                 normalize_lengths<V>, advance_state<V>, time_steps<V>,  scan_state<V>};
  add_attention<V>(k);
  k.cache_records = {write_cache_record<V>, expand_cache_records<V>};
  return k;
}

}  // namespace
}  // namespace cpumoe
