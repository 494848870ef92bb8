"""Linears of which every rank has some outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cpumoe.layers.linear import QuantizedLinear
from cpumoe.parallel.ranks import Ranks


class SplitLinear(nn.Module):
    """A linear whose outputs are split over the ranks in equal parts; what it gives is whole on each of them.

    A row of the weight is multiplied as it is in one process: the bits are the same.

    Args:
        own: the outputs of this rank.
        ranks: which all call it, with the same x.
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
