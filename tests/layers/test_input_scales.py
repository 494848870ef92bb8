"""Every scheme through Experts and QuantizedLinear, stored scales of inputs, scales of blocks and tensors, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from random_layers import fitting, linear_inputs, random_layer, relative_error, routing

import cpumoe
from cpumoe import Experts, QuantizedLinear, Scheme
from cpumoe.layers import reference
from cpumoe.layers.activation_rounding import held_activations, input_scale_arguments, needs_input_scales
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import SCHEMES

STORED = [name for name in SCHEMES if needs_input_scales(Scheme.parse(name))]
BACKENDS = ["reference", pytest.param("native", id="native")]


def floats(experts: int = 4, hidden: int = 256, inner: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.randn(experts, 2 * inner, hidden) / hidden**0.5
    return gate_up, torch.randn(experts, hidden, inner) / inner**0.5


def by_definition(experts: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Expert by expert and half by half from the weights that are held, in float64 but for what is quantised."""
    held, form = experts.quantized(), experts.config.scheme.product_activations
    out = torch.zeros(x.shape, dtype=torch.float64)
    for index in range(held.count):
        token, slot = torch.where(ids == index)
        if token.numel() == 0:
            continue
        halves = []
        for half in held.gate_up[index].halves():
            inputs = reference.activations(x[token], form, half.input_scales)
            halves.append(inputs.double() @ reference.dequantize(half).double().T)
        h = torch.nn.functional.silu(halves[0]) * halves[1]
        down = held.down[index]
        h = reference.activations(h.float(), form, down.input_scales).double()
        out[token] += h @ reference.dequantize(down).double().T * weights[token, slot].unsqueeze(1)
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_scheme_through_experts(scheme: str, backend: str) -> None:
    gate_up, down = floats()
    parsed = Scheme.parse(scheme)
    experts = Experts.quantize(gate_up, down, scheme, backend=backend, **input_scale_arguments(parsed, 4.0, 12.0))
    assert experts.config.scheme == parsed and f"{scheme}," in repr(experts)
    x = torch.randn(9, 256)
    ids, weights = routing(9, 4, 2)
    out = experts(x, ids, weights)
    assert relative_error(out, by_definition(experts, x, ids, weights)) < 2e-2
    held, rounded = experts.quantized(), quantize_weight(gate_up, parsed)
    assert held.gate_up.scales.shape == rounded.scales.shape
    assert torch.equal(reference.dequantize(held.gate_up), reference.dequantize(rounded))
    assert (held.down.input_scales is not None) == needs_input_scales(parsed)
    exact = Experts.quantize(gate_up, down, "fp32", backend="reference")(x, ids, weights)
    worst = {4: 0.35, 6: 0.2, 8: 0.1, 16: 5e-3, 32: 1e-4}
    assert relative_error(out, exact) < worst[parsed.weights.bits]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_through_a_linear(scheme: str) -> None:
    """On the native kernels, which are all that a linear has."""
    weight, bias = torch.randn(160, 256), torch.randn(160)
    parsed, inputs = Scheme.parse(scheme), linear_inputs(scheme, 4.0)
    linear = QuantizedLinear.quantize(weight, scheme, bias, **inputs)
    assert linear.scheme == parsed
    rounded = quantize_weight(weight, parsed)
    stored = None if not inputs else next(iter(inputs.values())).reshape(1)
    dense = reference.Dense(reference.dequantize(rounded), bias, stored)
    for tokens in (1, 7, 40):
        x = torch.randn(tokens, 256)
        assert relative_error(linear(x), reference.linear(x, dense, held_activations(parsed))) < 2e-5
    scale = None if parsed.weights.scale == "none" else rounded.scales
    parts = {"zero_point": rounded.zero_points, **inputs}
    if rounded.factors is not None:
        parts["global_scale"] = 1.0 / rounded.factors[:1]
    again = QuantizedLinear.from_quantized(rounded.values, scale, scheme, bias, **parts)
    assert torch.equal(again(x), linear(x))


# ---- stored scales of inputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", STORED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_forms_in_which_input_scales_are_given(scheme: str, backend: str) -> None:
    layer = random_layer(scheme)
    first, second = layer.input_scales  # their names
    number = layer.input_scales[first]
    x = torch.randn(5, 128)
    ids, weights = routing(5, 4, 2)
    expected = layer.experts(backend)(x, ids, weights)
    for same in (float(number), number.reshape(1), number.expand(4), number.expand(4, 1), number.expand(4, 2)):
        layer.input_scales[first] = same
        assert torch.equal(layer.experts(backend)(x, ids, weights), expected)
    for same in (number.double(), number.expand(4, 1)):
        layer.input_scales[second] = same
        assert torch.equal(layer.experts(backend)(x, ids, weights), expected)
    layer.input_scales[first] = number * 3
    assert not torch.equal(layer.experts(backend)(x, ids, weights), expected)


