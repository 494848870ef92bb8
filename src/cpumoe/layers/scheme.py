"""Schemes: what is stored and what is computed, as values that compare, print and parse.

>>> Scheme.parse("w4a8-g128").weights.group
GroupShape(rows=1, columns=128)
>>> str(Scheme.parse("w4a16-g32-asym").with_int8_activations())
'w4a16-g32-asym+int8'
>>> Scheme.parse("fp8-block").activations.group
GroupShape(rows=1, columns=128)
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from cpumoe import settings
from cpumoe.errors import UnsupportedScheme

#: Value instead of a scheme: weights stay in float, and transformers computes the experts.
FLOAT = "float"

#: The scheme of float models that are packed in memory, where neither the caller nor the environment names one.
DEFAULT_SCHEME = "w4a8-g128"

#: Integers, small floats (``fp4`` is e2m1, ``fp8`` e4m3 without infinities), and floats as they are.
ElementType = Literal["int4", "int8", "fp4", "fp6-e3m2", "fp6-e2m3", "fp8", "bf16", "fp16", "fp32"]
_BITS = {
    **{"int4": 4, "int8": 8},
    **{"fp4": 4, "fp6-e3m2": 6, "fp6-e2m3": 6, "fp8": 8},
    **{"bf16": 16, "fp16": 16, "fp32": 32},
}

#: Sizes of layers in memory are multiples of this.
SIZE_UNIT = 32

INTEGERS, WHOLE_FLOATS = ("int4", "int8"), ("bf16", "fp16", "fp32")

#: How scales are held: as floating point numbers, as powers of two (E8M0), or as 8-bit floats (e4m3) with a floating
#: point factor for the whole matrix; floats of 16 and 32 bits have none.
ScaleType = Literal["float", "e8m0", "e4m3", "none"]


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

    @classmethod
    def per_block(cls, rows: int, columns: int) -> GroupShape:
        return cls(rows, columns)

    @property
    def group_size(self) -> int | None:
        """Inputs of a row that share a scale; None when the whole row does."""
        return self.columns

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a [rows, columns] matrix."""
        down = 1 if self.rows is None else -(-rows // self.rows)
        across = 1 if self.columns is None else -(-columns // self.columns)
        return down, across


_ROW, _TENSOR, _BLOCK = GroupShape.per_row(), GroupShape.per_tensor(), GroupShape.per_block(128, 128)
# Which groups and scales the small floats may have, and how that is called.
_SMALL_FLOATS: dict[str, dict[tuple[GroupShape, str], str]] = {
    "fp4": {
        (GroupShape.per_group(32), "e8m0"): "groups of 32 with e8m0 scales (mxfp4)",
        (GroupShape.per_group(16), "e4m3"): "groups of 16 with e4m3 scales (nvfp4)",
    },
    "fp6-e3m2": {(GroupShape.per_group(32), "e8m0"): "groups of 32 with e8m0 scales (mxfp6)"},
    "fp6-e2m3": {(GroupShape.per_group(32), "e8m0"): "groups of 32 with e8m0 scales (mxfp6)"},
    "fp8": {
        (_ROW, "float"): "rows",
        (_TENSOR, "float"): "a tensor",
        (_BLOCK, "float"): "blocks of 128x128",
        (GroupShape.per_group(128), "float"): "groups of 128",
        (GroupShape.per_group(32), "e8m0"): "groups of 32 with e8m0 scales (mxfp8)",
    },
}


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
            raise UnsupportedScheme(f"element {self.element!r}; {', '.join(_BITS)} are accepted")
        size = self.group.group_size
        if self.element in INTEGERS:
            if self.scale != "float":
                raise UnsupportedScheme(f"{self.scale} scales with {self.element}; floating point scales are accepted")
            if size is not None and size % 32 != 0:
                raise UnsupportedScheme(f"group_size={size}; a multiple of 32 (32, 64, 96, 128, 256, ...) is accepted")
        elif self.element in WHOLE_FLOATS:
            if (self.group, self.symmetric, self.scale) != (_TENSOR, True, "none"):
                raise UnsupportedScheme(f"{self.element} with scales or zero points; neither is accepted")
        elif (self.group, self.scale) not in _SMALL_FLOATS[self.element] or not self.symmetric:
            raise UnsupportedScheme(
                f"{'' if self.symmetric else 'asymmetric '}{self.element} in groups of "
                f"{self.group.rows or 'all'} x {size or 'all'} with "
                f"{self.scale} scales; {' and '.join(_SMALL_FLOATS[self.element].values())}, symmetric, are accepted"
            )

    @property
    def bits(self) -> int:
        return _BITS[self.element]

    @property
    def largest(self) -> int:
        """Largest representable integer; the smallest is -largest - 1."""
        return int(2 ** (self.bits - 1)) - 1

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a [rows, columns] matrix; without scales the last dimension is 0."""
        return (rows, 0) if self.scale == "none" else self.group.scale_shape(rows, columns)


#: int8 activations with a zero point, one scale per token, found as the token is seen.
PER_TOKEN_INT8 = TensorFormat("int8", _ROW, symmetric=False, dynamic=True)
#: int8 activations with one scale, which was found before and is stored with the weights.
STATIC_INT8 = TensorFormat("int8", _TENSOR)
#: The same choices of fp8, and one scale per token and 128 inputs.
PER_TOKEN_FP8 = TensorFormat("fp8", _ROW, dynamic=True)
STATIC_FP8 = TensorFormat("fp8", _TENSOR)
PER_TENSOR_FP8 = TensorFormat("fp8", _TENSOR, dynamic=True)
#: What files may say; no scheme computes it, see ``stored_activations`` of a storage.
PER_TENSOR_INT8 = TensorFormat("int8", _TENSOR, dynamic=True)
PER_TOKEN_AND_128_FP8 = TensorFormat("fp8", GroupShape.per_group(128), dynamic=True)
#: OCP MX: a power of two for 32 values.
MXFP4 = TensorFormat("fp4", GroupShape.per_group(32), dynamic=True, scale="e8m0")
MXFP6_E3M2, MXFP6_E2M3 = replace(MXFP4, element="fp6-e3m2"), replace(MXFP4, element="fp6-e2m3")
MXFP8 = replace(MXFP4, element="fp8")
#: e4m3 scales for 16 values under a stored global scale.
NVFP4 = TensorFormat("fp4", GroupShape.per_group(16), dynamic=True, scale="e4m3")


def stored_format(activations: TensorFormat) -> TensorFormat:
    """Return the format of weights that corresponds to one of activations."""
    return replace(activations, dynamic=False)


_SHORT_NAMES: dict[tuple[ElementType, ScaleType], str] = {
    ("fp4", "e8m0"): "mxfp4",
    ("fp4", "e4m3"): "nvfp4",
    ("fp6-e3m2", "e8m0"): "mxfp6-e3m2",
    ("fp6-e2m3", "e8m0"): "mxfp6-e2m3",
    ("fp8", "e8m0"): "mxfp8",
}


def _weights_text(form: TensorFormat) -> str:
    """Return a format of weights in words, for messages: ``int4 in groups of 128``, ``mxfp4``."""
    if form.element in WHOLE_FLOATS or (form.element, form.scale) in _SHORT_NAMES:
        return _SHORT_NAMES.get((form.element, form.scale), form.element)
    group = form.group
    if group == _ROW:
        scales = "per channel"
    elif group == _TENSOR:
        scales = "with one scale per linear"
    elif group.rows == 1:
        scales = f"in groups of {group.columns}"
    else:
        scales = f"in {group.rows or 'all'}x{group.columns or 'all'} blocks"
    return f"{'' if form.symmetric else 'asymmetric '}{form.element} {scales}"


def _activations_text(form: TensorFormat | None) -> str:
    """Return a format of activations in words, for messages: ``int8 per token``, ``fp8 with a stored scale``."""
    if form is None or form.element in WHOLE_FLOATS:
        return "float" if form is None else form.element
    if (form.element, form.scale) in _SHORT_NAMES:
        return _SHORT_NAMES[form.element, form.scale]
    element = f"symmetric {form.element}" if form == replace(PER_TOKEN_INT8, symmetric=True) else form.element
    if not form.dynamic:
        return f"{element} with {'a stored scale' if form.group == _TENSOR else 'stored scales'}"
    if form.group == _TENSOR:
        return f"{element} with one dynamic scale"
    inputs = form.group.group_size
    return f"{element} per token" + ("" if inputs is None else f" and {inputs} inputs")


_FP8, _FP8_TENSOR, _FP8_BLOCK = (TensorFormat("fp8", group) for group in (_ROW, _TENSOR, _BLOCK))

# The schemes whose weights are floats, by their names. Those of integers are composed of parts.
_FLOAT_SCHEMES: dict[str, tuple[TensorFormat, TensorFormat | None]] = {
    "fp8": (_FP8, PER_TOKEN_FP8),
    "fp8-static": (_FP8, STATIC_FP8),
    "fp8-tensor": (_FP8_TENSOR, STATIC_FP8),
    "fp8-tensor-dynamic": (_FP8_TENSOR, PER_TENSOR_FP8),
    "fp8-tensor-token": (_FP8_TENSOR, PER_TOKEN_FP8),
    "fp8-block": (_FP8_BLOCK, PER_TOKEN_AND_128_FP8),
    "fp8a16": (_FP8, None),
    "fp8a16-tensor": (_FP8_TENSOR, None),
    "fp8a16-block": (_FP8_BLOCK, None),
    "nvfp4": (stored_format(NVFP4), NVFP4),
    "nvfp4a16": (stored_format(NVFP4), None),
    "mxfp4": (stored_format(MXFP4), MXFP4),
    "mxfp4a16": (stored_format(MXFP4), None),
    "mxfp4a8": (stored_format(MXFP4), MXFP8),
    "mxfp4afp8": (stored_format(MXFP4), PER_TOKEN_FP8),
    "mxfp4afp8-static": (stored_format(MXFP4), STATIC_FP8),
    "mxfp4a6-e3m2": (stored_format(MXFP4), MXFP6_E3M2),
    "mxfp4a6-e2m3": (stored_format(MXFP4), MXFP6_E2M3),
    "mxfp6-e3m2": (stored_format(MXFP6_E3M2), MXFP6_E3M2),
    "mxfp6-e3m2a16": (stored_format(MXFP6_E3M2), None),
    "mxfp6-e3m2afp8": (stored_format(MXFP6_E3M2), PER_TOKEN_FP8),
    "mxfp6-e3m2afp8-static": (stored_format(MXFP6_E3M2), STATIC_FP8),
    "mxfp6-e2m3": (stored_format(MXFP6_E2M3), MXFP6_E2M3),
    "mxfp6-e2m3a16": (stored_format(MXFP6_E2M3), None),
    "mxfp6-e2m3afp8": (stored_format(MXFP6_E2M3), PER_TOKEN_FP8),
    "mxfp6-e2m3afp8-static": (stored_format(MXFP6_E2M3), STATIC_FP8),
    "mxfp8": (stored_format(MXFP8), MXFP8),
    "mxfp8a16": (stored_format(MXFP8), None),
    "bf16": (TensorFormat("bf16", _TENSOR, scale="none"), None),
    "fp16": (TensorFormat("fp16", _TENSOR, scale="none"), None),
    "fp32": (TensorFormat("fp32", _TENSOR, scale="none"), None),
}
_FLOAT_NAMES = {formats: name for name, formats in _FLOAT_SCHEMES.items()}

# How the activations of integer weights are called in names, and the weights that stored scales go with.
_INTEGER_ACTIVATIONS = {"8": PER_TOKEN_INT8, "16": None, "fp8": PER_TOKEN_FP8}
_STATIC_ACTIVATIONS = {"8": STATIC_INT8, "fp8": STATIC_FP8}


@dataclass(frozen=True)
class Scheme:
    """A weight format and an activation format. Illegal pairs are refused when they are made.

    ``activations`` is None for weight-only schemes, whose activations stay floats; ``requested`` are those that such a
    scheme is run with on request.
    """

    weights: TensorFormat
    activations: TensorFormat | None
    requested: TensorFormat | None = None

    def __post_init__(self) -> None:
        w, a = self.weights, self.activations
        if w.dynamic:
            raise UnsupportedScheme("weights with scales that are found when they are seen; stored scales are accepted")
        if w.element in INTEGERS:
            self._check_integers()
        elif (w, a) not in _FLOAT_NAMES:
            accepted = [name for (weights, _), name in _FLOAT_NAMES.items() if weights.element == w.element]
            instead = "; ask for these instead: mxfp4a16+int8" if w.element == "fp4" and a == PER_TOKEN_INT8 else ""
            raise UnsupportedScheme(
                f"{w.element} weights with {'float' if a is None else a.element} activations in these groups "
                f"({_weights_text(w)} and {_activations_text(a)}){instead}; {', '.join(accepted)} are accepted"
            )
        if self.requested is not None and (
            self.requested != PER_TOKEN_INT8 or a is not None or not self.takes_int8_activations
        ):
            raise UnsupportedScheme(
                f"{_activations_text(self.requested)} activations on request, where the scheme has {w.element} weights "
                f"and {_activations_text(a)} activations; int8 per token with weight-only schemes of integers (not of "
                "asymmetric int8) and of fp4 is accepted"
            )

    def _check_integers(self) -> None:
        w, a = self.weights, self.activations
        if a not in (*_INTEGER_ACTIVATIONS.values(), *_STATIC_ACTIVATIONS.values()):
            raise UnsupportedScheme(
                f"{_activations_text(a)} activations with {w.element} weights; int8 or fp8, per token or with a stored "
                "scale, or none are accepted"
            )
        if w.group.rows != 1:
            raise UnsupportedScheme(
                f"weight scales over blocks of {w.group.rows} rows do not go with per-token activations; "
                "per channel or per group along the inputs is accepted"
            )
        if not w.symmetric and a is not None:
            raise UnsupportedScheme(
                f"asymmetric {w.element} weights with {a.element} activations; asymmetric weights with 16-bit "
                "activations (w4a16-asym) are accepted"
            )
        if a == STATIC_INT8 and (w.element != "int8" or w.group != _ROW):
            raise UnsupportedScheme(
                f"{w.element} weights with int8 activations of a stored scale; int8 weights per channel "
                "(w8a8-static) are accepted"
            )
        if a in (PER_TOKEN_FP8, STATIC_FP8) and w.element != "int4":
            raise UnsupportedScheme(f"{w.element} weights with fp8 activations; int4 weights (w4afp8) are accepted")

    @classmethod
    def parse(cls, name: str | Scheme) -> Scheme:
        """Scheme of a short name: ``w4a8-g32``, ``w8a8``, ``w4a16-g128-asym``, ``fp8-block``, ``mxfp4a16+int8``.

        ``wXaY`` are X-bit integers with activations of Y bits, ``-gN`` in groups of N inputs, ``-asym`` with zero
        points; ``a16`` stands for activations that stay floats, ``+int8`` runs such a scheme with int8 ones.
        """
        if isinstance(name, Scheme):
            return name
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise UnsupportedScheme(
                f"scheme {name!r} is not known; w4a8, w8a8, w4a16, w8a16 and w4afp8 (with -gN for groups of N, a "
                "multiple of 32; with 16-bit activations -asym), w8a8-static, w4afp8-static, "
                f"{', '.join(_FLOAT_SCHEMES)} are accepted"
            )
        requested = PER_TOKEN_INT8 if match["requested"] else None
        if match["float"]:
            return cls(*_FLOAT_SCHEMES[match["float"]], requested)
        element: ElementType = "int4" if match["bits"] == "4" else "int8"
        group = _ROW if match["group"] is None else GroupShape.per_group(int(match["group"]))
        weights = TensorFormat(element, group, symmetric=match["asymmetric"] is None)
        if match["static"] and match["inputs"] not in _STATIC_ACTIVATIONS:
            raise UnsupportedScheme(f"scheme {name!r}; of stored scales w8a8-static and w4afp8-static are accepted")
        activations = (_STATIC_ACTIVATIONS if match["static"] else _INTEGER_ACTIVATIONS)[match["inputs"]]
        return cls(weights, activations, requested)

    @property
    def takes_int8_activations(self) -> bool:
        """Whether the weights are multiples of small integers, which int8 activations can be multiplied with."""
        w = self.weights
        return w.element in ("int4", "fp4") or (w.element == "int8" and w.symmetric)

    def with_int8_activations(self) -> Scheme:
        """The same weights, run with int8 activations; a scheme with quantised activations stays as it is."""
        return self if self.activations is not None else replace(self, requested=PER_TOKEN_INT8)

    @property
    def product_activations(self) -> TensorFormat | None:
        """What activations are held as in products: None stands for floats."""
        return self.requested or self.activations

    @property
    def group_size(self) -> int | None:
        """Inputs that share a weight scale; None per channel."""
        return self.weights.group.group_size

    @property
    def slice_unit(self) -> int:
        """Inputs of ``down`` that slices of experts have multiples of: those that share a scale, and 32 in memory."""
        return math.lcm(SIZE_UNIT, self.weights.group.rows or 1, self.weights.group.columns or 1)

    def fits(self, in_features: int) -> bool:
        """Whether the group size divides an input size."""
        return self.group_size is None or in_features % self.group_size == 0

    def check_inputs(self, in_features: int, name: str) -> None:
        """Refuses an input size that the group size does not divide."""
        size = self.group_size
        if not self.fits(in_features):
            fitting = [g for g in (32, 64, 128) if in_features % g == 0]
            advice = f"use {', '.join(map(str, fitting))}" if fitting else "use per channel"
            if self.weights.element not in INTEGERS:
                advice = f"for {self} a multiple of {size} is accepted"
            raise UnsupportedScheme(f"{name}: group_size={size} does not divide in_features={in_features}; {advice}")

    def __str__(self) -> str:
        requested = "" if self.requested is None else "+int8"
        w, a = self.weights, self.activations
        if w.element not in INTEGERS:
            return _FLOAT_NAMES[w, a] + requested
        static = "-static" if a in _STATIC_ACTIVATIONS.values() else ""
        named = _STATIC_ACTIVATIONS if static else _INTEGER_ACTIVATIONS
        inputs = next(text for text, activations in named.items() if activations == a)
        group = "" if self.group_size is None else f"-g{self.group_size}"
        return f"w{w.bits}a{inputs}{group}{'' if w.symmetric else '-asym'}{static}{requested}"


_NAME = re.compile(
    r"(?:w(?P<bits>[48])a(?P<inputs>8|16|fp8)(?:-g(?P<group>[1-9][0-9]{0,5}))?(?P<asymmetric>-asym)?(?P<static>-static)?"
    rf"|(?P<float>{'|'.join(sorted(_FLOAT_SCHEMES, key=len, reverse=True))}))(?P<requested>\+int8)?"
)


_QUANTIZED = ["w4a8", "w4a8-g32", "w4a8-g64", "w4a8-g128", "w8a8", "w8a8-g32", "w8a8-g128", "w8a8-static"]
_QUANTIZED += ["w4afp8", "w4afp8-g128", "w4afp8-static", "w4afp8-g32-static"]
_A16 = ["w4a16", "w4a16-g32", "w4a16-g128", "w4a16-asym", "w4a16-g32-asym", "w4a16-g128-asym"]
_A16 += ["w8a16", "w8a16-g32", "w8a16-g128", "w8a16-asym", "w8a16-g32-asym"]
_ON_REQUEST = [name for name in (*_A16, "mxfp4a16", "nvfp4a16") if Scheme.parse(name).takes_int8_activations]
#: Names of schemes of every kind that is served. Groups may have any multiple of 32 inputs; these are the usual ones.
SCHEMES = (*_QUANTIZED, *_A16, *_FLOAT_SCHEMES, *(f"{name}+int8" for name in _ON_REQUEST))


_Default = TypeVar("_Default", str, None)


def named_scheme(named: Scheme | str | None, default: _Default) -> Scheme | str | _Default:
    """Return the scheme of a float model's experts: what the caller names, else ``CPUMOE_SCHEME``, else ``default``."""
    for scheme in (named, settings.SCHEME.get()):
        if scheme is not None:
            return scheme
    return default
