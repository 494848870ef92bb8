// The Python seam of expert layers and linears.
#include <string>
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
#include "bind/shaped_array.h"
#include "kernels/dispatch.h"
#include "ops/experts.h"
#include "ops/linear.h"
#include "packed/layout.h"
#include "runtime/check.h"
#include "runtime/exchange.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

// The dtype of a result: that of the input, or fp32, for sums that others are added to before they are rounded.
DType result_type(const Array& out, const Array& x) {
  const DType type = out.float_type();
  CPUMOE_REQUIRE(type == DType::kF32 || out.same_type(x), out.name(), " is ", out.dtype_text(), "; that of ", x.name(),
                 " (", x.dtype_text(), ") or float32 is accepted");
  return type;
}

DType dtype_of(int number) {
  CPUMOE_REQUIRE(number >= 0 && number <= static_cast<int>(DType::kF16), "dtype ", number, "; 0 to 2 are accepted");
  return static_cast<DType>(number);
}

void moe(nb::handle x_, nb::handle ids_, nb::handle weights_, nb::handle gate_up_, nb::handle down_, nb::handle out_,
         int activation, bool gated, float alpha, float limit, bool weight_on_input, RankExchange* slices) {
  const Array x(x_, "hidden_states"), ids(ids_, "topk_ids"), weights(weights_, "topk_weights");
  const Array gate_up(gate_up_, "gate_up"), down(down_, "down"), out(out_, "out");
  MoeCall call{};
  call.gate_up = packed_matrix(gate_up);
  call.down = packed_matrix(down);
  check_rows(x, ids, weights, out);
  call.type = x.float_type();
  call.out_type = result_type(out, x);
  call.tokens = x.dim(0);
  call.topk = ids.dim(1);
  CPUMOE_REQUIRE(x.dim(1) == call.gate_up.spec.depth, "hidden_states have ", x.dim(1), " features, but gate_up takes ",
                 call.gate_up.spec.depth);
  CPUMOE_REQUIRE(activation >= 0 && activation <= static_cast<int>(Activation::kRelu2), "activation=", activation,
                 "; 0 to 5 are accepted");
  call.activation = {static_cast<Activation>(activation), gated, alpha, limit};
  call.weight_on_input = weight_on_input;
  call.x = x.data();
  call.slices = slices;
  call.out = out.data();
  call.weights = weights.data<float>();
  std::vector<std::int32_t> narrow;
  call.ids = narrow_ids(ids, call.gate_up.spec.experts, narrow);
  const Computation computation;
  moe_forward(active_kernels(), call);
}

// Multiplies x [rows, depth] by a matrix.
void multiply(const Array& x, const Matrix& matrix, const Array& out) {
  const DType type = x.contiguous(2).float_type(), out_type = result_type(out.writable().contiguous(2), x);
  CPUMOE_REQUIRE(x.dim(1) == matrix.depth, "x has ", x.dim(1), " features, but the weight takes ", matrix.depth);
  CPUMOE_REQUIRE(out.dim(0) == x.dim(0) && out.dim(1) == matrix.columns, "out must be [", x.dim(0), ", ",
                 matrix.columns, "]");
  const Computation computation;
  linear_forward(active_kernels(), {matrix, x.data(), type, out_type, x.dim(0), out.data()});
}

void linear(nb::handle x_, nb::handle weight_, nb::handle out_) {
  const Array x(x_, "x"), weight(weight_, "weight"), out(out_, "out");
  multiply(x, matrix_of(packed_matrix(weight)), out);
}

// For few rows: every row is multiplied by the whole weight [columns, depth].
void float_linear(nb::handle x_, nb::handle weight_, nb::handle bias_, nb::handle out_) {
  const Array x(x_, "x"), weight(weight_, "weight"), out(out_, "out");
  Matrix matrix;
  matrix.floats = weight.contiguous(2).like(x).data();
  matrix.type = weight.float_type();
  matrix.columns = weight.dim(0);
  matrix.depth = weight.dim(1);
  const ShapedArray bias(bias_, "bias", {matrix.columns}, Presence::kOptional);
  matrix.bias = bias.fp32();
  multiply(x, matrix, out);
}

}  // namespace

void check_rows(const Array& x, const Array& ids, const Array& weights, const Array& out) {
  x.contiguous(2);
  out.writable().contiguous(2);
  weights.contiguous(2).expect<float>("float32");
  ids.contiguous(2);
  CPUMOE_REQUIRE(out.dim(0) == x.dim(0) && out.dim(1) == x.dim(1), "out must have the shape of hidden_states");
  CPUMOE_REQUIRE(ids.dim(0) == x.dim(0), "topk_ids ", ids.shape_text(), " do not have the ", x.dim(0),
                 " rows of hidden_states");
  CPUMOE_REQUIRE(weights.dim(0) == ids.dim(0) && weights.dim(1) == ids.dim(1), "topk_weights ", weights.shape_text(),
                 " and topk_ids ", ids.shape_text(), " differ in shape");
}

const std::int32_t* narrow_ids(const Array& ids, std::int64_t experts, std::vector<std::int32_t>& narrow) {
  if (ids.is<std::int32_t>()) return ids.data<std::int32_t>();
  const auto* wide = ids.expect<std::int64_t>("int32 or int64").data<std::int64_t>();
  narrow.resize(static_cast<std::size_t>(ids.size()));
  for (std::size_t i = 0; i < narrow.size(); ++i) {
    narrow[i] = static_cast<std::int32_t>(wide[i]);
    CPUMOE_REQUIRE(narrow[i] == wide[i], "topk_ids hold ", wide[i], "; 0 to ", experts - 1,
                   " are experts and -1 means none");
  }
  return narrow.data();
}

void bind_experts(nb::module_& m) {
  using namespace nb::literals;
  m.def("moe", &moe, "x"_a, "ids"_a, "weights"_a, "gate_up"_a, "down"_a, "out"_a, "activation"_a, "gated"_a, "alpha"_a,
        "limit"_a, "weight_on_input"_a, "slices"_a.none() = nb::none());
  m.def(
      "prepared_token_bytes",
      [](nb::handle gate_up, int type) {
        return prepared_token_bytes(packed_matrix(Array(gate_up, "gate_up")), dtype_of(type));
      },
      "gate_up"_a, "type"_a);
  m.def("linear", &linear, "x"_a, "weight"_a, "out"_a);
  m.def("float_linear", &float_linear, "x"_a, "weight"_a, "bias"_a.none(), "out"_a);
}

}  // namespace cpumoe
