// Random packed weights of every format, and layers made of them.
#pragma once

#include <algorithm>

#include "ops/experts.h"
#include "ops/linear.h"
#include "packed/format_list.h"
#include "packed/packing.h"
#include "tests/harness.h"

namespace cpumoe::tests {

struct Matrix {
  PackedSpec spec;
  std::vector<std::int8_t> values, zeros;
  std::vector<float> floats;              // weights that are floats
  std::vector<std::uint8_t> float_bytes;  // the same as they are given to be packed
  std::vector<float> scales, factors, bias, input_scales;
  std::vector<std::uint8_t> byte_scales;  // in the place of `scales`, which then have their values
  std::vector<std::int32_t> orders;       // [experts, input_orders, depth]
  std::vector<std::uint8_t> blob;
  PackedMatrix packed;

  std::int64_t groups() const { return spec.group == 0 ? 1 : spec.depth / spec.group; }
  double weight(std::int64_t e, std::int64_t n, std::int64_t k) const;
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

// The value of a small float from its definition.
inline double small_float(int code, int exponent_bits, int mantissa_bits) {
  const int steps = 1 << mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1), mantissa = code & (steps - 1);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                         : std::ldexp(steps + mantissa, exponent - bias - mantissa_bits);
  return (code >> (exponent_bits + mantissa_bits) & 1) != 0 ? -magnitude : magnitude;
}

inline double value_of(ScaleType type, std::uint8_t code) {
  return type == ScaleType::kE8M0 ? std::ldexp(1.0, code - 127) : small_float(code, 4, 3);
}

inline double value_of(Decoding decoding, int value) {
  switch (decoding) {
    case Decoding::kFp4: return small_float(value, 2, 1);
    case Decoding::kE4M3: return small_float(value, 4, 3);
    case Decoding::kE3M2: return small_float(value, 3, 2);
    case Decoding::kE2M3: return small_float(value, 2, 3);
    default: return value;
  }
}

inline double Matrix::weight(std::int64_t e, std::int64_t n, std::int64_t k) const {
  const auto row = e * spec.columns + n;
  if (!floats.empty()) return floats[static_cast<std::size_t>(row * spec.depth + k)];
  std::int64_t place = k;  // among the packed inputs
  if (spec.input_orders != 0) {
    const std::int64_t order = e * spec.input_orders + (spec.input_orders == 2 && n >= spec.columns / 2 ? 1 : 0);
    const auto begin = orders.begin() + order * spec.depth;
    place = std::find(begin, begin + spec.depth, static_cast<std::int32_t>(k)) - begin;
  }
  const auto group = static_cast<std::size_t>(row * groups() + spec.group_of(place));
  const FormatTraits traits = traits_of(spec.weights);
  double weight = value_of(traits.decoding, values[static_cast<std::size_t>(row * spec.depth + k)]);
  if (traits.has_zeros()) weight -= zeros[group];
  if (traits.has_factor) weight *= factors[static_cast<std::size_t>(row)];
  return weight * static_cast<double>(scales[group]);
}

inline float as_half(float f) {
  std::uint16_t half;
  scalar().store_row(&f, 1, DType::kF16, &half);
  scalar().load_row(&half, DType::kF16, 1, &f);
  return f;
}

// Values and scales of the whole range.
inline void fill_weights(Matrix& m, Random& random) {
  const PackedSpec& spec = m.spec;
  const FormatTraits traits = traits_of(spec.weights);
  const bool integers =
      traits.decoding == Decoding::kBytes || traits.decoding == Decoding::kNibbles || traits.has_zeros();
  const int smallest = integers || traits.bits == 8 ? -(1 << (std::min(traits.bits, 8) - 1)) : 0;
  const auto value = [&] {
    return static_cast<std::int8_t>(random.integer(smallest, smallest + (1 << std::min(traits.bits, 8)) - 1));
  };
  const auto scale = [&] { return random.uniform(0.001f, 0.02f); };
  const auto rows = static_cast<std::size_t>(spec.experts * spec.columns);
  const auto scales = rows * static_cast<std::size_t>(m.groups());
  const std::size_t count = rows * static_cast<std::size_t>(spec.depth);
  if (!traits.has_scales()) {
    const DType type = dtype_of(spec.weights);
    m.floats = random_values(count, random.bits());
    m.float_bytes.resize(count * static_cast<std::size_t>(size_of(type)));
    scalar().store_row(m.floats.data(), static_cast<std::int64_t>(count), type, m.float_bytes.data());
    scalar().load_row(m.float_bytes.data(), type, static_cast<int>(count), m.floats.data());
    return;
  }
  m.values.resize(count);
  for (auto& v : m.values) {
    do {
      v = value();
    } while (traits.decoding == Decoding::kE4M3 && (v & 0x7F) == 0x7F);  // NaN
  }
  m.scales.resize(scales);
  for (auto& s : m.scales) s = spec.scales == ScaleType::kF16 ? as_half(scale()) : as_bfloat(scale());
  if (has_tile_scales(spec.weights)) {  // one for 16 rows
    for (std::size_t i = 0; i < scales; ++i) {
      const std::size_t groups = static_cast<std::size_t>(m.groups());
      m.scales[i] = m.scales[i / groups / 16 * 16 * groups + i % groups];
    }
  }
  if (traits.has_zeros()) m.zeros.resize(scales);
  for (auto& z : m.zeros) z = value();
  if (traits.has_factor) m.factors.resize(rows);
  for (auto& f : m.factors) f = scale();
  if (size_of(spec.scales) == 1) m.byte_scales.resize(scales);
  for (std::size_t i = 0; i < m.byte_scales.size(); ++i) {
    m.byte_scales[i] =
        static_cast<std::uint8_t>(spec.scales == ScaleType::kE8M0 ? random.integer(120, 127) : random.integer(0, 126));
    m.scales[i] = static_cast<float>(value_of(spec.scales, m.byte_scales[i]));
  }
}

inline Matrix make_matrix(PackedSpec spec, unsigned seed) {
  Matrix m;
  for (const ScaleType type : {ScaleType::kE8M0, ScaleType::kE4M3, ScaleType::kNone}) {
    if (info_of(spec).takes(type)) spec.scales = type;
  }
  if (has_tile_scales(spec.weights)) spec.scales = ScaleType::kF32;
  if (traits_of(spec.rows).stored_scale) spec.input_scales = spec.gated && seed % 2 == 1 ? 2 : 1;
  m.spec = spec;
  Random random(seed);
  const FormatTraits traits = traits_of(spec.weights);
  const auto rows = static_cast<std::size_t>(spec.experts * spec.columns);
  fill_weights(m, random);
  m.input_scales.resize(static_cast<std::size_t>(spec.experts * spec.input_scales));
  for (auto& s : m.input_scales) s = random.uniform(0.01f, 0.03f) * (spec.rows == RowFormat::kNvfp4 ? 2e4f : 1.0f);
  if (spec.has_bias) {
    m.bias.resize(rows);
    for (auto& b : m.bias) b = random.uniform(-1.0f, 1.0f);
  }
  for (std::int64_t i = 0; i < spec.experts * spec.input_orders; ++i) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(spec.depth));
    for (std::size_t k = 0; k < order.size(); ++k) order[k] = static_cast<std::int32_t>(k);
    random.shuffle(order);
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
    if (!traits.has_scales()) {
      s.values = m.float_bytes.data() + row * spec.depth * size_of(dtype_of(spec.weights));
      s.scales = nullptr;
    }
    if (!m.byte_scales.empty()) s.scales = m.byte_scales.data() + group;
    s.zeros = traits.has_zeros() ? m.zeros.data() + group : nullptr;
    s.factors = traits.has_factor ? m.factors.data() + row : nullptr;
    s.bias = spec.has_bias ? m.bias.data() + row : nullptr;
    s.order = spec.gated ? RowOrder::kGateThenUp : RowOrder::kPlain;
    s.input_order = spec.input_orders == 0 ? nullptr : m.orders.data() + e * spec.input_orders * spec.depth;
    s.input_scales = spec.input_scales == 0 ? nullptr : m.input_scales.data() + e * spec.input_scales;
    sources.push_back(s);
  }
  pack_experts(m.packed, m.blob.data(), 0, sources.data(), spec.experts, "matrix");
  m.packed = open_packed(m.blob.data(), m.packed.total_bytes, "matrix");
  return m;
}

