"""Short convolutions."""

from __future__ import annotations

from typing import Any

from torch import nn

from cpumoe.integrations.transformers.recognition.parts import Parts, describe_matrix, plain
from cpumoe.ops import decoder


def describe_short_conv(module: Any, parts: Parts) -> decoder.ShortConv:
    """A short convolution between its two linears. Raises NotDescribed if one of them is none."""
    conv: nn.Conv1d = module.conv
    parts.take(conv.weight, conv.bias)
    parts.take_all_of(module.in_proj, module.out_proj)
    return decoder.ShortConv(
        describe_matrix(module.in_proj, "in_proj"),
        describe_matrix(module.out_proj, "out_proj"),
        plain(conv.weight).flatten(1),
        None if conv.bias is None else plain(conv.bias),
    )
