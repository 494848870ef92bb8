// The Python seam of expert layers and linears.
#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "bind/array.h"
#include "bind/module.h"
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

// `prepared_type`: -1, or the type of the tokens before they were prepared.
void moe(nb::handle x_, nb::handle ids_, nb::handle weights_, nb::handle gate_up_, nb::handle down_, nb::handle out_,
         int activation, bool gated, float alpha, float limit, bool weight_on_input, int prepared_type,
         RankExchange* slices) {
  const Array x(x_, "hidden_states"), ids(ids_, "topk_ids"), weights(weights_, "topk_weights");
  const Array gate_up(gate_up_, "gate_up"), down(down_, "down"), out(out_, "out");
  MoeCall call{};
  call.gate_up = packed_matrix(gate_up);
  call.down = packed_matrix(down);
  x.contiguous(2);
  out.writable().contiguous(2);
  const bool prepared = prepared_type >= 0;
  call.type = prepared ? dtype_of(prepared_type) : x.float_type();
  call.out_type = prepared ? out.expect<float>("float32").float_type() : result_type(out, x);
  weights.contiguous(2).expect<float>("float32");
  ids.contiguous(2);
  call.tokens = x.dim(0);
  call.topk = ids.dim(1);
  if (prepared) {
    const std::int64_t bytes = prepared_token_bytes(call.gate_up, call.type);
    CPUMOE_REQUIRE(bytes > 0 && x.expect<std::uint8_t>("uint8").dim(1) == bytes, "prepared tokens have ", x.dim(1),
                   " bytes, but those for gate_up have ", bytes);
    CPUMOE_REQUIRE(reinterpret_cast<std::uintptr_t>(x.data()) % 64 == 0,
                   "prepared tokens do not begin at a multiple of 64 bytes");
  } else {
    CPUMOE_REQUIRE(x.dim(1) == call.gate_up.spec.depth, "hidden_states have ", x.dim(1),
                   " features, but gate_up takes ", call.gate_up.spec.depth);
  }
  CPUMOE_REQUIRE(out.dim(0) == x.dim(0) && out.dim(1) == call.gate_up.spec.depth,
                 "out must have the shape of hidden_states");
  CPUMOE_REQUIRE(ids.dim(0) == call.tokens, "topk_ids ", ids.shape_text(), " do not have the ", call.tokens,
                 " rows of hidden_states");
  CPUMOE_REQUIRE(weights.dim(0) == ids.dim(0) && weights.dim(1) == ids.dim(1), "topk_weights ", weights.shape_text(),
                 " and topk_ids ", ids.shape_text(), " differ in shape");
  CPUMOE_REQUIRE(activation >= 0 && activation <= static_cast<int>(Activation::kRelu2), "activation=", activation,
                 "; 0 to 5 are accepted");
  call.activation = {static_cast<Activation>(activation), gated, alpha, limit};
  call.weight_on_input = weight_on_input;
  call.x = prepared ? nullptr : x.data();
  call.prepared = prepared ? x.data() : nullptr;
  call.slices = slices;
  call.out = out.data();
  call.weights = weights.data<float>();

  std::vector<std::int32_t> narrow;
  if (ids.is<std::int32_t>()) {
    call.ids = ids.data<std::int32_t>();
  } else {
    const auto* wide = ids.expect<std::int64_t>("int32 or int64").data<std::int64_t>();
    narrow.resize(static_cast<std::size_t>(ids.size()));
    for (std::size_t i = 0; i < narrow.size(); ++i) {
      const bool fits =
          wide[i] >= std::numeric_limits<std::int32_t>::min() && wide[i] <= std::numeric_limits<std::int32_t>::max();
      CPUMOE_REQUIRE(fits, "topk_ids holds ", wide[i], "; 0 to ", call.gate_up.spec.experts - 1,
                     " are experts and -1 means none");
      narrow[i] = static_cast<std::int32_t>(wide[i]);
    }
    call.ids = narrow.data();
  }
  const Computation computation;
  moe_forward(active_kernels(), call);
}

// Tokens as the first product of `gate_up` wants them.
void prepare(nb::handle x_, nb::handle gate_up_, nb::handle out_) {
  const Array x(x_, "hidden_states"), gate_up(gate_up_, "gate_up"), out(out_, "out");
  const PackedMatrix matrix = packed_matrix(gate_up);
  const DType type = x.contiguous(2).float_type();
  CPUMOE_REQUIRE(x.dim(1) == matrix.spec.depth, "hidden_states have ", x.dim(1), " features, but gate_up takes ",
                 matrix.spec.depth);
  const std::int64_t bytes = prepared_token_bytes(matrix, type);
  out.writable().contiguous(2).expect<std::uint8_t>("uint8");
  CPUMOE_REQUIRE(bytes > 0 && out.dim(0) == x.dim(0) && out.dim(1) == bytes, "out is ", out.shape_text(), "; [",
                 x.dim(0), ", ", bytes, "] is accepted");
  const Computation computation;
  prepare_tokens(active_kernels(), matrix, x.data(), type, x.dim(0), out.data());
}

void linear(nb::handle x_, nb::handle weight_, nb::handle out_) {
  const Array x(x_, "x"), weight(weight_, "weight"), out(out_, "out");
  LinearCall call{};
  call.weight = packed_matrix(weight);
  call.type = x.contiguous(2).float_type();
  call.out_type = result_type(out.writable().contiguous(2), x);
  CPUMOE_REQUIRE(x.dim(1) == call.weight.spec.depth, "x has ", x.dim(1), " features, but the weight takes ",
                 call.weight.spec.depth);
  CPUMOE_REQUIRE(out.dim(0) == x.dim(0) && out.dim(1) == call.weight.spec.columns, "out must be [", x.dim(0), ", ",
                 call.weight.spec.columns, "]");
  call.rows = x.dim(0);
  call.x = x.data();
  call.out = out.data();
  const Computation computation;
  linear_forward(active_kernels(), call);
}

}  // namespace

void bind_experts(nb::module_& m) {
  using namespace nb::literals;
  m.def("moe", &moe, "x"_a, "ids"_a, "weights"_a, "gate_up"_a, "down"_a, "out"_a, "activation"_a, "gated"_a, "alpha"_a,
        "limit"_a, "weight_on_input"_a, "prepared_type"_a = -1, "slices"_a.none() = nb::none());
  m.def("prepare_tokens", &prepare, "x"_a, "gate_up"_a, "out"_a);
  m.def(
      "prepared_token_bytes",
      [](nb::handle gate_up, int type) {
        return prepared_token_bytes(packed_matrix(Array(gate_up, "gate_up")), dtype_of(type));
      },
      "gate_up"_a, "type"_a);
  m.def("linear", &linear, "x"_a, "weight"_a, "out"_a);
}

}  // namespace cpumoe
