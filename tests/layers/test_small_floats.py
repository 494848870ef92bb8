"""Floats of 4, 6 and 8 bits: every code from the definition, the nearest value by brute force and as others round."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpumoe.layers.small_floats import (
    SMALL_FLOATS,
    mx_scales,
    nearest,
    nearest_codes,
    nearest_fp8,
    scale_values,
    values_of,
)

#: Exponent bits, mantissa bits, bias, and codes that are no numbers.
DEFINITIONS = {
    "fp4": (2, 1, 1, ()),
    "fp6-e2m3": (2, 3, 1, ()),
    "fp6-e3m2": (3, 2, 3, ()),
    "fp8": (4, 3, 7, (0x7F, 0xFF)),
}


def by_definition(element: str, code: int) -> Fraction | None:
    exponent_bits, mantissa_bits, bias, none = DEFINITIONS[element]
    if code in none:
        return None
    mantissa = code % 2**mantissa_bits
    exponent = code // 2**mantissa_bits % 2**exponent_bits
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    if exponent == 0:
        return sign * Fraction(mantissa, 2**mantissa_bits) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(mantissa, 2**mantissa_bits)) * Fraction(2) ** (exponent - bias)


@pytest.mark.parametrize("element", DEFINITIONS)
def test_every_code(element: str) -> None:
    bits = SMALL_FLOATS[element].bits
    values = values_of(torch.arange(2**bits, dtype=torch.int16).to(torch.uint8).view(torch.int8), element).tolist()
    assert len(values) == {"fp4": 16, "fp8": 256}.get(element, 64)
    for code, value in enumerate(values):
        expected = by_definition(element, code)
        assert math.isnan(value) if expected is None else value == expected, code
        if expected == 0:
            assert math.copysign(1, value) == (-1 if code else 1)
    assert max(v for v in values if not math.isnan(v)) == SMALL_FLOATS[element].largest


def test_codes_by_hand() -> None:
    """One of each kind: the smallest, the largest subnormal, one, the largest."""
    for element, known in {
        "fp4": {1: 0.5, 2: 1.0, 7: 6.0, 15: -6.0},
        "fp6-e2m3": {1: 0.125, 7: 0.875, 8: 1.0, 31: 7.5, 63: -7.5},
        "fp6-e3m2": {1: 0.0625, 3: 0.1875, 12: 1.0, 31: 28.0, 33: -0.0625},
        "fp8": {1: 2.0**-9, 7: 7 * 2.0**-9, 8: 2.0**-6, 56: 1.0, 126: 448.0, 254: -448.0},
    }.items():
        for code, value in known.items():
            as_byte = torch.tensor([code], dtype=torch.uint8).view(torch.int8)
            assert values_of(as_byte, element).item() == value
            assert nearest_codes(torch.tensor([value]), element).view(torch.uint8).item() == code


def test_fp8_is_that_of_pytorch() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn)
    assert torch.equal(values_of(theirs, "fp8").nan_to_num(1e9), theirs.float().nan_to_num(1e9))


def test_every_scale_of_e8m0() -> None:
    values = scale_values(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert values[:255].tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]
    assert math.isnan(values[255])


def raster(element: str) -> torch.Tensor:
    """All values, the middles between them, their neighbours in fp32, and what is larger than the largest."""
    positive = [by_definition(element, code) for code in range(2 ** (SMALL_FLOATS[element].bits - 1))]
    values = torch.tensor([float(v) for v in positive if v is not None])
    points = torch.cat((values, (values[1:] + values[:-1]) / 2, values[-1:] * torch.tensor([1.01, 1.1, 2.0, 1e30])))
    points = torch.cat((points, points.nextafter(torch.tensor(1e38)), points.nextafter(torch.tensor(-1e38))))
    return torch.cat((points, -points))


@pytest.mark.parametrize("element", DEFINITIONS)
def test_the_nearest_by_brute_force(element: str) -> None:
    half = 2 ** (SMALL_FLOATS[element].bits - 1)
    numbers = {code: value for code in range(half) if (value := by_definition(element, code)) is not None}
    points = raster(element)
    rounded = nearest(points, element)
    codes = nearest_codes(points, element).view(torch.uint8)
    assert torch.equal(values_of(codes.view(torch.int8), element), rounded)
    assert torch.equal(torch.signbit(rounded), torch.signbit(points))
    for point, value, code in zip(points.tolist(), rounded.tolist(), codes.tolist(), strict=True):
        exact = abs(Fraction(point))
        distances = {c: abs(exact - number) for c, number in numbers.items()}
        smallest = min(distances.values())
        closest = [c for c, distance in distances.items() if distance == smallest]
        best = closest[0] if len(closest) == 1 else next(c for c in closest if c % 2 == 0)
        assert abs(value) == numbers[best] and code % half == best, point


def test_6_bit_floats_are_rounded_as_compressed_tensors_does() -> None:
    from compressed_tensors.compressors.mxfp6.helpers import pack_fp6_to_uint8
    from compressed_tensors.quantization.utils.fp6_utils import cast_to_fp6

    points = raster("fp6-e2m3")
    points = points[: len(points) // 4 * 4]
    theirs = cast_to_fp6(points)
    assert torch.equal(nearest(points, "fp6-e2m3"), theirs)
    packed = pack_fp6_to_uint8(theirs.view(1, -1)).view(-1, 3).int()
    word = packed[:, 0] | packed[:, 1] << 8 | packed[:, 2] << 16
    codes = torch.stack([word >> shift & 63 for shift in (0, 6, 12, 18)], 1).flatten()
    assert torch.equal(nearest_codes(points, "fp6-e2m3").int(), codes)


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50), st.sampled_from(list(DEFINITIONS)))
def test_rounding_twice_changes_nothing(values: list[float], element: str) -> None:
    once = nearest(torch.tensor(values), element)
    assert torch.equal(nearest(once, element), once)
    assert bool((once.abs() <= SMALL_FLOATS[element].largest).all())
    if element == "fp8":
        assert torch.equal(nearest_fp8(torch.tensor(values)).float(), once)


@pytest.mark.parametrize(("element", "bits"), [("fp4", 4), ("fp6-e2m3", 6), ("fp8", 8)])
def test_mx_scales_are_those_of_compressed_tensors(element: str, bits: int) -> None:
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    fractions = torch.tensor([1.0, 1.49, 1.5, 1.74, 1.75, 1.76, 1.87, 1.875, 1.9, 1.93, 1.9375, 1.94, 1.999])
    magnitudes = (fractions * 2.0 ** torch.arange(-110, 120).unsqueeze(1)).flatten()
    theirs = generate_mx_scales(magnitudes, bits)
    assert torch.equal(mx_scales(magnitudes, element).float(), theirs)


def test_mx_scales_at_the_ends() -> None:
    ends = torch.tensor([0.0, 2.0**-149, 2.0**-126, torch.finfo(torch.float32).max])
    assert mx_scales(ends, "fp4").tolist() == [0, 0, 0, 253]
    assert mx_scales(ends, "fp8").tolist() == [0, 0, 0, 247]
    # e3m2: the largest is 28 = 1.75 * 2^4, and from 1.875 on the next power is taken.
    assert mx_scales(torch.tensor([28.0, 29.9, 30.0, 31.0, 32.0]), "fp6-e3m2").tolist() == [127, 127, 128, 128, 128]
