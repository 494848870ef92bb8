// The Python seam of state_space.h and lightning_attention.h.
#include <optional>

#include "bind/array.h"
#include "bind/module.h"
#include "kernels/dispatch.h"
#include "ops/lightning_attention.h"
#include "ops/state_space.h"
#include "runtime/check.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

enum class Presence { kRequired, kOptional };

// A tensor of the given shape, or none.
class Tensor {
 public:
  Tensor(nb::handle object, const char* name, std::initializer_list<std::int64_t> shape,
         Presence presence = Presence::kRequired) {
    CPUMOE_REQUIRE(presence == Presence::kOptional || !object.is_none(), name, " is missing");
    if (object.is_none()) return;
    array_.emplace(object, name);
    array_->contiguous(static_cast<int>(shape.size()));
    int i = 0;
    bool fits = true;
    std::string accepted;
    for (const std::int64_t size : shape) {
      fits = fits && array_->dim(i++) == size;
      accepted += concat(accepted.empty() ? "[" : ", ", size);
    }
    CPUMOE_REQUIRE(fits, name, " is ", array_->shape_text(), "; ", accepted, "] is accepted");
  }

  Floats floats() const { return array_ ? Floats{array_->data(), array_->float_type()} : Floats{}; }
  const float* fp32() const { return array_ ? array_->expect<float>("float32").data<float>() : nullptr; }

  const Tensor& writable() const {
    array_->writable();
    return *this;
  }
  // Of the dtype of another.
  template <class T = void>
  T* like(const Array& other) const {
    if (!array_) return nullptr;
    CPUMOE_REQUIRE(array_->same_type(other), array_->name(), " is ", array_->dtype_text(), "; that of ", other.name(),
                   " (", other.dtype_text(), ") is accepted");
    return reinterpret_cast<T*>(array_->data());
  }
  float* state() const { return const_cast<float*>(writable().fp32()); }

 private:
  std::optional<Array> array_;
};

