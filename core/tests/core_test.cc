// Every kernel against the scalar one, bit for bit, over odd shapes; the scalar one against plain double arithmetic;
// and the threads. Needs nothing but the core, so that it also runs under sanitizers and emulators.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../attention.h"
#include "../dispatch.h"
#include "../formats.h"
#include "../linear.h"
#include "../measure.h"
#include "../memory.h"
#include "../moe.h"
#include "../norm.h"
#include "../packed.h"
#include "../products.h"
#include "../route.h"
#include "../threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using namespace cpumoe;

int passed = 0, failed = 0;

void check(bool ok, const std::string& what) {
  ok ? ++passed : ++failed;
  if (!ok) std::printf("FAILED: %s\n", what.c_str());
}

bool same_bits(const void* a, const void* b, std::size_t bytes) { return std::memcmp(a, b, bytes) == 0; }

bool same_numbers(const std::vector<float>& a, const std::vector<float>& b, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (!(same_bits(&a[i], &b[i], 4) || (a[i] != a[i] && b[i] != b[i]))) return false;
  }
  return true;
}

std::vector<const Kernels*> other_kernels() {
  std::vector<const Kernels*> found;
  for (const IsaEntry& e : instruction_sets()) {
    if (e.supported && std::string(e.name) != "scalar") found.push_back(e.kernels);
  }
  return found;
}

const Kernels& scalar() { return *instruction_sets()[0].kernels; }

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

float as_bfloat(float f) {
  std::uint32_t bits;
  std::memcpy(&bits, &f, 4);
  bits &= 0xFFFF0000u;
  std::memcpy(&f, &bits, 4);
  return f;
}

const FormatInfo& info_of(const PackedSpec& spec) { return *find_format(static_cast<std::uint32_t>(spec.weights)); }

