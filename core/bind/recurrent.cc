// The Python seam of layers with a recurrent state.
#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
#include "bind/shaped_array.h"
#include "kernels/dispatch.h"
#include "ops/delta_rule.h"
#include "ops/elements.h"
#include "ops/state_space.h"
#include "runtime/check.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

// The weight [channels, 1, taps] of a convolution, its bias [channels] or none, and its state [batch, channels, taps].
struct Convolution {
  Array weight;
  ShapedArray bias, state;

  Convolution(nb::handle weight_, nb::handle bias_, nb::handle state_, std::int64_t batch, std::int64_t channels)
      : weight(checked(Array(weight_, "conv_weight"), channels)),
        bias(bias_, "conv_bias", {channels}, Presence::kOptional),
        state(state_, "conv_state", {batch, channels, weight.dim(2)}) {}

  ChannelConvolution values() const {
    return {weight.dim(0), static_cast<int>(weight.dim(2)), {weight.data(), weight.float_type()}, bias.parameters()};
  }

 private:
  static const Array& checked(const Array& weight, std::int64_t channels) {
    CPUMOE_REQUIRE(weight.contiguous(3).dim(0) == channels && weight.dim(1) == 1, weight.name(), " is ",
                   weight.shape_text(), "; [", channels, ", 1, taps] is accepted");
    return weight;
  }
};

// [batch, tokens, width] in the type of the first projection.
const Array& projection(const Array& array, const Array& first, std::int64_t width) {
  array.contiguous(3).like(first);
  CPUMOE_REQUIRE(array.dim(0) == first.dim(0) && array.dim(1) == first.dim(1) && array.dim(2) == width, array.name(),
                 " is ", array.shape_text(), "; [", first.dim(0), ", ", first.dim(1), ", ", width, "] is accepted");
  return array;
}

// The rows of each sequence of [batch, tokens, ..]; none without elements, where the batch may be of any size.
std::vector<SequenceRows> sequences_of(const Array& array) {
  std::vector<SequenceRows> sequences;
  if (array.size() == 0) return sequences;
  for (std::int64_t i = 0; i < array.dim(0); ++i) sequences.push_back({i, i * array.dim(1), array.dim(1)});
  return sequences;
}

HeadRows head_rows(const Array& array, std::int64_t first, std::int64_t group, std::int64_t group_stride,
                   std::int64_t head_stride) {
  return {at(array.data(), first, array.float_type()), array.dim(2), group, group_stride, head_stride};
}

void delta_rule(nb::handle q_, nb::handle k_, nb::handle v_, nb::handle z_, nb::handle b_, nb::handle a_,
                std::int64_t key_heads, nb::handle log_rates_, nb::handle decay_bias_, float decay_bound,
                nb::handle conv_weight_, nb::handle conv_bias_, nb::handle conv_state_, nb::handle state_,
                nb::handle norm_weight_, float norm_epsilon, bool sigmoid_gate, nb::handle out_) {
  const Array q(q_, "q"), b(b_, "b"), state(state_, "state"), out(out_, "out");
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
  const Convolution convolution(conv_weight_, conv_bias_, conv_state_, q.dim(0), rule.channels());
  const ShapedArray log_rates(log_rates_, "log_rates", {rule.heads}), norm_weight(norm_weight_, "norm_weight", {dv});
  const ShapedArray decay_bias(decay_bias_, "decay_bias", {rule.heads * (rule.decay_of_channels ? dk : 1)});
  rule.convolution = convolution.values();
  call.conv_state = convolution.state.writable().like(q);
  rule.log_rates = log_rates.parameters();
  rule.decay_bias = decay_bias.parameters();
  rule.decay_bound = decay_bound;
  rule.norm_weight = norm_weight.parameters();
  rule.norm_epsilon = norm_epsilon;
  rule.sigmoid_gate = sigmoid_gate;
  call.state = state.data<float>();
  projection(out.writable(), q, width);
  call.out = out.data();
  const Computation computation;
  gated_delta_rule(active_kernels(), call);
}

void call_short_convolution(nb::handle projected_, nb::handle conv_weight_, nb::handle conv_bias_,
                            nb::handle conv_state_, nb::handle out_) {
  const Array projected(projected_, "projected"), out(out_, "out");
  const DType type = projected.contiguous(3).float_type();
  const std::vector<SequenceRows> sequences = sequences_of(projected);
  CPUMOE_REQUIRE(projected.dim(2) % 3 == 0, "projected is ", projected.shape_text(), "; [batch, tokens, 3 * channels] ",
                 "is accepted");
  const Convolution convolution(conv_weight_, conv_bias_, conv_state_, projected.dim(0), projected.dim(2) / 3);
  const ConvolutionCall call = short_convolution(convolution.values(), type, sequences, projected.data(),
                                                 convolution.state.writable().like(projected),
                                                 projection(out.writable(), projected, projected.dim(2) / 3).data());
  const Computation computation;
  convolve(active_kernels(), call);
}

