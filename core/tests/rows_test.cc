// What works along rows: preparing, converting, scoring, activations; special values and every magnitude.
#include "../threads.h"
#include "matrices.h"
#include "prepared_row.h"
#include "tests.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cpumoe::tests {
namespace {

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

// Rows of floats, anywhere in fp32: the same bits everywhere, and near what they stand for.
void test_float_rows() {
  std::mt19937 random(89);
  for (int round = 0; round < 200; ++round) {
    const int count = 1 + static_cast<int>(random() % 300);
    const float unit = std::ldexp(1.0f, static_cast<int>(random() % 220) - 110);
    auto row = random_values(static_cast<std::size_t>(count), static_cast<unsigned>(round));
    for (float& v : row) v *= unit * std::ldexp(1.0f, -static_cast<int>(random() % (round % 3 == 0 ? 40 : 6)));
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

}  // namespace cpumoe::tests
