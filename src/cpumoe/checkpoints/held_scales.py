"""How weights with one scale for all of a linear are held: gate and up are one matrix in memory, and have one each.

Where a scheme of the same values with a scale per row exists, each row gets that of its linear, and nothing is lost.
Else (activations with one scale for all tokens) both are brought to the larger of the two, which rounds the values of
the other again.
"""

from __future__ import annotations

from dataclasses import replace

from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.gate_up_scales import with_the_larger_scale
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import WHOLE_FLOATS, GroupShape, Scheme


def is_per_tensor(scheme: Scheme) -> bool:
    """Whether a linear of a scheme has one scale for all of it."""
    return scheme.weights.group == GroupShape.per_tensor() and scheme.weights.element not in WHOLE_FLOATS


def held_scheme(stored: Scheme) -> Scheme:
    """The scheme that weights are held in which are stored in another: with a scale per row, if there is such a one."""
    if not is_per_tensor(stored):
        return stored
    try:
        return replace(stored, weights=replace(stored.weights, group=GroupShape.per_row()))
    except UnsupportedScheme:
        return stored


def held_weight(weight: QuantizedWeight, stored: Scheme, rows: int) -> QuantizedWeight:
    """n linears of ``rows`` each, [..., n * rows, in] with scales [..., n, 1] -> the same as they are held."""
    if not is_per_tensor(stored):
        return weight
    if held_scheme(stored) != stored:
        return replace(weight, scales=weight.scales.repeat_interleave(rows, -2))
    if weight.scales.shape[-2] == 1:
        return weight

    def part(place: int) -> QuantizedWeight:
        wanted = slice(place * rows, (place + 1) * rows)
        return replace(
            weight,
            values=weight.values[..., wanted, :],
            scales=weight.scales[..., place : place + 1, :],
            bias=None if weight.bias is None else weight.bias[..., wanted],
        )

    return with_the_larger_scale(part(0), part(1))