// Convolves the first features of each token.
void call_mamba_convolution(nb::handle projected_, nb::handle conv_state_, nb::handle weight_, nb::handle bias_,
                            nb::handle mask_, nb::handle out_) {
  const Array projected(projected_, "projected"), out(out_, "out");
  ConvolutionCall c{};
  c.type = projected.contiguous(3).float_type();
  c.stride = projected.dim(2);
  const std::int64_t channels = Array(weight_, "conv_weight").contiguous(3).dim(0);
  CPUMOE_REQUIRE(c.stride >= channels, "projected has ", c.stride, " features for ", channels, " channels");
  const Convolution convolution(weight_, bias_, conv_state_, projected.dim(0), channels);
  const ShapedArray mask(mask_, "mask", {projected.dim(0), projected.dim(1)}, Presence::kOptional);
  const std::vector<SequenceRows> sequences = sequences_of(projected);
  c.convolution = convolution.values();
  c.sequences = sequences;
  c.x = projected.data();
  c.silu = true;
  c.mask = mask.fp32();
  c.state = convolution.state.writable().like(projected);
  c.out = projection(out.writable(), projected, channels).data();
  const Computation computation;
  convolve(active_kernels(), c);
}

void call_mamba2(nb::handle projected_, nb::handle conv_state_, nb::handle state_, nb::handle conv_weight_,
                 nb::handle conv_bias_, nb::handle dt_bias_, nb::handle A_log_, nb::handle D_, nb::handle norm_weight_,
                 nb::handle mask_, std::int64_t groups, std::int64_t norm_group, float epsilon, bool gate_last,
                 float step_low, float step_high, nb::handle out_) {
  const Array projected(projected_, "projected"), state_array(state_, "state");
  Mamba2Call c{};
  c.type = projected.contiguous(3).float_type();
  c.batch = projected.dim(0);
  c.tokens = projected.dim(1);
  state_array.contiguous(4);
  c.heads = state_array.dim(1);
  c.head_dim = state_array.dim(2);
  c.depth = state_array.dim(3);
  c.groups = groups;
  CPUMOE_REQUIRE(groups >= 1, "groups=", groups, "; 1 or more is accepted");
  CPUMOE_REQUIRE(projected.dim(2) == c.row(), "projected has ", projected.dim(2), " features; ", c.row(),
                 " (gate, x, B, C and steps) are accepted");
  const ShapedArray state(state_, "state", {c.batch, c.heads, c.head_dim, c.depth});
  const Convolution convolution(conv_weight_, conv_bias_, conv_state_, c.batch, c.convolved());
  const ShapedArray dt_bias(dt_bias_, "dt_bias", {c.heads}), A_log(A_log_, "A_log", {c.heads}), D(D_, "D", {c.heads});
  const ShapedArray norm_weight(norm_weight_, "norm_weight", {c.inner()}, Presence::kOptional),
      mask(mask_, "mask", {c.batch, c.tokens}, Presence::kOptional);
  const ShapedArray out(out_, "out", {c.batch, c.tokens, c.inner()});
  c.projected = projected.data();
  c.convolution = convolution.values();
  c.conv_state = convolution.state.writable().like(projected);
  c.state = state.writable().fp32();
  c.dt_bias = dt_bias.parameters();
  c.A_log = A_log.parameters();
  c.D = D.parameters();
  c.norm_weight = norm_weight.parameters();
  c.mask = mask.fp32();
  c.out = out.writable().like(projected);
  c.norm_group = norm_group;
  c.epsilon = epsilon;
  c.gate_last = gate_last;
  c.step_low = step_low;
  c.step_high = step_high;
  const Computation computation;
  mamba2(active_kernels(), c);
}

