// What works along rows: preparing, converting, scoring, activations; special values and every magnitude.
#include "runtime/threads.h"
#include "tests/matrices.h"
#include "tests/prepared_row.h"
#include "tests/tests.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cpumoe::tests {
namespace {

// Finite numbers of every magnitude, the subnormal ones included.
std::vector<float> random_bits(std::size_t count, Random& random) {
  std::vector<float> values(count);
  for (auto& v : values) {
    do {
      const std::uint32_t bits = random.bits();
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
      .activate({layout, head.data(), acc.data(), kTileRows, 1, 0, scale.data(), scale.data(), zero.data()}, spec,
                out.data(), kBlockColumns);
  return out;
}

// All that rows are held as.
const std::vector<RowFormat> kPreparedRows = [] {
  std::vector<RowFormat> formats;
  for (int i = 0; i < kRowFormatCount; ++i) {
    if (static_cast<RowFormat>(i) != RowFormat::kFloat) formats.push_back(static_cast<RowFormat>(i));
  }
  return formats;
}();

std::string row_name(RowFormat format) { return std::to_string(static_cast<int>(format)); }

// The range of values from which on a row of integers has a scale that is a normal number of fp32.
float smallest_range(RowFormat format) { return (format == RowFormat::kBytes ? 255.0f : 65535.0f) * 0x1p-126f; }

// The smallest and the largest value of a row, 0 among them.
struct Extremes {
  float low = 0.0f, high = 0.0f;

  explicit Extremes(const std::vector<float>& row, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      low = std::min(low, row[i]);
      high = std::max(high, row[i]);
    }
  }
  float range() const { return high - low; }
};

// A row of integers is off by a step at most, or a row of zeros if its scale would be subnormal.
void check_integer_row(const PreparedRow& prepared, const std::vector<float>& row, const Extremes& extremes,
                       std::size_t count, const std::string& what) {
  const bool zeros = extremes.range() < smallest_range(prepared.format);
  const double steps = prepared.format == RowFormat::kBytes ? 255 : 65535;
  const double step = (static_cast<double>(extremes.high) - static_cast<double>(extremes.low)) / steps;
  double worst = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double value = prepared.at(static_cast<std::int64_t>(i));
    worst = std::max(worst, zeros ? std::fabs(value) : std::fabs(value - static_cast<double>(row[i])));
  }
  check(zeros ? prepared.scale.scale == 0.0f : prepared.scale.scale >= 0x1p-126f, what + ": scale of the row");
  check(zeros ? worst == 0 : worst <= 1.01 * step, what + (zeros ? ": not zeros" : ": off by more than a step"));
}

// Rows of integers around the smallest range, of every type that holds such numbers, on every instruction set.
void check_smallest_ranges(RowFormat format, int count, Random& random) {
  const float limit = smallest_range(format);
  const auto size = static_cast<std::size_t>(count);
  const std::vector<float> zeros(size, 0.0f);
  const PreparedRow zero_row(scalar(), format, zeros.data(), DType::kF32, count);
  for (const float range : {0x1p-149f, 3e-43f, 0x1p-126f, 0.25f * limit, std::nextafter(limit, 0.0f), limit,
                            std::nextafter(limit, 1.0f), 1.5f * limit, 300.0f * limit}) {
    for (const float share : {0.0f, 0.5f, 1.0f}) {
      std::vector<float> row(size, -0.0f);
      for (float& v : row) v = random.below(8) == 0 ? -0.0f : random.uniform(-share * range, (1.0f - share) * range);
      row.front() = -share * range;
      if (share < 1.0f) row.back() = (1.0f - share) * range;
      std::vector<std::uint16_t> narrow(size);
      for (const DType type : {DType::kF32, DType::kBF16}) {
        if (type == DType::kBF16) {
          scalar().store_row(row.data(), count, type, narrow.data());
          scalar().load_row(narrow.data(), type, count, row.data());
        }
        const void* src = type == DType::kF32 ? static_cast<const void*>(row.data()) : narrow.data();
        const Extremes extremes(row, size);
        const PreparedRow prepared(scalar(), format, src, type, count);
        const bool tiny = extremes.range() < limit;
        check_integer_row(prepared, row, extremes, size, "a row near the smallest range");
        check(!tiny || prepared == zero_row, "a row below the smallest range is prepared as one of zeros");
        // A part of a row is zeros if the whole row is.
        const float inside[2] = {extremes.low, std::nextafter(extremes.low + limit, 0.0f)};
        const float wide[2] = {extremes.low, extremes.low + 4.0f * limit};
        const PreparedRow part(scalar(), format, src, type, count, 0.0f, wide);
        check(part.scale.scale >= 0x1p-126f, "the range of the whole row decides: not zeros");
        for (const Kernels* k : other_kernels()) {
          const std::string what = std::string(k->name) + " row near the smallest range, type " + row_name(format);
          check(PreparedRow(*k, format, src, type, count) == prepared, what);
          check(PreparedRow(*k, format, src, type, count, 0.0f, wide) == part, what + ", part");
          if (tiny && extremes.low == 0.0f) {
            check(PreparedRow(*k, format, src, type, count, 0.0f, inside) == zero_row, what + ", part of zeros");
          }
        }
      }
      for (const float broken : {NAN, INFINITY, -INFINITY}) {
        row[random.below(static_cast<std::uint32_t>(size))] = broken;
        const PreparedRow prepared(scalar(), format, row.data(), DType::kF32, count);
        check(std::isnan(prepared.scale.scale), "a small row with a NaN or an infinity is NaN");
        for (const Kernels* k : other_kernels()) {
          check(PreparedRow(*k, format, row.data(), DType::kF32, count) == prepared,
                std::string(k->name) + " small row with a NaN or an infinity");
        }
      }
    }
  }
}

// Products with rows around the smallest range: those below it are zeros whatever the weights are, a NaN stays in its
// row.
void check_smallest_products(WeightFormat weights, RowFormat format, std::int64_t rows) {
  constexpr std::int64_t kDepth = 96;
  PackedSpec spec{weights, ScaleType::kF32, traits_of(weights).subgroup, 1, 40, kDepth, false, false};
  spec.rows = format;
  const Matrix m = make_matrix(spec, 97);
  const float limit = smallest_range(format);
  auto x = random_values(static_cast<std::size_t>(rows * kDepth), 101);
  enum Kind { kBelow, kAt, kNan };
  const auto kind_of = [](std::int64_t row) { return static_cast<Kind>(row % 3); };
  for (std::int64_t row = 0; row < rows; ++row) {
    float* values = x.data() + row * kDepth;
    for (std::int64_t i = 0; i < kDepth; ++i) values[i] = std::max(-0.4f, std::min(0.5f, 0.1f * values[i])) * limit;
    values[row] = -0.4f * limit;
    values[row + 1] = (kind_of(row) == kBelow ? 0.59f : 0.61f) * limit;
    if (kind_of(row) == kNan) values[row + 2] = NAN;
  }
  const auto expected = run_linear(scalar(), m, x, rows);
  bool right = true;
  for (std::int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (std::int64_t column = 0; column < spec.columns; ++column) {
      const float v = expected[static_cast<std::size_t>(row * spec.columns + column)];
      sum += std::fabs(static_cast<double>(v));
      right = right && (kind_of(row) == kNan ? std::isnan(v) : kind_of(row) == kBelow ? v == 0.0f : std::isfinite(v));
    }
    right = right && (kind_of(row) != kAt || sum > 0);
  }
  check(right, describe(spec, "scalar", rows) + ": zeros below the smallest range, numbers from it on, NaN stays NaN");
  for (const Kernels* k : other_kernels()) {
    check(same_numbers(run_linear(*k, m, x, rows), expected, expected.size()),
          describe(spec, k->name, rows) + " near the smallest range");
  }
}

// Rows of small floats and of floats may have subnormal scales, which every instruction set multiplies with alike.
void check_subnormal_scales(WeightFormat weights, RowFormat format) {
  constexpr std::int64_t kRows = 3, kDepth = 256;
  PackedSpec spec{weights, ScaleType::kF32, traits_of(weights).subgroup, 1, 40, kDepth, false, false};
  spec.rows = format;
  const Matrix m = make_matrix(spec, 103);
  for (const float unit : {1e-35f, 0x1p-122f, 0x1p-126f, 1e-40f, 1e-43f}) {
    auto x = random_values(static_cast<std::size_t>(kRows * kDepth), 107);
    for (float& v : x) v *= unit;
    const auto expected = run_linear(scalar(), m, x, kRows);
    for (const Kernels* k : other_kernels()) {
      check(same_numbers(run_linear(*k, m, x, kRows), expected, expected.size()),
            describe(spec, k->name, kRows) + " with a subnormal scale");
    }
  }
}

// How far a value may be from its input: a share of it, and of the largest one that it shares a scale with.
struct Tolerance {
  double share, of_largest;
};

Tolerance tolerance_of(RowFormat format) {
  switch (format) {
    case RowFormat::kFp8:
    case RowFormat::kFp8Group128: return {0.0626, 1.01 / 448 / 1024};
    case RowFormat::kMxfp4: return {0.26, 0.126};
    case RowFormat::kMxfp6E3M2: return {0.13, 1.0 / 256};
    case RowFormat::kMxfp6E2M3: return {0.07, 1.0 / 60};
    case RowFormat::kMxfp8: return {0.0626, 1.0 / 448 / 512};
    case RowFormat::kBF16: return {0x1.01p-8, 0x1p-59};
    case RowFormat::kBF16Pair: return {0x1.1p-17, 0x1p-59};
    default: return {0.0, 0.0};
  }
}

}  // namespace

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
        for (const RowFormat rows : kPreparedRows) {
          check(PreparedRow(scalar(), rows, src, type, count, 0.02f) == PreparedRow(*k, rows, src, type, count, 0.02f),
                std::string(k->name) + " prepared row of " + std::to_string(count) + " type " + row_name(rows));
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

// The whole of fp32: rows, scores and activations have the scalar kernel's bits, and its scores are near the truth.
void test_extremes() {
  Random random(71);
  for (const RowFormat format : {RowFormat::kBytes, RowFormat::kWords}) {
    for (const int count : {1, 2, 7, 16, 64, 130}) check_smallest_ranges(format, count, random);
    for (const WeightFormat weights :
         {WeightFormat::kInt4, WeightFormat::kInt4Group32, WeightFormat::kInt8, WeightFormat::kInt8Group32,
          WeightFormat::kInt4ZeroGroup32, WeightFormat::kFp4Group32}) {
      for (const std::int64_t rows : {1, 3, 40}) check_smallest_products(weights, format, rows);
    }
  }
  for (const RowFormat format : {RowFormat::kFp8, RowFormat::kFp8Tensor, RowFormat::kFloat}) {
    check_subnormal_scales(WeightFormat::kE4M3, format);
  }
  check_subnormal_scales(WeightFormat::kE4M3Tile128, RowFormat::kFp8Group128);
  check_subnormal_scales(WeightFormat::kE4M3Group32, RowFormat::kMxfp8);
  check_subnormal_scales(WeightFormat::kFp4Group32, RowFormat::kMxfp4);
  for (int round = 0; round < 300; ++round) {
    auto x = random_bits(kAccTileFloats, random);
    if (round % 2 == 0) {  // where exp and sigmoid end
      for (std::size_t i = 0; i < x.size(); i += 2) x[i] = random.uniform(-220.0f, 110.0f);
    }
    auto row = x;  // a few powers of two apart, anywhere
    const float unit = std::ldexp(1.0f, random.integer(-149, 126));
    for (std::size_t i = 0; i < row.size() && round % 3 != 0; ++i) row[i] = std::fmod(x[i], 1.99f) * unit;
    const int count = random.integer(1, 200);
    for (const RowFormat format : {RowFormat::kBytes, RowFormat::kWords}) {
      const PreparedRow prepared(scalar(), format, row.data(), DType::kF32, count);
      const auto size = static_cast<std::size_t>(count);
      check_integer_row(prepared, row, Extremes(row, size), size, "a row of any magnitude");
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

// Rows of floats, anywhere in fp32: the same bits everywhere, and near what they stand for.
void test_float_rows() {
  Random random(89);
  for (int round = 0; round < 200; ++round) {
    const int count = random.integer(1, 300);
    const float unit = std::ldexp(1.0f, random.integer(-110, 109));
    auto row = random_values(static_cast<std::size_t>(count), static_cast<unsigned>(round));
    for (float& v : row) v *= unit * std::ldexp(1.0f, -random.integer(0, round % 3 == 0 ? 39 : 5));
    for (const RowFormat format : kPreparedRows) {
      const float stored = unit * 0.01f;
      const PreparedRow prepared(scalar(), format, row.data(), DType::kF32, count, stored);
      for (const Kernels* k : other_kernels()) {
        check(PreparedRow(*k, format, row.data(), DType::kF32, count, stored) == prepared,
              std::string(k->name) + " row of floats, type " + row_name(format));
      }
      const Tolerance tolerance = tolerance_of(format);
      if (tolerance.share == 0.0 && format != RowFormat::kF32) continue;
      const RowTraits traits = traits_of(format);
      const int group = traits.record_scales                                         ? 128
                        : format >= RowFormat::kMxfp4 && format <= RowFormat::kMxfp8 ? 32
                                                                                     : count;
      for (int i = 0; i < count; ++i) {
        double largest = 0;
        for (int j = i / group * group; j < std::min(count, i / group * group + group); ++j) {
          largest = std::max(largest, std::fabs(static_cast<double>(row[static_cast<std::size_t>(j)])));
        }
        const double x = row[static_cast<std::size_t>(i)];
        check(std::fabs(prepared.at(i) - x) <= tolerance.share * std::fabs(x) + tolerance.of_largest * largest,
              "a value of a row of type " + row_name(format) + " is off: " + std::to_string(prepared.at(i) / x));
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
// mode. Every fourth row is below the smallest range and gives zeros in both modes.
void test_float_mode() {
  const Matrix m = make_matrix({WeightFormat::kInt4Group32, ScaleType::kF32, 32, 1, 96, 64, false, false}, 73);
  const std::int64_t rows = 40;
  auto x = random_values(static_cast<std::size_t>(rows * 64), 79);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] *= i / 64 % 4 == 3 ? 1e-37f : 2e-36f;
  const std::uint64_t usual = float_mode();
  set_thread_count(1);
  const auto expected = run_linear(active_kernels(), m, x, rows);
  int subnormal = 0;
  bool zeros = true;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    subnormal += std::fpclassify(expected[i]) == FP_SUBNORMAL ? 1 : 0;
    zeros = zeros && (i / 96 % 4 != 3 || expected[i] == 0.0f);
  }
  check(subnormal > 0, "there are subnormal results");
  check(zeros, "rows below the smallest range give zeros");
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

}  // namespace cpumoe::tests
