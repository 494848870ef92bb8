"""Schemes: what is stored and what is computed, as values that compare, print and parse.

>>> Scheme.parse("w4a8-g128").weights.group
GroupShape(rows=1, columns=128)
>>> str(Scheme.parse("w4a16-g32-asym").with_int8_activations())
'w4a16-g32-asym+int8'
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from cpumoe.errors import UnsupportedScheme

#: ``fp4`` is e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
ElementType = Literal["int4", "int8", "fp4"]
_BITS = {"int4": 4, "int8": 8, "fp4": 4}

#: How scales are held: as floating point numbers, as powers of two (E8M0), or as 8-bit floats (e4m3) with a floating
#: point factor for the whole matrix.
ScaleType = Literal["float", "e8m0", "e4m3"]


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


_FP4_NAMES = {(32, "e8m0"): "mxfp4", (16, "e4m3"): "nvfp4"}


@dataclass(frozen=True)
class TensorFormat:
    """How one operand is held: element type, which elements share a scale, whether zero is fixed, and the scales."""

    element: ElementType
    group: GroupShape
    symmetric: bool = True
    dynamic: bool = False  # scales are found when the operand is seen (activations)
    scale: ScaleType = "float"

    def __post_init__(self) -> None:
        if self.element not in _BITS:
            raise UnsupportedScheme(f"element {self.element!r}; {' and '.join(_BITS)} are accepted")
        size = self.group.group_size
        if self.element != "fp4":
            if self.scale != "float":
                raise UnsupportedScheme(f"{self.scale} scales with {self.element}; floating point scales are accepted")
            if size is not None and size % 32 != 0:
                raise UnsupportedScheme(f"group_size={size}; a multiple of 32 (32, 64, 96, 128, 256, ...) is accepted")
        elif (size, self.scale) not in _FP4_NAMES or not self.symmetric:
            raise UnsupportedScheme(
                f"fp4 in groups of {size} with {self.scale} scales, {'' if self.symmetric else 'a'}symmetric; "
                "groups of 32 with e8m0 scales (mxfp4) and of 16 with e4m3 scales (nvfp4) are accepted"
            )

    @property
    def bits(self) -> int:
        return _BITS[self.element]

    @property
    def largest(self) -> int:
        """Largest representable integer; the smallest is -largest - 1."""
        return int(2 ** (self.bits - 1)) - 1


@dataclass(frozen=True)
class Scheme:
    """A weight format and an activation format. Illegal pairs are refused when they are made.

    ``activations`` is None for weight-only schemes, whose activations stay 16-bit floats; ``requested`` are those that
    such a scheme is run with on request.
    """

    weights: TensorFormat
    activations: TensorFormat | None
    requested: TensorFormat | None = None

    def __post_init__(self) -> None:
        w, a = self.weights, self.activations
        if w.dynamic:
            raise UnsupportedScheme("weights with scales that are found when they are seen; stored scales are accepted")
        if a not in (None, PER_TOKEN_INT8):
            raise UnsupportedScheme(f"activations {a} are not served; {PER_TOKEN_INT8} or none is accepted")
        if w.group.rows != 1:
            raise UnsupportedScheme(
                f"weight scales over blocks of {w.group.rows} rows do not go with per-token activations; "
                "per channel or per group along the inputs is accepted"
            )
        if not w.symmetric and (w.element != "int4" or a is not None):
            raise UnsupportedScheme(
                f"asymmetric {w.element} weights with {'16-bit' if a is None else 'int8'} activations; asymmetric int4 "
                "weights with 16-bit activations (w4a16-asym) are accepted"
            )
        if w.element == "fp4" and a is not None:
            raise UnsupportedScheme("fp4 weights with int8 activations; ask for these instead: mxfp4a16+int8")
        if self.requested not in (None, PER_TOKEN_INT8) or (self.requested is not None and a is not None):
            raise UnsupportedScheme(f"activations {self.requested} on request, where the scheme has {a}")

    @classmethod
    def parse(cls, name: str | Scheme) -> Scheme:
        """Scheme of a short name: ``w4a8``, ``w4a8-g32``, ``w8a8``, ``w4a16-g128-asym``, ``mxfp4a16``, ``w4a16+int8``.

        ``wXaY`` are X-bit integers with activations of Y bits, ``-gN`` in groups of N inputs, ``-asym`` with zero
        points; ``+int8`` runs a scheme with 16-bit activations with int8 ones.
        """
        if isinstance(name, Scheme):
            return name
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise UnsupportedScheme(
                f"scheme {name!r} is not known; w4a8, w8a8, w4a16 and w8a16 (with -gN for groups of N, a multiple of "
                "32), w4a16-asym, mxfp4a16 and nvfp4a16 are accepted"
            )
        group = GroupShape.per_row() if match["group"] is None else GroupShape.per_group(int(match["group"]))
        requested = PER_TOKEN_INT8 if match["requested"] else None
        if match["fp4"]:
            size, scale = (32, "e8m0") if match["fp4"] == "mxfp4" else (16, "e4m3")
            weights = TensorFormat("fp4", GroupShape.per_group(size), scale=scale)  # type: ignore[arg-type]
            return cls(weights, None, requested)
        element: ElementType = "int4" if match["bits"] == "4" else "int8"
        weights = TensorFormat(element, group, symmetric=match["asymmetric"] is None)
        return cls(weights, PER_TOKEN_INT8 if match["inputs"] == "8" else None, requested)

    def with_int8_activations(self) -> Scheme:
        """The same weights, run with int8 activations; a scheme that has them already stays as it is."""
        return self if self.activations is not None else replace(self, requested=PER_TOKEN_INT8)

    @property
    def activation_bits(self) -> int:
        """Bits that activations are held with in products: 8, or 16 for floats, which are counted per token."""
        return 16 if self.activations is None and self.requested is None else 8

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
            if self.weights.element == "fp4":
                advice = f"for {self} a multiple of {size} is accepted"
            raise UnsupportedScheme(f"{name}: group_size={size} does not divide in_features={in_features}; {advice}")

    def __str__(self) -> str:
        inputs = 16 if self.activations is None else self.activations.bits
        requested = "" if self.requested is None else "+int8"
        if self.weights.element == "fp4":
            return f"{_FP4_NAMES[self.group_size, self.weights.scale]}a{inputs}{requested}"  # type: ignore[index]
        group = "" if self.group_size is None else f"-g{self.group_size}"
        return f"w{self.weights.bits}a{inputs}{group}{'' if self.weights.symmetric else '-asym'}{requested}"


_NAME = re.compile(
    r"(?:w(?P<bits>[48])a(?P<inputs>8|16)(?:-g(?P<group>[1-9][0-9]{0,5}))?(?P<asymmetric>-asym)?"
    r"|(?P<fp4>mxfp4|nvfp4)a16)(?P<requested>\+int8)?"
)


#: int8 activations with a zero point, one scale per token, found as the token is seen.
PER_TOKEN_INT8 = TensorFormat("int8", GroupShape.per_row(), symmetric=False, dynamic=True)


_A8 = ["w4a8", "w4a8-g32", "w4a8-g64", "w4a8-g128", "w8a8", "w8a8-g32", "w8a8-g128"]
_A16 = ["w4a16", "w4a16-g32", "w4a16-g128", "w4a16-asym", "w4a16-g32-asym", "w4a16-g128-asym"]
_A16 += ["w8a16", "w8a16-g32", "w8a16-g128", "mxfp4a16", "nvfp4a16"]
#: Names of schemes of every kind that is served. Groups may have any multiple of 32 inputs; these are the usual ones.
SCHEMES = (*_A8, *_A16, *(f"{name}+int8" for name in _A16))
