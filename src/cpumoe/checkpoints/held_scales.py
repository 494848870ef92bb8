"""How weights with one scale for all of a linear are held: gate and up are one matrix in memory, and have one each.

Each row gets the scale of its linear, so that nothing is rounded again.
"""

from __future__ import annotations

from dataclasses import replace

from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import WHOLE_FLOATS, GroupShape, Scheme


def is_per_tensor(scheme: Scheme) -> bool:
    """Whether a linear of a scheme has one scale for all of it."""
    return scheme.weights.group == GroupShape.per_tensor() and scheme.weights.element not in WHOLE_FLOATS


def held_scheme(stored: Scheme) -> Scheme:
    """Return the scheme in memory of weights stored in another: the same with a scale per row."""
    if not is_per_tensor(stored):
        return stored
    return replace(stored, weights=replace(stored.weights, group=GroupShape.per_row()))


def held_weight(weight: QuantizedWeight, stored: Scheme, rows: int) -> QuantizedWeight:
    """n linears of ``rows`` each, [..., n * rows, in] with scales [..., n, 1] -> the same as they are held."""
    if not is_per_tensor(stored):
        return weight
    return replace(weight, scales=weight.scales.repeat_interleave(rows, -2))
