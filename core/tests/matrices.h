// Random packed weights of every format, and layers made of them.
#pragma once

#include <algorithm>
#include <random>

#include "../formats.h"
#include "../linear.h"
#include "../moe.h"
#include "../packed.h"
#include "harness.h"

namespace cpumoe::tests {

struct Matrix {
  PackedSpec spec;
  std::vector<std::int8_t> values, zeros;
  std::vector<float> scales, factors, bias;
  std::vector<std::uint8_t> byte_scales;  // in the place of `scales`, which then have their values
  std::vector<std::int32_t> orders;       // [experts, input_orders, depth]
  std::vector<std::uint8_t> blob;
  PackedMatrix packed;

  std::int64_t groups() const { return spec.group == 0 ? 1 : spec.depth / spec.group; }
  double weight(std::int64_t e, std::int64_t n, std::int64_t k) const {
    const auto row = e * spec.columns + n;
    std::int64_t place = k;  // among the packed inputs
    if (spec.input_orders != 0) {
      const std::int64_t order = e * spec.input_orders + (spec.input_orders == 2 && n >= spec.columns / 2 ? 1 : 0);
      const auto begin = orders.begin() + order * spec.depth;
      place = std::find(begin, begin + spec.depth, static_cast<std::int32_t>(k)) - begin;
    }
    const auto group = static_cast<std::size_t>(row * groups() + spec.group_of(place));
    const int value = values[static_cast<std::size_t>(row * spec.depth + k)];
    const FormatTraits traits = traits_of(spec.weights);
    double weight = traits.decoding == Decoding::kFp4 ? kFp4Doubled[value] / 2.0 : value;
    if (traits.has_zeros()) weight -= zeros[group];
    if (traits.has_factor) weight *= factors[static_cast<std::size_t>(row)];
    return weight * static_cast<double>(scales[group]);
  }
};

inline float as_bfloat(float f) {
  std::uint32_t bits;
  std::memcpy(&bits, &f, 4);
  bits &= 0xFFFF0000u;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline const FormatInfo& info_of(const PackedSpec& spec) {
  return *find_format(static_cast<std::uint32_t>(spec.weights));
}

// Values of E8M0 and e4m3 from their definitions.
inline double value_of(ScaleType type, std::uint8_t code) {
  if (type == ScaleType::kE8M0) return std::ldexp(1.0, code - 127);
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

inline float as_half(float f) {
  std::uint16_t half;
  scalar().store_row(&f, 1, DType::kF16, &half);
  scalar().load_row(&half, DType::kF16, 1, &f);
  return f;
}

inline Matrix make_matrix(PackedSpec spec, unsigned seed) {
  Matrix m;
  for (const ScaleType type : {ScaleType::kE8M0, ScaleType::kE4M3}) {
    if (info_of(spec).takes(type)) spec.scales = type;
  }
  m.spec = spec;
  std::mt19937 random(seed);
  const FormatTraits traits = traits_of(spec.weights);
  const int smallest = traits.bits == 8 ? -128 : traits.decoding == Decoding::kFp4 ? 0 : -8;
  std::uniform_int_distribution<int> value(smallest, smallest + (1 << traits.bits) - 1), zero(-8, 7);
  std::uniform_real_distribution<float> scale(0.001f, 0.02f), bias(-1.0f, 1.0f);
  const auto rows = static_cast<std::size_t>(spec.experts * spec.columns);
  const auto scales = rows * static_cast<std::size_t>(m.groups());
  m.values.resize(rows * static_cast<std::size_t>(spec.depth));
  for (auto& v : m.values) v = static_cast<std::int8_t>(value(random));
  m.scales.resize(scales);
  for (auto& s : m.scales) s = spec.scales == ScaleType::kF16 ? as_half(scale(random)) : as_bfloat(scale(random));
  if (traits.has_zeros()) m.zeros.resize(scales);
  for (auto& z : m.zeros) z = static_cast<std::int8_t>(zero(random));
  if (traits.has_factor) {
    m.factors.resize(rows);
    for (auto& f : m.factors) f = scale(random);
    m.byte_scales.resize(scales);
    for (std::size_t i = 0; i < scales; ++i) {
      m.byte_scales[i] =
          static_cast<std::uint8_t>(spec.scales == ScaleType::kE8M0 ? 120 + random() % 8 : random() % 127);
      m.scales[i] = static_cast<float>(value_of(spec.scales, m.byte_scales[i]));
    }
  }
  if (spec.has_bias) {
    m.bias.resize(rows);
    for (auto& b : m.bias) b = bias(random);
  }
  for (std::int64_t i = 0; i < spec.experts * spec.input_orders; ++i) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(spec.depth));
    for (std::size_t k = 0; k < order.size(); ++k) order[k] = static_cast<std::int32_t>(k);
    std::shuffle(order.begin(), order.end(), random);
    m.orders.insert(m.orders.end(), order.begin(), order.end());
  }
  m.packed = layout_of(spec, "matrix");
  m.blob.resize(static_cast<std::size_t>(m.packed.total_bytes));
  write_header(m.packed, m.blob.data());
  std::vector<PackSource> sources;
  for (std::int64_t e = 0; e < spec.experts; ++e) {
    PackSource s;
    const std::int64_t row = e * spec.columns, group = row * m.groups();
    s.values = m.values.data() + row * spec.depth;
    s.scales = m.scales.data() + group;
    if (traits.has_factor) s.scales = m.byte_scales.data() + group;
    s.zeros = traits.has_zeros() ? m.zeros.data() + group : nullptr;
    s.factors = traits.has_factor ? m.factors.data() + row : nullptr;
    s.bias = spec.has_bias ? m.bias.data() + row : nullptr;
    s.order = spec.gated ? RowOrder::kGateThenUp : RowOrder::kPlain;
    s.input_order = spec.input_orders == 0 ? nullptr : m.orders.data() + e * spec.input_orders * spec.depth;
    sources.push_back(s);
  }
  pack_experts(m.packed, m.blob.data(), 0, sources.data(), spec.experts, "matrix");
  m.packed = open_packed(m.blob.data(), m.packed.total_bytes, "matrix");
  return m;
}

inline std::string describe(const PackedSpec& s, const std::string& kernel, std::int64_t rows) {
  return std::to_string(s.input_orders) + " orders " + kernel + " " + info_of(s).name +
         (s.rows == RowFormat::kWords ? " words" : "") + " group " + std::to_string(s.group) + " " +
         std::to_string(s.columns) + "x" + std::to_string(s.depth) + " rows " + std::to_string(rows) +
         (s.has_bias ? " bias" : "") +
         (s.scales == ScaleType::kBF16  ? " bf16"
          : s.scales == ScaleType::kF16 ? " fp16"
                                        : " fp32");
}

inline std::vector<float> run_linear(const Kernels& k, const Matrix& m, const std::vector<float>& x,
                                     std::int64_t rows) {
  std::vector<float> out(static_cast<std::size_t>(rows * m.spec.columns), -7.0f);
  linear_forward(k, {m.packed, x.data(), DType::kF32, DType::kF32, rows, out.data()});
  return out;
}

// Every weight format that holds groups of `group` inputs, with either kind of rows.
inline std::vector<PackedSpec> specs_of_group(std::int64_t group) {
  std::vector<PackedSpec> specs;
  for (const FormatInfo& f : kWeightFormats) {
    if (find_format(f.element, group, traits_of(f.id).has_zeros()) != &f) continue;
    for (const RowFormat rows : {RowFormat::kBytes, RowFormat::kWords}) {
      PackedSpec s;
      s.weights = f.id;
      s.group = group;
      s.experts = 1;
      s.rows = rows;
      specs.push_back(s);
    }
  }
  return specs;
}

inline std::vector<PackedSpec> linear_specs() {
  std::vector<PackedSpec> specs;
  for (const std::int64_t group : {0, 16, 32, 64, 96, 128, 256, 384}) {
    for (const std::int64_t depth : {32, 50, 64, 96, 128, 160, 192, 256, 384, 768, 2880}) {
      if (group != 0 && depth % group != 0) continue;
      for (PackedSpec s : specs_of_group(group)) {
        // All depths for the first formats; what is the same for the others is not tried again.
        const bool first = s.weights <= WeightFormat::kInt8 && s.rows == RowFormat::kBytes;
        if (!first && (depth == 64 || depth == 128 || depth == 768 || (depth == 2880 && group != 96))) continue;
        s.depth = depth;
        s.columns = depth == 96 ? 10 : depth == 160 ? 33 : 64;
        s.has_bias = depth % 128 == 0;
        s.scales = depth == 384 || depth == 160 ? ScaleType::kF16
                   : depth % 64 == 0            ? ScaleType::kBF16
                                                : ScaleType::kF32;
        s.input_orders = depth == 160 || depth == 192 ? 1 : 0;
        specs.push_back(s);
      }
    }
  }
  return specs;
}

struct Layer {
  Matrix gate_up, down;
};

inline Layer make_layer(std::int64_t hidden, std::int64_t inner, std::int64_t experts, std::int64_t group,
                        const char* element, bool gated, bool bias, RowFormat rows = RowFormat::kBytes,
                        bool zeros = false, int orders = 0) {
  PackedSpec first, second;
  first.input_orders = orders;
  second.input_orders = std::min(orders, 1);
  first.weights = second.weights = find_format(element, group, zeros)->id;
  first.rows = second.rows = rows;
  first.group = second.group = group;
  first.experts = second.experts = experts;
  first.columns = gated ? 2 * inner : inner;
  first.depth = hidden;
  first.gated = gated;
  second.columns = hidden;
  second.depth = inner;
  first.has_bias = second.has_bias = bias;
  first.scales = second.scales = ScaleType::kBF16;
  return {make_matrix(first, 31), make_matrix(second, 37)};
}

template <class T>
inline std::vector<T> run_layer(const Kernels& k, const Layer& layer, const std::vector<T>& x, DType type,
                                const std::vector<std::int32_t>& ids, const std::vector<float>& weights,
                                std::int64_t tokens, const ActivationSpec& activation, bool weight_on_input) {
  std::vector<T> out(x.size());
  MoeCall call{layer.gate_up.packed,
               layer.down.packed,
               x.data(),
               type,
               type,
               tokens,
               tokens == 0 ? 0 : static_cast<std::int64_t>(ids.size()) / tokens,
               ids.data(),
               weights.data(),
               weight_on_input,
               activation,
               out.data()};
  moe_forward(k, call);
  return out;
}

}  // namespace cpumoe::tests
