"""Parts of a layer's experts, cut in memory: what one rank holds of weights that are there whole."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from cpumoe.layers.parallel_layout import ExpertsPart
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight
from cpumoe.layers.regrouping import Regrouping, regrouped_size
from cpumoe.layers.scheme import SIZE_UNIT


def part_of_experts(experts: QuantizedExperts, part: ExpertsPart, *, gated: bool) -> QuantizedExperts:
    """Some of a layer's experts, or a slice of each; ``gated`` layers have gate and up rows.

    The bias of ``down`` is that of the first slice alone: sums of slices are added. Weights in activation order get
    other groups when they are sliced (see ``regrouping.py``).
    """
    held = experts.each(lambda tensor: tensor[list(part.experts)])
    if part.slices == 1:
        return held
    blocks = 2 if gated and not experts.interleaved else 1
    first, count = part.cut(held.down.columns, _slice_unit(held.down))
    pairs = 2 if experts.interleaved else 1  # of gate and up rows, which alternate
    gate_up, down = held.gate_up.row_slice(pairs * first, pairs * count, blocks), held.down
    if part.slice > 0:
        down = replace(down, bias=None)
    if down.input_order is not None:
        return _regrouped(gate_up, down, first, count, blocks)
    return replace(held, gate_up=gate_up, down=down.column_slice(first, count))


def _slice_unit(down: QuantizedWeight) -> int:
    """Inputs that slices have multiples of (``Scheme.slice_unit``)."""
    groups = down.scales.shape[-1]
    return math.lcm(SIZE_UNIT, 1 if groups <= 1 or down.input_order is not None else -(-down.columns // groups))


def _regrouped(
    gate_up: QuantizedWeight, down: QuantizedWeight, first: int, count: int, blocks: int
) -> QuantizedExperts:
    groups, scales = _groups_of_inputs(down), down.scales.shape[-1]
    groups = groups[:, first : first + count]
    columns = down.plain().values.narrow(-1, first, count)
    places = Regrouping.of(groups, scales, regrouped_size(groups, scales))
    return QuantizedExperts(places.rows_of(gate_up, blocks), places.columns_of(replace(down, values=columns)))


def _groups_of_inputs(weight: QuantizedWeight) -> Tensor:
    """The group of each input, [experts, in], of weights with one order."""
    assert weight.input_order is not None
    order = weight.input_order[:, 0].long()
    inputs = order.shape[1]
    groups = torch.arange(inputs) // (inputs // weight.scales.shape[-1])
    return torch.empty_like(order).scatter_(1, order, groups.expand_as(order))
