// Linears and layers: every kernel against the scalar one, the scalar one against double arithmetic, and the threads.
#include <atomic>
#include <thread>

#include "runtime/threads.h"
#include "tests/matrices.h"
#include "tests/prepared_row.h"
#include "tests/tests.h"

namespace cpumoe::tests {

namespace {

// Every kernel against the scalar one.
void check_linear(const Matrix& m, const std::vector<float>& x, std::int64_t rows) {
  const auto expected = run_linear(scalar(), m, x, rows);
  for (const Kernels* k : other_kernels()) {
    const auto got = run_linear(*k, m, x, rows);
    const bool right = rounds_otherwise(*k, m.spec, type_of_rows(m.spec, rows), rows)
                           ? distance(got, expected) < 1e-6
                           : same_bits(expected.data(), got.data(), got.size() * 4);
    check(right, "linear " + describe(m.spec, k->name, rows));
  }
}

}  // namespace

void test_linear_kernels() {
  for (const PackedSpec& spec : linear_specs()) {
    const Matrix m = make_matrix(spec, 7);
    for (const std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 15, 16, 17, 31, 40, 130}) {
      if (rows > 17 && spec.depth > 800) continue;
      // Where there are two rows for each, up to 7 are few, more come in tiles.
      if (spec.rows != RowFormat::kBytes && rows != 1 && rows != 3 && rows != 7 && rows != 8 && rows != 17) continue;
      const auto x = random_values(static_cast<std::size_t>(rows * spec.depth), 11);
      check_linear(m, x, rows);
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
        if (spec.rows >= RowFormat::kFp8Static && spec.rows != RowFormat::kFp8Group128 &&
            spec.rows != RowFormat::kFloat) {
          continue;  // multiplied like others
        }
        std::vector<std::int64_t> counts = {33, 65, 81, 97, 113, 128, 129, 257};
        if (!bytes) counts = {20, 65, 113};
        if (depth != 384) counts = {129};
        const bool first = bytes && spec.weights <= WeightFormat::kInt8;
        if (depth != 384 && !first && spec.rows != RowFormat::kFp8Group128) continue;
        if (bytes && spec.weights > WeightFormat::kInt8) counts = {33, 113, 128};
        for (const std::int64_t rows : counts) {
          const auto x = random_values(static_cast<std::size_t>(rows * depth), 5);
          check_linear(m, x, rows);
        }
      }
    }
  }
}

// Many rows of bf16 numbers on AMX: the order of sums is that of tdpbf16ps (float_products.h), bit for bit.
void test_order_of_tiles() {
  PackedSpec spec;
  spec.weights = WeightFormat::kBF16;
  spec.rows = RowFormat::kFloat;
  spec.experts = 1;
  spec.columns = 70;
  spec.depth = 384;
  const Matrix m = make_matrix(spec, 13);
  const std::int64_t rows = 37;
  auto x = random_values(static_cast<std::size_t>(rows * spec.depth), 17);
  for (float& v : x) v = as_bfloat(v);
  std::vector<float> expected;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t n = 0; n < spec.columns; ++n) {
      float total = 0.0f;
      for (std::int64_t run = 0; run < spec.depth; run += 32) {
        float sums[2] = {};
        for (std::int64_t i = run; i < run + 32; ++i) {
          sums[i / 2 % 2] += x[static_cast<std::size_t>(r * spec.depth + i)] *
                             m.floats[static_cast<std::size_t>(n * spec.depth + i)];  // the product is exact
        }
        total += sums[0] + sums[1];
      }
      expected.push_back(total);
    }
  }
  for (const Kernels* k : other_kernels()) {
    const auto got = run_linear(*k, m, x, rows);
    const bool tiles = rounds_otherwise(*k, spec, DType::kBF16, rows);
    check(same_bits(got.data(), expected.data(), got.size() * 4) == tiles, std::string(k->name) + " order of sums");
  }
}

