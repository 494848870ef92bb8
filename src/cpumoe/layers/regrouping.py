"""Slices of experts whose weights are in activation order.

The inputs of ``down`` that share a scale lie anywhere, so that a slice of them has some of each group, while packed
weights have groups of one size. The inputs of a slice are therefore sorted by their groups, and each group is filled up
to a multiple of 32 with inputs whose weights are zero; 32 inputs then share a scale, which is that of their group. What
goes into these inputs are the rows of gate and up, which are sorted and filled up in the same way, so that ``down``
needs no order any more. A row of zeros without a bias gives zero behind every activation: each is 0 where its gate is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import GroupShape, Scheme

_GROUP = 32  # the smallest that packed integers have


def regrouped_scheme(scheme: Scheme) -> Scheme:
    """The scheme of such slices."""
    return replace(scheme, weights=replace(scheme.weights, group=GroupShape.per_group(_GROUP)))


def regrouped_size(groups: Tensor, group_count: int) -> int:
    """Inputs that slices of experts have when they are filled up: as many as the largest of them needs.

    ``groups`` [experts, inputs] are the groups of the slice's inputs, 0 to ``group_count - 1``.
    """
    return int(_filled_up(_counts(groups, group_count)).sum(1).amax())


def _counts(groups: Tensor, group_count: int) -> Tensor:
    """[experts, inputs] -> how many inputs there are of each group, [experts, groups]."""
    counts = torch.zeros((len(groups), group_count), dtype=torch.int64)
    return counts.scatter_add_(1, groups.long(), torch.ones_like(groups, dtype=torch.int64))


def _filled_up(counts: Tensor) -> Tensor:
    return (counts + _GROUP - 1) // _GROUP * _GROUP


@dataclass(frozen=True)
class Regrouping:
    """Where the inputs of slices of some experts go.

    Attributes:
        inputs: [experts, size] int64, the input of the slice that is at each place; -1 where it is filled up.
        groups: [experts, size / 32] int64, the group whose scale 32 places have.
    """

    inputs: Tensor
    groups: Tensor

    @classmethod
    def of(cls, groups: Tensor, group_count: int, size: int) -> Regrouping:
        """For the groups [experts, inputs] of a slice's inputs; ``size`` is that of :func:`regrouped_size`, or more."""
        counts = _counts(groups, group_count)
        filled = _filled_up(counts)
        found, order = groups.long().sort(dim=1, stable=True)
        # An input's place: where its group begins, and how many of the group come before it.
        shift = (filled.cumsum(1) - filled) - (counts.cumsum(1) - counts)  # [experts, groups]
        places = torch.arange(groups.shape[1]) + shift.gather(1, found)
        inputs = torch.full((len(groups), size), -1).scatter_(1, places, order)
        # A group is filled up at its end, so that the first of 32 places has an input, or all that follow have none.
        of_places = torch.zeros((len(groups), size), dtype=torch.int64).scatter_(1, places, found)
        return cls(inputs, of_places[:, ::_GROUP])

    def rows_of(self, weight: QuantizedWeight, blocks: int) -> QuantizedWeight:
        """gate_up [experts, blocks * inputs, H], gate rows before up rows, -> [experts, blocks * size, H]."""
        weight, (count, size) = weight.plain(), self.inputs.shape
        each = weight.values.shape[1] // blocks
        added = (self.inputs < 0).repeat(1, blocks).unsqueeze(-1)  # [experts, blocks * size, 1]
        offsets = each * torch.arange(blocks).repeat_interleave(size)
        rows = self.inputs.clamp(min=0).repeat(1, blocks) + offsets

        def taken(tensor: Tensor) -> Tensor:  # [experts, rows, n]
            return tensor.gather(1, rows.unsqueeze(-1).expand(count, rows.shape[1], tensor.shape[-1]))

        repeats = weight.values.shape[-1] // weight.scales.shape[-1] // _GROUP
        zeros, bias = weight.zero_points, weight.bias
        if zeros is not None:
            zeros = taken(zeros).masked_fill(added, 0).repeat_interleave(repeats, -1)
        if bias is not None:
            bias = taken(bias.unsqueeze(-1)).masked_fill(added, 0).squeeze(-1)
        return replace(
            weight,
            values=taken(weight.values).masked_fill(added, 0),
            scales=taken(weight.scales).repeat_interleave(repeats, -1),
            zero_points=zeros,
            bias=bias,
        )

    def columns_of(self, weight: QuantizedWeight) -> QuantizedWeight:
        """down [experts, H, inputs], with the scales and zero points of all groups, -> [experts, H, size]."""
        weight, rows = weight.plain(), weight.values.shape[1]

        def across(places: Tensor) -> Tensor:  # [experts, n] -> [experts, H, n]
            return places.unsqueeze(1).expand(-1, rows, -1)

        scales = weight.scales.gather(-1, across(self.groups))
        zeros = None if weight.zero_points is None else weight.zero_points.gather(-1, across(self.groups))
        values = weight.values.gather(-1, across(self.inputs.clamp(min=0)))
        nothing = torch.zeros((), dtype=torch.int8) if zeros is None else zeros.repeat_interleave(_GROUP, -1)
        values = torch.where(across(self.inputs < 0), nothing, values)
        return replace(weight, values=values, scales=scales, zero_points=zeros, input_order=None)
