// Tests of routers, norms, linears of floats and measuring.
#include <numeric>

#include "ops/linear.h"
#include "ops/measure.h"
#include "ops/norm.h"
#include "ops/routing.h"
#include "runtime/threads.h"
#include "tests/harness.h"
#include "tests/tests.h"

namespace cpumoe::tests {

// Linears of floats, as routers are: the same bits everywhere.
void test_float_linears() {
  for (const std::int64_t depth : {7, 64, 200}) {
    for (const std::int64_t tokens : {1, 3, 6}) {
      const std::int64_t experts = 37;
      const auto x = random_values(static_cast<std::size_t>(tokens * depth), 5);
      const auto w = random_values(static_cast<std::size_t>(experts * depth), 6);
      const auto bias = random_values(static_cast<std::size_t>(experts), 7);
      std::vector<float> expected(static_cast<std::size_t>(tokens * experts)), out(expected);
      cpumoe::Matrix matrix;
      matrix.floats = w.data();
      matrix.bias = bias.data();
      matrix.columns = experts;
      matrix.depth = depth;
      linear_forward(scalar(), {matrix, x.data(), DType::kF32, DType::kF32, tokens, expected.data()});
      for (const Kernels* k : other_kernels()) {
        linear_forward(*k, {matrix, x.data(), DType::kF32, DType::kF32, tokens, out.data()});
        check(same_bits(out.data(), expected.data(), out.size() * 4), std::string(k->name) + " linear of floats");
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
      check(worst < 1e-4, "a linear of floats is " + std::to_string(worst) + " from the truth");
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
      std::vector<std::uint8_t> xs(bytes), expected(bytes), out(bytes);
      scalar().store_row(x.data(), count, type, xs.data());
      const bool plus_one = count % 2 == 0;
      for (const bool round_first : {false, true}) {
        scalar().normalize_row({xs.data(), w.data(), type, count, 1e-6f, round_first, plus_one, expected.data()});
        for (const Kernels* k : other_kernels()) {
          k->normalize_row({xs.data(), w.data(), type, count, 1e-6f, round_first, plus_one, out.data()});
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
        worst = std::max(worst, std::fabs(got - x[at] / std::sqrt(mean + 1e-6) * (w[at] + (plus_one ? 1.0 : 0.0))));
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
        {x.data() + r * width, w.data(), DType::kF32, width, 1e-6f, false, false, expected.data() + r * width});
  }
  for (const int threads : {1, 2, 3}) {
    set_thread_count(threads);
    rms_norm(scalar(), {DType::kF32, DType::kF32, rows, width, x.data(), w.data(), 1e-6f, false, false, out.data()});
    check(out == expected, "norms on " + std::to_string(threads) + " threads");
  }
  set_thread_count(0);
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

// A kernel that measures DRAM reads every byte once: its checksum is the sum of all 64-bit words.
void test_measuring() {
  std::vector<std::uint64_t> words((1 << 20) / sizeof(std::uint64_t));
  Random random(227);
  for (auto& word : words) word = std::uint64_t{random.bits()} << 32 | random.bits();
  const std::uint64_t sum = std::accumulate(words.begin(), words.end(), std::uint64_t{0});
  const auto bytes = static_cast<std::int64_t>(words.size() * sizeof(std::uint64_t));
  const auto* data = reinterpret_cast<const std::uint8_t*>(words.data());
  for (const IsaEntry& e : instruction_sets()) {
    if (!e.supported) continue;
    check(e.kernels->read_bytes(data, bytes) == sum, std::string("bytes read by ") + e.name);
    check(read_rate(*e.kernels, data, bytes) > 0 && dot_rate(*e.kernels, 1000, false) > 0 &&
              dot_rate(*e.kernels, 1000, true) > 0,
          std::string("rates of ") + e.name);
  }
}

}  // namespace cpumoe::tests