@pytest.mark.parametrize("scheme", STORED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_and_up_have_input_scales_of_their_own(scheme: str, backend: str) -> None:
    layer = random_layer(scheme)
    name = next(iter(layer.input_scales))
    both = layer.input_scales[name] * torch.linspace(0.5, 2.0, 8).view(4, 2)
    layer.input_scales[name] = both
    experts = layer.experts(backend)
    held = experts.quantized().gate_up
    assert held.input_scales is not None and torch.equal(held.input_scales, both)
    assert [half.input_scales.tolist() for half in held.halves()] == [both[:, :1].tolist(), both[:, 1:].tolist()]  # type: ignore[union-attr]
    x = torch.randn(9, 128)
    ids, weights = routing(9, 4, 2)
    out = experts(x, ids, weights)
    assert relative_error(out, by_definition(experts, x, ids, weights)) < 2e-2
    layer.input_scales[name] = both[:, :1]
    assert relative_error(layer.experts(backend)(x, ids, weights), out) > 1e-3


@pytest.mark.parametrize("scheme", STORED)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: None, "is missing for {scheme}"),
        (lambda t: t.expand(3), r"is \[3\]; one number(,| or) \[4\]"),
        (lambda t: t.expand(4, 3), r"is \[4, 3\]; one number(,| or) \[4\]"),
        (lambda t: t.expand(1, 4), r"is \[1, 4\]; one number"),
        (lambda t: t.new_ones(0), r"is \[0\]; one number"),
        (lambda t: t.to("meta"), "is on meta; CPU tensors are accepted"),
        (lambda t: t.int(), "is torch.int32; a floating point dtype is accepted"),
        (lambda t: t * 0, r"\[0, 0\] is 0; a positive and finite fp32 number"),
        (lambda t: -t, r"\[0, 0\] is -[0-9.e-]*; a positive and finite"),
        (lambda t: t * torch.nan, r"\[0, 0\] is nan; a positive"),
        (lambda t: t * torch.tensor([1, 1, torch.inf, 1]), r"\[2, 0\] is inf; a positive"),
        (lambda t: t.double() * 1e300, r"\[0, 0\] is inf; a positive"),
    ],
)
def test_input_scales_that_are_refused(scheme: str, which: int, change: Any, message: str) -> None:
    layer = random_layer(scheme)
    name = list(layer.input_scales)[which]
    layer.input_scales[name] = change(layer.input_scales[name])
    with pytest.raises(ValueError, match=name + r".*" + message.format(scheme=scheme)):
        layer.experts("reference")
    arguments = linear_inputs(scheme)
    only = next(iter(arguments))
    arguments[only] = change(arguments[only])
    if arguments[only] is None or arguments[only].numel() != 4:
        with pytest.raises(ValueError, match=only):
            QuantizedLinear.quantize(torch.randn(8, 128), scheme, **arguments)


