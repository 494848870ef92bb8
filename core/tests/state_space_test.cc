// State spaces: every kernel, number of threads and cut of the tokens gives the scalar kernel's bits, and those are
// near the truth.
#include "ops/state_space.h"

#include <algorithm>

#include "runtime/threads.h"

#include "tests/harness.h"
#include "tests/tests.h"

namespace cpumoe::tests {
namespace {

// Values rounded to a type, as bytes and as the numbers that they then are.
struct Rounded {
  std::vector<std::uint8_t> bytes;
  std::vector<float> values;

  Rounded(const std::vector<float>& source, DType type)
      : bytes(source.size() * static_cast<std::size_t>(size_of(type))), values(source.size()) {
    scalar().store_row(source.data(), static_cast<std::int64_t>(source.size()), type, bytes.data());
    scalar().load_row(bytes.data(), type, static_cast<int>(source.size()), values.data());
  }
  Parameters parameters(DType type) const { return {bytes.data(), type}; }
};

std::size_t count_of(std::int64_t count) { return static_cast<std::size_t>(count); }

double silu(double x) { return x / (1 + std::exp(-x)); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

struct Mamba2Case {
  std::int64_t batch, tokens, heads, head_dim, groups, depth, width, norm_group;
  bool gate_last, masked;
};

// The tensors of a layer and what it leaves behind.
struct Mamba2Run {
  Mamba2Case c;
  DType type;
  Rounded projected, conv_state, weight, bias, dt_bias, A_log, D, norm;
  std::vector<float> state, mask;

  Mamba2Run(const Mamba2Case& shape, DType dtype)
      : c(shape),
        type(dtype),
        projected(random_values(count_of(c.batch * c.tokens * call().row()), 1), dtype),
        conv_state(random_values(count_of(c.batch * call().convolved() * c.width), 2), dtype),
        weight(random_values(count_of(call().convolved() * c.width), 3), dtype),
        bias(random_values(count_of(call().convolved()), 4), dtype),
        dt_bias(random_values(count_of(c.heads), 5), DType::kF32),
        A_log(random_values(count_of(c.heads), 6), DType::kF32),
        D(random_values(count_of(c.heads), 7), dtype),
        norm(random_values(count_of(call().inner()), 8), dtype),
        state(random_values(count_of(c.batch * call().inner() * c.depth), 9)),
        mask(count_of(c.batch * c.tokens), 1.0f) {
    if (c.tokens > 2) mask[1] = 0.0f;
  }

  Mamba2Call call() const {
    Mamba2Call m{};
    m.type = type;
    m.batch = c.batch;
    m.tokens = c.tokens;
    m.heads = c.heads;
    m.head_dim = c.head_dim;
    m.groups = c.groups;
    m.depth = c.depth;
    m.convolution.channels = m.convolved();
    m.convolution.taps = static_cast<int>(c.width);
    m.norm_group = c.norm_group;
    m.epsilon = 1e-5f;
    m.gate_last = c.gate_last;
    m.step_low = 0.05f;
    m.step_high = 2.0f;
    return m;
  }

  struct Result {
    std::vector<std::uint8_t> out, conv_state;
    std::vector<float> state;
    bool operator==(const Result& o) const {
      return out == o.out && conv_state == o.conv_state && same_bits(state.data(), o.state.data(), state.size() * 4);
    }
  };

  // Of one sequence where the tokens are cut into parts, which then lie in memory of their own.
  Result run(const Kernels& k, std::int64_t first_part) const {
    Mamba2Call m = call();
    const auto element = static_cast<std::size_t>(size_of(type));
    Result result{std::vector<std::uint8_t>(count_of(c.batch * c.tokens * m.inner()) * element), conv_state.bytes,
                  state};
    m.conv_state = result.conv_state.data();
    m.state = result.state.data();
    m.convolution.weight = weight.parameters(type);
    m.convolution.bias = bias.parameters(type);
    m.dt_bias = dt_bias.parameters(DType::kF32);
    m.A_log = A_log.parameters(DType::kF32);
    m.D = D.parameters(type);
    m.norm_weight = norm.parameters(type);
    for (std::int64_t t = 0; t < c.tokens; t += m.tokens) {
      m.tokens = t == 0 ? first_part : c.tokens - t;
      m.projected = projected.bytes.data() + count_of(t * m.row()) * element;
      m.mask = c.masked ? mask.data() + t : nullptr;
      m.out = result.out.data() + count_of(t * m.inner()) * element;
      mamba2(k, m);
    }
    return result;
  }

  // In double, for fp32.
  double distance_from_truth(const Result& got) const {
    const Mamba2Call m = call();
    const std::int64_t inner = m.inner(), convolved = m.convolved();
    std::vector<float> expected, found(got.out.size() / 4);
    std::memcpy(found.data(), got.out.data(), got.out.size());
    for (std::int64_t b = 0; b < c.batch; ++b) {
      std::vector<double> s(state.begin() + b * inner * c.depth, state.begin() + (b + 1) * inner * c.depth);
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        const auto input = [&](std::int64_t token, std::int64_t channel) -> double {
          if (token < 0) return conv_state.values[count_of((b * convolved + channel + 1) * c.width + token)];
          return projected.values[count_of((b * c.tokens + token) * m.row() + inner + channel)];
        };
        std::vector<double> x(count_of(convolved)), y(count_of(inner));
        for (std::int64_t i = 0; i < convolved; ++i) {
          double sum = bias.values[count_of(i)];
          for (std::int64_t k = 0; k < c.width; ++k) {
            sum += weight.values[count_of(i * c.width + k)] * input(t - c.width + 1 + k, i);
          }
          x[count_of(i)] = silu(sum) * (c.masked ? mask[count_of(b * c.tokens + t)] : 1.0f);
        }
        const float* row = projected.values.data() + (b * c.tokens + t) * m.row();
        for (std::int64_t i = 0; i < inner; ++i) {
          const std::int64_t head = i / c.head_dim, group = head / (c.heads / c.groups);
          const double raw = row[inner + convolved + head] + dt_bias.values[count_of(head)];
          const double step = std::clamp(softplus(raw), 0.05, 2.0);
          const double decay = std::exp(-std::exp(A_log.values[count_of(head)]) * step);
          double sum = D.values[count_of(head)] * x[count_of(i)];
          for (std::int64_t n = 0; n < c.depth; ++n) {
            double& value = s[count_of(i * c.depth + n)];
            value = value * decay + step * x[count_of(i)] * x[count_of(inner + group * c.depth + n)];
            sum += value * x[count_of(inner + (c.groups + group) * c.depth + n)];
          }
          y[count_of(i)] = sum * (c.gate_last ? 1.0 : silu(row[i]));
        }
        for (std::int64_t i = 0; i < inner; ++i) {
          double squares = 0;
          for (std::int64_t j = 0; j < c.norm_group; ++j) {
            squares += std::pow(y[count_of(i / c.norm_group * c.norm_group + j)], 2);
          }
          const double normed = y[count_of(i)] / std::sqrt(squares / static_cast<double>(c.norm_group) + 1e-5);
          expected.push_back(
              static_cast<float>(normed * norm.values[count_of(i)] * (c.gate_last ? silu(row[i]) : 1.0)));
        }
      }
    }
    return distance(found, expected);
  }
};

struct SelectiveCase {
  std::int64_t batch, tokens, channels, depth, rank;
  bool normed;
};

std::vector<float> selective(const Kernels& k, const SelectiveCase& c, std::int64_t first_part, bool truth) {
  const std::int64_t rows = c.batch * c.tokens, features = c.rank + 2 * c.depth;
  const auto x = random_values(count_of(rows * c.channels), 1), steps = random_values(count_of(rows * c.channels), 2);
  const auto parameters = random_values(count_of(rows * features), 3);
  const auto gate = random_values(count_of(rows * 2 * c.channels), 4);
  const auto step_bias = random_values(count_of(c.channels), 5), D = random_values(count_of(c.channels), 6);
  const auto A_log = random_values(count_of(c.channels * c.depth), 7);
  const auto b_weight = random_values(count_of(c.depth), 8), c_weight = random_values(count_of(c.depth), 9);
  auto state = random_values(count_of(c.batch * c.channels * c.depth), 10);
  std::vector<float> out(count_of(rows * c.channels));
  if (!truth) {
    SelectiveScanCall call{};
    call.type = DType::kF32;
    call.batch = c.batch;
    call.channels = c.channels;
    call.depth = c.depth;
    call.parameter_row = features;
    call.gate_row = 2 * c.channels;
    call.state = state.data();
    call.step_bias = {step_bias.data(), DType::kF32};
    call.A_log = {A_log.data(), DType::kF32};
    call.D = {D.data(), DType::kF32};
    call.b_weight = {c.normed ? b_weight.data() : nullptr, DType::kF32};
    call.c_weight = {c.normed ? c_weight.data() : nullptr, DType::kF32};
    call.epsilon = 1e-6f;
    for (std::int64_t t = 0; t < c.tokens; t += call.tokens) {
      call.tokens = t == 0 ? first_part : c.tokens - t;
      call.x = x.data() + t * c.channels;
      call.steps = steps.data() + t * c.channels;
      call.parameters = parameters.data() + t * features;
      call.gate = gate.data() + t * 2 * c.channels;
      call.out = out.data() + t * c.channels;
      selective_scan(k, call);
    }
    out.insert(out.end(), state.begin(), state.end());
    return out;
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    std::vector<double> bc(parameters.begin() + r * features + c.rank, parameters.begin() + (r + 1) * features);
    for (std::int64_t which = 0; which < 2 && c.normed; ++which) {
      double squares = 0;
      for (std::int64_t n = 0; n < c.depth; ++n) squares += std::pow(bc[count_of(which * c.depth + n)], 2);
      const double root = std::sqrt(squares / static_cast<double>(c.depth) + 1e-6);
      for (std::int64_t n = 0; n < c.depth; ++n) {
        bc[count_of(which * c.depth + n)] *= (which == 0 ? b_weight : c_weight)[count_of(n)] / root;
      }
    }
    for (std::int64_t i = 0; i < c.channels; ++i) {
      const double value = x[count_of(r * c.channels + i)];
      const double step = softplus(steps[count_of(r * c.channels + i)] + step_bias[count_of(i)]);
      double sum = D[count_of(i)] * value;
      for (std::int64_t n = 0; n < c.depth; ++n) {
        float& s = state[count_of((r / c.tokens * c.channels + i) * c.depth + n)];
        s = static_cast<float>(s * std::exp(-std::exp(A_log[count_of(i * c.depth + n)]) * step) +
                               step * value * bc[count_of(n)]);
        sum += s * bc[count_of(c.depth + n)];
      }
      out[count_of(r * c.channels + i)] = static_cast<float>(sum * silu(gate[count_of((r * 2 + 1) * c.channels + i)]));
    }
  }
  out.insert(out.end(), state.begin(), state.end());
  return out;
}

void test_mamba2() {
  for (const Mamba2Case& c :
       {Mamba2Case{1, 1, 8, 64, 2, 128, 4, 512, false, false}, Mamba2Case{1, 150, 4, 64, 1, 128, 4, 256, false, false},
        Mamba2Case{3, 7, 6, 5, 3, 20, 3, 10, true, true}, Mamba2Case{2, 70, 2, 37, 1, 7, 2, 74, false, true},
        Mamba2Case{5, 1, 3, 16, 1, 33, 1, 48, false, false}, Mamba2Case{70, 1, 2, 8, 2, 16, 4, 8, false, true}}) {
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      const Mamba2Run layer(c, type);
      set_thread_count(1);
      const auto expected = layer.run(scalar(), c.tokens);
      for (const IsaEntry& e : instruction_sets()) {
        for (const int threads : {1, 2, 3}) {
          if (!e.supported) continue;
          set_thread_count(threads);
          check(layer.run(*e.kernels, c.tokens) == expected, std::string(e.name) + " mamba2");
        }
        if (e.supported && c.batch == 1 && c.tokens > 2) {
          for (const std::int64_t part : {std::int64_t{1}, c.tokens / 3, c.tokens - 1}) {
            check(layer.run(*e.kernels, part) == expected, std::string(e.name) + " mamba2 in two parts");
          }
        }
      }
      if (type != DType::kF32) continue;
      const double error = layer.distance_from_truth(expected);
      check(error < 1e-5, "mamba2 is " + std::to_string(error) + " from the truth");
    }
  }
  set_thread_count(0);
}

void test_selective_scan() {
  for (const SelectiveCase& c : {SelectiveCase{1, 1, 700, 16, 4, true}, SelectiveCase{1, 130, 70, 16, 3, false},
                                 SelectiveCase{3, 5, 129, 9, 1, true}, SelectiveCase{2, 66, 3, 40, 2, false}}) {
    set_thread_count(1);
    const auto expected = selective(scalar(), c, c.tokens, false);
    for (const IsaEntry& e : instruction_sets()) {
      if (!e.supported) continue;
      for (const int threads : {1, 2, 3}) {
        set_thread_count(threads);
        const auto got = selective(*e.kernels, c, c.tokens, false);
        check(same_bits(got.data(), expected.data(), got.size() * 4), std::string(e.name) + " selective scan");
      }
      if (c.batch == 1 && c.tokens > 1) {
        const auto got = selective(*e.kernels, c, 65, false);
        check(same_bits(got.data(), expected.data(), got.size() * 4), std::string(e.name) + " scan in two parts");
      }
    }
    const double error = distance(expected, selective(scalar(), c, c.tokens, true));
    check(error < 1e-5, "a selective scan is " + std::to_string(error) + " from the truth");
  }
  set_thread_count(0);
}

void test_lightning_attention() {
  struct Case {
    std::int64_t batch, tokens, heads, depth;
    bool has_state;
  };
  for (const Case& c : {Case{1, 1, 4, 128, true}, Case{2, 70, 3, 33, true}, Case{1, 200, 2, 16, false}}) {
    const std::int64_t square = c.depth * c.depth, states = c.batch * c.heads * square;
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      const Rounded qkv(random_values(count_of(c.batch * c.tokens * c.heads * 3 * c.depth), 1), type);
      const Rounded state(random_values(count_of(states), 2), type);
      std::vector<float> slopes(count_of(c.heads));
      for (std::size_t i = 0; i < slopes.size(); ++i) slopes[i] = 0.1f * static_cast<float>(i + 1);
      const auto element = static_cast<std::size_t>(size_of(type));
      std::vector<std::uint8_t> out(count_of(c.batch * c.tokens * c.heads * c.depth) * element), next(state.bytes);
      std::vector<std::uint8_t> expected, expected_next;
      for (const IsaEntry& e : instruction_sets()) {
        for (const int threads : {1, 2, 3}) {
          if (!e.supported) continue;
          set_thread_count(threads);
          lightning_attention(*e.kernels, {type, c.batch, c.tokens, c.heads, c.depth, qkv.bytes.data(), slopes.data(),
                                           type, c.has_state ? state.bytes.data() : nullptr, next.data(), out.data()});
          if (expected.empty()) {
            expected = out;
            expected_next = next;
          }
          check(out == expected && next == expected_next, std::string(e.name) + " lightning attention");
        }
      }
      if (type != DType::kF32) continue;
      std::vector<float> truth(out.size() / 4), got(out.size() / 4);
      std::memcpy(got.data(), expected.data(), expected.size());
      for (std::int64_t i = 0; i < c.batch * c.heads; ++i) {
        const std::int64_t b = i / c.heads, head = i % c.heads;
        std::vector<double> s(count_of(square), 0.0);
        if (c.has_state) s.assign(state.values.begin() + i * square, state.values.begin() + (i + 1) * square);
        for (std::int64_t t = 0; t < c.tokens; ++t) {
          const std::int64_t row = (b * c.tokens + t) * c.heads + head;
          const float* q = qkv.values.data() + row * 3 * c.depth;
          for (std::int64_t v = 0; v < c.depth; ++v) {
            double sum = 0;
            for (std::int64_t k = 0; k < c.depth; ++k) {
              double& value = s[count_of(k * c.depth + v)];
              value = value * std::exp(-static_cast<double>(slopes[count_of(head)])) +
                      static_cast<double>(q[c.depth + k]) * q[2 * c.depth + v];
              sum += q[k] * value;
            }
            truth[count_of(row * c.depth + v)] = static_cast<float>(sum);
          }
        }
      }
      const double error = distance(got, truth);
      check(error < 1e-5, "lightning attention is " + std::to_string(error) + " from the truth");
    }
  }
  set_thread_count(0);
}

}  // namespace

void test_state_spaces() {
  test_mamba2();
  test_selective_scan();
  test_lightning_attention();
}

}  // namespace cpumoe::tests
