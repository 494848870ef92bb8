"""Weights that become floats of any size or asymmetric int8: by hand, and as compressed-tensors rounds, or why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpumoe import Scheme
from cpumoe.layers import reference
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import SCHEMES
from cpumoe.layers.small_floats import scale_values, values_of


def weights(dtype: torch.dtype = torch.float32, rows: int = 256) -> Tensor:
    """[rows, 384] with tails, over many orders of magnitude from row to row."""
    powers: Tensor = 2.0 ** torch.linspace(-30, 30, rows)
    return (torch.randn(rows, 384) * torch.randn(rows, 384).exp() * powers.unsqueeze(1)).to(dtype)


def arguments(**changes: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(**{"dynamic": False, "symmetric": True, "type": "float", **changes})


THEIRS: dict[str, dict[str, Any]] = {
    "fp8": {"num_bits": 8, "strategy": "channel"},
    "fp8-tensor": {"num_bits": 8, "strategy": "tensor"},
    "fp8-block": {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    "mxfp6-e2m3": {"num_bits": 6, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    "mxfp8": {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    "w8a16-asym": {"num_bits": 8, "strategy": "channel", "type": "int", "symmetric": False},
    "w8a16-g32-asym": {"num_bits": 8, "strategy": "group", "group_size": 32, "type": "int", "symmetric": False},
}


def groups(weight: Tensor, args: Any) -> Tensor:
    """[..., elements that share a scale], in the shape of the scales."""
    if args.strategy == "tensor":
        return weight.view(1, -1)
    if args.strategy == "channel":
        return weight.unsqueeze(1)
    if args.strategy == "block":
        return weight.view(-1, 128, weight.shape[1] // 128, 128).transpose(1, 2).flatten(2)
    return weight.unflatten(-1, (-1, args.group_size))


@pytest.mark.parametrize("scheme", THEIRS)
def test_rounded_as_compressed_tensors_does(scheme: str) -> None:
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = arguments(**THEIRS[scheme])
    weight = weights()
    weight[3] = 0
    if scheme == "w8a16-asym":
        weight[3] = 1.0  # for the zero point of zeros they divide zero by zero
        weight[7], weight[8] = weight[7].abs(), -weight[8].abs()  # the range includes zero in any case
    elif scheme == "w8a16-g32-asym":
        weight[3, ::7] = 1.0
    ours = quantize_weight(weight, Scheme.parse(scheme))
    grouped = groups(weight, args)
    scales, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    given_zeros = None if args.symmetric else zeros
    theirs = quantize(weight, scales, given_zeros, args)
    assert torch.equal(scale_values(ours.scales).flatten(), scales.flatten())
    if given_zeros is not None:
        assert ours.zero_points is not None and torch.equal(ours.zero_points.flatten(), zeros.flatten())
    small = ours.element in ("fp8", "fp6-e2m3")
    assert torch.equal(values_of(ours.values, ours.element) if small else ours.values.float(), theirs)
    assert torch.equal(reference.dequantize(ours), dequantize(theirs, scales, given_zeros, args))


@pytest.mark.parametrize("scheme", ["fp8", "fp8-tensor", "fp8-block"])
def test_bf16_weights_have_bf16_scales_of_the_same_rule(scheme: str) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams

    args, weight = arguments(**THEIRS[scheme]), weights(torch.bfloat16)
    grouped = groups(weight, args)
    scales, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    ours = quantize_weight(weight, Scheme.parse(scheme))
    assert ours.scales.dtype == torch.bfloat16 and torch.equal(ours.scales.flatten(), scales.flatten())
    # Where the rules part: they divide in bf16, which rounds the quotient before it is rounded to e4m3.
    steps = ours.row_scales().float().repeat_interleave(384 // ours.scales.shape[-1], 1)
    assert torch.equal(ours.values.float(), (weight.float() / steps).clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_by_hand() -> None:
    weight = torch.zeros(2, 32)
    weight[0, :4] = torch.tensor([896.0, -600.0, 1.0, 0.003])
    weight[1, :2] = torch.tensor([56.0, 3.3])
    fp8 = quantize_weight(weight, Scheme.parse("fp8"))
    assert fp8.scales.tolist() == [[2.0], [0.125]]
    assert fp8.values.float()[0, :4].tolist() == [448.0, -288.0, 0.5, 2.0**-9]
    assert reference.dequantize(fp8)[1, :2].tolist() == [56.0, 3.25]
    whole = quantize_weight(weight, Scheme.parse("fp8-tensor"))
    assert whole.scales.tolist() == [[2.0]] and reference.dequantize(whole)[1, :2].tolist() == [56.0, 3.25]
    e3m2 = quantize_weight(weight, Scheme.parse("mxfp6-e3m2"))
    assert e3m2.scales.tolist() == [[127 + 5], [127 + 1]]  # 896 is 28 * 2^5, 56 is 28 * 2
    assert e3m2.values[0, :3].tolist() == [0b011111, 0b111101, 0]  # 1 is half of the smallest
    assert reference.dequantize(e3m2)[0, :4].tolist() == [896.0, -640.0, 0.0, 0.0]
    asymmetric = quantize_weight(torch.tensor([[0.0, 255.0, 1.0, 254.4]]), Scheme.parse("w8a16-asym"))
    assert asymmetric.scales.tolist() == [[1.0]] and asymmetric.zero_points.tolist() == [[-128]]  # type: ignore[union-attr]
    assert asymmetric.values.tolist() == [[-128, 127, -127, 126]]
    assert reference.dequantize(asymmetric).tolist() == [[0.0, 255.0, 1.0, 254.0]]


def test_blocks_are_those_of_the_definition() -> None:
    """The last block of rows may be shorter; the scale of a weight is that of its block."""
    weight = weights(rows=300)[:, :256]
    ours = quantize_weight(weight, Scheme.parse("fp8-block"))
    assert ours.scales.shape == (3, 2)
    found = reference.dequantize(ours)
    for row in range(3):
        for column in range(2):
            place = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scale = weight[place].abs().max() / 448
            assert ours.scales[row, column] == scale
            assert torch.equal(found[place], (weight[place] / scale).to(torch.float8_e4m3fn).float() * scale)


def test_a_part_of_a_matrix_takes_the_largest_of_all_of_it() -> None:
    weight = weights()
    for scheme in ("fp8-tensor", "nvfp4a16"):
        whole = quantize_weight(weight, Scheme.parse(scheme))
        part = quantize_weight(weight[:100], Scheme.parse(scheme), largest_magnitude=weight.abs().max())
        assert torch.equal(reference.dequantize(part), reference.dequantize(whole)[:100])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shapes_and_errors(scheme: str) -> None:
    """Several matrices at once are as one by one, whatever the scheme, and none is far from its weights."""
    parsed = Scheme.parse(scheme)
    weight = torch.randn(3, 256, 384)
    ours = quantize_weight(weight, parsed)
    assert ours.scales.shape == (3, *parsed.weights.scale_shape(256, 384))
    found = reference.dequantize(ours)
    for index in range(3):
        alone = quantize_weight(weight[index], parsed)
        assert torch.equal(reference.dequantize(alone), found[index])
        assert torch.equal(reference.dequantize(ours[index]), found[index])
    error = float((found - weight).norm() / weight.norm())
    assert error < {4: 0.13, 6: 0.06, 8: 0.03, 16: 2e-3, 32: 1e-9}[parsed.weights.bits]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    scheme=st.sampled_from(["fp8", "fp8-block", "fp8-tensor", "mxfp4", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp8", "fp16"]),
    power=st.integers(-20, 13),
)
def test_what_a_format_holds_is_kept(seed: int, scheme: str, power: int) -> None:
    """Weights that were rounded once, with the largest value in place, are rounded to themselves."""
    torch.manual_seed(seed)
    weight = torch.randn(128, 128).clamp(-3.4, 3.4) * 2.0**power
    weight[:, ::32] = 3.5 * 2.0**power  # 1.75 times a power of two, which is 448, 28, and 3.5 times a scale elsewhere
    once = reference.dequantize(quantize_weight(weight, Scheme.parse(scheme)))
    assert torch.equal(reference.dequantize(quantize_weight(once, Scheme.parse(scheme))), once)


@pytest.mark.parametrize(
    ("scheme", "weight", "message"),
    [
        ("fp16", torch.full((2, 32), 7e4), "w holds 70000, which is no number of fp16; magnitudes up to 65504"),
        ("bf16", torch.full((2, 32), 3.4e38), r"w holds 3.4e\+38, which is no number of bf16"),
        ("fp32", torch.full((2, 32), torch.nan), "w holds NaN or infinity"),
        ("fp8", torch.full((2, 32), torch.inf), "w holds NaN or infinity"),
        ("bf16", torch.ones(2, 32).int(), "w is torch.int32; a floating point dtype is accepted"),
        (
            "fp8-block",
            torch.ones(2, 160),
            "w: group_size=128 does not divide in_features=160; for fp8-block a multiple",
        ),
        ("mxfp8", torch.ones(2, 48), "w: group_size=32 does not divide in_features=48; for mxfp8 a multiple of 32"),
    ],
)
def test_weights_that_are_refused(scheme: str, weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_weight(weight, Scheme.parse(scheme), "w")


@pytest.mark.parametrize(
    "scheme", ["fp8", "fp8-tensor", "fp8-block", "mxfp8", "mxfp6-e2m3", "mxfp6-e3m2", "w8a16-asym"]
)
def test_zeros_and_the_ends_of_fp32(scheme: str) -> None:
    for number in (0.0, 1e-45, 1e-38, torch.finfo(torch.float32).max):
        found = reference.dequantize(quantize_weight(torch.full((128, 128), number), Scheme.parse(scheme)))
        assert bool(torch.isfinite(found).all())
        assert bool((found == 0).all()) if number < 1e-40 else abs(float(found[0, 0]) - number) <= 0.13 * number