inline std::string describe(const PackedSpec& s, const std::string& kernel, std::int64_t rows) {
  return std::to_string(s.input_orders) + " orders " + kernel + " " + info_of(s).name + " rows of type " +
         std::to_string(static_cast<int>(s.rows)) + " group " + std::to_string(s.group) + " " +
         std::to_string(s.columns) + "x" + std::to_string(s.depth) + " rows " + std::to_string(rows) +
         (s.has_bias ? " bias" : "") +
         (s.scales == ScaleType::kBF16  ? " bf16"
          : s.scales == ScaleType::kF16 ? " fp16"
                                        : " fp32");
}

// Rows of floats are given as bf16 numbers where their number is odd: they are held otherwise then.
inline DType type_of_rows(const PackedSpec& spec, std::int64_t rows) {
  return spec.rows == RowFormat::kFloat && rows % 2 == 1 ? DType::kBF16 : DType::kF32;
}

// Whether up to `rows` rows may be multiplied in tiles of bf16 numbers, which are not portable (float_products.h).
inline bool rounds_otherwise(const Kernels& k, const PackedSpec& spec, DType type, std::int64_t rows) {
  const RowTraits traits = traits_of(rows_for(spec, type));
  return !k.arithmetic.portable_floats && traits.kind == RowKind::kBF16 && traits_of(spec.weights).subgroup != 16 &&
         rows * traits.planes > k.few_rows;
}

