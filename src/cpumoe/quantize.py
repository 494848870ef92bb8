"""From float weights to integers and scales: round to nearest, with the scale rule of compressed-tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe.scheme import Scheme


def quantize_weight(weight: Tensor, scheme: Scheme, name: str = "weight") -> tuple[Tensor, Tensor]:
    """Quantises [..., out, in] float weights.

    The scale of a group is its largest magnitude over half the integer range (7.5 for int4, 127.5 for int8), held in
    bf16 for bf16 weights and fp32 otherwise; values are rounded to nearest even and clamped.

    Returns:
        values [..., out, in] int8 and scales [..., out, groups].
    """
    if not weight.is_floating_point():
        raise ValueError(f"{name} is {weight.dtype}; a floating point dtype is accepted")
    largest = scheme.weights.largest
    group = scheme.group_size or weight.shape[-1]
    scheme.check_inputs(weight.shape[-1], name)
    scale_dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
    grouped = weight.to(torch.float32).unflatten(-1, (-1, group))  # [..., out, groups, group]
    if not bool(torch.isfinite(grouped).all()):
        raise ValueError(f"{name} holds NaN or infinity; only finite weights can be quantised")
    scales = (grouped.abs().amax(-1) / (largest + 0.5)).to(scale_dtype)
    scales = torch.where(scales == 0, torch.finfo(scale_dtype).eps, scales)
    values = (grouped / scales.to(torch.float32).unsqueeze(-1)).round().clamp(-largest - 1, largest)
    return values.to(torch.int8).flatten(-2), scales


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., n] uint8 nibbles (low one first, stored plus 8) -> [..., 2 n] int8 values."""
    low, high = packed & 0xF, packed >> 4
    return (torch.stack((low, high), -1).flatten(-2).to(torch.int16) - 8).to(torch.int8)


def pack_nibbles(values: Tensor) -> Tensor:
    """[..., 2 n] int8 values in -8 to 7 -> [..., n] uint8 nibbles (low one first, stored plus 8)."""
    shifted = (values.to(torch.int16) + 8).to(torch.uint8)
    return shifted[..., 0::2] | (shifted[..., 1::2] << 4)