void call_selective_scan(nb::handle x_, nb::handle steps_, nb::handle step_bias_, nb::handle parameters_,
                         nb::handle A_log_, nb::handle D_, nb::handle gate_, nb::handle state_, nb::handle b_weight_,
                         nb::handle c_weight_, float epsilon, nb::handle out_) {
  const Array x(x_, "x"), parameter_array(parameters_, "parameters"), gate_array(gate_, "gate");
  const Array rates(A_log_, "A_log");
  SelectiveScanCall c{};
  c.type = x.contiguous(3).float_type();
  c.batch = x.dim(0);
  c.tokens = x.dim(1);
  c.channels = x.dim(2);
  c.depth = rates.contiguous(2).dim(1);
  c.parameter_row = parameter_array.contiguous(3).dim(2);
  c.gate_row = gate_array.contiguous(3).dim(2);
  CPUMOE_REQUIRE(c.parameter_row >= 2 * c.depth, "parameters has ", c.parameter_row, " features; at least ",
                 2 * c.depth, " (B and C) are accepted");
  CPUMOE_REQUIRE(c.gate_row >= c.channels, "gate has ", c.gate_row, " features for ", c.channels, " channels");
  const ShapedArray steps(steps_, "steps", {c.batch, c.tokens, c.channels}),
      step_bias(step_bias_, "step_bias", {c.channels}, Presence::kOptional);
  const ShapedArray parameters(parameters_, "parameters", {c.batch, c.tokens, c.parameter_row});
  const ShapedArray gate(gate_, "gate", {c.batch, c.tokens, c.gate_row});
  const ShapedArray A_log(A_log_, "A_log", {c.channels, c.depth}), D(D_, "D", {c.channels});
  const ShapedArray state(state_, "state", {c.batch, c.channels, c.depth});
  const ShapedArray b_weight(b_weight_, "b_weight", {c.depth}, Presence::kOptional),
      c_weight(c_weight_, "c_weight", {c.depth}, Presence::kOptional);
  const ShapedArray out(out_, "out", {c.batch, c.tokens, c.channels});
  c.x = x.data();
  c.steps = steps.like(x);
  c.step_bias = step_bias.parameters();
  c.parameters = parameters.like(x);
  c.A_log = A_log.parameters();
  c.D = D.parameters();
  c.gate = gate.like(x);
  c.state = state.writable().fp32();
  c.b_weight = b_weight.parameters();
  c.c_weight = c_weight.parameters();
  c.epsilon = epsilon;
  c.out = out.writable().like(x);
  const Computation computation;
  selective_scan(active_kernels(), c);
}

void call_lightning_attention(nb::handle qkv_, nb::handle slopes_, nb::handle state_, nb::handle next_state_,
                              nb::handle out_) {
  const Array qkv(qkv_, "qkv"), next(next_state_, "next_state");
  LightningCall c{};
  c.type = qkv.contiguous(3).float_type();
  c.batch = qkv.dim(0);
  c.tokens = qkv.dim(1);
  c.heads = next.contiguous(4).dim(1);
  c.depth = next.dim(2);
  CPUMOE_REQUIRE(qkv.dim(2) == c.heads * 3 * c.depth, "qkv has ", qkv.dim(2), " features; ", c.heads * 3 * c.depth,
                 " are accepted");
  const ShapedArray slopes(slopes_, "slopes", {c.heads});
  const ShapedArray state(state_, "state", {c.batch, c.heads, c.depth, c.depth}, Presence::kOptional);
  const ShapedArray next_state(next_state_, "next_state", {c.batch, c.heads, c.depth, c.depth});
  const ShapedArray out(out_, "out", {c.batch, c.tokens, c.heads * c.depth});
  c.qkv = qkv.data();
  c.slopes = slopes.fp32();
  c.state_type = next.float_type();
  c.state = state.like(next);
  c.next_state = next_state.writable().like(next);
  c.out = out.writable().like(qkv);
  const Computation computation;
  lightning_attention(active_kernels(), c);
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  using namespace nb::literals;
  m.def("gated_delta_rule", &delta_rule, "q"_a, "k"_a.none(), "v"_a.none(), "z"_a.none(), "b"_a, "a"_a.none(),
        "key_heads"_a, "log_rates"_a, "decay_bias"_a, "decay_bound"_a, "conv_weight"_a, "conv_bias"_a.none(),
        "conv_state"_a, "state"_a, "norm_weight"_a, "norm_epsilon"_a, "sigmoid_gate"_a, "out"_a);
  m.def("short_convolution", &call_short_convolution, "projected"_a, "conv_weight"_a, "conv_bias"_a.none(),
        "conv_state"_a, "out"_a);
  m.def("mamba2", &call_mamba2, "projected"_a, "conv_state"_a, "state"_a, "conv_weight"_a, "conv_bias"_a.none(),
        "dt_bias"_a, "A_log"_a, "D"_a, "norm_weight"_a.none(), "mask"_a.none(), "groups"_a, "norm_group"_a, "epsilon"_a,
        "gate_last"_a, "step_low"_a, "step_high"_a, "out"_a);
  m.def("mamba_convolution", &call_mamba_convolution, "projected"_a, "conv_state"_a, "weight"_a, "bias"_a.none(),
        "mask"_a.none(), "out"_a);
  m.def("selective_scan", &call_selective_scan, "x"_a, "steps"_a, "step_bias"_a.none(), "parameters"_a, "A_log"_a,
        "D"_a, "gate"_a, "state"_a, "b_weight"_a.none(), "c_weight"_a.none(), "epsilon"_a, "out"_a);
  m.def("lightning_attention", &call_lightning_attention, "qkv"_a, "slopes"_a, "state"_a.none(), "next_state"_a,
        "out"_a);
}

}  // namespace cpumoe
