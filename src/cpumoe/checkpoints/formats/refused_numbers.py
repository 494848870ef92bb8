"""Numbers that stored tensors may not hold: each function is given a tensor with its name and raises CheckpointError.

They run on every tensor that is loaded, so each of them looks at the extremes first and searches only where these are
wrong.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cpumoe.errors import CheckpointError

_E4M3_NAN = 0x7F  # and with the sign bit 0xFF
_E8M0_NAN = 0xFF


def refuse_unless_positive(name: str, scales: Tensor) -> None:
    """For floating point scales: refuses zero, negative numbers, NaN and infinity."""
    low, high = scales.to(torch.float32).aminmax() if scales.numel() else (1.0, 1.0)
    if low > 0 and high < math.inf:  # neither is so for NaN
        return
    values = scales.to(torch.float32)
    _refuse(name, values, ~((values > 0) & (values < math.inf)), "positive finite numbers are accepted")


def refuse_zero(name: str, scales: Tensor) -> None:
    """For floating point scales that may be negative: refuses zero, NaN and infinity."""
    magnitudes = scales.to(torch.float32).abs()
    low, high = magnitudes.aminmax() if scales.numel() else (1.0, 1.0)
    if low > 0 and high < math.inf:
        return
    wrong = ~((magnitudes > 0) & (magnitudes < math.inf))
    _refuse(name, scales.to(torch.float32), wrong, "finite numbers other than 0 are accepted")


def refuse_nan_codes(name: str, weight: Tensor) -> None:
    """For weights in e4m3, whose codes 0x7F and 0xFF stand for no number."""
    codes = weight.view(torch.uint8)
    if not codes.numel() or (int(codes.view(torch.int8).amax()) != _E4M3_NAN and int(codes.amax()) != 0xFF):
        return
    _refuse(name, codes, (codes & _E4M3_NAN) == _E4M3_NAN, "every code but 127 and 255, which are NaN, is accepted")


def refuse_nan_powers(name: str, scales: Tensor) -> None:
    """For scales in E8M0, whose code 255 stands for no number."""
    if scales.numel() and int(scales.amax()) == _E8M0_NAN:
        _refuse(name, scales, scales == _E8M0_NAN, "the codes 0 to 254 are accepted")


def refuse_negative_codes(name: str, scales: Tensor) -> None:
    """For scales in e4m3: refuses the codes of negative numbers and of NaN."""
    codes = scales.view(torch.uint8)
    if codes.numel() and int(codes.amax()) >= _E4M3_NAN:
        _refuse(name, codes, codes >= _E4M3_NAN, "the codes 0 to 126 are accepted")


def _refuse(name: str, values: Tensor, wrong: Tensor, accepted: str) -> None:
    """Names the first of the values that are wrong, and says how many there are."""
    places = wrong.nonzero()
    place = tuple(places[0].tolist())
    where = f" at {list(place)}" if values.numel() > 1 else ""
    count = f" ({len(places)} such values)" if len(places) > 1 else ""
    raise CheckpointError(f"{name} holds {values[place].item():g}{where}{count}; {accepted}")