// Values of E8M0 and e4m3 from their definitions.
double value_of(ScaleType type, std::uint8_t code) {
  if (type == ScaleType::kE8M0) return std::ldexp(1.0, code - 127);
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

float as_half(float f) {
  std::uint16_t half;
  scalar().store_row(&f, 1, DType::kF16, &half);
  scalar().load_row(&half, DType::kF16, 1, &f);
  return f;
}

Matrix make_matrix(PackedSpec spec, unsigned seed) {
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

std::vector<float> random_values(std::size_t count, unsigned seed, float offset = 0.1f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(offset, 1.0f);
  std::vector<float> values(count);
  for (auto& v : values) v = normal(random);
  return values;
}

std::string describe(const PackedSpec& s, const std::string& kernel, std::int64_t rows) {
  return std::to_string(s.input_orders) + " orders " + kernel + " " + info_of(s).name +
         (s.rows == RowFormat::kWords ? " words" : "") + " group " + std::to_string(s.group) + " " +
         std::to_string(s.columns) + "x" + std::to_string(s.depth) + " rows " + std::to_string(rows) +
         (s.has_bias ? " bias" : "") +
         (s.scales == ScaleType::kBF16  ? " bf16"
          : s.scales == ScaleType::kF16 ? " fp16"
                                        : " fp32");
}

std::vector<float> run_linear(const Kernels& k, const Matrix& m, const std::vector<float>& x, std::int64_t rows) {
  std::vector<float> out(static_cast<std::size_t>(rows * m.spec.columns), -7.0f);
  linear_forward(k, {m.packed, x.data(), DType::kF32, DType::kF32, rows, out.data()});
  return out;
}

// Every weight format that holds groups of `group` inputs, with either kind of rows.
std::vector<PackedSpec> specs_of_group(std::int64_t group) {
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

std::vector<PackedSpec> linear_specs() {
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

void test_linear_kernels() {
  for (const PackedSpec& spec : linear_specs()) {
    const Matrix m = make_matrix(spec, 7);
    for (const std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 15, 16, 17, 31, 40, 130}) {
      if (rows > 17 && spec.depth > 800) continue;
      // Two rows of bytes for each: up to 7 are few, more come in tiles.
      if (spec.rows == RowFormat::kWords && rows != 1 && rows != 3 && rows != 7 && rows != 8 && rows != 17) continue;
      const auto x = random_values(static_cast<std::size_t>(rows * spec.depth), 11);
      const auto expected = run_linear(scalar(), m, x, rows);
      for (const Kernels* k : other_kernels()) {
        const auto got = run_linear(*k, m, x, rows);
        check(same_bits(expected.data(), got.data(), got.size() * 4), "linear " + describe(spec, k->name, rows));
      }
    }
  }
}

// Every number of row tiles, several chunks, and inputs too large for one pass over the records.
void test_many_rows() {
  for (const std::int64_t group : {0, 16, 32, 64, 96, 128}) {
    for (const std::int64_t depth : {384, 3456}) {
      for (PackedSpec spec : specs_of_group(group)) {
        spec.depth = depth;
        spec.columns = 70;
        spec.has_bias = group != 128;
        const Matrix m = make_matrix(spec, 3);
        const bool bytes = spec.rows == RowFormat::kBytes;
        std::vector<std::int64_t> counts = {33, 65, 81, 97, 113, 128, 129, 257};
        if (!bytes) counts = {20, 65};
        if (depth != 384) counts = {129};
        if (depth != 384 && !(bytes && spec.weights <= WeightFormat::kInt8)) continue;
        if (bytes && spec.weights > WeightFormat::kInt8) counts = {33, 113, 128};
        for (const std::int64_t rows : counts) {
          const auto x = random_values(static_cast<std::size_t>(rows * depth), 5);
          const auto expected = run_linear(scalar(), m, x, rows);
          for (const Kernels* k : other_kernels()) {
            const auto got = run_linear(*k, m, x, rows);
            check(same_bits(expected.data(), got.data(), got.size() * 4), "linear " + describe(spec, k->name, rows));
          }
        }
      }
    }
  }
}

// A row by itself, as a kernel prepares it.
struct PreparedRow {
  RowScale scale{};
  int planes;
  std::vector<std::uint8_t> bytes;

  PreparedRow(const Kernels& k, RowFormat format, const void* x, DType type, std::int64_t count)
      : planes(planes_of(format)), bytes(static_cast<std::size_t>((count + 127) / 128 * 128 * planes), 1) {
    scale = k.of(format).prepare(
        {x, type, count, (count + 127) / 128 * 128, bytes.data(), 128 * planes, std::ptrdiff_t{64} * planes});
  }

  double at(std::int64_t i) const {
    const auto half = static_cast<std::size_t>(i / 64 * 64 * planes + i % 64);
    const int u = planes == 1 ? bytes[half] : bytes[half] * 256 + bytes[half + 64];
    return (u - scale.zero) * static_cast<double>(scale.scale);
  }

  bool operator==(const PreparedRow& other) const {
    const bool both_nan = scale.scale != scale.scale && other.scale.scale != other.scale.scale;
    return bytes == other.bytes && scale.zero == other.scale.zero && (both_nan || scale.scale == other.scale.scale);
  }
};

// The scalar kernel against double arithmetic on the same quantised inputs.
void test_linear_meaning() {
  for (const PackedSpec& spec : linear_specs()) {
    const Matrix m = make_matrix(spec, 19);
    const std::int64_t rows = 3;
    const auto x = random_values(static_cast<std::size_t>(rows * spec.depth), 23);
    const auto got = run_linear(scalar(), m, x, rows);
    double error = 0, norm = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      const PreparedRow row(scalar(), spec.rows, x.data() + r * spec.depth, DType::kF32, spec.depth);
      for (std::int64_t n = 0; n < spec.columns; ++n) {
        double sum = 0;
        for (std::int64_t k = 0; k < spec.depth; ++k) {
          sum += row.at(k) * m.weight(0, n, k);
        }
        if (spec.has_bias) sum += m.bias[static_cast<std::size_t>(n)];
        const double d = sum - got[static_cast<std::size_t>(r * spec.columns + n)];
        error += d * d;
        norm += sum * sum;
      }
    }
    // Weights that are not centred have large column sums, of which the zero point's share cancels.
    const double tolerance = traits_of(spec.weights).has_zeros() ? 4e-6 : 2e-6;
    check(std::sqrt(error / norm) < tolerance, "meaning of " + describe(spec, "scalar", rows));
  }
}

struct Layer {
  Matrix gate_up, down;
};

Layer make_layer(std::int64_t hidden, std::int64_t inner, std::int64_t experts, std::int64_t group, const char* element,
                 bool gated, bool bias, RowFormat rows = RowFormat::kBytes, bool zeros = false, int orders = 0) {
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
std::vector<T> run_layer(const Kernels& k, const Layer& layer, const std::vector<T>& x, DType type,
                         const std::vector<std::int32_t>& ids, const std::vector<float>& weights, std::int64_t tokens,
                         const ActivationSpec& activation, bool weight_on_input) {
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

void test_layers() {
  struct Case {
    std::int64_t hidden, inner, experts, group;
    const char* element;
    bool gated, bias;
    Activation activation;
    bool words = false, zeros = false;
    int orders = 0;
  };
  const char *i4 = "int4", *i8 = "int8", *f4 = "fp4";
  const std::vector<Case> cases = {
      {128, 64, 5, 32, i4, true, false, Activation::kSilu},
      {256, 128, 4, 128, i4, true, true, Activation::kSwigluOai},
      {96, 96, 3, 96, i4, true, false, Activation::kGelu},
      {64, 160, 7, 0, i4, true, true, Activation::kGeluTanh},
      {160, 32, 3, 0, i8, true, false, Activation::kSwigluStep},
      {128, 96, 3, 32, i4, false, false, Activation::kRelu2},
      {192, 64, 70, 64, i4, true, false, Activation::kSilu},
      {64, 64, 3, 0, i8, false, true, Activation::kGelu},
      {2880, 96, 4, 32, i4, true, true, Activation::kSwigluOai},
      {128, 64, 5, 32, i4, true, false, Activation::kSilu, true},
      {64, 160, 70, 0, i4, true, true, Activation::kGeluTanh, true},
      {192, 96, 3, 32, i4, true, true, Activation::kGelu, true, true},
      {256, 128, 4, 128, i4, false, false, Activation::kRelu2, false, true},
      {128, 96, 3, 32, i8, true, false, Activation::kSwigluStep, true},
      {256, 64, 70, 64, i8, true, true, Activation::kSilu},
      {160, 32, 3, 0, i8, false, true, Activation::kSilu, true},
      {96, 64, 5, 32, f4, true, true, Activation::kSwigluOai, true},
      {128, 96, 3, 16, f4, true, false, Activation::kSilu, true},
      {64, 128, 70, 16, f4, true, false, Activation::kSilu},
      {160, 96, 5, 32, i4, true, true, Activation::kSilu, true, false, 2},
      {192, 64, 70, 64, i4, true, false, Activation::kSilu, true, true, 2},
      {96, 160, 3, 32, i4, true, false, Activation::kGelu, false, false, 1},
      {128, 96, 4, 32, i8, false, true, Activation::kRelu2, true, false, 1},
  };
  for (const Case& c : cases) {
    const Layer layer = make_layer(c.hidden, c.inner, c.experts, c.group, c.element, c.gated, c.bias,
                                   c.words ? RowFormat::kWords : RowFormat::kBytes, c.zeros, c.orders);
    for (const std::int64_t tokens : {1, 2, 9, 70, 300}) {
      if (tokens > 9 && c.hidden > 1000) continue;
      const bool later = c.words || c.zeros || c.orders != 0;  // cases that differ from earlier ones in this
      if ((tokens == 300 || tokens == 2) && later) continue;
      const std::int64_t topk = std::min<std::int64_t>(3, c.experts);
      const auto x = random_values(static_cast<std::size_t>(tokens * c.hidden), 41);
      std::mt19937 random(43);
      std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * topk));
      std::vector<float> weights(ids.size());
      for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = static_cast<std::int32_t>(random() % static_cast<unsigned>(c.experts + 1)) - 1;
        weights[i] = static_cast<float>(random() % 1000) * 1e-3f;
      }
      ActivationSpec spec;
      spec.kind = c.activation;
      spec.gated = c.gated;
      const bool on_input = tokens == 9;
      set_thread_count(1);
      const auto expected = run_layer(scalar(), layer, x, DType::kF32, ids, weights, tokens, spec, on_input);
      for (const IsaEntry& e : instruction_sets()) {
        if (!e.supported) continue;
        for (const int threads : {1, 2, 3}) {
          if (threads == 3 && (tokens > 70 || later)) continue;
          set_thread_count(threads);
          const auto got = run_layer(*e.kernels, layer, x, DType::kF32, ids, weights, tokens, spec, on_input);
          check(same_bits(expected.data(), got.data(), got.size() * 4),
                "layer " + describe(layer.gate_up.spec, e.name, tokens) + " threads " + std::to_string(threads));
        }
      }
      set_thread_count(0);
    }
  }
}

// Quantising, converting and scoring rows of every length and type, with special values among them.
void test_rowwise() {
  for (const Kernels* k : other_kernels()) {
    for (int count = 1; count < 150; ++count) {
      auto x = random_values(static_cast<std::size_t>(count), static_cast<unsigned>(count));
      if (count % 7 == 0) x[static_cast<std::size_t>(count / 2)] = 3e38f;
      if (count % 11 == 0) x[0] = NAN;
      if (count % 13 == 0) x[static_cast<std::size_t>(count - 1)] = -INFINITY;
      if (count % 17 == 0) x.assign(x.size(), 1e-39f);
      std::vector<std::uint16_t> half[2] = {std::vector<std::uint16_t>(x.size()), std::vector<std::uint16_t>(x.size())};
      for (int i = 0; i < 2; ++i) {
        const DType type = i == 0 ? DType::kBF16 : DType::kF16;
        std::vector<std::uint16_t> other(x.size());
        scalar().store_row(x.data(), count, type, half[i].data());
        k->store_row(x.data(), count, type, other.data());
        check(half[i] == other, std::string(k->name) + " store_row " + std::to_string(count));
      }
      for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
        const void* src =
            type == DType::kF32 ? static_cast<const void*>(x.data()) : half[type == DType::kF16 ? 1 : 0].data();
        for (const RowFormat rows : {RowFormat::kBytes, RowFormat::kWords}) {
          check(PreparedRow(scalar(), rows, src, type, count) == PreparedRow(*k, rows, src, type, count),
                std::string(k->name) + " prepared row of " + std::to_string(count));
        }
        for (const Scoring scoring : {Scoring::kNone, Scoring::kSoftmax, Scoring::kSigmoid, Scoring::kSqrtSoftplus}) {
          std::vector<float> sa(static_cast<std::size_t>(count + 32)), sb(sa);
          scalar().load_row(src, type, count, sa.data());
          k->load_row(src, type, count, sb.data());
          check(same_numbers(sa, sb, sa.size()), std::string(k->name) + " load_row " + std::to_string(count));
          scalar().score(sa.data(), count, scoring);
          k->score(sb.data(), count, scoring);
          bool same = true;
          for (int i = 0; i < count; ++i) {
            const float p = sa[static_cast<std::size_t>(i)], q = sb[static_cast<std::size_t>(i)];
            same = same && (p == q || (p != p && q != q));
          }
          check(same, std::string(k->name) + " score " + std::to_string(count));
        }
      }
    }
  }
}

