"""Schemes: what is stored and what is computed, as values that compare, print and parse.

>>> Scheme.parse("w4a8-g128").weights.group
GroupShape(rows=1, columns=128)
>>> str(Scheme.parse("w4a8-g128"))
'w4a8-g128'
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from cpumoe.errors import UnsupportedScheme

ElementType = Literal["int4", "int8"]
_BITS = {"int4": 4, "int8": 8}


@dataclass(frozen=True)
class GroupShape:
    """How many rows and columns of a matrix share a scale; None stands for all of them.

    For a weight [out, in] a row is an output channel; for activations [tokens, in] it is a token.
    """

    rows: int | None
    columns: int | None

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("columns", self.columns)):
            if value is not None and value < 1:
                raise UnsupportedScheme(f"GroupShape {name}={value}; a positive number or None is accepted")

    @classmethod
    def per_tensor(cls) -> GroupShape:
        return cls(None, None)

    @classmethod
    def per_row(cls) -> GroupShape:
        return cls(1, None)

    @classmethod
    def per_group(cls, size: int) -> GroupShape:
        return cls(1, size)

    @property
    def group_size(self) -> int | None:
        """Inputs of a row that share a scale; None when the whole row does."""
        return self.columns

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a [rows, columns] matrix."""
        down = 1 if self.rows is None else -(-rows // self.rows)
        across = 1 if self.columns is None else -(-columns // self.columns)
        return down, across


@dataclass(frozen=True)
class TensorFormat:
    """How one operand is held: element type, which elements share a scale, and whether zero is fixed."""

    element: ElementType
    group: GroupShape
    symmetric: bool = True
    dynamic: bool = False  # scales are found when the operand is seen (activations)

    def __post_init__(self) -> None:
        if self.element not in _BITS:
            raise UnsupportedScheme(f"element {self.element!r}; {' and '.join(_BITS)} are accepted")

    @property
    def bits(self) -> int:
        return _BITS[self.element]

    @property
    def largest(self) -> int:
        """Largest representable integer; the smallest is -largest - 1."""
        return int(2 ** (self.bits - 1)) - 1


@dataclass(frozen=True)
class Scheme:
    """A weight format and an activation format. Illegal pairs are refused when they are made."""

    weights: TensorFormat
    activations: TensorFormat

    def __post_init__(self) -> None:
        w, a = self.weights, self.activations
        if not w.symmetric or w.dynamic:
            raise UnsupportedScheme("weights must be symmetric with stored scales")
        if a != PER_TOKEN_INT8:
            raise UnsupportedScheme(f"activations {a} are not served; {PER_TOKEN_INT8} is accepted")
        if w.group.rows != 1:
            raise UnsupportedScheme(
                f"weight scales over blocks of {w.group.rows} rows do not go with per-token activations; "
                "per channel or per group along the inputs is accepted"
            )
        size = w.group.group_size
        if size is not None and w.element == "int8":
            raise UnsupportedScheme(f"group_size={size} with int8 weights; w8a8 is per channel")
        if size is not None and size % 32 != 0:
            raise UnsupportedScheme(f"group_size={size}; a multiple of 32 (32, 64, 96, 128, 256, ...) is accepted")

    @classmethod
    def parse(cls, name: str | Scheme) -> Scheme:
        """Scheme of a short name: ``w4a8``, ``w4a8-g32``, ``w4a8-g128``, ``w8a8``, ..."""
        if isinstance(name, Scheme):
            return name
        match = re.fullmatch(r"w([48])a8(?:-g([1-9][0-9]{0,5}))?", name) if isinstance(name, str) else None
        if match is None:
            raise UnsupportedScheme(
                f"scheme {name!r} is not known; w4a8, w4a8-gN (N a multiple of 32) and w8a8 are accepted"
            )
        group = GroupShape.per_row() if match[2] is None else GroupShape.per_group(int(match[2]))
        return cls(TensorFormat("int4" if match[1] == "4" else "int8", group), PER_TOKEN_INT8)

    @property
    def group_size(self) -> int | None:
        """Inputs that share a weight scale; None per channel."""
        return self.weights.group.group_size

    def fits(self, in_features: int) -> bool:
        """Whether the group size divides an input size."""
        return self.group_size is None or in_features % self.group_size == 0

    def check_inputs(self, in_features: int, name: str) -> None:
        """Refuses an input size that the group size does not divide."""
        size = self.group_size
        if not self.fits(in_features):
            fitting = [g for g in (32, 64, 128) if in_features % g == 0]
            advice = f"use {', '.join(map(str, fitting))}" if fitting else "use per channel"
            raise UnsupportedScheme(f"{name}: group_size={size} does not divide in_features={in_features}; {advice}")

    def __str__(self) -> str:
        suffix = "" if self.group_size is None else f"-g{self.group_size}"
        return f"w{self.weights.bits}a{self.activations.bits}{suffix}"


#: int8 activations with a zero point, one scale per token, found as the token is seen.
PER_TOKEN_INT8 = TensorFormat("int8", GroupShape.per_row(), symmetric=False, dynamic=True)
