"""Linears of which every rank has some outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cpumoe.checkpoints.linear_sources import LinearSource
from cpumoe.checkpoints.model_layout import LinearPlace
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.parallel_layout import ParallelLayout
from cpumoe.layers.rounding import scales_span_rows
from cpumoe.layers.scheme import Scheme
from cpumoe.parallel.ranks import Ranks

#: Linears whose weight is taken without a call where attention is over latents: they stay whole.
_EXPANSION = "kv_b_proj"


def is_split(place: LinearPlace, quantized: LinearSource | None, scheme: Scheme | None, layout: ParallelLayout) -> bool:
    """Whether every rank of a tensor parallel group has some outputs of a linear, and not all of them.

    They have all where there is no such group, where the outputs do not divide by its size, and where scales depend on
    those of other ranks.

    Args:
        place: the linear.
        quantized: where it is quantised in the files; None if it is float there.
        scheme: that floats are quantised to; None leaves them in float.
    """
    parts = layout.tp_size
    if parts == 1 or not place.may_be_packed:
        return False
    if place.module.rpartition(".")[2] == _EXPANSION:
        return False
    if quantized is not None:
        return quantized.divides(parts)
    if scheme is None:
        return place.rows % parts == 0
    form = scheme.weights
    return not scales_span_rows(form) and place.rows % (parts * (form.group.rows or place.rows)) == 0


class SplitLinear(nn.Module):
    """A linear whose outputs are split over ranks in equal parts; what it gives is whole on each of them.

    A row of the weight is multiplied as it is in one process: the bits are the same.

    Args:
        own: the outputs of this rank.
        ranks: a tensor parallel group, of which all call it with the same x.
    """

    def __init__(self, own: nn.Linear | QuantizedLinear, ranks: Ranks) -> None:
        super().__init__()
        self.own = own
        self.ranks = ranks
        self.in_features = own.in_features
        self.out_features = own.out_features * ranks.size

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        own: Tensor = self.own(x)
        rows = own.reshape(-1, own.shape[-1])
        parts = self.ranks.gather_parts(rows, [len(rows)] * self.ranks.size)
        return torch.cat(parts, 1).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, ranks={self.ranks.size}"