// Finite numbers of every magnitude, the subnormal ones included.
std::vector<float> random_bits(std::size_t count, std::mt19937& random) {
  std::vector<float> values(count);
  for (auto& v : values) {
    do {
      const auto bits = static_cast<std::uint32_t>(random());
      std::memcpy(&v, &bits, 4);
    } while (!std::isfinite(v));
  }
  return values;
}

std::vector<float> activated(const Kernels& k, const ActivationSpec& spec, std::vector<float> acc) {
  const std::vector<std::uint8_t> head(kBlockVectorBytes);
  const std::vector<float> scale(kTileRows, 1.0f);
  const std::vector<std::int32_t> zero(kTileRows, 0);
  std::vector<float> out(kAccTileFloats, 0.0f);
  const BlockLayout layout{WeightFormat::kInt4Group128, ScaleType::kF32, false};
  k.of(layout.weights)
      .with(RowFormat::kBytes)
      .activate({layout, head.data(), acc.data(), kTileRows, 1, 0, scale.data(), zero.data()}, spec, out.data(),
                kBlockColumns);
  return out;
}

// The whole of fp32: rows, scores and activations have the scalar kernel's bits, and its scores are near the truth.
void test_extremes() {
  std::mt19937 random(71);
  for (int round = 0; round < 300; ++round) {
    auto x = random_bits(kAccTileFloats, random);
    if (round % 2 == 0) {  // where exp and sigmoid end
      for (std::size_t i = 0; i < x.size(); i += 2) x[i] = std::uniform_real_distribution<float>(-220, 110)(random);
    }
    auto row = x;  // a few powers of two apart, anywhere
    const float unit = std::ldexp(1.0f, static_cast<int>(random() % 276) - 149);
    for (std::size_t i = 0; i < row.size() && round % 3 != 0; ++i) row[i] = std::fmod(x[i], 1.99f) * unit;
    const int count = 1 + static_cast<int>(random() % 200);
    for (const RowFormat format : {RowFormat::kBytes, RowFormat::kWords}) {
      const PreparedRow prepared(scalar(), format, row.data(), DType::kF32, count);
      double low = 0, high = 0, worst = 0;
      for (int i = 0; i < count; ++i) {
        low = std::min(low, static_cast<double>(row[static_cast<std::size_t>(i)]));
        high = std::max(high, static_cast<double>(row[static_cast<std::size_t>(i)]));
      }
      for (int i = 0; i < count; ++i) {
        worst = std::max(worst, std::fabs(prepared.at(i) - row[static_cast<std::size_t>(i)]));
      }
      const double steps = format == RowFormat::kBytes ? 255 : 65535;
      check(worst <= 1.01 * (high - low) / steps + 1.5e-45, "a row is off by more than a step");
      for (const Kernels* k : other_kernels()) {
        check(PreparedRow(*k, format, row.data(), DType::kF32, count) == prepared,
              std::string(k->name) + " prepared row of every magnitude");
      }
    }
    for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid, Scoring::kSqrtSoftplus}) {
      std::vector<float> expected = x;
      expected.resize(x.size() + 32);
      const std::vector<float> logits = expected;
      scalar().score(expected.data(), kAccTileFloats, scoring);
      for (std::size_t i = 0; i < x.size() && scoring != Scoring::kSoftmax; ++i) {
        const double e = std::exp(-std::fabs(static_cast<double>(x[i])));
        double truth = x[i] < 0 ? e / (1 + e) : 1 / (1 + e);
        if (scoring == Scoring::kSqrtSoftplus) truth = std::sqrt(std::max(x[i], 0.0f) + std::log1p(e));
        check(std::fabs(expected[i] - truth) <= 5e-7 * truth + 1.5e-45, "score of " + std::to_string(x[i]));
      }
      for (const Kernels* k : other_kernels()) {
        std::vector<float> got = logits;
        k->score(got.data(), kAccTileFloats, scoring);
        check(same_numbers(got, expected, x.size()), std::string(k->name) + " scores of every magnitude");
      }
    }
    for (int kind = 0; kind <= static_cast<int>(Activation::kRelu2); ++kind) {
      for (const bool gated : {true, false}) {
        const ActivationSpec spec{static_cast<Activation>(kind), gated, 1.702f, 7.0f};
        const auto expected = activated(scalar(), spec, x);
        for (const Kernels* k : other_kernels()) {
          check(same_numbers(activated(*k, spec, x), expected, expected.size()),
                std::string(k->name) + " activation " + std::to_string(kind) + " of every magnitude");
        }
      }
    }
  }
}

