"""The operators as PyTorch sees them: schemas, fakes, compile, export."""

from __future__ import annotations

import pytest
import torch
from random_layers import random_layer, relative_error, routing

import cpumoe
from cpumoe import ops
from cpumoe.layers.nibbles import pack_nibbles
from cpumoe.layers.packed_weights import packed_activations


def fused_arguments(tokens: int = 5) -> tuple[object, ...]:
    experts = random_layer("w4a8-g32").experts("native")
    ids, weights = routing(tokens, 4, 2)
    x = torch.randn(tokens, 128)
    return x, ids, weights, experts.gate_up_packed, experts.down_packed


def test_opcheck() -> None:
    x, ids, weights, gate_up, down = fused_arguments()
    fused = (x, ids, weights, gate_up, down, 0, True, 1.702, 7.0, False)
    torch.library.opcheck(torch.ops.cpumoe.fused_experts.default, fused)
    four_bit = (x, ids, weights, gate_up, down, 128, 96, 192, 32, False, 0)
    torch.library.opcheck(torch.ops.cpumoe.dynamic_4bit_int_moe.default, four_bit)
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(20, 64), "w4a8-g32")
    torch.library.opcheck(torch.ops.cpumoe.linear.default, (torch.randn(3, 64), linear.weight_packed, 20))
    values, scales = torch.randint(-8, 8, (2, 32, 64), dtype=torch.int8), torch.rand(2, 32, 2)
    pack = torch.ops.cpumoe.pack.default
    torch.library.opcheck(pack, (values, scales, None, 64, 32, "int4", 1))
    zeros = torch.randint(-8, 8, (2, 32, 2), dtype=torch.int8)
    torch.library.opcheck(pack, (values, scales, None, 64, 32, "int4", 1, "w", zeros, None, "int16"))
    codes, powers = values & 15, torch.full((2, 32, 2), 120, dtype=torch.uint8)
    torch.library.opcheck(pack, (codes, powers, None, 64, 32, "fp4", 0, "w", None, None, "int16"))
    small, factors = torch.rand(2, 32, 4).to(torch.float8_e4m3fn), torch.rand(2, 32)
    # Its look at the schema compares what came in with what is left of it, which PyTorch cannot for 8-bit floats.
    torch.library.opcheck(
        pack,
        (codes, small, torch.randn(2, 32), 64, 16, "fp4", 0, "w", None, factors, "int8"),
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    logits = torch.randn(4, 8)
    torch.library.opcheck(torch.ops.cpumoe.select_experts.default, (logits, 2, 1, True, None, 0, 0, False, 1.0))


@pytest.mark.parametrize("scheme", ["w4a8-g32", "w8a16", "w4a16-g32-asym", "mxfp4a16", "nvfp4a16+int8"])
@torch.no_grad()
def test_packing_compiles(scheme: str) -> None:
    """Packing and a product with what was packed, in one graph and without."""
    parsed = cpumoe.Scheme.parse(scheme)
    experts = random_layer(scheme, experts=1).experts("native")
    w = experts.quantized().down
    settings = (96, parsed.group_size or -1, w.element, ops.ROWS_PLAIN, "w")

    def product(x: torch.Tensor, *parts: torch.Tensor | None) -> torch.Tensor:
        values, scales, *others = parts
        packed = ops.pack(values, scales, None, *settings, *others, packed_activations(parsed))
        return ops.linear(x, packed, 128)

    x = torch.randn(3, 96)
    parts = (w.values, w.scales, w.zero_points, w.factors)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, *parts), product(x, *parts))
    assert torch.equal(product(x, *parts), ops.linear(x, experts.down_packed, 128))


class Model(torch.nn.Module):
    def __init__(self, scheme: str = "w4a8-g32") -> None:
        super().__init__()
        self.first = cpumoe.QuantizedLinear.quantize(torch.randn(128, 64), scheme)
        self.moe = cpumoe.MoELayer(torch.nn.Linear(128, 4, bias=False), random_layer(scheme).experts("native"), topk=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.first(x)) * 2


