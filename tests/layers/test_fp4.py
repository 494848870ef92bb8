"""4-bit floats: their codes and scales by hand, through packing and back, and as compressed-tensors rounds to them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpumoe import QuantizedLinear, Scheme, ops
from cpumoe.layers import reference
from cpumoe.layers.activation_rounding import held_activations
from cpumoe.layers.packed_weights import packed_activations
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.small_floats import FP4_VALUES, nearest_codes

#: The values of the codes 0 to 15: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: Codes of E8M0 and what they stand for; the smallest is subnormal in fp32.
E8M0 = {0: 5.877471754111438e-39, 1: 1.1754943508222875e-38, 126: 0.5, 127: 1.0, 128: 2.0, 254: 1.7014118346046923e38}
#: Codes of e4m3: subnormal ones, one, and the largest.
E4M3 = {0: 0.0, 1: 2.0**-9, 7: 7 * 2.0**-9, 8: 2.0**-6, 56: 1.0, 57: 1.125, 126: 448.0}


def all_codes(rows: int, columns: int) -> Tensor:
    """Every code beside every other, in the low nibble and in the high one."""
    place = torch.arange(rows * columns).view(rows, columns)
    return ((place + place // 16) % 16).to(torch.int8)


def in_fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32))


# ---- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", E8M0)
def test_mxfp4_values(code: int) -> None:
    weight = QuantizedWeight("fp4", all_codes(2, 64), torch.full((2, 2), code, dtype=torch.uint8))
    expected = [[in_fp32(E2M1[c] * E8M0[code]) for c in row] for row in weight.values.tolist()]
    assert reference.dequantize(weight).tolist() == expected


@pytest.mark.parametrize("code", E4M3)
def test_nvfp4_values(code: int) -> None:
    scales = torch.full((3, 4), code, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = QuantizedWeight("fp4", all_codes(3, 64), scales, factors=torch.tensor([1.0, 0.5, -0.25]))
    expected = [
        [E2M1[c] * E4M3[code] * factor for c in row]
        for row, factor in zip(weight.values.tolist(), (1.0, 0.5, -0.25), strict=True)
    ]
    assert reference.dequantize(weight).tolist() == expected


def test_every_scale_of_e8m0() -> None:
    values = reference.scale_values(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert values[:255].tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]
    assert math.isnan(values[255])


@pytest.mark.parametrize("activations", ["mxfp4a16", "mxfp4a16+int8"])
@pytest.mark.parametrize("code", [0, 1, 2, 3, 100, 126, 127, 128, 200, 230])
def test_linears_with_any_scale(code: int, activations: str) -> None:
    """Sums are over integers, so a scale changes nothing but the exponent; above 2^104 they leave the range of fp32."""
    weight = QuantizedWeight("fp4", all_codes(32, 64), torch.full((32, 2), code, dtype=torch.uint8))
    linear = QuantizedLinear.from_weight(weight, Scheme.parse(activations))
    x = torch.randn(3, 64)
    dense = torch.tensor([[E2M1[c] for c in row] for row in weight.values.tolist()], dtype=torch.float64)
    held = held_activations(Scheme.parse(activations))
    truth = reference.activations(x, held).double() @ dense.T * 2.0 ** (code - 127)
    # What is subnormal in fp32 has fewer bits: a few steps of 2^-149 are allowed beside the rounding of sums.
    torch.testing.assert_close(linear(x).double(), truth, rtol=1e-5, atol=1e-5 * float(truth.abs().max()) + 2.0**-145)


# ---- packing and back ------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    scheme=st.sampled_from(["mxfp4a16", "mxfp4a16+int8", "nvfp4a16", "nvfp4a16+int8"]),
    experts=st.integers(1, 3),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    order=st.sampled_from([ops.ROWS_PLAIN, ops.ROWS_GATE_THEN_UP, ops.ROWS_GATE_UP_INTERLEAVED]),
    nibbles=st.booleans(),
    bias=st.booleans(),
)
def test_any_codes_and_scales_are_packed_to_the_bit(
    seed: int, scheme: str, experts: int, rows: int, groups: int, order: int, nibbles: bool, bias: bool
) -> None:
    torch.manual_seed(seed)
    parsed = Scheme.parse(scheme)
    is_mx = parsed.weights.scale == "e8m0"
    rows, columns = rows if order == ops.ROWS_PLAIN else (rows % 3 + 1) * 64, 32 * groups
    codes = torch.randint(0, 16, (experts, rows, columns), dtype=torch.int8)
    scales = torch.randint(0, 255 if is_mx else 127, (experts, rows, columns // (32 if is_mx else 16)))
    scales = scales.to(torch.uint8) if is_mx else scales.to(torch.uint8).view(torch.float8_e4m3fn)
    factors = None if is_mx else torch.rand(experts, rows) + 0.5  # without them, ones come back
    biases = torch.randn(experts, rows) if bias else None
    unsigned = codes.view(torch.uint8)
    given_values = unsigned[..., 0::2] | unsigned[..., 1::2] << 4 if nibbles else codes
    size = parsed.group_size
    assert size is not None
    blob = ops.pack(
        given_values,
        scales,
        biases,
        columns,
        size,
        "fp4",
        order,
        factors=factors,
        activations=packed_activations(parsed),
    )
    names = ("values", "scales", "zero_points", "factors", "bias", "input_order", "input_scales")
    packed = dict(zip(names, ops.unpack(blob), strict=True))
    assert packed["zero_points"] is packed["input_order"] is packed["input_scales"] is None
    expected_factors = torch.ones(experts, rows) if factors is None else factors
    for name, stored in (("values", codes), ("scales", scales), ("factors", expected_factors), ("bias", biases)):
        found = packed[name]
        if stored is None or found is None:
            assert stored is found, name
            continue
        if order == ops.ROWS_GATE_UP_INTERLEAVED:
            stored = torch.cat((stored[:, 0::2], stored[:, 1::2]), 1)
        assert found.dtype == stored.dtype
        assert torch.equal(found.view(torch.uint8), stored.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        (torch.full((1, 4, 1), 255, dtype=torch.uint8), "scale at [0, 0, 0] has the code 255, which is NaN; 0 to 254"),
        (torch.full((1, 4, 2), 127, dtype=torch.uint8).view(torch.float8_e4m3fn), "has the code 127"),
        (torch.full((1, 4, 2), 128, dtype=torch.uint8).view(torch.float8_e4m3fn), "has the code 128, which is neg"),
    ],
)
def test_scales_that_are_no_numbers(scales: Tensor, said: str) -> None:
    factors = torch.ones(1, 4) if scales.dtype == torch.float8_e4m3fn else None
    with pytest.raises(ValueError) as refusal:
        ops.pack(
            torch.zeros(1, 4, 32, dtype=torch.int8),
            scales,
            None,
            32,
            32 // scales.shape[-1],
            "fp4",
            ops.ROWS_PLAIN,
            factors=factors,
            activations="int16",
        )
    assert said in str(refusal.value)


@pytest.mark.parametrize("code", [16, -1, 127])
def test_codes_that_are_none(code: int) -> None:
    values = torch.zeros(1, 4, 32, dtype=torch.int8)
    values[0, 2, 5] = code
    with pytest.raises(ValueError, match=f"{code}.*0 to 15 are accepted"):
        scales = torch.full((1, 4, 1), 127, dtype=torch.uint8)
        ops.pack(values, scales, None, 32, 32, "fp4", ops.ROWS_PLAIN, activations="int16")


# ---- as compressed-tensors rounds ------------------------------------------------------------------------------------


def arguments(**changes: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(dynamic=False, **changes)


MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4 |= {"scale_dtype": torch.float8_e4m3fn}
ASYMMETRIC = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}


def rounded_by_them(weight: Tensor, args: Any, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Values [rows, columns], scales and zero points [rows, groups] of compressed-tensors, by its code for CPUs."""
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    grouped: Tensor = weight.unflatten(-1, (-1, args.group_size))
    scales, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args, global_scale=global_scale)
    given_zeros = None if args.symmetric else zeros
    return quantize(weight, scales, given_zeros, args, global_scale=global_scale), scales, zeros  # type: ignore[arg-type]