#if defined(__x86_64__) || defined(__aarch64__)
#if defined(__x86_64__)
constexpr std::uint64_t kFlush = 0x8040;  // results and operands
std::uint64_t float_mode() { return _mm_getcsr() & 0xFFC0u; }
void set_float_mode(std::uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#else
constexpr std::uint64_t kFlush = 1u << 24;
std::uint64_t float_mode() {
  std::uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void set_float_mode(std::uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#endif

// A caller that flushes subnormal numbers gets the bits of one that does not, on any number of threads, and keeps its
// mode.
void test_float_mode() {
  const Matrix m = make_matrix({WeightFormat::kInt4Group32, ScaleType::kF32, 32, 1, 96, 64, false, false}, 73);
  const std::int64_t rows = 40;
  auto x = random_values(static_cast<std::size_t>(rows * 64), 79);
  for (auto& v : x) v *= 1e-36f;
  const std::uint64_t usual = float_mode();
  set_thread_count(1);
  const auto expected = run_linear(active_kernels(), m, x, rows);
  int subnormal = 0;
  for (const float v : expected) subnormal += std::fpclassify(v) == FP_SUBNORMAL ? 1 : 0;
  check(subnormal > 0, "there are subnormal results");
  for (const int threads : {1, 2, 3}) {
    set_thread_count(threads);
    set_float_mode(usual | kFlush);
    const auto got = run_linear(active_kernels(), m, x, rows);
    const std::uint64_t after = float_mode();
    set_float_mode(usual);
    check(same_bits(got.data(), expected.data(), got.size() * 4), "flushing changes no bit");
    check(after == (usual | kFlush), "the caller's mode is restored");
  }
  set_thread_count(0);
}
#else
void test_float_mode() {}
#endif

// Attention of one token: every kernel and thread count gives the scalar kernel's bits, and those are near the truth.
void test_attention() {
  struct Case {
    std::int64_t batch, heads, kv_heads, tokens, depth, value_depth;
    bool masked, sunk;
  };
  for (const Case& c : {Case{1, 8, 2, 300, 128, 128, false, false}, Case{2, 3, 3, 1, 16, 16, true, false},
                        Case{1, 5, 1, 129, 40, 24, true, true}, Case{3, 4, 2, 17, 33, 50, false, true},
                        Case{1, 32, 4, 640, 64, 64, true, false}, Case{2, 4, 2, 16, 16, 16, true, true}}) {
    const auto kv = static_cast<std::size_t>(c.batch * c.kv_heads * c.tokens * c.depth);
    const auto kv_out = static_cast<std::size_t>(c.batch * c.kv_heads * c.tokens * c.value_depth);
    const auto rows = static_cast<std::size_t>(c.batch * c.heads * c.depth);
    const auto out_size = static_cast<std::size_t>(c.batch * c.heads * c.value_depth);
    const auto query = random_values(rows, 1), keys = random_values(kv, 2), values = random_values(kv_out, 3);
    auto mask = random_values(static_cast<std::size_t>(c.batch * c.tokens), 4);
    if (c.tokens > 2) mask[1] = -INFINITY;
    const auto sinks = random_values(static_cast<std::size_t>(c.heads), 5);
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      const std::size_t element = type == DType::kF32 ? 4 : 2;
      std::vector<std::uint8_t> q(rows * element), k(kv * element), v(kv_out * element), expected(out_size * element);
      scalar().store_row(query.data(), static_cast<std::int64_t>(rows), type, q.data());
      scalar().store_row(keys.data(), static_cast<std::int64_t>(kv), type, k.data());
      scalar().store_row(values.data(), static_cast<std::int64_t>(kv_out), type, v.data());
      AttentionCall call{type,
                         c.batch,
                         c.heads,
                         c.kv_heads,
                         c.tokens,
                         c.depth,
                         c.value_depth,
                         q.data(),
                         k.data(),
                         v.data(),
                         c.masked ? mask.data() : nullptr,
                         c.sunk ? sinks.data() : nullptr,
                         0.3f,
                         expected.data()};
      set_thread_count(1);
      attend(scalar(), call);
      for (const IsaEntry& e : instruction_sets()) {
        for (const int threads : {1, 2, 3}) {
          if (!e.supported) continue;
          std::vector<std::uint8_t> out(expected.size());
          call.out = out.data();
          set_thread_count(threads);
          attend(*e.kernels, call);
          check(out == expected, std::string(e.name) + " attention of " + std::to_string(c.tokens) + " tokens");
        }
      }
      if (type != DType::kF32) continue;
      const std::int64_t share = c.heads / c.kv_heads;
      double worst = 0;
      for (std::int64_t r = 0; r < c.batch * c.heads; ++r) {
        const std::int64_t group = (r / c.heads) * c.kv_heads + (r % c.heads) / share;
        std::vector<double> weight(static_cast<std::size_t>(c.tokens));
        double total = c.sunk ? std::exp(static_cast<double>(sinks[static_cast<std::size_t>(r % c.heads)])) : 0.0;
        for (std::int64_t t = 0; t < c.tokens; ++t) {
          double score = c.masked ? mask[static_cast<std::size_t>(r / c.heads * c.tokens + t)] : 0.0;
          for (std::int64_t i = 0; i < c.depth; ++i) {
            score += 0.3 * query[static_cast<std::size_t>(r * c.depth + i)] *
                     keys[static_cast<std::size_t>((group * c.tokens + t) * c.depth + i)];
          }
          weight[static_cast<std::size_t>(t)] = std::exp(score);
          total += weight[static_cast<std::size_t>(t)];
        }
        for (std::int64_t i = 0; i < c.value_depth; ++i) {
          double sum = 0;
          for (std::int64_t t = 0; t < c.tokens; ++t) {
            sum += weight[static_cast<std::size_t>(t)] / total *
                   values[static_cast<std::size_t>((group * c.tokens + t) * c.value_depth + i)];
          }
          float got;
          std::memcpy(&got, expected.data() + (r * c.value_depth + i) * 4, 4);
          worst = std::max(worst, std::fabs(got - sum));
        }
      }
      check(worst < 2e-5, "attention is " + std::to_string(worst) + " from the truth");
    }
  }
  set_thread_count(0);
}

// Logits of a router: the same bits everywhere.
void test_router_logits() {
  for (const std::int64_t depth : {7, 64, 200}) {
    for (const std::int64_t tokens : {1, 3, 6}) {
      const std::int64_t experts = 37;
      const auto x = random_values(static_cast<std::size_t>(tokens * depth), 5);
      const auto w = random_values(static_cast<std::size_t>(experts * depth), 6);
      const auto bias = random_values(static_cast<std::size_t>(experts), 7);
      std::vector<float> expected(static_cast<std::size_t>(tokens * experts)), out(expected);
      LogitsCall call{DType::kF32, x.data(), w.data(),    bias.data(),    tokens,
                      experts,     depth,    DType::kF32, expected.data()};
      router_logits(scalar(), call);
      call.logits = out.data();
      for (const Kernels* k : other_kernels()) {
        router_logits(*k, call);
        check(same_bits(out.data(), expected.data(), out.size() * 4), std::string(k->name) + " router logits");
      }
      double worst = 0;
      for (std::int64_t i = 0; i < tokens * experts; ++i) {
        double sum = bias[static_cast<std::size_t>(i % experts)];
        for (std::int64_t d = 0; d < depth; ++d) {
          sum += static_cast<double>(x[static_cast<std::size_t>(i / experts * depth + d)]) *
                 w[static_cast<std::size_t>(i % experts * depth + d)];
        }
        worst = std::max(worst, std::fabs(expected[static_cast<std::size_t>(i)] - sum));
      }
      check(worst < 1e-4, "router logits are " + std::to_string(worst) + " from the truth");
    }
  }
}

// Root-mean-square norms of rows of every length and type: the same bits everywhere, near the truth.
void test_norms() {
  for (int count = 1; count < 150; count += count < 40 ? 1 : 13) {
    const auto x = random_values(static_cast<std::size_t>(count), static_cast<unsigned>(count));
    const auto w = random_values(static_cast<std::size_t>(count), 99);
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      const std::size_t bytes = static_cast<std::size_t>(count) * static_cast<std::size_t>(size_of(type));
      std::vector<std::uint8_t> xs(bytes), ws(bytes), expected(bytes), out(bytes);
      scalar().store_row(x.data(), count, type, xs.data());
      scalar().store_row(w.data(), count, type, ws.data());
      for (const bool round_first : {false, true}) {
        scalar().normalize_row({xs.data(), ws.data(), type, count, 1e-6f, round_first, expected.data()});
        for (const Kernels* k : other_kernels()) {
          k->normalize_row({xs.data(), ws.data(), type, count, 1e-6f, round_first, out.data()});
          check(out == expected, std::string(k->name) + " norm of " + std::to_string(count));
        }
      }
      if (type != DType::kF32) continue;
      double mean = 0, worst = 0;
      for (const float v : x) mean += static_cast<double>(v) * v / count;
      for (int i = 0; i < count; ++i) {
        float got;
        std::memcpy(&got, expected.data() + i * 4, 4);
        const auto at = static_cast<std::size_t>(i);
        worst = std::max(worst, std::fabs(got - x[at] / std::sqrt(mean + 1e-6) * w[at]));
      }
      check(worst < 1e-5, "a norm is " + std::to_string(worst) + " from the truth");
    }
  }
  const std::int64_t rows = 300, width = 130;  // enough for threads
  const auto x = random_values(static_cast<std::size_t>(rows * width), 3);
  const auto w = random_values(static_cast<std::size_t>(width), 5);
  std::vector<float> expected(x.size()), out(x.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    scalar().normalize_row(
        {x.data() + r * width, w.data(), DType::kF32, width, 1e-6f, false, expected.data() + r * width});
  }
  for (const int threads : {1, 2, 3}) {
    set_thread_count(threads);
    rms_norm(scalar(), {DType::kF32, rows, width, x.data(), w.data(), 1e-6f, false, out.data()});
    check(out == expected, "norms on " + std::to_string(threads) + " threads");
  }
  set_thread_count(0);
}

// A token with a NaN comes out as NaN and leaves the others as they were.
void test_nan_stays_in_its_token() {
  const Layer layer = make_layer(128, 64, 4, 32, "int4", true, false);
  const std::int64_t tokens = 5;
  auto x = random_values(static_cast<std::size_t>(tokens * 128), 47);
  const std::vector<std::int32_t> ids = {0, 1, 0, 1, 2, 3, 0, 3, 1, 2};
  const std::vector<float> weights(ids.size(), 0.5f);
  const auto clean = run_layer(active_kernels(), layer, x, DType::kF32, ids, weights, tokens, {}, false);
  for (const float poison : {NAN, INFINITY, -INFINITY}) {
    x[2 * 128 + 5] = poison;
    const auto got = run_layer(active_kernels(), layer, x, DType::kF32, ids, weights, tokens, {}, false);
    bool ok = true;
    for (std::size_t i = 0; i < got.size(); ++i) ok = ok && (i / 128 == 2 ? got[i] != got[i] : got[i] == clean[i]);
    check(ok, "a poisoned token touches no other");
  }
}

// Several callers at once, with thread counts that change, get what one caller gets.
void test_callers() {
  const Layer layer = make_layer(128, 64, 6, 32, "int4", true, false);
  const std::int64_t tokens = 12;
  const auto x = random_values(static_cast<std::size_t>(tokens * 128), 53);
  std::vector<std::int32_t> ids;
  for (int i = 0; i < tokens * 2; ++i) ids.push_back(i % 6);
  const std::vector<float> weights(ids.size(), 0.25f);
  const auto expected = run_layer(active_kernels(), layer, x, DType::kF32, ids, weights, tokens, {}, false);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&, c] {
      for (int i = 0; i < 40; ++i) {
        if (i % 10 == c) set_thread_count(1 + (i + c) % 4);
        const auto got = run_layer(active_kernels(), layer, x, DType::kF32, ids, weights, tokens, {}, false);
        if (got != expected) wrong.fetch_add(1);
      }
    });
  }
  for (auto& caller : callers) caller.join();
  set_thread_count(0);
  check(wrong.load() == 0, "concurrent callers agree");
}