@pytest.mark.every(5)
@pytest.mark.parametrize("scheme", ["w4a8-g32", "w8a16-g32", "w4a16-g32-asym", "mxfp4a16", "nvfp4a16"])
@torch.no_grad()
def test_compile_fullgraph(scheme: str) -> None:
    torch._dynamo.reset()  # it compiles the same function for a few models only
    model = Model(scheme)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (1, 7, 3):
        x = torch.randn(tokens, 64)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.full
@torch.no_grad()
def test_compile_inductor() -> None:
    torch._dynamo.reset()
    model = Model()
    x = torch.randn(6, 64)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_export() -> None:
    model = Model()
    x = torch.randn(6, 64)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("tokens", min=2)}})
    other = torch.randn(11, 64)
    torch.testing.assert_close(program.module()(other), model(other))


def test_there_are_no_gradients() -> None:
    """Operators give results that ask for none; modules, where a gradient would be lost in silence, refuse."""
    x, ids, weights, gate_up, down = fused_arguments()
    layer = cpumoe.Experts.from_packed(gate_up, down, activation="silu")
    x = x.requires_grad_()
    call = torch.ops.cpumoe.dynamic_4bit_int_moe
    assert not call(x, ids, weights, gate_up, down, 128, 96, 192, 32, False, 0).requires_grad
    with pytest.raises(RuntimeError, match="for inference"):
        layer(x, ids, weights)
    with torch.no_grad():
        assert not layer(x, ids, weights).requires_grad


def test_a_gradient_is_refused_wherever_it_would_be_lost() -> None:
    x, ids, weights, gate_up, down = fused_arguments()
    experts = cpumoe.Experts.from_packed(gate_up, down, activation="silu")
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(8, 128), "w8a8")
    layer = cpumoe.MoELayer(torch.nn.Linear(128, 4), experts, topk=2)
    wanted, logits = x.clone().requires_grad_(), torch.randn(5, 4)
    biased = {"method": "deepseek_v3", "correction_bias": torch.zeros(4, requires_grad=True)}
    calls = {
        "hidden_states": lambda: experts(wanted, ids, weights),
        "topk_weights": lambda: experts(x, ids, weights.clone().requires_grad_()),
        "x": lambda: linear(wanted),
        "router_logits": lambda: layer(x),  # the router's parameters
        "correction_bias": lambda: cpumoe.select_experts(logits, 2, **biased),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"^{name} requires a gradient, .* for inference.* use torch.no_grad"):
            call()
        for quiet in (torch.no_grad(), torch.inference_mode()):
            with quiet:
                call()
    with pytest.raises(RuntimeError, match="router_logits requires a gradient"):
        cpumoe.select_experts(logits.requires_grad_(), 2)
    layer.requires_grad_(False)
    assert not layer(x).requires_grad
    # A routing of the user's may have gradients; the experts behind it have none.
    custom = cpumoe.MoELayer(torch.nn.Linear(128, 4), experts, 2, "custom", custom=lambda z, k: z.softmax(-1).topk(k))
    with pytest.raises(RuntimeError, match="topk_weights requires a gradient"):
        custom(x)


def test_dynamic_4bit_int_moe_is_the_layer() -> None:
    x, ids, weights, gate_up, down = fused_arguments()
    layer = cpumoe.Experts.from_packed(gate_up, down, activation="silu")
    call = torch.ops.cpumoe.dynamic_4bit_int_moe
    for kind, activation in ((0, "silu"), (2, "silu"), (1, "swiglu_oai")):
        expected = cpumoe.Experts.from_packed(gate_up, down, activation=activation)(x, ids, weights)
        assert torch.equal(call(x, ids, weights, gate_up, down, 128, 96, 192, 32, False, kind), expected)
    on_input = call(x, ids, weights, gate_up, down, 128, 96, 192, 32, True, 0)
    assert torch.equal(on_input, layer(x, ids, weights, apply_router_weight_on_input=True))


