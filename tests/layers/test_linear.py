"""QuantizedLinear and MoELayer."""

from __future__ import annotations

import pytest
import torch
from random_layers import random_layer, relative_error
from torch.nn import functional as F

import cpumoe
from cpumoe.layers import reference
from cpumoe.layers.rounding import pack_nibbles, quantize_weight


@pytest.mark.parametrize("scheme", ["w4a8", "w4a8-g32", "w4a8-g160", "w8a8"])
@pytest.mark.parametrize(("out", "inputs"), [(1, 160), (10, 160), (33, 320), (64, 480)])
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_linear_against_reference(scheme: str, out: int, inputs: int, rows: int, isa: str) -> None:
    weight, bias = torch.randn(out, inputs), torch.randn(out)
    values, scale = quantize_weight(weight, cpumoe.Scheme.parse(scheme))
    linear = cpumoe.QuantizedLinear.from_quantized(values, scale, scheme, bias)
    x = torch.randn(rows, inputs)
    expected = reference.linear(x, reference.dequantize(values, scale), bias)
    assert relative_error(linear(x), expected) < 2e-6
    if scheme != "w8a8":
        packed = cpumoe.QuantizedLinear.from_quantized(pack_nibbles(values), scale, scheme, bias)
        assert torch.equal(packed(x), linear(x))


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
        (torch.zeros(64, dtype=torch.int8), torch.ones(4, 1), "w8a8", None, "weight is torch.int8"),
        (
            torch.zeros(4, 64, dtype=torch.int8),
            torch.ones(4, 2),
            "w8a8",
            None,
            r"scale is torch.float32 \[4, 2\]",
        ),
        (
            torch.zeros(4, 64, dtype=torch.int8),
            torch.ones(4, 2, dtype=torch.int32),
            "w4a8-g32",
            None,
            "scale is",
        ),
        (torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 1), "w4a8-g128", None, "does not divide"),
        (torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 1), "w8a8", torch.ones(5), r"bias is \[5\]"),
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
    with pytest.raises(ValueError, match="shared_gate without"):
        cpumoe.MoELayer(torch.nn.Linear(128, 4), experts, 2, shared_gate=torch.nn.Linear(128, 1))