template <class Call>
bool refused(Call&& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

// Damaged, truncated and foreign bytes are refused.
void test_packed_bytes() {
  const Matrix m = make_matrix(make_layer(128, 64, 2, 32, "int4", true, false).gate_up.spec, 59);
  for (std::size_t i = 0; i < 64; ++i) {
    auto blob = m.blob;
    blob[i] ^= 0x5A;
    check(refused([&] { open_packed(blob.data(), static_cast<std::int64_t>(blob.size()), "blob"); }), "damaged header");
  }
  for (const std::size_t size : {std::size_t{0}, std::size_t{63}, std::size_t{64}, m.blob.size() - 1}) {
    check(refused([&] { open_packed(m.blob.data(), static_cast<std::int64_t>(size), "blob"); }), "truncated");
  }
  const ScaleType f32 = ScaleType::kF32;
  check(refused([&] { choose_format("int4", 48, false, "m"); }) &&
            refused([&] { choose_format("int8", 32, true, "m"); }) &&
            refused([&] { choose_format("fp4", 64, false, "m"); }),
        "formats that there are not");
  check(refused([&] { layout_of({WeightFormat::kInt4Group64, f32, 64, 1, 32, 96, false, false}, "m"); }), "64 in 96");
  check(refused([&] { layout_of({WeightFormat::kInt4, f32, 0, 1, 32, 1 << 20, false, false}, "m"); }), "deep");
  check(refused([&] { layout_of({WeightFormat::kInt4, f32, 32, 1, 32, 96, false, false}, "m"); }) &&
            refused([&] { layout_of({WeightFormat::kInt4Group32, f32, 64, 1, 32, 64, false, false}, "m"); }),
        "a format that does not go with its group");
  check(refused([&] { layout_of({static_cast<WeightFormat>(77), f32, 0, 1, 32, 64, false, false}, "m"); }) &&
            refused(
                [&] { layout_of({WeightFormat::kInt8, static_cast<ScaleType>(9), 0, 1, 32, 64, false, false}, "m"); }),
        "numbers that stand for nothing");
}

// One list of formats: every instruction set has a row for each, in its place, and all rows pack alike.
void test_formats() {
  for (int i = 0; i < kFormatCount; ++i) {
    const FormatInfo& f = kWeightFormats[i];
    check(find_format(static_cast<std::uint32_t>(f.id)) == &f && static_cast<int>(f.id) == i + 1, f.name);
    for (const IsaEntry& e : instruction_sets()) {
      if (e.kernels == nullptr) continue;
      const FormatKernels& row = e.kernels->of(f.id);
      bool whole = row.weights == f.id && row.codec == scalar().of(f.id).codec && row.multiply != nullptr;
      for (const RowFormat rows : {RowFormat::kBytes, RowFormat::kWords}) {
        const Epilogues& epilogues = row.with(rows);
        whole = whole && epilogues.start != nullptr && epilogues.finish != nullptr && epilogues.activate != nullptr &&
                epilogues.combine != nullptr && e.kernels->of(rows).format == rows;
      }
      check(whole, std::string(e.name) + " " + f.name);
    }
  }
  check(find_format(0u) == nullptr && find_format("int4", 96) == find_format("int4", 32), "look-up of formats");
}

// What was packed comes back to the bit, for every format, odd sizes, gated rows and biases.
void test_unpacking() {
  std::vector<PackedSpec> specs = linear_specs();
  for (const char* element : {"int4", "int8"}) {
    for (const bool bias : {false, true}) specs.push_back(make_layer(160, 96, 3, 0, element, true, bias).gate_up.spec);
  }
  specs.push_back(make_layer(192, 96, 2, 96, "int4", true, true).gate_up.spec);
  specs.push_back(make_layer(192, 96, 2, 0, "int4", true, true, RowFormat::kWords, true).gate_up.spec);
  specs.push_back(make_layer(192, 96, 3, 32, "int4", true, false, RowFormat::kWords, false, 2).gate_up.spec);
  for (const PackedSpec& spec : specs) {
    const Matrix m = make_matrix(spec, 97);
    std::vector<std::int8_t> values(m.values.size(), 99);
    std::vector<std::int8_t> zeros(m.zeros.size());
    std::vector<std::int32_t> orders(m.orders.size());
    std::vector<std::uint8_t> byte_scales(m.byte_scales.size());
    std::vector<float> scales(m.scales.size()), factors(m.factors.size()), bias(m.bias.size());
    std::vector<UnpackTarget> targets;
    const bool bytes = !byte_scales.empty();
    for (std::int64_t e = 0; e < spec.experts; ++e) {
      const std::int64_t row = e * spec.columns, group = row * spec.groups();
      UnpackTarget target{};
      target.values = values.data() + row * spec.depth;
      target.scales = bytes ? static_cast<void*>(byte_scales.data() + group) : scales.data() + group;
      target.scale_type = DType::kF32;
      target.zeros = zeros.data() + group;
      target.factors = factors.data() + row;
      target.bias = bias.data() + row;
      target.input_order = spec.input_orders == 0 ? nullptr : orders.data() + e * spec.input_orders * spec.depth;
      targets.push_back(target);
    }
    unpack_experts(m.packed, 0, targets.data(), spec.experts, "matrix");
    check(values == m.values && (bytes || scales == m.scales) && byte_scales == m.byte_scales && zeros == m.zeros &&
              factors == m.factors && bias == m.bias && orders == m.orders,
          "unpacked " + describe(spec, "", 0));
    check(refused([&] { unpack_experts(m.packed, spec.experts, targets.data(), 1, "matrix"); }), "too many experts");
  }
}

// Sums that are given in fp32 are those that would be rounded.
void test_fp32_results() {
  const Layer layer = make_layer(128, 64, 4, 32, "int4", true, false);
  const std::int64_t tokens = 5;
  const auto wide = random_values(static_cast<std::size_t>(tokens * 128), 101);
  std::vector<std::uint16_t> x(wide.size()), rounded(wide.size()), expected(wide.size());
  scalar().store_row(wide.data(), static_cast<std::int64_t>(wide.size()), DType::kBF16, x.data());
  const std::vector<std::int32_t> ids = {0, 1, 2, 3, 1, 0, 3, 2, 0, 2};
  const std::vector<float> weights(ids.size(), 0.4f);
  for (const IsaEntry& e : instruction_sets()) {
    if (!e.supported) continue;
    expected = run_layer(*e.kernels, layer, x, DType::kBF16, ids, weights, tokens, {}, false);
    std::vector<float> sums(wide.size());
    moe_forward(*e.kernels, {layer.gate_up.packed,
                             layer.down.packed,
                             x.data(),
                             DType::kBF16,
                             DType::kF32,
                             tokens,
                             2,
                             ids.data(),
                             weights.data(),
                             false,
                             {},
                             sums.data()});
    e.kernels->store_row(sums.data(), static_cast<std::int64_t>(sums.size()), DType::kBF16, rounded.data());
    check(rounded == expected, std::string("fp32 sums on ") + e.name);
  }
}

void test_measuring() {
  const std::vector<std::uint8_t> data(1 << 20, 1);
  for (const IsaEntry& e : instruction_sets()) {
    if (!e.supported) continue;
    check(read_rate(*e.kernels, data.data(), static_cast<std::int64_t>(data.size())) > 0 &&
              dot_rate(*e.kernels, 1000) > 0,
          std::string("rates of ") + e.name);
  }
}

void test_routing() {
  for (const IsaEntry& e : instruction_sets()) {
    if (!e.supported) continue;
    const auto logits = random_values(40 * 24, 61);
    RouteCall call{};
    call.logits = logits.data();
    call.type = DType::kF32;
    call.tokens = 40;
    call.experts = 24;
    call.topk = 4;
    call.scoring = Scoring::kSigmoid;
    call.groups = 4;
    call.topk_groups = 2;
    const auto bias = random_values(24, 67);
    call.bias = bias.data();
    call.renormalize = true;
    call.scale = 2.5f;
    std::vector<std::int32_t> ids(160), ids_scalar(160);
    std::vector<float> weights(160), weights_scalar(160);
    call.ids = ids_scalar.data();
    call.weights = weights_scalar.data();
    route(scalar(), call);
    call.ids = ids.data();
    call.weights = weights.data();
    route(*e.kernels, call);
    check(ids == ids_scalar && weights == weights_scalar, std::string("routing on ") + e.name);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  if (only == "isa") {  // the instruction set that would be used here
    std::printf("%s\n", active_kernels().name);
    return 0;
  }
  for (const IsaEntry& e : instruction_sets()) {
    std::printf("%-12s %s\n", e.name, e.supported ? "tested" : e.reason.c_str());
  }
  const std::vector<std::pair<std::string, std::function<void()>>> tests = {
      {"rowwise", test_rowwise},        {"kernels", test_linear_kernels}, {"rows", test_many_rows},
      {"meaning", test_linear_meaning}, {"layers", test_layers},          {"nan", test_nan_stays_in_its_token},
      {"callers", test_callers},        {"packed", test_packed_bytes},    {"routing", test_routing},
      {"attention", test_attention},    {"logits", test_router_logits},   {"norms", test_norms},
      {"extremes", test_extremes},      {"mode", test_float_mode},        {"formats", test_formats},
      {"unpacking", test_unpacking},    {"fp32", test_fp32_results},      {"measuring", test_measuring}};
  for (const auto& [name, test] : tests) {
    if (only.empty() || only == name) test();
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
