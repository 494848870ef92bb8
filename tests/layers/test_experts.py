"""The fused layer against the plain-PyTorch reference, over schemes, activations, shapes and dtypes."""

from __future__ import annotations

import pytest
import torch
from random_layers import (
    INT8_ROWS,
    INT16_ROWS,
    QUANTIZED_FLOATS,
    SCHEMES,
    WEIGHT_ONLY_FLOATS,
    fitting,
    linear_inputs,
    random_layer,
    relative_error,
    routing,
)

import cpumoe
from cpumoe.layers import reference
from cpumoe.layers.activation_rounding import input_scale_arguments
from cpumoe.layers.nibbles import pack_nibbles, unpack_nibbles
from cpumoe.layers.rounding import quantize_weight

# A flipped rounding tie in the requantised intermediate shows as one quantum of one value.
FLIPS = 3e-3
FLIPS_OF_FLOATS = 2e-2  # a quantum of e2m1 is up to a third of the value
FLIPS_OF_16_BITS = 2e-5
PAIRS = 4e-5  # of bf16, as which floats are held
BF16 = 6e-3  # as which what lies between the products is held, where the hidden states are
# What 16 bits for the activations cost at most, where they should stay as they are.
FIXED_POINT = 2e-4


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("tokens", "bias"), [(1, True), (3, False), (70, True)])
def test_schemes(scheme: str, tokens: int, bias: bool) -> None:
    size = fitting(scheme, 192)
    layer = random_layer(scheme, hidden=size, inner=size, bias=bias)
    x = torch.randn(tokens, size)
    ids, weights = routing(tokens, 4, 2)
    expected = layer.experts("reference")(x, ids, weights)
    experts = layer.experts("native")
    out = experts(x, ids, weights)
    flips = FLIPS_OF_FLOATS if scheme in QUANTIZED_FLOATS else FLIPS
    quantised = scheme in (*INT8_ROWS, *QUANTIZED_FLOATS)
    assert relative_error(out, expected) < (flips if quantised else FIXED_POINT)
    of_its_own = experts.reference(x, ids, weights)
    held = PAIRS if scheme in WEIGHT_ONLY_FLOATS else FLIPS_OF_16_BITS
    assert relative_error(out, of_its_own) < (flips if quantised else held)


@pytest.mark.parametrize("scheme", [name for name in INT8_ROWS if "+" in name])
def test_int8_activations_on_request_change_the_activations_alone(scheme: str) -> None:
    layer = random_layer(scheme, hidden=192, inner=192)
    asked = layer.experts("native")
    layer.scheme = scheme.removesuffix("+int8")
    exact = layer.experts("native")
    assert str(asked.config.scheme) == scheme and str(exact.config.scheme) == layer.scheme
    assert asked.packed_bytes == exact.packed_bytes
    x = torch.randn(9, 192)
    ids, weights = routing(9, 4, 2)
    truth = exact.reference(x, ids, weights, quantize_activations=False)
    assert torch.equal(asked.reference(x, ids, weights, quantize_activations=False), truth)
    assert relative_error(exact(x, ids, weights), truth) < FIXED_POINT
    assert 1e-3 < relative_error(asked(x, ids, weights), truth) < 0.03


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-g32", "w8a16", "w8a16-g32"])
def test_symmetric_integers_on_request_are_the_scheme_with_int8_activations(scheme: str) -> None:
    """The same arithmetic, so the same bits."""
    layer = random_layer(f"{scheme}+int8")
    asked = layer.experts("native")
    layer.scheme = scheme.replace("a16", "a8")
    plain = layer.experts("native")
    assert str(asked.config.scheme) == f"{scheme}+int8"
    assert torch.equal(asked.gate_up_packed, plain.gate_up_packed)
    again = cpumoe.Experts.from_packed(asked.gate_up_packed, asked.down_packed, activation="silu")
    assert str(again.config.scheme) == layer.scheme