def test_dynamic_4bit_int_moe_per_channel_and_nibbles() -> None:
    layer = random_layer("w4a8")
    x = torch.randn(4, 128)
    ids, weights = routing(4, 4, 2)
    gate_up = torch.ops.cpumoe.pack(
        pack_nibbles(layer.gate_up), layer.gate_up_scale, None, 128, -1, "int4", ops.ROWS_GATE_THEN_UP
    )
    down = torch.ops.cpumoe.pack(pack_nibbles(layer.down), layer.down_scale, None, 96, -1, "int4", ops.ROWS_PLAIN)
    out = torch.ops.cpumoe.dynamic_4bit_int_moe(x, ids, weights, gate_up, down, 128, 96, 192, -1, False, 0)
    assert relative_error(out, layer.experts("reference")(x, ids, weights)) < 3e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 64}, "packed with group_size=32, but the call says 64"),
        ({"group": 0}, "group_size=0; -1"),
        ({"group": -1}, "packed with group_size=32, but the call says None"),
        ({"hidden": 64}, "packed with in_features=128, but the call says 64"),
        ({"double": 100}, "twice intermediate_size"),
        ({"kind": 3}, "activation_kind=3; 0, 1 and 2 are accepted"),
    ],
)
def test_dynamic_4bit_int_moe_refuses_what_does_not_fit(changes: dict[str, int], message: str) -> None:
    sizes = {"hidden": 128, "inner": 96, "double": 192, "group": 32, "kind": 0, **changes}
    with pytest.raises(ValueError, match=message):
        torch.ops.cpumoe.dynamic_4bit_int_moe(
            *fused_arguments(),
            sizes["hidden"],
            sizes["inner"],
            sizes["double"],
            sizes["group"],
            False,
            sizes["kind"],
        )


def test_whoever_watches_operators_sees_ours() -> None:
    """Calls go straight to the core, but not past a mode, a profiler, a compiler or another device."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    experts = random_layer("w4a8-g32").experts("native")
    x, (weights, ids) = torch.randn(3, 128), cpumoe.select_experts(torch.randn(3, 4), 2)
    expected = experts(x, ids, weights)

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.names.append(str(operator))
            return operator(*args, **(kwargs or {}))

    with Seen() as seen:
        assert torch.equal(experts(x, ids, weights), expected)
    assert "cpumoe.fused_experts.default" in seen.names
    with torch.profiler.profile() as profiler:
        experts(x, ids, weights)
    assert "cpumoe::fused_experts" in {event.key for event in profiler.key_averages()}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = experts(mode.from_tensor(x), ids, weights)
    assert fake.shape == expected.shape and type(fake) is not torch.Tensor
    assert experts(x.to("meta"), ids.to("meta"), weights.to("meta")).device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_in_fp32_are_those_that_are_rounded(dtype: torch.dtype) -> None:
    x = torch.randn(5, 128, dtype=dtype)
    weights, ids = cpumoe.select_experts(torch.randn(5, 4), 2)
    for backend in ("native", "reference"):
        experts = random_layer("w4a8-g32", bias=True).experts(backend)
        sums = experts(x, ids, weights, fp32_out=True)
        assert sums.dtype == torch.float32 and torch.equal(sums.to(dtype), experts(x, ids, weights))
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(96, 128), "w4a8-g32")
    wide = linear(x, fp32_out=True)
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), linear(x))
    torch.library.opcheck(torch.ops.cpumoe.linear.default, (x, linear.weight_packed, 96, True))


class Wrapped(torch.Tensor):
    """A tensor that has no memory of its own, as those of other libraries."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        out = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        out.inner = inner
        return out

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return operator(*[a.inner if isinstance(a, Wrapped) else a for a in args], **(kwargs or {}))


def test_tensors_that_are_not_what_they_look_like() -> None:
    experts = random_layer("w4a8-g32").experts("native")
    x, (weights, ids) = torch.randn(3, 128), cpumoe.select_experts(torch.randn(3, 4), 2)
    expected = experts(x, ids, weights)
    assert torch.equal(experts(x, ids, Wrapped(weights)), expected)
    assert torch.equal(experts(Wrapped(x), ids, weights), expected)
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(32, 64), "w8a8")
    y = torch.randn(2, 64)
    assert torch.equal(ops.linear(y, Wrapped(linear.weight_packed), 32), linear(y))
    assert torch.equal(linear(torch._neg_view(y)), linear(-y))
    assert torch.equal(ops.linear(x=y, weight=linear.weight_packed, out_features=32), linear(y))
    with pytest.raises((ValueError, RuntimeError)):
        ops.linear(torch._efficientzerotensor((2, 64)), linear.weight_packed, 32)
