// Layers with a recurrent state: every kernel against the scalar one, the scalar one against double arithmetic,
// threads, and tokens that come in pieces.
#include <algorithm>

#include "ops/delta_rule.h"
#include "runtime/threads.h"
#include "tests/harness.h"
#include "tests/tests.h"

namespace cpumoe::tests {
namespace {

// Values of any type, with the fp32 numbers that they stand for.
struct Typed {
  DType type;
  std::vector<float> exact;
  std::vector<std::uint8_t> bytes;

  Typed(std::size_t count, DType dtype, unsigned seed, float size = 1.0f)
      : type(dtype), exact(random_values(count, seed)), bytes(count * static_cast<std::size_t>(size_of(dtype))) {
    for (auto& v : exact) v *= size;
    scalar().store_row(exact.data(), static_cast<std::int64_t>(count), type, bytes.data());
    scalar().load_row(bytes.data(), type, static_cast<int>(count), exact.data());
  }
  Parameters parameters() const { return {bytes.data(), type}; }
};

struct Sizes {
  std::int64_t batch, tokens, key_heads, heads, key_depth, value_depth;
  int taps;
  bool of_channels, grouped, sigmoid, conv_bias;
  float bound;
};

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

// A layer, and its input as projections give it: all in one tensor with the heads that share a key side by side, or
// each in its own.
struct Problem {
  Sizes s;
  DType type;
  std::int64_t group, widths[4], channels;  // of queries, keys, values and gates of a token
  Typed mixed, betas, decays, rates, bias, conv, conv_bias, norm, first_conv;
  std::vector<float> first_state;

  Problem(const Sizes& sizes, DType dtype, DType parameter_type)
      : s(sizes),
        type(dtype),
        group(s.heads / s.key_heads),
        widths{s.key_heads * s.key_depth, s.key_heads * s.key_depth, s.heads * s.value_depth, s.heads * s.value_depth},
        channels(widths[0] + widths[1] + widths[2]),
        mixed(size(s.batch * s.tokens * (channels + widths[3])), type, 1),
        betas(size(s.batch * s.tokens * s.heads), type, 2),
        decays(size(s.batch * s.tokens * s.heads * (s.of_channels ? s.key_depth : 1)), type, 3),
        rates(size(s.heads), parameter_type, 4),
        bias(size(s.heads * (s.of_channels ? s.key_depth : 1)), parameter_type, 5),
        conv(size(channels * s.taps), parameter_type, 6, 0.5f),
        conv_bias(size(channels), parameter_type, 7),
        norm(size(s.value_depth), parameter_type, 8),
        first_conv(size(s.batch * channels * s.taps), type, 9),
        first_state(random_values(size(s.batch * s.heads * s.key_depth * s.value_depth), 10)) {}

  // Element of part 0 to 3 (queries, keys, values, gates) of a token in `mixed`.
  std::int64_t offset(int part, std::int64_t token, std::int64_t head) const {
    const std::int64_t row = token * (channels + widths[3]);
    const bool keys = part < 2;
    if (!s.grouped) {
      std::int64_t first = row;
      for (int p = 0; p < part; ++p) first += widths[p];
      return first + head * (keys ? s.key_depth : s.value_depth);
    }
    const std::int64_t of_group = 2 * s.key_depth + 2 * group * s.value_depth;
    if (keys) return row + head * of_group + part * s.key_depth;
    return row + head / group * of_group + 2 * s.key_depth + (part - 2) * group * s.value_depth +
           head % group * s.value_depth;
  }

  HeadRows rows(int part, std::int64_t token) const {
    const std::int64_t shared = part < 2 || !s.grouped ? 1 : group;
    HeadRows r;
    r.data = mixed.bytes.data() + offset(part, token, 0) * size_of(type);
    r.token_stride = channels + widths[3];
    r.group = shared;
    r.group_stride = (part < 2 ? s.key_heads : s.heads) > shared ? offset(part, 0, shared) - offset(part, 0, 0) : 0;
    r.head_stride = shared > 1 ? s.value_depth : 0;
    return r;
  }
};

struct Outcome {
  std::vector<std::uint8_t> out, conv;
  std::vector<float> state;