@pytest.mark.parametrize("scheme", (*INT16_ROWS, *WEIGHT_ONLY_FLOATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_only_schemes_take_16_bit_inputs(scheme: str, dtype: torch.dtype) -> None:
    size = fitting(scheme, 192)
    experts = random_layer(scheme, hidden=size, inner=size).experts("native")
    x = torch.randn(5, size).to(dtype)
    ids, weights = routing(5, 4, 2)
    truth = experts.reference(x.float(), ids, weights, quantize_activations=False)
    out = experts(x, ids, weights, fp32_out=True)
    as_bf16 = scheme in WEIGHT_ONLY_FLOATS and dtype == torch.bfloat16
    assert relative_error(out, truth) < (BF16 if as_bf16 else FIXED_POINT)
    assert torch.equal(experts(x, ids, weights), out.to(dtype))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_gate_and_up_have_global_scales_of_their_own(backend: str) -> None:
    """As two linears of a checkpoint have; a factor of a row is that of the linear it came from."""
    layer = random_layer("nvfp4a16")
    both = torch.stack((layer.gate_up_global_scale * 3, layer.gate_up_global_scale / 5), 1)
    gate, up = (layer.experts(backend, gate_up_global_scale=both[:, i]).quantized().gate_up for i in range(2))
    held = layer.experts(backend, gate_up_global_scale=both).quantized().gate_up
    assert held.factors.shape == (4, 192)
    assert torch.equal(held.factors, torch.cat((gate.factors[:, :96], up.factors[:, 96:]), 1))

    def mix(t: torch.Tensor) -> torch.Tensor:
        first, second = t.chunk(2, 1)
        return torch.stack((first, second), 2).flatten(1, 2)

    layer.gate_up, layer.gate_up_scale = mix(layer.gate_up), mix(layer.gate_up_scale.view(torch.uint8))
    layer.gate_up_scale = layer.gate_up_scale.view(torch.float8_e4m3fn)
    mixed = layer.experts(backend, gate_up_global_scale=both, interleaved=True).quantized().gate_up
    assert torch.equal(mixed.factors, held.factors) and torch.equal(mixed.values, held.values)


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai", "swiglu_step", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_activations(activation: str, gated: bool) -> None:
    if activation.startswith("swiglu") and not gated:
        pytest.skip("has no form without a gate")
    layer = random_layer("w4a8-g32", hidden=96, inner=64, activation=activation, gated=gated)
    # Large values reach the limits of the clamped activations.
    layer.gate_up_scale = layer.gate_up_scale * 6
    x = torch.randn(20, 96)
    ids, weights = routing(20, 4, 3)
    expected = layer.experts("reference")(x, ids, weights)
    assert relative_error(layer.experts("native")(x, ids, weights), expected) < FLIPS


def test_activation_parameters_matter() -> None:
    layer = random_layer("w8a8", activation="swiglu_oai")
    layer.gate_up_scale = layer.gate_up_scale * 4
    x = torch.randn(9, 128)
    ids, weights = routing(9, 4, 2)
    outputs = []
    for alpha, limit in ((1.702, 7.0), (1.0, 7.0), (1.702, 0.5)):
        activation = cpumoe.Activation("swiglu_oai", alpha=alpha, limit=limit)
        native = layer.experts("native", activation=activation)(x, ids, weights)
        assert relative_error(native, layer.experts("reference", activation=activation)(x, ids, weights)) < FLIPS
        outputs.append(native)
    assert not torch.allclose(outputs[0], outputs[1]) and not torch.allclose(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    layer = random_layer("w4a8-g32", scale_dtype=scale_dtype)
    x = torch.randn(12, 128).to(dtype)
    ids, weights = routing(12, 4, 2)
    out = layer.experts("native")(x, ids.long(), weights.to(dtype))
    assert out.dtype == dtype
    expected = layer.experts("reference")(x, ids, weights.to(dtype))
    assert relative_error(out, expected) < (FLIPS if dtype == torch.float32 else 1e-2)


def test_output_is_rounded_to_nearest_even() -> None:
    layer = random_layer("w4a8-g32")
    x = torch.randn(6, 128).bfloat16()
    ids, weights = routing(6, 4, 2)
    experts = layer.experts("native")
    assert torch.equal(experts(x, ids, weights), experts(x.float(), ids, weights).bfloat16())
    half = x.half()
    assert torch.equal(experts(half, ids, weights), experts(half.float(), ids, weights).half())


@pytest.mark.parametrize("scheme", ["w4a8-g32", "w4a16-g32", "w4a16-g32-asym", "mxfp4a16", "nvfp4a16"])
def test_interleaved_rows_and_nibbles_are_the_same_layer(scheme: str) -> None:
    layer = random_layer(scheme, bias=True)
    x = torch.randn(8, 128)
    ids, weights = routing(8, 4, 2)
    expected = layer.experts("native")(x, ids, weights)

    def mix(t: torch.Tensor) -> torch.Tensor:
        gate, up = t.chunk(2, 1)
        return torch.stack((gate, up), 2).flatten(1, 2)

    def nibbles_of(t: torch.Tensor) -> torch.Tensor:
        return (
            t[..., 0::2].view(torch.uint8) | t[..., 1::2].view(torch.uint8) << 4 if "fp4" in scheme else pack_nibbles(t)
        )

    for backend in ("native", "reference"):
        for nibbles in (False, True):
            gate_up, down = mix(layer.gate_up), layer.down
            if nibbles:
                gate_up, down = nibbles_of(gate_up), nibbles_of(down)
            mixed = cpumoe.Experts.from_quantized(
                gate_up,
                mix(layer.gate_up_scale.view(torch.uint8)).view(layer.gate_up_scale.dtype),
                down,
                layer.down_scale,
                scheme,
                gate_up_zero_point=None if layer.gate_up_zero_point is None else mix(layer.gate_up_zero_point),
                down_zero_point=layer.down_zero_point,
                gate_up_global_scale=layer.gate_up_global_scale,
                down_global_scale=layer.down_global_scale,
                gate_up_bias=mix(layer.gate_up_bias),
                down_bias=layer.down_bias,
                interleaved=True,
                backend=backend,
            )
            out = mixed(x, ids, weights)
            assert torch.equal(out, expected) if backend == "native" else relative_error(out, expected) < FLIPS


def test_no_tokens_no_experts_and_minus_one() -> None:
    experts = random_layer("w4a8-g32").experts("native")
    assert experts(torch.empty(0, 128), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2)).shape == (
        0,
        128,
    )
    x = torch.randn(3, 128)
    nobody = torch.full((3, 2), -1)
    assert torch.equal(experts(x, nobody, torch.ones(3, 2)), torch.zeros(3, 128))
    assert torch.equal(experts(x, torch.empty(3, 0, dtype=torch.int32), torch.empty(3, 0)), torch.zeros(3, 128))
    ids, weights = routing(3, 4, 2)
    both = experts(x, ids, weights)
    first, second = ids.clone(), ids.clone()
    first[:, 1], second[:, 0] = -1, -1
    assert relative_error(experts(x, first, weights) + experts(x, second, weights), both) < 1e-6


def test_router_weight_on_input() -> None:
    layer = random_layer("w8a8")
    x = torch.randn(10, 128)
    ids, weights = routing(10, 4, 1)
    weights = torch.rand(10, 1) + 0.5
    native = layer.experts("native")(x, ids, weights, apply_router_weight_on_input=True)
    scaled = layer.experts("reference")(x * weights, ids, torch.ones(10, 1))
    assert relative_error(native, scaled) < FLIPS
    assert relative_error(layer.experts("native")(x, ids, weights), native) > 0.01


def test_an_expert_chosen_twice_counts_twice() -> None:
    experts = random_layer("w4a8-g32").experts("native")
    x = torch.randn(2, 128)
    twice = experts(x, torch.tensor([[1, 1], [2, 2]]), torch.tensor([[0.25, 0.25], [0.5, 0.5]]))
    once = experts(x, torch.tensor([[1], [2]]), torch.tensor([[0.5], [1.0]]))
    assert relative_error(twice, once) < 1e-6


def test_tensors_that_are_not_contiguous() -> None:
    experts = random_layer("w4a8-g32").experts("native")
    ids, weights = routing(6, 4, 2)
    wide = torch.randn(6, 256)
    assert torch.equal(experts(wide[:, ::2], ids, weights), experts(wide[:, ::2].contiguous(), ids, weights))
    strided = torch.randn(128, 6).t()
    turned_ids, turned_weights = ids.t().contiguous().t(), weights.t().contiguous().t()
    assert torch.equal(experts(strided, turned_ids, turned_weights), experts(strided.contiguous(), ids, weights))


def test_many_tokens_are_computed_in_rounds() -> None:
    """More tokens than one round holds: every token as if it were alone."""
    experts = random_layer("w4a8-g32", hidden=32, inner=32).experts("native")
    tokens = 9001
    x = torch.randn(tokens, 32)
    ids, weights = routing(tokens, 4, 2)
    out = experts(x, ids, weights)
    picked = torch.randint(0, tokens, (40,))
    for t in [0, 4095, 4096, 8191, 8192, 9000, *picked.tolist()]:
        assert torch.equal(out[t], experts(x[t : t + 1], ids[t : t + 1], weights[t : t + 1])[0])


def test_quantize_follows_the_scale_rule() -> None:
    weight = torch.randn(3, 8, 64)
    weight[0, 0] = 0
    quantized = quantize_weight(weight, cpumoe.Scheme.parse("w4a8-g32"))
    values, scales = quantized.values, quantized.scales
    assert values.dtype == torch.int8 and scales.shape == (3, 8, 2)
    groups = weight.unflatten(-1, (2, 32))
    nonzero = groups.abs().amax(-1) > 0
    torch.testing.assert_close(scales[nonzero], groups.abs().amax(-1)[nonzero] / 7.5)
    assert (values[0, 0] == 0).all()
    assert relative_error(reference.dequantize(quantized), weight) < 0.15
    quantized = quantize_weight(weight.bfloat16(), cpumoe.Scheme.parse("w8a8"))
    assert quantized.scales.dtype == torch.bfloat16
    assert relative_error(reference.dequantize(quantized), weight) < 0.01
    with pytest.raises(ValueError, match="finite"):
        quantize_weight(torch.full((1, 32), torch.nan), cpumoe.Scheme.parse("w8a8"))


def test_nibbles_round_trip() -> None:
    values = torch.randint(-8, 8, (3, 10), dtype=torch.int8)
    assert torch.equal(unpack_nibbles(pack_nibbles(values)), values)


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        *(("w4a8-g128", 4.125), ("w4a16-g128", 4.125), ("w4a16-g32", 4.5), ("w4a16-g128-asym", 4.1875)),
        *(("mxfp4a16", 4.25), ("nvfp4a16", 4.5), ("w8a16-g128", 8.125), ("w8a8", 8.0)),
        *(("fp8", 8.0), ("fp8-block", 8.0), ("mxfp4", 4.25), ("mxfp6-e2m3", 6.25), ("mxfp6-e3m2", 6.25)),
        *(("mxfp8", 8.25), ("nvfp4", 4.5), ("w8a16-g32-asym", 8.75), ("bf16", 16.0), ("fp16", 16.0), ("fp32", 32.0)),
    ],
)
def test_packed_size_keeps_the_promise_of_the_format(scheme: str, bits: float) -> None:
    """Of the values, their scales and zero points; a block of rows has a few numbers of its own."""
    weights = torch.randn(2, 1024, 2048).bfloat16(), torch.randn(2, 2048, 512).bfloat16()
    experts = cpumoe.Experts.quantize(*weights, scheme, **input_scale_arguments(cpumoe.Scheme.parse(scheme), 5.0, 5.0))
    held = 8 * experts.packed_bytes / sum(w.numel() for w in weights)
    assert bits <= held <= max(bits + 0.175, bits * 1.03)
    assert f"{scheme}," in repr(experts) and "backend=native" in repr(experts)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_token_of_zeros_gives_zero(scheme):
    inputs = input_scale_arguments(cpumoe.Scheme.parse(scheme), 5.0, 5.0)
    layer = cpumoe.Experts.quantize(torch.randn(4, 768, 384), torch.randn(4, 384, 384), scheme, **inputs)
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(96, 384), scheme, **linear_inputs(scheme))
    x = torch.zeros(3, 384)
    ids, weights = torch.tensor([[0, 1], [1, 2], [2, 3]]), torch.rand(3, 2)
    assert torch.equal(linear(x), torch.zeros(3, 96))
    x[1] = 1e-40  # what the activation leaves of it is zero
    assert torch.equal(layer(x, ids, weights), torch.zeros(3, 384))
