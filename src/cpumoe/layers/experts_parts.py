"""Parts of a layer's experts, cut in memory: what one rank holds of weights that are there whole."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cpumoe.layers.parallel_layout import ExpertsPart
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight
from cpumoe.layers.regrouping import Regrouping, regrouped_size


def part_of_experts(experts: QuantizedExperts, part: ExpertsPart, *, gated: bool) -> QuantizedExperts:
    """Some of a layer's experts, or a slice of each; ``gated`` layers have gate and up rows.

    The bias of ``down`` is that of the first slice alone: sums of slices are added. Weights in activation order get
    other groups when they are sliced (see ``regrouping.py``).
    """
    held = experts.each(lambda tensor: tensor[list(part.experts)])
    if part.slices == 1:
        return held
    blocks = 2 if gated and not experts.interleaved else 1
    gate_up, down = held.gate_up.row_slice(part.slices, part.slice, blocks), held.down
    if part.slice > 0:
        down = replace(down, bias=None)
    if down.input_order is not None:
        return _regrouped(gate_up, down, part, blocks)
    return replace(held, gate_up=gate_up, down=down.column_slice(part.slices, part.slice))


def _regrouped(gate_up: QuantizedWeight, down: QuantizedWeight, part: ExpertsPart, blocks: int) -> QuantizedExperts:
    groups, scales = _groups_of_inputs(down), down.scales.shape[-1]
    each = groups.shape[1] // part.slices
    groups = groups[:, part.slice * each : (part.slice + 1) * each]
    columns = down.plain().values.narrow(-1, part.slice * each, each)
    places = Regrouping.of(groups, scales, regrouped_size(groups, scales))
    return QuantizedExperts(places.rows_of(gate_up, blocks), places.columns_of(replace(down, values=columns)))


def _groups_of_inputs(weight: QuantizedWeight) -> Tensor:
    """The group of each input, [experts, in], of weights with one order."""
    assert weight.input_order is not None
    order = weight.input_order[:, 0].long()
    inputs = order.shape[1]
    groups = torch.arange(inputs) // (inputs // weight.scales.shape[-1])
    return torch.empty_like(order).scatter_(1, order, groups.expand_as(order))
