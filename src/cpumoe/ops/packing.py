"""Packed weights: what they are, making them a few experts at a time, and taking them apart again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpumoe import _core, numa
from cpumoe.ops.registration import aligned, register

# How the rows of a first product lie in memory (core/packed/layout.h).
ROWS_PLAIN, ROWS_GATE_THEN_UP, ROWS_GATE_UP_INTERLEAVED = 0, 1, 2


#: What packed weights are: weights ("int4", "int8", "fp4", "fp6-e3m2", "fp6-e2m3", "fp8", "bf16", "fp16", "fp32"),
#: group_size (None: one scale per row), scales ("float32", "bfloat16", "float16", "e8m0", "e4m3", "none"), experts,
#: out_features, in_features, gated, has_bias, has_zero_points, the activations they are multiplied with ("int8",
#: "int16", "int8-static", "fp8", "fp8-static", "fp8-tensor", "fp8-g128", "nvfp4", "mxfp4", "mxfp6-e3m2", "mxfp6-e2m3",
#: "mxfp8", "float"), input_orders and input_scales (each 0, 1, or 2 for gate and up); all by keyword. It also knows
#: ``packed_bytes``.
PackedSpec = _core.PackedSpec


def read_spec(blob: Tensor) -> PackedSpec:
    """What the header of packed weights says; raises ValueError for what is not packed weights of this version."""
    return _core.read_spec(blob)


_FIELDS = (
    *("weights", "group_size", "scales", "experts", "out_features", "in_features"),
    *("gated", "has_bias", "has_zero_points", "activations", "input_orders", "input_scales"),
)
_HEADER_BYTES = 64


def packed_like(blob: Tensor, experts: int) -> Tensor:
    """Room for so many packed experts of the kind of others, to be filled through :func:`packed_experts`."""
    spec = read_spec(blob)
    changed = PackedSpec(**{**{name: getattr(spec, name) for name in _FIELDS}, "experts": experts})
    return _new_blob(changed)


def _new_blob(spec: PackedSpec) -> Tensor:
    """Memory for packed weights with their header: a tensor that counts writes, also in inference mode."""
    with torch.inference_mode(False):
        blob = torch.empty(spec.packed_bytes, dtype=torch.uint8, device="cpu")
    _core.advise_huge_pages(blob)
    _core.write_packed_header(blob, spec)
    numa.place(blob)  # before it is filled: pages that nobody has touched need not be moved
    return blob


def packed_experts(blob: Tensor) -> Tensor:
    """A view of packed weights, uint8 [experts, bytes]: an expert may be moved as it is among others of its kind."""
    return blob[_HEADER_BYTES:].view(read_spec(blob).experts, -1)


#: How scales are held, by the dtype they come in; the codes of E8M0 come as bytes. Others are held as fp32.
_SCALES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.uint8: "e8m0",
    torch.float8_e4m3fn: "e4m3",
}


def scales_name(dtype: torch.dtype) -> str:
    """How scales of a dtype are held."""
    return _SCALES.get(dtype, "float32")


#: The dtypes that values come in; int8 for the others.
_VALUES = {
    "fp8": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def scale_dtype(name: str) -> torch.dtype:
    """The dtype that scales so named are given in."""
    return next((dtype for dtype, held in _SCALES.items() if held == name), torch.float32)


class PackedBuilder:
    """Packs a matrix of experts a few at a time, in any order."""

    def __init__(self, spec: PackedSpec) -> None:
        self.spec = spec
        self._blob = _new_blob(spec)
        self._missing = set(range(spec.experts))

    def put(
        self,
        first: int,
        values: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        row_order: int,
        name: str,
        *,
        zero_points: Tensor | None = None,
        factors: Tensor | None = None,
        input_order: Tensor | None = None,
        input_scales: Tensor | None = None,
    ) -> None:
        """Experts from ``first`` on: values [n, out, in] (or nibbles), scales [n, out, groups] and bias [n, out].

        Zero points are like the scales; factors [n, out] multiply scales of type e4m3. ``input_order`` [n, orders, in]
        int32 lists the inputs so that those that share a scale lie side by side; gate and up rows may have one each.
        ``input_scales`` [n, 1], or [n, 2] of gate and up, are the stored scales of the input.
        """
        experts = set(range(first, first + values.shape[0])) & set(range(self.spec.experts))
        self._missing |= experts  # until it is done: what fails half way leaves nothing behind that could be used
        _core.pack_into(
            self._blob,
            first,
            aligned(values.view(torch.int8) if values.dtype == torch.float8_e4m3fn else values),
            aligned(scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales),
            None if zero_points is None else zero_points.contiguous(),
            None if factors is None else aligned(factors.to(torch.float32)),
            None if bias is None else aligned(bias.to(torch.float32)),
            None if input_order is None else aligned(input_order),
            None if input_scales is None else aligned(input_scales.to(torch.float32)),
            row_order,
            name,
        )
        self._missing -= experts

    def finish(self) -> Tensor:
        """The packed weights; raises ValueError if an expert is missing."""
        if self._missing:
            missing = sorted(self._missing)
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise ValueError(f"experts {', '.join(map(str, missing[:8]))}{more} were not packed")
        return self._blob


class _Pack(NamedTuple):
    """The arguments of ``pack``."""

    values: Tensor
    scales: Tensor
    bias: Tensor | None
    in_features: int
    group_size: int
    weights: str
    row_order: int
    name: str = "values"
    zero_points: Tensor | None = None
    factors: Tensor | None = None
    activations: str = "int8"
    input_order: Tensor | None = None
    input_scales: Tensor | None = None

    @property
    def spec(self) -> PackedSpec:
        if self.values.dim() != 3:
            raise ValueError(
                f"{self.name} has {self.values.dim()} dimensions; [experts, out_features, in_features] is accepted"
            )
        return PackedSpec(
            weights=self.weights,
            group_size=None if self.group_size == -1 else self.group_size,
            scales="none" if self.weights in ("bf16", "fp16", "fp32") else scales_name(self.scales.dtype),
            experts=self.values.shape[0],
            out_features=self.values.shape[1],
            in_features=self.in_features,
            gated=self.row_order != ROWS_PLAIN,
            has_bias=self.bias is not None,
            has_zero_points=self.zero_points is not None,
            input_orders=0 if self.input_order is None else self.input_order.shape[1],
            input_scales=0 if self.input_scales is None else self.input_scales.shape[1],
            activations=self.activations,
        )


def _pack(*arguments: Any, **named: Any) -> Tensor:
    call = _Pack(*arguments, **named)
    builder = PackedBuilder(call.spec)
    optional = {name: getattr(call, name) for name in ("zero_points", "factors", "input_order", "input_scales")}
    builder.put(0, call.values, call.scales, call.bias, call.row_order, call.name, **optional)
    return builder.finish()


def _pack_fake(*arguments: Any, **named: Any) -> Tensor:
    call = _Pack(*arguments, **named)
    return torch.empty(call.spec.packed_bytes, dtype=torch.uint8, device=call.values.device)


pack = register(
    "pack(Tensor values, Tensor scales, Tensor? bias, int in_features, int group_size, str weights, "
    'int row_order, str name="values", Tensor? zero_points=None, Tensor? factors=None, '
    'str activations="int8", Tensor? input_order=None, Tensor? input_scales=None) -> Tensor',
    _pack,
    _pack_fake,
)


#: values, scales, zero_points, factors, bias, input_order, input_scales
Unpacked = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def unpack(blob: Tensor, first: int = 0, count: int | None = None) -> Unpacked:
    """Experts ``first`` to ``first + count - 1`` of packed weights (all by default), as they were packed.

    To the bit, but for scales of int4 weights below 2^-122, whose sixteenth, which is what is held, has fewer bits.

    Returns:
        values [count, out, in] (int8, float8_e4m3fn for fp8, or the floats), scales [count, out, groups] (groups is 1
        per channel, 0 where values are floats) in the dtype that was packed, and, each or None, zero points int8 like
        the scales, factors and biases [count, out] fp32, the orders of inputs [count, orders, in] int32 and the scales
        of the input [count, 1] or [count, 2] fp32. Rows of a gated matrix are gate rows, then up rows.
    """
    spec = read_spec(blob)
    count = spec.experts - first if count is None else count
    if not (first >= 0 and 0 <= count <= spec.experts - first):
        raise ValueError(f"experts {first} to {first + count - 1}; 0 to {spec.experts - 1} are packed")
    shape = (count, spec.out_features)

    def empty(*last: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((*shape, *last), dtype=dtype, device="cpu")

    values_dtype, dtype = _VALUES.get(spec.weights, torch.int8), scale_dtype(spec.scales)
    values = empty(spec.in_features, dtype=torch.int8 if values_dtype.itemsize == 1 else values_dtype)
    groups = 0 if spec.scales == "none" else spec.groups
    scales = empty(groups, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
    zero_points = empty(spec.groups, dtype=torch.int8) if spec.has_zero_points else None
    factors = empty() if spec.has_factors else None
    bias = empty() if spec.has_bias else None
    order = None
    if spec.input_orders:
        order = torch.empty((count, spec.input_orders, spec.in_features), dtype=torch.int32, device="cpu")
    inputs = torch.empty((count, spec.input_scales), device="cpu") if spec.input_scales else None
    _core.unpack_into(blob.contiguous(), first, values, scales, zero_points, factors, bias, order, inputs)
    return values.view(values_dtype), scales.view(dtype), zero_points, factors, bias, order, inputs