inline std::vector<float> run_linear(const Kernels& k, const Matrix& m, const std::vector<float>& x,
                                     std::int64_t rows) {
  std::vector<float> out(static_cast<std::size_t>(rows * m.spec.columns), -7.0f);
  std::vector<std::uint16_t> narrow(x.size());
  scalar().store_row(x.data(), static_cast<std::int64_t>(x.size()), DType::kBF16, narrow.data());
  if (type_of_rows(m.spec, rows) == DType::kBF16) {
    linear_forward(k, {matrix_of(m.packed), narrow.data(), DType::kBF16, DType::kF32, rows, out.data()});
  } else {
    linear_forward(k, {matrix_of(m.packed), x.data(), DType::kF32, DType::kF32, rows, out.data()});
  }
  return out;
}

// Row formats that a weight format is tried with: all that differ in how they are multiplied, and for one all others.
inline std::vector<RowFormat> rows_for_tests(WeightFormat format) {
  const FormatTraits traits = traits_of(format);
  std::vector<RowFormat> rows;
  if (traits.takes(RowKind::kBytes)) rows = {RowFormat::kBytes, RowFormat::kWords};
  if (traits.has_integers() && format == WeightFormat::kInt8) rows.push_back(RowFormat::kBytesStatic);
  if (traits.takes(RowKind::kBF16) && traits.bits <= 8) rows.push_back(RowFormat::kFp8);
  if (!traits.has_integers()) rows.push_back(RowFormat::kFloat);
  if (has_tile_scales(format)) rows.push_back(RowFormat::kFp8Group128);
  if (format == WeightFormat::kFp4Group16) rows.push_back(RowFormat::kNvfp4);
  if (format == WeightFormat::kE4M3) rows.insert(rows.end(), {RowFormat::kFp8Static, RowFormat::kFp8Tensor});
  if (format == WeightFormat::kFp4Group32) rows.insert(rows.end(), {RowFormat::kMxfp4, RowFormat::kMxfp8});
  if (format == WeightFormat::kE3M2Group32) rows.push_back(RowFormat::kMxfp6E3M2);
  if (format == WeightFormat::kE2M3Group32) rows.push_back(RowFormat::kMxfp6E2M3);
  return rows;
}

// Every weight format that holds groups of `group` inputs, with rows of every kind that it takes.
inline std::vector<PackedSpec> specs_of_group(std::int64_t group) {
  std::vector<PackedSpec> specs;
  for (const FormatInfo& f : kWeightFormats) {
    if (find_format(f.element, group, traits_of(f.id).has_zeros()) != &f) continue;
    if (has_tile_scales(f.id) && group != kRecordDepth) continue;
    for (const RowFormat rows : rows_for_tests(f.id)) {
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
        s.input_orders = (depth == 160 || depth == 192) && traits_of(s.weights).bits <= 8 ? 1 : 0;
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
