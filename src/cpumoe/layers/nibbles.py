"""Two 4-bit integers in a byte: the low one first, stored plus 8."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., n] uint8 nibbles (low one first, stored plus 8) -> [..., 2 n] int8 values."""
    low, high = packed & 0xF, packed >> 4
    return (torch.stack((low, high), -1).flatten(-2).to(torch.int16) - 8).to(torch.int8)


def pack_nibbles(values: Tensor) -> Tensor:
    """[..., 2 n] int8 values in -8 to 7 -> [..., n] uint8 nibbles (low one first, stored plus 8)."""
    shifted = (values.to(torch.int16) + 8).to(torch.uint8)
    return shifted[..., 0::2] | (shifted[..., 1::2] << 4)
