// The Python seam of layers with a recurrent state.
#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
#include "kernels/dispatch.h"
#include "ops/delta_rule.h"
#include "runtime/check.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

Parameters parameters(const Array& array, std::int64_t count) {
  CPUMOE_REQUIRE(array.contiguous(1).dim(0) == count, array.name(), " is ", array.shape_text(), "; [", count,
                 "] is accepted");
  return {array.data(), array.float_type()};
}

// The weight [channels, 1, taps] of a convolution and its bias [channels] or none.
struct Convolution {
  Array weight;
  std::optional<Array> bias;

  Convolution(nb::handle weight_, nb::handle bias_, std::int64_t channels) : weight(weight_, "conv_weight") {
    CPUMOE_REQUIRE(weight.contiguous(3).dim(0) == channels && weight.dim(1) == 1, "conv_weight is ",
                   weight.shape_text(), "; [", channels, ", 1, taps] is accepted");
    if (bias_.is_none()) return;
    bias.emplace(bias_, "conv_bias");
    CPUMOE_REQUIRE(bias->same_type(weight), "conv_bias is ", bias->dtype_text(), "; that of conv_weight (",
                   weight.dtype_text(), ") is accepted");
    parameters(*bias, channels);
  }

  ChannelConvolution values() const {
    const Parameters biases = bias ? Parameters{bias->data(), bias->float_type()} : Parameters{};
    return {weight.dim(0), static_cast<int>(weight.dim(2)), {weight.data(), weight.float_type()}, biases};
  }
};

// [batch, tokens, width] in the type of the first projection.
const Array& projection(const Array& array, const Array& first, std::int64_t width) {
  CPUMOE_REQUIRE(array.contiguous(3).same_type(first), array.name(), " is ", array.dtype_text(), "; that of ",
                 first.name(), " (", first.dtype_text(), ") is accepted");
  CPUMOE_REQUIRE(array.dim(0) == first.dim(0) && array.dim(1) == first.dim(1) && array.dim(2) == width, array.name(),
                 " is ", array.shape_text(), "; [", first.dim(0), ", ", first.dim(1), ", ", width, "] is accepted");
  return array;
}

// The state [batch, channels, taps] of a convolution.
void* convolution_state(const Array& state, const Array& x, const ChannelConvolution& c) {
  CPUMOE_REQUIRE(state.writable().contiguous(3).same_type(x), "conv_state is ", state.dtype_text(), "; that of ",
                 x.name(), " (", x.dtype_text(), ") is accepted");
  CPUMOE_REQUIRE(state.dim(0) == x.dim(0) && state.dim(1) == c.channels && state.dim(2) == c.taps, "conv_state is ",
                 state.shape_text(), "; [", x.dim(0), ", ", c.channels, ", ", c.taps, "] is accepted");
  return state.data();
}

// The rows of each sequence of [batch, tokens, ..].
std::vector<SequenceRows> sequences_of(const Array& array) {
  std::vector<SequenceRows> sequences;
  for (std::int64_t i = 0; i < array.dim(0); ++i) sequences.push_back({i, i * array.dim(1), array.dim(1)});
  return sequences;
}

HeadRows head_rows(const Array& array, std::int64_t first, std::int64_t group, std::int64_t group_stride,
                   std::int64_t head_stride) {
  const auto* data = static_cast<const std::uint8_t*>(array.data()) + first * size_of(array.float_type());
  return {data, array.dim(2), group, group_stride, head_stride};
}