// The same bits on any number of threads, also where they are not the scalar kernel's.
void test_threads_of_linears() {
  for (const std::int64_t group : {0, 32, 64, 128}) {
    for (PackedSpec spec : specs_of_group(group)) {
      spec.depth = 256;
      spec.columns = 200;
      const Matrix m = make_matrix(spec, 29);
      for (const std::int64_t rows : {16, 41}) {
        const auto x = random_values(static_cast<std::size_t>(rows * spec.depth), 31);
        for (const Kernels* k : other_kernels()) {
          if (!rounds_otherwise(*k, spec, type_of_rows(spec, rows), rows)) continue;
          set_thread_count(1);
          const auto expected = run_linear(*k, m, x, rows);
          for (const int threads : {2, 3}) {
            set_thread_count(threads);
            check(run_linear(*k, m, x, rows) == expected,
                  "threads " + std::to_string(threads) + " linear " + describe(spec, k->name, rows));
          }
        }
      }
    }
  }
  set_thread_count(0);
}

// The scalar kernel against double arithmetic on the same quantised inputs.
void test_linear_meaning() {
  for (const PackedSpec& spec : linear_specs()) {
    const Matrix m = make_matrix(spec, 19);
    const std::int64_t rows = 3;
    const auto x = random_values(static_cast<std::size_t>(rows * spec.depth), 23);
    const auto got = run_linear(scalar(), m, x, rows);
    std::vector<std::uint16_t> narrow(x.size());  // what run_linear gives as bf16 numbers
    scalar().store_row(x.data(), static_cast<std::int64_t>(x.size()), DType::kBF16, narrow.data());
    const DType type = spec.rows == RowFormat::kFloat ? DType::kBF16 : DType::kF32;
    const auto* inputs = type == DType::kBF16 ? reinterpret_cast<const std::uint8_t*>(narrow.data())
                                              : reinterpret_cast<const std::uint8_t*>(x.data());
    float stored = m.packed.input_scale(0, 0);
    if (spec.rows == RowFormat::kFp8Tensor) {
      for (const float v : x) stored = std::max(stored, std::fabs(v) / 448.0f);
    }
    double error = 0, norm = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      const PreparedRow row(scalar(), rows_for(m.spec, type), inputs + r * spec.depth * size_of(type), type, spec.depth,
                            stored);
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

void test_layers() {
  struct Case {
    std::int64_t hidden, inner, experts, group;
    const char* element;
    bool gated, bias;
    Activation activation;
    RowFormat rows = RowFormat::kBytes;
    bool zeros = false;
    int orders = 0;
  };
  const char *i4 = "int4", *i8 = "int8", *f4 = "fp4", *f8 = "fp8";
  constexpr RowFormat kWords = RowFormat::kWords, kBytes = RowFormat::kBytes;
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
      {128, 64, 5, 32, i4, true, false, Activation::kSilu, kWords},
      {64, 160, 70, 0, i4, true, true, Activation::kGeluTanh, kWords},
      {192, 96, 3, 32, i4, true, true, Activation::kGelu, kWords, true},
      {256, 128, 4, 128, i4, false, false, Activation::kRelu2, kBytes, true},
      {128, 96, 3, 32, i8, true, false, Activation::kSwigluStep, kWords},
      {256, 64, 70, 64, i8, true, true, Activation::kSilu},
      {160, 32, 3, 0, i8, false, true, Activation::kSilu, kWords},
      {96, 64, 5, 32, f4, true, true, Activation::kSwigluOai, kWords},
      {128, 96, 3, 16, f4, true, false, Activation::kSilu, kWords},
      {64, 128, 70, 16, f4, true, false, Activation::kSilu},
      {160, 96, 5, 32, i4, true, true, Activation::kSilu, kWords, false, 2},
      {192, 64, 70, 64, i4, true, false, Activation::kSilu, kWords, true, 2},
      {96, 160, 3, 32, i4, true, false, Activation::kGelu, kBytes, false, 1},
      {128, 96, 4, 32, i8, false, true, Activation::kRelu2, kWords, false, 1},
      {128, 64, 5, 0, f8, true, true, Activation::kSilu, RowFormat::kFp8},
      {192, 96, 70, 0, f8, true, false, Activation::kSilu, RowFormat::kFp8Static},
      {160, 32, 3, 0, f8, false, true, Activation::kRelu2, RowFormat::kFp8Tensor},
      {128, 64, 70, 0, f8, true, false, Activation::kSilu, RowFormat::kFp8Tensor},
      {256, 128, 4, 128, f8, true, true, Activation::kSilu, RowFormat::kFp8Group128},
      {384, 128, 70, 128, f8, true, false, Activation::kSilu, RowFormat::kFp8Group128},
      {256, 128, 3, 128, f8, true, false, Activation::kGelu, RowFormat::kFloat},
      {96, 64, 5, 32, f8, true, false, Activation::kSilu, RowFormat::kMxfp8},
      {128, 96, 5, 16, f4, true, true, Activation::kSilu, RowFormat::kNvfp4},
      {160, 96, 5, 32, f4, true, true, Activation::kSwigluOai, RowFormat::kMxfp4},
      {128, 256, 5, 128, i4, true, false, Activation::kSilu, RowFormat::kFp8},
      {160, 96, 3, 32, "fp6-e3m2", true, true, Activation::kSilu, RowFormat::kMxfp6E3M2},
      {96, 64, 3, 32, "fp6-e2m3", true, false, Activation::kSilu, RowFormat::kFloat},
      {160, 64, 3, 32, i8, true, false, Activation::kSilu, RowFormat::kFloat, true, 2},
      {96, 160, 4, 0, i8, true, true, Activation::kSilu, RowFormat::kBytesStatic},
      {160, 96, 5, 0, "bf16", true, true, Activation::kSwigluOai, RowFormat::kFloat},
      {96, 64, 70, 0, "fp16", true, false, Activation::kSilu, RowFormat::kFloat},
      {100, 64, 3, 0, "fp32", false, true, Activation::kGelu, RowFormat::kFloat},
  };
  for (const Case& c : cases) {
    const Layer layer =
        make_layer(c.hidden, c.inner, c.experts, c.group, c.element, c.gated, c.bias, c.rows, c.zeros, c.orders);
    for (const std::int64_t tokens : {1, 2, 9, 70, 300}) {
      if (tokens > 9 && c.hidden > 1000) continue;
      const bool later = c.rows != kBytes || c.zeros || c.orders != 0;  // cases that differ from earlier ones in this
      if ((tokens == 300 || tokens == 2) && later) continue;
      const std::int64_t topk = std::min<std::int64_t>(3, c.experts);
      const auto x = random_values(static_cast<std::size_t>(tokens * c.hidden), 41);
      Random random(43);
      std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * topk));
      std::vector<float> weights(ids.size());
      for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = random.integer(-1, static_cast<int>(c.experts) - 1);
        weights[i] = static_cast<float>(random.below(1000)) * 1e-3f;
      }
      ActivationSpec spec;
      spec.kind = c.activation;
      spec.gated = c.gated;
      const bool on_input = tokens == 9;
      set_thread_count(1);
      const auto expected = run_layer(scalar(), layer, x, DType::kF32, ids, weights, tokens, spec, on_input);
      for (const IsaEntry& e : instruction_sets()) {
        if (!e.supported) continue;
        auto of_this = expected;
        if (rounds_otherwise(*e.kernels, layer.gate_up.spec, DType::kF32, tokens * topk)) {
          set_thread_count(1);
          of_this = run_layer(*e.kernels, layer, x, DType::kF32, ids, weights, tokens, spec, on_input);
          // Between the matrices values are rounded to few bits; those of these layers all go the same way.
          check(distance(of_this, expected) < 1e-6, "layer " + describe(layer.gate_up.spec, e.name, tokens));
        }
        for (const int threads : {1, 2, 3}) {
          if (threads == 3 && (tokens > 70 || later)) continue;
          set_thread_count(threads);
          const auto got = run_layer(*e.kernels, layer, x, DType::kF32, ids, weights, tokens, spec, on_input);
          check(same_bits(of_this.data(), got.data(), got.size() * 4),
                "layer " + describe(layer.gate_up.spec, e.name, tokens) + " threads " + std::to_string(threads));
        }
      }
      set_thread_count(0);
    }
  }
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

}  // namespace cpumoe::tests
