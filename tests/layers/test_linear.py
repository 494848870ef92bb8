"""QuantizedLinear and MoELayer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_layers import global_scale, random_layer, relative_error
from torch.nn import functional as F

import cpumoe
from cpumoe.layers import reference
from cpumoe.layers.nibbles import pack_nibbles
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import PER_TOKEN_INT8
from cpumoe.layers.small_floats import FP4_VALUES

WEIGHTS = (
    "w4",
    "w4-g32",
    "w4-g160",
    "w8",
    "w8-g32",
    "w8-g160",
    "w4-asym",
    "w4-g32-asym",
    "w4-g160-asym",
    "mxfp4",
    "nvfp4",
)


def scheme_named(weights: str, bits: int) -> str:
    """The scheme of some weights with activations of 8 or 16 bits."""
    weights, dash, rest = weights.partition("-")
    on_request = bits == 8 and ("asym" in rest or "fp4" in weights)
    return f"{weights}a{16 if on_request else bits}{dash}{rest}{'+int8' if on_request else ''}"


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("out", "inputs"), [(1, 160), (10, 160), (33, 320), (64, 480)])
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_linear_against_reference(weights: str, bits: int, out: int, inputs: int, rows: int) -> None:
    scheme = scheme_named(weights, bits)
    bias = torch.randn(out)
    weight = replace(quantize_weight(torch.randn(out, inputs), cpumoe.Scheme.parse(scheme)), bias=bias)
    others = {"zero_point": weight.zero_points, "global_scale": global_scale(weight)}
    linear = cpumoe.QuantizedLinear.from_quantized(weight.values, weight.scales, scheme, bias, **others)
    assert str(linear.scheme) == scheme
    x = torch.randn(rows, inputs)
    expected = reference.linear(x, reference.dense(weight), PER_TOKEN_INT8 if bits == 8 else "int16")
    assert relative_error(linear(x), expected) < (2e-6 if bits == 8 else 2e-5)
    if bits == 16:
        assert relative_error(linear(x), reference.linear(x, reference.dense(weight), None)) < 2e-4
    if "w8" not in scheme:
        nibbles = pack_nibbles(weight.values - 8 if "fp4" in scheme else weight.values)
        packed = cpumoe.QuantizedLinear.from_quantized(nibbles, weight.scales, scheme, bias, **others)
        assert torch.equal(packed(x), linear(x))


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "w4a16-asym", "w4a16-asym+int8"])
@pytest.mark.parametrize("inputs", [1, 31, 100, 127, 129])
def test_inputs_that_fill_no_vector(scheme: str, inputs: int) -> None:
    """Zero points of what lies beyond the end must not be counted."""
    weight = quantize_weight(torch.rand(5, inputs) + 1, cpumoe.Scheme.parse(scheme))  # zero points at the end
    linear = cpumoe.QuantizedLinear.from_weight(weight, cpumoe.Scheme.parse(scheme))
    x = torch.rand(3, inputs) + 1
    expected = reference.linear(x, reference.dense(weight), PER_TOKEN_INT8 if "+" in scheme else "int16")
    assert relative_error(linear(x), expected) < (2e-6 if "+" in scheme else 2e-5)


@pytest.mark.parametrize("zero", [-8, 0, 7])
def test_every_value_with_the_zero_points_at_the_ends(zero: int) -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(4, 6)
    zeros = torch.full((4, 3), zero, dtype=torch.int8)
    linear = cpumoe.QuantizedLinear.from_quantized(values, torch.ones(4, 3), "w4a16-g32-asym", zero_point=zeros)
    one_hot = torch.eye(96)
    assert torch.equal(linear(one_hot), (values - zero).float().T)


def test_every_code_of_fp4_with_every_scale() -> None:
    """All 16 codes with the scales of E8M0 up to 2**108 and all of e4m3, to the bit.

    Beyond that the sums overflow before they are multiplied with the step of the row, as those of other schemes do.
    """
    values = torch.arange(16, dtype=torch.int8).repeat(236, 2)
    one_hot = torch.eye(32)[:16]
    codes = torch.arange(236, dtype=torch.uint8).unsqueeze(1)
    linear = cpumoe.QuantizedLinear.from_quantized(values, codes, "mxfp4a16")
    exact = FP4_VALUES.double() * 2.0 ** (codes.double() - 127)
    assert torch.equal(linear(one_hot).T, exact.float())
    codes = torch.arange(127, dtype=torch.uint8).unsqueeze(1).repeat(1, 2).view(torch.float8_e4m3fn)
    for factor in (1.0, 4.0, 2.0**-100):
        linear = cpumoe.QuantizedLinear.from_quantized(
            values[:127], codes, "nvfp4a16", global_scale=torch.tensor([factor])
        )
        exact = FP4_VALUES.double() * codes[:, :1].double() / factor
        assert torch.equal(linear(one_hot).T, exact.float())


def test_shapes_of_inputs() -> None:
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(20, 64).bfloat16(), "w4a8-g32")
    assert (linear.in_features, linear.out_features, str(linear.scheme)) == (64, 20, "w4a8-g32")
    x = torch.randn(2, 3, 64).bfloat16()
    assert linear(x).shape == (2, 3, 20) and linear(x).dtype == torch.bfloat16
    assert torch.equal(linear(x)[1, 2], linear(x[1, 2]))
    assert linear(torch.empty(0, 64)).shape == (0, 20)
    assert torch.equal(linear(x.transpose(0, 1)), linear(x).transpose(0, 1))
    assert "w4a8-g32" in repr(linear)


@pytest.mark.parametrize(
    ("weight", "scale", "scheme", "bias", "message"),
    [
        (torch.zeros(4, 64), torch.ones(4, 1), "w8a8", None, "weight is torch.float32"),
        (torch.zeros(64, dtype=torch.int8), torch.ones(4, 1), "w8a8", None, r"weight is \[64\]; \[out, in\]"),
        (
            torch.zeros(4, 64, dtype=torch.int8),
            torch.ones(4, 2),
            "w8a8",
            None,
            r"scale is \[4, 2\]; \[4, 1\] is accepted",
        ),
        (
            torch.zeros(4, 64, dtype=torch.int8),
            torch.ones(4, 2, dtype=torch.int32),
            "w4a8-g32",
            None,
            "scale is",
        ),
        (torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 1), "w4a8-g128", None, "does not divide"),
        (
            torch.zeros(4, 64, dtype=torch.int8),
            torch.ones(4, 1),
            "w8a8",
            torch.ones(5),
            r"bias is \[5\]; \[4\] is accepted",
        ),
        (
            torch.full((4, 64), 9, dtype=torch.int8),
            torch.ones(4, 1),
            "w4a8",
            None,
            "value 9 at .* is not an int4",
        ),
        (torch.zeros(4, 64, dtype=torch.int8), torch.full((4, 1), torch.inf), "w8a8", None, "is not finite"),
        (torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 1), "w8a8", None, "must be int8 for 8-bit"),
    ],
)
def test_bad_weights(
    weight: torch.Tensor, scale: torch.Tensor, scheme: str, bias: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cpumoe.QuantizedLinear.from_quantized(weight, scale, scheme, bias)


def test_bad_inputs() -> None:
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(20, 64), "w4a8-g32")
    with pytest.raises(ValueError, match=r"x is \[2, 63\]; \[..., 64\] is accepted"):
        linear(torch.randn(2, 63))
    with pytest.raises(ValueError, match="x is float64; float32, bfloat16 or float16 is accepted"):
        linear(torch.randn(2, 64).double())
    with pytest.raises(ValueError, match=r"x is \[\]"):
        linear(torch.tensor(1.0))
    with pytest.raises(ValueError, match="weight is on meta"):
        cpumoe.QuantizedLinear.from_quantized(
            torch.zeros(4, 64, dtype=torch.int8, device="meta"), torch.ones(4, 1), "w8a8"
        )


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16-g32-asym", "fp8", "mxfp4", "nvfp4a16", "bf16"])
def test_float_weights_of_the_meta_device_are_refused(scheme: str) -> None:
    for weight in (torch.nn.Linear(64, 32, device="meta"), torch.empty(32, 64, device="meta")):
        with pytest.raises(ValueError, match="^weight is on meta; CPU tensors are accepted$"):
            cpumoe.QuantizedLinear.quantize(weight, scheme)
    with pytest.raises(ValueError, match="^gate_up is on meta; CPU tensors are accepted$"):
        cpumoe.Experts.quantize(torch.empty(2, 64, 32, device="meta"), torch.empty(2, 32, 32, device="meta"), scheme)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_of_pytorch_is_quantized_with_its_bias(bias: bool) -> None:
    linear = torch.nn.Linear(64, 20, bias=bias)
    x = torch.randn(3, 64)
    own = cpumoe.QuantizedLinear.quantize(linear.weight, "w4a8-g32", linear.bias)
    with torch.no_grad():
        assert torch.equal(cpumoe.QuantizedLinear.quantize(linear, "w4a8-g32")(x), own(x))
    given = torch.randn(20)
    if bias:
        with pytest.raises(ValueError, match="bias is given, and Linear.* has one"):
            cpumoe.QuantizedLinear.quantize(linear, "w4a8-g32", given)
    else:
        with_bias = cpumoe.QuantizedLinear.quantize(linear, "w4a8-g32", given)
        torch.testing.assert_close(with_bias(x), own(x) + given)
    with pytest.raises(ValueError, match=r"weight is a list; a float tensor \[out, in\] or an nn.Linear is accepted"):
        cpumoe.QuantizedLinear.quantize([[1.0]], "w4a8-g32")  # type: ignore[arg-type]


def test_layer_is_router_experts_and_shared_experts() -> None:
    experts = random_layer("w8a8", experts=6).experts("native")
    router = torch.nn.Linear(128, 6, bias=False)
    shared, gate = torch.nn.Linear(128, 128), torch.nn.Linear(128, 1)
    layer = cpumoe.MoELayer(router, experts, 2, shared_experts=shared, shared_gate=gate)
    x = torch.randn(3, 5, 128)
    with torch.no_grad():
        out = layer(x)
        flat = x.view(-1, 128)
        top, ids = router(flat).topk(2)
        expected = experts(flat, ids, F.softmax(top, -1)) + torch.sigmoid(gate(flat)) * shared(flat)
    assert out.shape == x.shape
    assert relative_error(out, expected.view_as(x)) < 1e-5


def test_layer_with_deepseek_routing() -> None:
    experts = random_layer("w4a8-g32", experts=8).experts("native")
    bias = torch.randn(8)
    router = torch.nn.Linear(128, 8, bias=False)
    layer = cpumoe.MoELayer(
        router,
        experts,
        2,
        "deepseek_v3",
        correction_bias=bias,
        num_expert_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    x = torch.randn(9, 128)
    with torch.no_grad():
        weights, ids = cpumoe.select_experts(
            router(x),
            2,
            "deepseek_v3",
            correction_bias=bias,
            num_expert_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
        )
        assert torch.equal(layer(x), experts(x, ids, weights))
    assert "correction_bias" in layer.state_dict()


def test_layer_refuses_what_does_not_fit() -> None:
    experts = random_layer("w4a8-g32").experts("native")
    with pytest.raises(ValueError, match="topk=5; 1 to 4"):
        cpumoe.MoELayer(torch.nn.Linear(128, 4), experts, 5)
    with pytest.raises(ValueError, match="routed_scaling_factor=None; a finite number"):
        cpumoe.MoELayer(torch.nn.Linear(128, 4), experts, 2, routed_scaling_factor=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shared_gate without"):
        cpumoe.MoELayer(torch.nn.Linear(128, 4), experts, 2, shared_gate=torch.nn.Linear(128, 1))