  bool operator==(const Outcome& o) const {
    return out == o.out && conv == o.conv && same_bits(state.data(), o.state.data(), state.size() * 4);
  }
};

// Tokens [first, last) of a problem of one sequence, or all of it.
void call(const Kernels& k, const Problem& p, std::int64_t first, std::int64_t last, Outcome& o) {
  const Sizes& s = p.s;
  const std::int64_t of_head = s.of_channels ? s.key_depth : 1;
  DeltaRuleCall c{};
  c.type = p.type;
  std::vector<SequenceRows> sequences;
  for (std::int64_t i = 0; i < s.batch; ++i) sequences.push_back({i, i * (last - first), last - first});
  c.sequences = sequences;
  c.rule.key_heads = s.key_heads;
  c.rule.heads = s.heads;
  c.rule.key_depth = s.key_depth;
  c.rule.value_depth = s.value_depth;
  c.queries = p.rows(0, first);
  c.keys = p.rows(1, first);
  c.values = p.rows(2, first);
  c.gates = p.rows(3, first);
  c.betas = {p.betas.bytes.data() + first * s.heads * size_of(p.type), s.heads, 1, 1, 0};
  c.decays = {p.decays.bytes.data() + first * s.heads * of_head * size_of(p.type), s.heads * of_head, 1, of_head, 0};
  c.rule.decay_of_channels = s.of_channels;
  c.rule.log_rates = p.rates.parameters();
  c.rule.decay_bias = p.bias.parameters();
  c.rule.decay_bound = s.bound;
  c.rule.convolution = {c.rule.channels(), s.taps, p.conv.parameters(), {}};
  if (s.conv_bias) c.rule.convolution.bias = p.conv_bias.parameters();
  c.conv_state = o.conv.data();
  c.state = o.state.data();
  c.rule.norm_weight = p.norm.parameters();
  c.rule.norm_epsilon = 1e-5f;
  c.rule.sigmoid_gate = s.sigmoid;
  c.out = o.out.data() + first * s.heads * s.value_depth * size_of(p.type);
  gated_delta_rule(k, c);
}

Outcome start(const Problem& p) {
  const std::int64_t values = p.s.batch * p.s.tokens * p.s.heads * p.s.value_depth;
  return {std::vector<std::uint8_t>(size(values * size_of(p.type))), p.first_conv.bytes, p.first_state};
}

Outcome run(const Kernels& k, const Problem& p) {
  Outcome o = start(p);
  call(k, p, 0, p.s.tokens, o);
  return o;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The convolution and silu of a channel, in double.
double convolved(const Problem& p, int part, std::int64_t sequence, std::int64_t token, std::int64_t head,
                 std::int64_t index) {
  const std::int64_t depth = part < 2 ? p.s.key_depth : p.s.value_depth;
  std::int64_t channel = head * depth + index;
  for (int i = 0; i < part; ++i) channel += p.widths[i];
  double sum = p.s.conv_bias ? p.conv_bias.exact[size(channel)] : 0.0f;
  for (int j = 0; j < p.s.taps; ++j) {
    const std::int64_t t = token - p.s.taps + 1 + j;
    const std::int64_t before = (sequence * p.channels + channel) * p.s.taps + t + p.s.taps;
    const double x = t < 0 ? p.first_conv.exact[size(before)]
                           : p.mixed.exact[size(p.offset(part, sequence * p.s.tokens + t, head) + index)];
    sum += static_cast<double>(p.conv.exact[size(channel * p.s.taps + j)]) * x;
  }
  return sum * sigmoid(sum);
}

// The definition, in double: results and states.
std::pair<std::vector<float>, std::vector<float>> truth(const Problem& p) {
  const Sizes& s = p.s;
  const std::int64_t of_head = s.of_channels ? s.key_depth : 1;
  std::vector<double> state(p.first_state.begin(), p.first_state.end());
  std::vector<float> out(size(s.batch * s.tokens * s.heads * s.value_depth));
  for (std::int64_t i = 0; i < s.batch * s.heads * s.tokens; ++i) {
    const std::int64_t b = i / (s.heads * s.tokens), h = i / s.tokens % s.heads, t = i % s.tokens;
    const std::int64_t row = b * s.tokens + t;
    double* const of_state = state.data() + (b * s.heads + h) * s.key_depth * s.value_depth;
    std::vector<double> q(size(s.key_depth)), k(q), kept(q);
    double q_squares = 1e-6, k_squares = 1e-6;
    for (std::int64_t r = 0; r < s.key_depth; ++r) {
      q[size(r)] = convolved(p, 0, b, t, h / p.group, r);
      k[size(r)] = convolved(p, 1, b, t, h / p.group, r);
      q_squares += q[size(r)] * q[size(r)];
      k_squares += k[size(r)] * k[size(r)];
      const std::int64_t at = s.of_channels ? r : 0;
      const double rate = std::exp(static_cast<double>(p.rates.exact[size(h)]));
      const double x = static_cast<double>(p.decays.exact[size((row * s.heads + h) * of_head + at)]) +
                       p.bias.exact[size(h * of_head + at)];
      kept[size(r)] = s.bound == 0 ? std::exp(-rate * std::log1p(std::exp(x))) : std::exp(s.bound * sigmoid(rate * x));
    }
    const double beta = sigmoid(p.betas.exact[size(row * s.heads + h)]);
    std::vector<double> recalled(size(s.value_depth));
    double squares = 0;
    for (std::int64_t c = 0; c < s.value_depth; ++c) {
      double read = 0;
      for (std::int64_t r = 0; r < s.key_depth; ++r) {
        double& x = of_state[r * s.value_depth + c];
        x *= kept[size(r)];
        read += x * k[size(r)] / std::sqrt(k_squares);
      }
      const double change = (convolved(p, 2, b, t, h, c) - read) * beta;
      for (std::int64_t r = 0; r < s.key_depth; ++r) {
        double& x = of_state[r * s.value_depth + c];
        x += k[size(r)] / std::sqrt(k_squares) * change;
        recalled[size(c)] += x * q[size(r)] / std::sqrt(q_squares * static_cast<double>(s.key_depth));
      }
      squares += recalled[size(c)] * recalled[size(c)];
    }
    for (std::int64_t c = 0; c < s.value_depth; ++c) {
      const double gate = p.mixed.exact[size(p.offset(3, row, h) + c)];
      const double factor = p.norm.exact[size(c)] * sigmoid(gate) * (s.sigmoid ? 1.0 : gate);
      out[size((row * s.heads + h) * s.value_depth + c)] = static_cast<float>(
          recalled[size(c)] / std::sqrt(squares / static_cast<double>(s.value_depth) + 1e-5f) * factor);
    }
  }
  return {out, std::vector<float>(state.begin(), state.end())};
}

void check_meaning(const Problem& p, const Outcome& o, const std::string& name) {
  const auto [out, state] = truth(p);
  std::vector<float> got(out.size());
  scalar().load_row(o.out.data(), p.type, static_cast<int>(got.size()), got.data());
  const double rounding = p.type == DType::kF32 ? 1e-5 : p.type == DType::kF16 ? 1e-3 : 5e-3;
  check(distance(got, out) < rounding, name + " results " + std::to_string(distance(got, out)));
  check(distance(o.state, state) < 1e-5, name + " states " + std::to_string(distance(o.state, state)));
}

void test_delta_rule() {
  const std::vector<Sizes> shapes = {
      {1, 1, 1, 1, 1, 1, 1, false, false, false, false, 0.0f},
      {1, 1, 2, 4, 128, 128, 4, false, true, false, false, 0.0f},
      {2, 3, 2, 6, 24, 20, 4, false, true, false, true, 0.0f},
      {3, 9, 1, 3, 33, 47, 3, false, false, true, false, 0.0f},
      {1, 140, 2, 2, 16, 65, 4, true, false, true, false, 0.0f},
      {2, 1, 3, 3, 20, 130, 5, true, false, true, true, -5.0f},
      {300, 1, 1, 2, 8, 7, 4, false, false, false, false, 0.0f},
      {3, 130, 1, 1, 17, 33, 2, true, false, false, false, -5.0f},
  };
  for (const Sizes& s : shapes) {
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      const Problem p(s, type, s.batch % 2 == 0 ? DType::kF32 : type);
      const std::string name = "delta rule of " + std::to_string(s.tokens) + " tokens, " + std::to_string(s.key_depth) +
                               " x " + std::to_string(s.value_depth) + " type " +
                               std::to_string(static_cast<int>(type));
      set_thread_count(1);
      const Outcome expected = run(scalar(), p);
      check_meaning(p, expected, name);
      for (const Kernels* k : other_kernels()) {
        check(run(*k, p) == expected, std::string(k->name) + " " + name);
      }
      for (const int threads : {2, 3}) {
        set_thread_count(threads);
        check(run(active_kernels(), p) == expected, name + " on " + std::to_string(threads) + " threads");
      }
      if (s.batch == 1) {  // in pieces: one by one, then several, then the rest
        Outcome pieces = start(p);
        for (std::int64_t first = 0, count = 1; first < s.tokens; first += count) {
          count = std::min<std::int64_t>(first < 3 ? 1 : first < 10 ? 5 : s.tokens, s.tokens - first);
          call(active_kernels(), p, first, first + count, pieces);
        }
        check(pieces == expected, name + " in pieces");
      }
      set_thread_count(0);
    }
  }
}

// LFM2's convolutions between two gates, and Mamba's with silu and a mask.
void test_convolution(std::int64_t channels, DType type, int taps, bool is_gated) {
  const std::int64_t batch = 2, tokens = taps == 4 ? 75 : 7, width = 3 * channels;
  const bool has_bias = taps != 3;
  const Typed projected(size(batch * tokens * width), type, 1), weight(size(channels * taps), type, 2);
  const Typed bias(size(channels), DType::kF32, 3), state(size(batch * channels * taps), type, 4);
  std::vector<float> mask(size(batch * tokens), 1.0f);
  mask[2] = 0.0f;
  const auto run = [&](const Kernels& k) {
    std::pair<std::vector<std::uint8_t>, std::vector<std::uint8_t>> r{
        std::vector<std::uint8_t>(size(batch * tokens * channels * size_of(type))), state.bytes};
    const SequenceRows sequences[] = {{0, 0, tokens}, {1, tokens, tokens}};
    const ChannelConvolution convolution{channels, taps, weight.parameters(),
                                         has_bias ? bias.parameters() : Parameters{}};
    ConvolutionCall c =
        short_convolution(convolution, type, sequences, projected.bytes.data(), r.second.data(), r.first.data());
    if (!is_gated) {
      c.gate = c.out_gate = nullptr;
      c.silu = true;
      c.mask = mask.data();
    }
    convolve(k, c);
    return r;
  };
  const std::string name = "convolution of " + std::to_string(channels) + " channels, " + std::to_string(taps) +
                           " taps, type " + std::to_string(static_cast<int>(type));
  const auto expected = run(scalar());
  for (const int threads : {1, 2, 3}) {
    set_thread_count(threads);
    for (const Kernels* k : other_kernels()) {
      check(run(*k) == expected, std::string(k->name) + " " + name + " on " + std::to_string(threads) + " threads");
    }
  }
  set_thread_count(0);

  std::vector<float> got(size(batch * tokens * channels)), truth(got), left(size(batch * channels * taps)),
      inputs(left);
  scalar().load_row(expected.first.data(), type, static_cast<int>(got.size()), got.data());
  scalar().load_row(expected.second.data(), type, static_cast<int>(left.size()), left.data());
  const auto at = [&](std::int64_t row, int part, std::int64_t c) {
    return static_cast<double>(projected.exact[size(row * width + part * channels + c)]);
  };
  // The input of a token, or of one before the first.
  const auto input = [&](std::int64_t b, std::int64_t t, std::int64_t c) {
    if (t < 0) return static_cast<double>(state.exact[size((b * channels + c) * taps + t + taps)]);
    return at(b * tokens + t, 2, c) * (is_gated ? at(b * tokens + t, 0, c) : 1.0);
  };
  for (std::int64_t i = 0; i < batch * tokens * channels; ++i) {
    const std::int64_t c = i % channels, row = i / channels, b = row / tokens, t = row % tokens;
    double sum = has_bias ? bias.exact[size(c)] : 0.0f;
    for (int j = 0; j < taps; ++j) {
      sum += static_cast<double>(weight.exact[size(c * taps + j)]) * input(b, t - taps + 1 + j, c);
    }
    truth[size(i)] =
        static_cast<float>(is_gated ? sum * at(row, 1, c) : sum * sigmoid(sum) * static_cast<double>(mask[size(row)]));
  }
  for (std::int64_t i = 0; i < batch * channels * taps; ++i) {
    inputs[size(i)] = static_cast<float>(input(i / taps / channels, tokens - taps + i % taps, i / taps % channels));
  }
  const double rounding = type == DType::kF32 ? 1e-6 : type == DType::kF16 ? 1e-3 : 5e-3;
  check(distance(got, truth) < rounding, name + " differs by " + std::to_string(distance(got, truth)));
  check(distance(left, inputs) < rounding, name + " leaves other inputs");
}

}  // namespace

void test_recurrent() {
  test_delta_rule();
  for (const std::int64_t channels : {1, 16, 130, 200}) {
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const int taps : {1, 3, 4, 16}) {
        for (const bool is_gated : {false, true}) test_convolution(channels, type, taps, is_gated);
      }
    }
  }
}

}  // namespace cpumoe::tests