void call_mamba2(nb::handle projected_, nb::handle conv_state_, nb::handle state_, nb::handle conv_weight_,
                 nb::handle conv_bias_, nb::handle dt_bias_, nb::handle A_log_, nb::handle D_, nb::handle norm_weight_,
                 nb::handle mask_, std::int64_t groups, std::int64_t norm_group, float epsilon, bool gate_last,
                 float step_low, float step_high, nb::handle out_) {
  const Array projected(projected_, "projected"), state_array(state_, "state"), weight(conv_weight_, "conv_weight");
  Mamba2Call c{};
  c.type = projected.contiguous(3).float_type();
  c.batch = projected.dim(0);
  c.tokens = projected.dim(1);
  state_array.contiguous(4);
  c.heads = state_array.dim(1);
  c.head_dim = state_array.dim(2);
  c.depth = state_array.dim(3);
  c.groups = groups;
  c.width = weight.contiguous(3).dim(2);
  CPUMOE_REQUIRE(groups >= 1, "groups=", groups, "; 1 or more is accepted");
  CPUMOE_REQUIRE(projected.dim(2) == c.row(), "projected has ", projected.dim(2), " features; ", c.row(),
                 " (gate, x, B, C and steps) are accepted");
  const Tensor state(state_, "state", {c.batch, c.heads, c.head_dim, c.depth});
  const Tensor conv_state(conv_state_, "conv_state", {c.batch, c.convolved(), c.width});
  const Tensor conv_weight(conv_weight_, "conv_weight", {c.convolved(), 1, c.width});
  const Tensor conv_bias(conv_bias_, "conv_bias", {c.convolved()}, Presence::kOptional);
  const Tensor dt_bias(dt_bias_, "dt_bias", {c.heads}), A_log(A_log_, "A_log", {c.heads}), D(D_, "D", {c.heads});
  const Tensor norm_weight(norm_weight_, "norm_weight", {c.inner()}, Presence::kOptional),
      mask(mask_, "mask", {c.batch, c.tokens}, Presence::kOptional);
  const Tensor out(out_, "out", {c.batch, c.tokens, c.inner()});
  c.projected = projected.data();
  c.conv_state = conv_state.writable().like(projected);
  c.state = state.state();
  c.conv_weight = conv_weight.floats();
  c.conv_bias = conv_bias.floats();
  c.dt_bias = dt_bias.floats();
  c.A_log = A_log.floats();
  c.D = D.floats();
  c.norm_weight = norm_weight.floats();
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

void call_convolve(nb::handle projected_, nb::handle conv_state_, nb::handle weight_, nb::handle bias_,
                   nb::handle mask_, nb::handle out_) {
  const Array projected(projected_, "projected"), weights(weight_, "weight");
  ConvolutionCall c{};
  c.type = projected.contiguous(3).float_type();
  c.batch = projected.dim(0);
  c.tokens = projected.dim(1);
  c.row = projected.dim(2);
  c.channels = weights.contiguous(3).dim(0);
  c.width = weights.dim(2);
  CPUMOE_REQUIRE(c.row >= c.channels, "projected has ", c.row, " features for ", c.channels, " channels");
  const Tensor conv_state(conv_state_, "conv_state", {c.batch, c.channels, c.width});
  const Tensor weight(weight_, "weight", {c.channels, 1, c.width}),
      bias(bias_, "bias", {c.channels}, Presence::kOptional);
  const Tensor mask(mask_, "mask", {c.batch, c.tokens}, Presence::kOptional),
      out(out_, "out", {c.batch, c.tokens, c.channels});
  c.projected = projected.data();
  c.conv_state = conv_state.writable().like(projected);
  c.weight = weight.floats();
  c.bias = bias.floats();
  c.mask = mask.fp32();
  c.out = out.writable().like(projected);
  const Computation computation;
  convolve(active_kernels(), c);
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
  const Tensor steps(steps_, "steps", {c.batch, c.tokens, c.channels}),
      step_bias(step_bias_, "step_bias", {c.channels}, Presence::kOptional);
  const Tensor parameters(parameters_, "parameters", {c.batch, c.tokens, c.parameter_row});
  const Tensor gate(gate_, "gate", {c.batch, c.tokens, c.gate_row});
  const Tensor A_log(A_log_, "A_log", {c.channels, c.depth}), D(D_, "D", {c.channels});
  const Tensor state(state_, "state", {c.batch, c.channels, c.depth});
  const Tensor b_weight(b_weight_, "b_weight", {c.depth}, Presence::kOptional),
      c_weight(c_weight_, "c_weight", {c.depth}, Presence::kOptional);
  const Tensor out(out_, "out", {c.batch, c.tokens, c.channels});
  c.x = x.data();
  c.steps = steps.like(x);
  c.step_bias = step_bias.floats();
  c.parameters = parameters.like(x);
  c.A_log = A_log.floats();
  c.D = D.floats();
  c.gate = gate.like(x);
  c.state = state.state();
  c.b_weight = b_weight.floats();
  c.c_weight = c_weight.floats();
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
  const Tensor slopes(slopes_, "slopes", {c.heads});
  const Tensor state(state_, "state", {c.batch, c.heads, c.depth, c.depth}, Presence::kOptional);
  const Tensor next_state(next_state_, "next_state", {c.batch, c.heads, c.depth, c.depth});
  const Tensor out(out_, "out", {c.batch, c.tokens, c.heads * c.depth});
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

void bind_state_space(nb::module_& m) {
  using namespace nb::literals;
  m.def("mamba2", &call_mamba2, "projected"_a, "conv_state"_a, "state"_a, "conv_weight"_a, "conv_bias"_a.none(),
        "dt_bias"_a, "A_log"_a, "D"_a, "norm_weight"_a.none(), "mask"_a.none(), "groups"_a, "norm_group"_a, "epsilon"_a,
        "gate_last"_a, "step_low"_a, "step_high"_a, "out"_a);
  m.def("mamba_convolution", &call_convolve, "projected"_a, "conv_state"_a, "weight"_a, "bias"_a.none(),
        "mask"_a.none(), "out"_a);
  m.def("selective_scan", &call_selective_scan, "x"_a, "steps"_a, "step_bias"_a.none(), "parameters"_a, "A_log"_a,
        "D"_a, "gate"_a, "state"_a, "b_weight"_a.none(), "c_weight"_a.none(), "epsilon"_a, "out"_a);
  m.def("lightning_attention", &call_lightning_attention, "qkv"_a, "slopes"_a, "state"_a.none(), "next_state"_a,
        "out"_a);
}

}  // namespace cpumoe
