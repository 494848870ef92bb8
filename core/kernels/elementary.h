// What everything along rows is made of: comparisons, and rows to and from fp32.
//
// Internal linkage on purpose: see kernels/table.h.
#pragma once

#include "kernels/formats.h"
#include "kernels/vector_scalar.h"

namespace cpumoe {
namespace {

// Calls f<type>() for the type whose value is `type`.
template <class F>
inline auto with_type(DType type, const F& f) {
  switch (type) {
    case DType::kF32: return f.template operator()<DType::kF32>();
    case DType::kBF16: return f.template operator()<DType::kBF16>();
    case DType::kF16: return f.template operator()<DType::kF16>();
  }
  __builtin_unreachable();
}

template <class V>
inline V min_of(V a, V b) {  // b when unordered: min_of(bound, x) keeps a NaN in x
  return V::select_less(a, b, a, b);
}
template <class V>
inline V max_of(V a, V b) {
  return V::select_less(b, a, a, b);
}

// x within [low, high]; a NaN stays.
template <class V>
inline V clamp_to(float low, float high, V x) {
  return max_of(V::set(low), min_of(V::set(high), x));
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
  with_type(type, [&]<DType type>() { store_typed<V, type>(src, count, dst); });
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
  with_type(type, [&]<DType type>() { load_typed<V, type>(src, count, dst); });
}

}  // namespace
}  // namespace cpumoe