def test_input_scales_where_none_belong() -> None:
    layer = random_layer("w8a8")
    for name in ("gate_up_input_scale", "down_input_global_scale"):
        with pytest.raises(ValueError, match=f"{name} is not expected for w8a8"):
            layer.experts("reference", **{name: 1.0})
    with pytest.raises(ValueError, match="gate_up_input_scale is not expected for nvfp4"):
        random_layer("nvfp4").experts("reference", gate_up_input_scale=1.0)
    with pytest.raises(ValueError, match="down_input_global_scale is not expected for fp8-static"):
        random_layer("fp8-static").experts("reference", down_input_global_scale=1.0)
    with pytest.raises(ValueError, match=r"down_input_scale is \[4, 2\]; one number or \[4\] is accepted"):
        random_layer("fp8-static").experts("reference", down_input_scale=torch.ones(4, 2))
    one = random_layer("fp8-static", activation="relu2", gated=False)
    with pytest.raises(ValueError, match=r"gate_up_input_scale is \[4, 2\]; one number or \[4\] is accepted"):
        one.experts("reference", gate_up_input_scale=torch.ones(4, 2))
    with pytest.raises(ValueError, match="input_scale is missing for w8a8-static"):
        QuantizedLinear.quantize(torch.randn(8, 64), "w8a8-static")
    with pytest.raises(ValueError, match="input_global_scale is not expected for w8a8"):
        QuantizedLinear.quantize(torch.randn(8, 64), "w8a8", input_global_scale=1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_without_their_input_scales_are_refused(backend: str) -> None:
    experts = random_layer("fp8-static").experts(backend)
    held = experts.quantized()
    assert Experts.from_chunks([held[:2], held[2:]], experts.config, backend=backend).quantized().count == 4
    bare = QuantizedExperts(replace(held.gate_up, input_scales=None), held.down)
    with pytest.raises(ValueError, match="input.scale"):
        Experts.from_chunks([bare], experts.config, backend=backend)
    zero = QuantizedExperts(held.gate_up, replace(held.down, input_scales=torch.zeros(4, 1)))
    with pytest.raises(ValueError, match="down.*(input_scale|input scale).* 0"):
        Experts.from_chunks([zero], experts.config, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["w8a8-static", "fp8-static", "nvfp4", "fp8", "fp8-tensor-dynamic"])
def test_the_router_weight_multiplies_what_was_quantised(scheme: str, backend: str) -> None:
    experts = random_layer(scheme).experts(backend)
    x, ids = torch.randn(7, 128), torch.arange(7).unsqueeze(1) % 4
    half = torch.full((7, 1), 0.5)
    out = experts(x, ids, half, apply_router_weight_on_input=True)
    held = experts.quantized()
    form = experts.config.scheme.product_activations
    for index in range(4):
        token = torch.where(ids.flatten() == index)[0]
        parts = held[index]
        first = reference.linear(x[token], reference.dense(parts.gate_up), form) * 0.5
        expected = reference.linear(
            reference.apply_activation(first, cpumoe.Activation()), reference.dense(parts.down), form
        )
        assert relative_error(out[token], expected) < 2e-2


# ---- scales of blocks and tensors ------------------------------------------------------------------------------------


def test_halves_of_blocks_and_tensors() -> None:
    for scheme, rows in (("fp8-block", 1), ("fp8-tensor", 1), ("fp8", 128), ("bf16", 128)):
        weight = quantize_weight(torch.randn(2, 256, 256), Scheme.parse(scheme))
        gate, up = weight.halves()
        assert gate.scales.shape[1] == up.scales.shape[1] == rows
        both = torch.cat((reference.dequantize(gate), reference.dequantize(up)), 1)
        assert torch.equal(both, reference.dequantize(weight))
    odd = quantize_weight(torch.randn(192, 256), Scheme.parse("fp8-block"))
    with pytest.raises(ValueError, match="gate and up rows of 96 each with scales for blocks of 128"):
        odd.halves()


def mixed(tensor: torch.Tensor) -> torch.Tensor:
    gate, up = tensor.chunk(2, 1)
    return torch.stack((gate.view(torch.uint8), up.view(torch.uint8)), 2).flatten(1, 2).view(tensor.dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["fp8", "fp8-tensor", "fp8-static", "nvfp4", "mxfp8", "w8a16-g32-asym"])
def test_interleaved_rows(scheme: str, backend: str) -> None:
    layer = random_layer(scheme, hidden=128, inner=128)
    name = next(iter(layer.input_scales), None)
    if name is not None:
        layer.input_scales[name] = layer.input_scales[name] * torch.tensor([1.0, 1.5]).expand(4, 2)
    x = torch.randn(5, 128)
    ids, weights = routing(5, 4, 2)
    expected = layer.experts(backend)(x, ids, weights)
    layer.gate_up = mixed(layer.gate_up)
    if layer.gate_up_scale.shape[1] > 1:  # type: ignore[union-attr]
        layer.gate_up_scale = mixed(layer.gate_up_scale)  # type: ignore[arg-type]
    if layer.gate_up_zero_point is not None:
        layer.gate_up_zero_point = mixed(layer.gate_up_zero_point)
    assert torch.equal(layer.experts(backend, interleaved=True)(x, ids, weights), expected)


def test_interleaved_rows_in_blocks_are_refused() -> None:
    for name in ("fp8-block", "fp8a16-block"):
        layer = random_layer(name, hidden=128, inner=128)
        with pytest.raises(
            ValueError, match="gate_up_scale has 2 rows for 256 interleaved gate and up rows; .* before up"
        ):
            layer.experts("reference", interleaved=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_of_a_tensor_may_lack_dimensions(backend: str) -> None:
    layer = random_layer("fp8-tensor", hidden=128, inner=128)
    x = torch.randn(3, 128)
    ids, weights = routing(3, 4, 2)
    expected = layer.experts(backend)(x, ids, weights)
    for shape in ((4,), (4, 1), (4, 1, 1)):
        layer.gate_up_scale, layer.down_scale = (t.reshape(shape) for t in (layer.gate_up_scale, layer.down_scale))  # type: ignore[union-attr]
        assert torch.equal(layer.experts(backend)(x, ids, weights), expected)


@pytest.mark.parametrize(
    ("scheme", "name", "change", "message"),
    [
        ("fp8", "gate_up", lambda t: t.view(torch.int8), "gate_up is torch.int8; float8_e4m3fn is accepted"),
        ("fp8", "down", lambda t: t.float(), "down is torch.float32; float8_e4m3fn is accepted"),
        ("fp8", "down_scale", lambda t: t[:, :1], r"down_scale is \[4, 1, 1\]; \[4, 128, 1\]"),
        ("fp8", "down_scale", lambda t: t * torch.nan, "down_scale is not finite"),
        ("fp8", "down_scale", lambda t: t.double(), "down_scale is torch.float64; float32, bfloat16 or float16"),
        ("fp8", "down_scale", lambda t: None, "down_scale is missing for fp8"),
        ("fp8", "gate_up_zero_point", lambda t: torch.zeros(4, 256, 1).char(), "gate_up_zero_point is not expected"),
        ("fp8-tensor", "gate_up_scale", lambda t: t.expand(4, 2, 1), r"gate_up_scale is \[4, 2, 1\]; \[4, 1, 1\]"),
        ("fp8-tensor", "gate_up_scale", lambda t: t[:3], r"gate_up_scale is \[3, 1, 1\]; \[4, 1, 1\]"),
        ("fp8-block", "gate_up_scale", lambda t: t[:, :1], r"gate_up_scale is \[4, 1, 1\]; \[4, 2, 1\]"),
        ("fp8-block", "down_scale", lambda t: t.expand(4, 128, 1), r"down_scale is \[4, 128, 1\]; \[4, 1, 1\]"),
        ("mxfp8", "down_scale", lambda t: t.float(), "down_scale is torch.float32; torch.uint8"),
        ("mxfp8", "down_scale", lambda t: t * 0 + 255, "down_scale is not finite"),
        ("mxfp6-e2m3", "down", lambda t: t.to(torch.uint8), "down is torch.uint8; int8 codes are accepted"),
        ("mxfp6-e2m3", "down", lambda t: t * 0 + 64, "down holds a value that is not a code of e2m3; 0 to 63"),
        ("mxfp6-e3m2", "down", lambda t: t * 0 - 1, "down holds a value that is not a code of e3m2; 0 to 63"),
        ("bf16", "gate_up", lambda t: t.float(), "gate_up is torch.float32; bfloat16 is accepted"),
        ("fp16", "gate_up", lambda t: t * torch.inf, "gate_up holds NaN or infinity"),
        ("fp32", "down", lambda t: t * torch.nan, "down holds NaN or infinity"),
        ("fp32", "down_scale", lambda t: torch.ones(4, 128, 1), "down_scale is not expected for fp32"),
        ("w8a16-asym", "down_zero_point", lambda t: None, "down_zero_point is missing for w8a16-asym"),
        ("w8a16-asym", "down_zero_point", lambda t: t.int(), "down_zero_point is torch.int32"),
    ],
)
def test_weights_that_are_refused(scheme: str, name: str, change: Any, message: str) -> None:
    layer = random_layer(scheme, hidden=128, inner=128)
    layer.experts("reference")  # is in order
    setattr(layer, name, change(getattr(layer, name)))
    with pytest.raises(ValueError, match=message):
        layer.experts("reference")


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_of_no_number_are_refused(backend: str) -> None:
    layer = random_layer("fp8", hidden=128, inner=128)
    layer.down.view(torch.uint8)[3, 127, 5] = 0x7F
    with pytest.raises(ValueError, match="down.*NaN"):
        layer.experts(backend)


def test_sizes_that_are_no_blocks_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        ValueError, match="down: group_size=128 does not divide in_features=96; for fp8-block a multiple of"
    ):
        Experts.quantize(torch.randn(2, 192, 128), torch.randn(2, 128, 96), "fp8-block", backend="reference")
    weight = QuantizedWeight("fp8", torch.zeros(2, 192, 128).to(torch.float8_e4m3fn), torch.ones(2, 2, 1))
    down = QuantizedWeight("fp8", torch.zeros(2, 128, 96).to(torch.float8_e4m3fn), torch.ones(2, 1, 1))
    with pytest.raises(ValueError, match="does not divide in_features=96"):
        Experts.from_quantized(weight.values, weight.scales, down.values, down.scales, "fp8-block", backend="reference")
    assert fitting("fp8-block", 96) == 128
