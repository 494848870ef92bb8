"""Short convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cpumoe.integrations.transformers.recognition.parts import Parts
from cpumoe.integrations.transformers.recognition.values import Source
from cpumoe.ops import decoder

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_TAPS = 16  # of a convolution, as the core has it


@dataclass(frozen=True)
class ConvolutionForm:
    """C * convolution(B * x), with B, C and x from one projection."""

    channels: int
    taps: int


def convolution_form(module: Any) -> ConvolutionForm | None:
    """Return what a module is, if it looks like a short convolution."""
    conv: Any = getattr(module, "conv", None)
    projection = getattr(module, "in_proj", None)
    if not is_depthwise(conv) or not hasattr(module, "out_proj") or not hasattr(module, "layer_idx"):
        return None
    if getattr(projection, "out_features", None) != 3 * conv.in_channels:
        return None
    return ConvolutionForm(conv.in_channels, conv.kernel_size[0])


def is_depthwise(conv: Any) -> bool:
    """Return whether a module is a causal convolution of each channel by itself."""
    if not isinstance(conv, nn.Conv1d) or conv.groups != conv.in_channels or conv.in_channels != conv.out_channels:
        return False
    taps = conv.kernel_size[0]
    plain = conv.stride == (1,) and conv.dilation == (1,) and conv.padding == (taps - 1,) and taps <= _MOST_TAPS
    return plain and conv.weight.dtype in _DTYPES


def recognize_short_conv(module: Any, parts: Parts) -> decoder.ShortConv[Source]:
    """Return a short convolution between its two linears. Raise UnsupportedDecoder if one of them is none."""
    conv: nn.Conv1d = module.conv
    return decoder.ShortConv[Source](
        parts.matrix(module.in_proj, "in_proj"),
        parts.matrix(module.out_proj, "out_proj"),
        parts.tensor(conv, "weight", flat_from=1),
        parts.optional(conv, "bias"),
    )
