"""Floats of 4, 6 and 8 bits: what their codes stand for, and the nearest of them; E8M0, which is an exponent alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpumoe.layers.scheme import ElementType


@dataclass(frozen=True)
class SmallFloat:
    """A sign, bits of exponent and bits of mantissa; no infinities. ``name`` is how the standard calls it."""

    name: str
    exponent: int
    mantissa: int
    largest: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def largest_exponent(self) -> int:
        """Of the largest value: the power of two that it is 1 to 2 times."""
        return int(torch.tensor(self.largest).log2().floor())

    def values(self) -> Tensor:
        """The values of all codes in fp32, by their code; codes that stand for no number are NaN."""
        codes = torch.arange(1 << self.bits)
        mantissa = codes & ((1 << self.mantissa) - 1)
        field = (codes >> self.mantissa) & ((1 << self.exponent) - 1)
        bias = (1 << (self.exponent - 1)) - 1
        fraction = (mantissa + torch.where(field > 0, 1 << self.mantissa, 0)).to(torch.float32)
        magnitude = torch.ldexp(fraction, field.clamp(min=1) - bias - self.mantissa)
        magnitude = torch.where(magnitude > self.largest, torch.nan, magnitude)
        return torch.where(codes >> (self.bits - 1) == 1, -magnitude, magnitude)


SMALL_FLOATS: dict[ElementType, SmallFloat] = {
    "fp4": SmallFloat("e2m1", 2, 1, 6.0),
    "fp6-e3m2": SmallFloat("e3m2", 3, 2, 28.0),
    "fp6-e2m3": SmallFloat("e2m3", 2, 3, 7.5),
    "fp8": SmallFloat("e4m3", 4, 3, 448.0),
}
_VALUES = {element: form.values() for element, form in SMALL_FLOATS.items()}
#: The values of e2m1 by their code.
FP4_VALUES = _VALUES["fp4"]


def values_of(codes: Tensor, element: ElementType) -> Tensor:
    """Codes, int8 or float8_e4m3fn, -> the values that they stand for in fp32."""
    bits = codes.view(torch.uint8) if codes.element_size() == 1 else codes
    return _VALUES[element][bits.long()]


def nearest_codes(values: Tensor, element: ElementType) -> Tensor:
    """Codes (int8) of the nearest values; half way between two, the one with the even code. The largest is the end."""
    positive = _VALUES[element][: 1 << (SMALL_FLOATS[element].bits - 1)]
    positive = positive[torch.isfinite(positive)]
    middles = (positive[1:] + positive[:-1]) / 2  # exact: one bit more than the values
    magnitude = values.abs().contiguous()  # bucketize warns of strides
    below = torch.bucketize(magnitude, middles)  # these two differ at a middle alone
    above = torch.bucketize(magnitude, middles, right=True)
    codes = torch.where(above % 2 == 0, above, below)
    return (codes + (1 << (SMALL_FLOATS[element].bits - 1)) * torch.signbit(values)).to(torch.uint8).view(torch.int8)


def nearest(values: Tensor, element: ElementType) -> Tensor:
    """fp32 -> the nearest values of an element in fp32, ties to even, clamped to the largest magnitude."""
    if element == "fp8":
        return nearest_fp8(values).to(torch.float32)
    return values_of(nearest_codes(values, element), element)


def nearest_fp8(values: Tensor) -> Tensor:
    """fp32 -> float8_e4m3fn, ties to even, clamped to the largest magnitude."""
    largest = SMALL_FLOATS["fp8"].largest
    return values.clamp(-largest, largest).to(torch.float8_e4m3fn)


def scale_values(scales: Tensor) -> Tensor:
    """Scales in fp32: uint8 are codes of E8M0, of which 255 is no number."""
    if scales.dtype == torch.uint8:
        ones = torch.ones(scales.shape, dtype=torch.float64)
        values = torch.ldexp(ones, scales.to(torch.int32) - 127).to(torch.float32)
        return torch.where(scales == 255, torch.nan, values)
    return scales.to(torch.float32)


# Bits of mantissa to which the largest magnitude of a group is rounded before its exponent is taken (generate_mx_scales
# of compressed-tensors): what would be rounded up to the next power of two in this many bits goes there.
_ROUNDED_BITS = {"fp4": 1, "fp6-e3m2": 2, "fp6-e2m3": 3, "fp8": 1}


def mx_scales(magnitude: Tensor, element: ElementType) -> Tensor:
    """Largest magnitudes of groups, fp32, finite -> their codes of E8M0 (uint8) by the rule of compressed-tensors."""
    bits = magnitude.contiguous().view(torch.int32) + (1 << (22 - _ROUNDED_BITS[element]))
    exponent = ((bits & 0x7F800000) >> 23) - SMALL_FLOATS[element].largest_exponent
    return exponent.clamp(0, 254).to(torch.uint8)
