"""Quantised weights of a linear and of a layer's experts, as checkpoints hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from cpumoe.layers.nibbles import unpack_nibbles
from cpumoe.layers.scheme import ElementType

_BLOCK_ROWS = 128  # that share a scale, where scales are for blocks


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [..., out, in] as integers, codes or floats, and scales.

    Attributes:
        element: what the values are.
        values: int8 [..., out, in] (for fp4 and fp6 their codes, 0 to 15 and 0 to 63), or uint8 nibbles with half the
            last dimension, the low one first (integers are stored plus 8); float8_e4m3fn for fp8; bfloat16, float16 or
            float32 where they are floats.
        scales: floating point, uint8 for E8M0 or float8_e4m3fn for e4m3, [..., out, groups]; [..., 1, 1] per tensor,
            [..., out / 128, in / 128] in blocks of 128x128, [..., out, 0] where the values are floats.
        zero_points: int8 [..., out, groups], which are subtracted from the integers, or None.
        factors: fp32 [..., out], which multiply the scales, or None.
        bias: [..., out] or None.
        input_order: [..., orders, in] int32 or None: the inputs, listed so that those that share a scale lie side by
            side (activation order). One order for all rows, or one for gate and one for up rows.
        input_scales: fp32 [..., 1], or [..., 2] of gate and up rows, or None: the stored scale of activations that have
            one, which are this times their quantised values; for nvfp4 the global scale of the input, which divides.
    """

    element: ElementType
    values: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    factors: Tensor | None = None
    bias: Tensor | None = None
    input_order: Tensor | None = None
    input_scales: Tensor | None = None

    @property
    def columns(self) -> int:
        """How many inputs there are; two nibbles are a byte."""
        return self.values.shape[-1] * (2 if self.values.dtype == torch.uint8 else 1)

    def each(self, function: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """The same with a function applied to every tensor."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {n: function(t) for n, t in tensors.items() if isinstance(t, Tensor)}
        return replace(self, **changed)

    def __getitem__(self, index: int | slice) -> QuantizedWeight:
        """Some of several weights, or one of them without its dimension."""
        return self.each(lambda tensor: tensor[index])

    def row_scales(self) -> Tensor:
        """Scales with one row for every output, [..., out, groups]; those of a tensor or of blocks are repeated."""
        rows, held = self.values.shape[-2], self.scales.shape[-2]
        if held == rows:
            return self.scales
        if held == 1:
            return self.scales.expand(*self.scales.shape[:-2], rows, -1)
        return self.scales.repeat_interleave(_BLOCK_ROWS, -2)[..., :rows, :]

    def halves(self) -> tuple[QuantizedWeight, QuantizedWeight]:
        """The gate and the up rows of a weight [..., 2 I, in]."""
        rows, order, inputs = self.values.shape[-2] // 2, self.input_order, self.input_scales
        if self.scales.shape[-2] not in (1, 2 * rows) and rows % _BLOCK_ROWS != 0:
            raise ValueError(
                f"gate and up rows of {rows} each with scales for blocks of {_BLOCK_ROWS}; a multiple of "
                f"{_BLOCK_ROWS} is accepted"
            )

        def half(first: bool) -> QuantizedWeight:
            return replace(
                self.row_slice(0 if first else rows, rows),
                input_order=None if order is None else order[..., :1, :] if first else order[..., -1:, :],
                input_scales=None if inputs is None else inputs[..., :1] if first else inputs[..., -1:],
            )

        return half(True), half(False)

    def _with_rows(self, select: Callable[[Tensor, int], Tensor]) -> QuantizedWeight:
        """Return the weight with ``select(tensor, axis of the rows)`` applied to every tensor that has rows."""
        axes = {"values": -2, "scales": -2, "zero_points": -2, "factors": -1, "bias": -1}
        if self.scales.shape[-2] == 1:  # one row of scales belongs to all rows
            del axes["scales"]
        tensors = {name: getattr(self, name) for name in axes}
        selected: dict[str, Any] = {n: select(t, axes[n]) for n, t in tensors.items() if t is not None}
        return replace(self, **selected)

    def row_slice(self, first: int, count: int, blocks: int = 1) -> QuantizedWeight:
        """Neighbouring rows; where there are two ``blocks`` of them, gate and up, these rows of both."""
        size = self.values.shape[-2] // blocks
        return self._with_rows(lambda tensor, axis: _slice(tensor, axis, first, count, size, blocks))

    def rows(self, ranges: Sequence[tuple[int, int]]) -> QuantizedWeight:
        """Some of the rows of a weight [out, in], in this order: ``ranges`` of a first row and a number of rows."""
        out = self.values.shape[0]

        def select(tensor: Tensor, _: int) -> Tensor:
            unit = 1 if tensor.shape[0] == out else _BLOCK_ROWS
            for first, count in ranges:
                if first % unit != 0 or (count % unit != 0 and first + count != out):
                    raise ValueError(
                        f"rows {first} to {first + count - 1} of {out} with scales for blocks of {unit}; multiples of "
                        f"{unit} are accepted"
                    )
            parts = [tensor[first // unit : -(-(first + count) // unit)] for first, count in ranges]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return self._with_rows(select)

    def goes_above(self, other: QuantizedWeight, rows_of_a_scale: int | None) -> bool:
        """Whether the rows of another weight [out, in] of the same scheme can follow these in one matrix.

        ``rows_of_a_scale``: how many rows share scales; None: all of them.
        """

        def kind(weight: QuantizedWeight) -> tuple[object, ...]:
            given = [getattr(weight, name) is None for name in ("zero_points", "factors", "bias")]
            return (weight.values.dtype, weight.values.shape[1:], weight.scales.dtype, weight.scales.shape[1:], *given)

        def same(name: str) -> bool:
            mine, theirs = getattr(self, name), getattr(other, name)
            return mine is theirs or (mine is not None and theirs is not None and torch.equal(mine, theirs))

        # One scale for all rows cannot be two; blocks follow each other where the last one is whole.
        is_whole = rows_of_a_scale is not None and len(self.values) % rows_of_a_scale == 0
        return is_whole and kind(self) == kind(other) and same("input_order") and same("input_scales")

    @staticmethod
    def below_one_another(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """The rows of all parts [out, in], each of which :meth:`goes_above` the next, in one matrix."""
        first = parts[0]
        if len(parts) == 1:
            return first
        names = ("values", "scales", "zero_points", "factors", "bias")
        tensors = {n: [getattr(part, n) for part in parts] for n in names if getattr(first, n) is not None}
        joined: dict[str, Any] = {name: torch.cat(of_parts) for name, of_parts in tensors.items()}
        return replace(first, **joined)

    def column_slice(self, first: int, count: int) -> QuantizedWeight:
        """Neighbouring inputs, with all rows and their biases."""
        if self.input_order is not None:
            raise ValueError("inputs in activation order cannot be cut by their places; regrouping.py has what can be")

        size = self.columns

        def of(tensor: Tensor) -> Tensor:  # a scale for the whole row stays
            return tensor if tensor.shape[-1] <= 1 else _slice(tensor, -1, first, count, size)

        return replace(
            self,
            values=_slice(self.values, -1, first, count, size),
            scales=of(self.scales),
            zero_points=None if self.zero_points is None else of(self.zero_points),
        )

    def plain(self) -> QuantizedWeight:
        """One value per byte."""
        if self.values.dtype != torch.uint8:
            return self
        values = unpack_nibbles(self.values)
        return replace(self, values=values + 8 if self.element == "fp4" else values)

    @staticmethod
    def joined(parts: list[QuantizedWeight]) -> QuantizedWeight:
        """Weights of the same kind one after another, along the first dimension."""
        tensors = {f.name: [getattr(part, f.name) for part in parts] for f in fields(QuantizedWeight)}
        joined: dict[str, Any] = {n: torch.cat(t) for n, t in tensors.items() if isinstance(t[0], Tensor)}
        return replace(parts[0], **joined)


def _slice(tensor: Tensor, axis: int, first: int, count: int, size: int, blocks: int = 1) -> Tensor:
    """The part of a dimension, counted from the last, that belongs to ``count`` of ``size`` rows or inputs.

    The dimension has ``blocks`` times as many entries as belong to all of them, and that part of each block is taken.
    """
    each = tensor.shape[axis] // blocks
    if first * each % size or count * each % size or tensor.shape[axis] % blocks:
        raise ValueError(
            f"{count} of {size} from {first} on, where {list(tensor.shape)} has {blocks} x {each} for them; multiples "
            f"of {size // math.gcd(each, size)} are accepted"
        )
    first, count, axis = first * each // size, count * each // size, axis + tensor.dim()
    parts: list[Tensor] = [tensor.narrow(axis, block * each + first, count) for block in range(blocks)]
    return parts[0] if blocks == 1 else torch.cat(parts, axis)


@dataclass(frozen=True)
class QuantizedExperts:
    """The experts of one layer: ``gate_up`` [E, rows, H] and ``down`` [E, H, I].

    ``interleaved``: rows of ``gate_up`` alternate gate and up.
    """

    gate_up: QuantizedWeight
    down: QuantizedWeight
    interleaved: bool = False

    def __post_init__(self) -> None:
        rows, scale_rows = self.gate_up.values.shape[-2], self.gate_up.scales.shape[-2]
        if self.interleaved and scale_rows not in (1, rows):
            raise ValueError(
                f"gate_up_scale has {scale_rows} rows for {rows} interleaved gate and up rows; with scales for blocks "
                "of rows, gate rows before up rows are accepted"
            )

    @property
    def count(self) -> int:
        """How many experts these are."""
        return self.down.values.shape[0]

    def copy(self) -> QuantizedExperts:
        """The same in memory of its own: a reader may use its buffers again for the next experts."""
        return self.each(Tensor.clone)

    def each(self, function: Callable[[Tensor], Tensor]) -> QuantizedExperts:
        """The same with a function applied to every tensor."""
        return replace(self, gate_up=self.gate_up.each(function), down=self.down.each(function))

    def __getitem__(self, index: int | slice) -> QuantizedExperts:
        """Some of the experts, or one of them without its dimension."""
        return self.each(lambda tensor: tensor[index])

    def plain(self) -> QuantizedExperts:
        """One value per byte, gate rows before up rows."""
        gate_up, down = self.gate_up.plain(), self.down.plain()
        if self.interleaved:
            by_rows = gate_up.each(lambda t: torch.cat((t[:, 0::2], t[:, 1::2]), 1))
            # What belongs to the matrix as a whole, or to all gate and all up rows, stays as it is.
            kept = ["input_order", "input_scales", *(["scales"] if gate_up.scales.shape[-2] == 1 else [])]
            changed: dict[str, Any] = {name: getattr(gate_up, name) for name in kept}
            gate_up = replace(by_rows, **changed)
        return QuantizedExperts(gate_up, down)

    def linears(self, *, gated: bool) -> list[QuantizedWeight]:
        """Gate, up and down, or up and down, of experts whose gate rows come before their up rows."""
        return [*(self.gate_up.halves() if gated else (self.gate_up,)), self.down]

    @staticmethod
    def joined(parts: list[QuantizedExperts]) -> QuantizedExperts:
        """Experts one after another; all of the same kind."""
        gate_up, down = (QuantizedWeight.joined([getattr(p, name) for p in parts]) for name in ("gate_up", "down"))
        return QuantizedExperts(gate_up, down, parts[0].interleaved)