def fp4_values(weight: QuantizedWeight) -> Tensor:
    return FP4_VALUES[weight.values.long()]


def weights(dtype: torch.dtype = torch.float32) -> Tensor:
    """[64, 128] with tails, over many orders of magnitude from row to row."""
    powers: Tensor = 2.0 ** torch.linspace(-40, 40, 64)
    return (torch.randn(64, 128) * torch.randn(64, 128).exp() * powers.unsqueeze(1)).to(dtype)


def test_nearest_codes_are_theirs() -> None:
    """A fine raster that has all middles between two values, and their neighbours in fp32."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4

    raster = torch.arange(-7 * 64, 7 * 64 + 1) / 64
    raster = torch.cat((raster, raster.nextafter(torch.tensor(9.0)), raster.nextafter(torch.tensor(-9.0))))
    special = [0.0, -0.0, 1e-45, 1e-30, -1e-30, 1e30, -1e30, math.inf, -math.inf]  # with them a multiple of 4
    raster = torch.cat((raster, torch.tensor(special)))
    theirs = cast_to_fp4(raster.clone())
    codes = nearest_codes(raster, "fp4")
    assert torch.equal(FP4_VALUES[codes.long()], theirs)
    packed = pack_fp4_to_uint8(theirs.view(2, -1))
    # A weight of -0.0 keeps its sign here and loses it there; what is rounded to zero from below keeps it in both.
    codes[(raster == 0) & torch.signbit(raster)] -= 8
    assert torch.equal(torch.stack((packed & 15, packed >> 4), -1).flatten().to(torch.int8), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp4_is_rounded_as_they_do(dtype: torch.dtype) -> None:
    from compressed_tensors.compressors.mx_utils import compress_mx_scale

    weight = weights(dtype)
    weight[3] = 0
    weight[5, :32] = torch.linspace(-1.75, 1.75, 32)  # the largest is on the edge to the next power of two
    weight[6, :32] = torch.linspace(-1.74, 1.74, 32)
    ours = quantize_weight(weight, Scheme.parse("mxfp4a16"))
    values, scales, _ = rounded_by_them(weight, arguments(**MXFP4))
    assert torch.equal(ours.scales, compress_mx_scale(scales, torch.uint8))
    assert torch.equal(fp4_values(ours), values.float())
    assert torch.equal(reference.dequantize(ours), values.float() * scales.float().repeat_interleave(32, 1))


def test_mxfp4_of_the_largest_weights() -> None:
    """Where the rules part: above 1.75 * 2^127 their scale is infinite and all weights zero; ours are clamped."""
    weight = torch.full((1, 32), torch.finfo(torch.float32).max)
    values, scales, _ = rounded_by_them(weight, arguments(**MXFP4))
    assert math.isinf(float(scales)) and not values.any()
    ours = quantize_weight(weight, Scheme.parse("mxfp4a16"))
    assert int(ours.scales) == 252 and fp4_values(ours).unique().tolist() == [6.0]  # 6 * 2^125 is finite, 4 * 2^126 not
    assert bool(torch.isfinite(reference.dequantize(ours)).all())


def test_nvfp4_is_rounded_as_they_do() -> None:
    from compressed_tensors.quantization.utils import generate_gparam

    weight = weights()[30:36]  # near enough to one another for one global scale
    global_scale = generate_gparam(weight.min(), weight.max())
    ours = quantize_weight(weight, Scheme.parse("nvfp4a16"))
    values, scales, _ = rounded_by_them(weight, arguments(**NVFP4), global_scale)
    assert ours.factors is not None and torch.equal(ours.factors, (1.0 / global_scale).expand(6))
    assert torch.equal(ours.scales.float(), scales)
    assert torch.equal(fp4_values(ours), values)
    # They divide the scale by the global one and we multiply with its reciprocal: the last bits may differ.
    theirs = values * (scales / global_scale).repeat_interleave(16, 1)
    torch.testing.assert_close(reference.dequantize(ours), theirs, rtol=3e-7, atol=0)


def test_nvfp4_of_groups_with_a_scale_of_zero() -> None:
    """Where the rules part: they take 1/8 for a scale that rounds to zero, we take the smallest, which loses less."""
    from compressed_tensors.quantization.utils import generate_gparam

    weight = torch.zeros(2, 32)
    weight[0, :16] = torch.linspace(-1, 1, 16)
    weight[0, 16:] = torch.linspace(-1e-7, 1e-7, 16)  # nothing to the 448 * 6 steps of the first group
    weight[1, :16] = torch.linspace(-3e-6, 3e-6, 16)  # its scale would be 0.00134; the smallest is 0.00195
    global_scale = generate_gparam(weight.min(), weight.max())
    ours = quantize_weight(weight, Scheme.parse("nvfp4a16"))
    values, scales, _ = rounded_by_them(weight, arguments(**NVFP4), global_scale)
    is_zero = torch.tensor([[False, True], [False, True]])
    assert torch.equal(scales == 0.125, is_zero)
    assert torch.equal(ours.scales.float(), torch.where(is_zero, 2.0**-9, scales))
    assert not values[0, 16:].any()
    theirs = values * (scales / global_scale).repeat_interleave(16, 1)
    assert (reference.dequantize(ours) - weight).norm() <= (theirs - weight).norm()


def test_nvfp4_of_zeros_and_of_the_smallest_weights() -> None:
    for weight in (torch.zeros(2, 32), torch.full((2, 32), 1e-42)):
        ours = quantize_weight(weight, Scheme.parse("nvfp4a16"))
        assert not reference.dequantize(ours).any() and ours.factors is not None
        assert bool((torch.isfinite(ours.factors) & (ours.factors > 0)).all())


def test_asymmetric_is_rounded_as_they_do() -> None:
    weight = weights() + torch.linspace(-2, 2, 64).unsqueeze(1)
    weight[7], weight[8] = weight[7].abs(), -weight[8].abs()  # the range of a group includes zero in any case
    ours = quantize_weight(weight, Scheme.parse("w4a16-g32-asym"))
    values, scales, zeros = rounded_by_them(weight, arguments(**ASYMMETRIC))
    assert ours.zero_points is not None and torch.equal(ours.zero_points, zeros)
    assert torch.equal(ours.scales, scales)
    assert torch.equal(ours.values.float(), values)
    assert int(ours.zero_points.min()) == -8 and int(ours.zero_points.max()) == 7


def test_asymmetric_groups_of_zeros() -> None:
    """Where the rules part: for the zero point of such a group they divide zero by zero. Either way it means zeros."""
    ours = quantize_weight(torch.zeros(2, 64), Scheme.parse("w4a16-g32-asym"))
    assert ours.zero_points is not None and ours.zero_points.unique().tolist() == [-8]
    assert ours.values.unique().tolist() == [-8] and not reference.dequantize(ours).any()


def test_asymmetric_bf16_is_rounded_once() -> None:
    """Where the rules part: in bf16 they round the range, the scale and the quotients; we round the scale alone."""
    from compressed_tensors.quantization.lifecycle.forward import quantize

    weight = weights(torch.bfloat16)
    ours = quantize_weight(weight, Scheme.parse("w4a16-g32-asym"))
    grouped = weight.float().unflatten(-1, (-1, 32))
    span = grouped.amax(-1).clamp(min=0) - grouped.amin(-1).clamp(max=0)
    assert ours.scales.dtype == torch.bfloat16 and torch.equal(ours.scales, (span / 15).bfloat16())
    assert ours.zero_points is not None
    given_zeros = ours.zero_points.float()
    values = quantize(weight.float(), ours.scales.float(), given_zeros, arguments(**ASYMMETRIC))
    assert torch.equal(ours.values.float(), values)  # from the same scales and zero points