void delta_rule(nb::handle q_, nb::handle k_, nb::handle v_, nb::handle z_, nb::handle b_, nb::handle a_,
                std::int64_t key_heads, nb::handle log_rates_, nb::handle decay_bias_, float decay_bound,
                nb::handle conv_weight_, nb::handle conv_bias_, nb::handle conv_state_, nb::handle state_,
                nb::handle norm_weight_, float norm_epsilon, bool sigmoid_gate, nb::handle out_) {
  const Array q(q_, "q"), b(b_, "b"), conv_state(conv_state_, "conv_state"), state(state_, "state"), out(out_, "out");
  const Array log_rates(log_rates_, "log_rates"), decay_bias(decay_bias_, "decay_bias");
  const Array norm_weight(norm_weight_, "norm_weight");
  DeltaRuleCall call{};
  DeltaRule& rule = call.rule;
  call.type = q.contiguous(3).float_type();
  state.writable().contiguous(4).expect<float>("float32");
  CPUMOE_REQUIRE(state.dim(0) == q.dim(0), "state is ", state.shape_text(), " for ", q.dim(0), " sequences");
  const std::vector<SequenceRows> sequences = sequences_of(q);
  call.sequences = sequences;
  rule.heads = state.dim(1);
  rule.key_depth = state.dim(2);
  rule.value_depth = state.dim(3);
  rule.key_heads = key_heads;
  CPUMOE_REQUIRE(rule.heads >= 1 && rule.key_depth >= 1, "state is ", state.shape_text(),
                 "; at least one head and one row is accepted");
  CPUMOE_REQUIRE(key_heads >= 1 && key_heads <= rule.heads && rule.heads % key_heads == 0, "key_heads=", key_heads,
                 " for a state of ", rule.heads, " heads; a divisor is accepted");
  const std::int64_t group = rule.heads / key_heads, dk = rule.key_depth, dv = rule.value_depth;
  const std::int64_t key_width = key_heads * dk, width = rule.heads * dv;

  std::optional<Array> k, v, z, a;
  if (!k_.is_none()) {
    CPUMOE_REQUIRE(!v_.is_none() && !z_.is_none() && !a_.is_none(), "k is given without v, z and a");
    k.emplace(k_, "k");
    v.emplace(v_, "v");
    call.queries = head_rows(projection(q, q, key_width), 0, 1, dk, 0);
    call.keys = head_rows(projection(*k, q, key_width), 0, 1, dk, 0);
    call.values = head_rows(projection(*v, q, width), 0, 1, dv, 0);
  } else if (!z_.is_none()) {
    CPUMOE_REQUIRE(v_.is_none() && !a_.is_none(), "z without k is for q, k and v in q; v must be None, a must not");
    projection(q, q, 2 * key_width + width);
    call.queries = head_rows(q, 0, 1, dk, 0);
    call.keys = head_rows(q, key_width, 1, dk, 0);
    call.values = head_rows(q, 2 * key_width, 1, dv, 0);
  } else {
    CPUMOE_REQUIRE(v_.is_none() && a_.is_none(), "without k and z all is in q and b; v and a must be None");
    projection(q, q, 2 * key_width + 2 * width);
    projection(b, q, 2 * rule.heads);
    const std::int64_t stride = 2 * dk + 2 * group * dv;
    call.queries = head_rows(q, 0, 1, stride, 0);
    call.keys = head_rows(q, dk, 1, stride, 0);
    call.values = head_rows(q, 2 * dk, group, stride, dv);
    call.gates = head_rows(q, 2 * dk + group * dv, group, stride, dv);
    call.betas = head_rows(b, 0, group, 2 * group, 1);
    call.decays = head_rows(b, group, group, 2 * group, 1);
  }
  if (!z_.is_none()) {
    z.emplace(z_, "z");
    a.emplace(a_, "a");
    call.gates = head_rows(projection(*z, q, width), 0, 1, dv, 0);
    call.betas = head_rows(projection(b, q, rule.heads), 0, 1, 1, 0);
    rule.decay_of_channels = a->contiguous(3).dim(2) != rule.heads;
    const std::int64_t of_head = rule.decay_of_channels ? dk : 1;
    call.decays = head_rows(projection(*a, q, rule.heads * of_head), 0, 1, of_head, 0);
  }
  const Convolution convolution(conv_weight_, conv_bias_, rule.channels());
  rule.convolution = convolution.values();
  call.conv_state = convolution_state(conv_state, q, rule.convolution);
  rule.log_rates = parameters(log_rates, rule.heads);
  rule.decay_bias = parameters(decay_bias, rule.heads * (rule.decay_of_channels ? dk : 1));
  rule.decay_bound = decay_bound;
  rule.norm_weight = parameters(norm_weight, dv);
  rule.norm_epsilon = norm_epsilon;
  rule.sigmoid_gate = sigmoid_gate;
  call.state = state.data<float>();
  projection(out.writable(), q, width);
  call.out = out.data();
  const Computation computation;
  gated_delta_rule(active_kernels(), call);
}

void convolve(nb::handle projected_, nb::handle conv_weight_, nb::handle conv_bias_, nb::handle conv_state_,
              nb::handle out_) {
  const Array projected(projected_, "projected"), conv_state(conv_state_, "conv_state"), out(out_, "out");
  ShortConvolutionCall call{};
  call.type = projected.contiguous(3).float_type();
  const std::vector<SequenceRows> sequences = sequences_of(projected);
  call.sequences = sequences;
  CPUMOE_REQUIRE(projected.dim(2) % 3 == 0, "projected is ", projected.shape_text(), "; [batch, tokens, 3 * channels] ",
                 "is accepted");
  const std::int64_t channels = projected.dim(2) / 3;
  const Convolution convolution(conv_weight_, conv_bias_, channels);
  call.convolution = convolution.values();
  call.state = convolution_state(conv_state, projected, call.convolution);
  projection(out.writable(), projected, channels);
  call.projected = projected.data();
  call.out = out.data();
  const Computation computation;
  short_convolution(active_kernels(), call);
}

}  // namespace

void bind_delta_rule(nb::module_& m) {
  using namespace nb::literals;
  m.def("gated_delta_rule", &delta_rule, "q"_a, "k"_a.none(), "v"_a.none(), "z"_a.none(), "b"_a, "a"_a.none(),
        "key_heads"_a, "log_rates"_a, "decay_bias"_a, "decay_bound"_a, "conv_weight"_a, "conv_bias"_a.none(),
        "conv_state"_a, "state"_a, "norm_weight"_a, "norm_epsilon"_a, "sigmoid_gate"_a, "out"_a);
  m.def("short_convolution", &convolve, "projected"_a, "conv_weight"_a, "conv_bias"_a.none(), "conv_state"_a, "out"_a);
}

}  // namespace cpumoe
