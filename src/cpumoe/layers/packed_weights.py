"""Packed weights and the schemes they stand for; packing the experts of a layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from cpumoe import ops
from cpumoe.layers.activation_rounding import Held, held_activations, needs_input_scales
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight
from cpumoe.layers.scheme import (
    INTEGERS,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8,
    NVFP4,
    PER_TENSOR_FP8,
    PER_TOKEN_AND_128_FP8,
    PER_TOKEN_FP8,
    PER_TOKEN_INT8,
    STATIC_FP8,
    STATIC_INT8,
    WHOLE_FLOATS,
    ElementType,
    GroupShape,
    ScaleType,
    Scheme,
    TensorFormat,
)

#: How the core calls what activations are held as.
_ACTIVATIONS: dict[Held, str] = {
    PER_TOKEN_INT8: "int8",
    "int16": "int16",
    STATIC_INT8: "int8-static",
    PER_TOKEN_FP8: "fp8",
    STATIC_FP8: "fp8-static",
    PER_TENSOR_FP8: "fp8-tensor",
    PER_TOKEN_AND_128_FP8: "fp8-g128",
    NVFP4: "nvfp4",
    MXFP4: "mxfp4",
    MXFP6_E3M2: "mxfp6-e3m2",
    MXFP6_E2M3: "mxfp6-e2m3",
    MXFP8: "mxfp8",
    None: "float",
}


# Blocks of fp8 have scales in fp32 for every row and 128 inputs when they are packed.
_BLOCK = GroupShape.per_block(128, 128)


def packed_activations(scheme: Scheme) -> str:
    """How the core calls what the activations of a scheme are held as."""
    return _ACTIVATIONS[held_activations(scheme)]


def multiplies_floats(scheme: Scheme) -> bool:
    """Return whether the core multiplies float activations, whose sums depend on the order of additions."""
    return not packed_activations(scheme).startswith("int")


def packed_spec(
    scheme: Scheme,
    scale_dtype: torch.dtype,
    experts: int,
    out_features: int,
    in_features: int,
    *,
    gated: bool = False,
    has_bias: bool = False,
    input_orders: int = 0,
    input_scales: int | None = None,
) -> ops.PackedSpec:
    """What packed weights of a scheme are; floating point scales are held as they are, those of blocks in fp32.

    ``input_scales`` of an expert: 2 where gate and up have one each. Left out, it is 1 for schemes that store them.
    """
    weights = scheme.weights
    if weights.group == _BLOCK:
        scale_dtype = torch.float32
    if input_scales is None:
        input_scales = int(needs_input_scales(scheme))
    return ops.PackedSpec(
        weights=weights.element,
        group_size=scheme.group_size,
        scales=ops.scales_name(scale_dtype) if weights.scale == "float" else weights.scale,
        experts=experts,
        out_features=out_features,
        in_features=in_features,
        gated=gated,
        has_bias=has_bias,
        has_zero_points=not weights.symmetric,
        input_orders=input_orders,
        input_scales=input_scales,
        activations=packed_activations(scheme),
    )


def scheme_of(spec: ops.PackedSpec) -> Scheme:
    """The scheme of packed weights.

    Symmetric integers that are multiplied with int8 activations are ``w4a8`` or ``w8a8``, also if a weight-only scheme
    was run with these on request, and fp8 with one scale for the tensor is fp8 with one per row: packed weights do not
    tell the difference, and there is none to the result.
    """
    group = GroupShape.per_row() if spec.group_size is None else GroupShape.per_group(spec.group_size)
    if spec.weights in WHOLE_FLOATS:
        group = GroupShape.per_tensor()
    elif spec.weights == "fp8" and (spec.group_size == _BLOCK.columns or spec.activations == "fp8-tensor"):
        group = GroupShape.per_tensor() if spec.group_size is None else _BLOCK
    scale = cast(ScaleType, spec.scales if spec.scales in ("e8m0", "e4m3", "none") else "float")
    weights = TensorFormat(cast(ElementType, spec.weights), group, symmetric=not spec.has_zero_points, scale=scale)
    held = next(held for held, name in _ACTIVATIONS.items() if name == spec.activations)
    if held is None or held == "int16":
        return Scheme(weights, None)
    if held == PER_TOKEN_INT8 and not (weights.symmetric and weights.element in INTEGERS):
        return Scheme(weights, None).with_int8_activations()
    return Scheme(weights, held)


def state_mismatches(
    own: Iterable[tuple[str, Tensor | None]], state: Mapping[str, Tensor], prefix: str
) -> Iterator[str]:
    """Yield a sentence for each packed tensor of a state dict that is of another scheme or shape than the layer's own.

    Blobs of two schemes may have the same size, so that PyTorch would copy one over the other.
    """
    for name, blob in own:
        given = state.get(prefix + name)
        if blob is None or given is None:
            continue
        try:
            spec, expected = ops.read_spec(given), ops.read_spec(blob)
        except ValueError as problem:
            yield f"{prefix}{name}: {problem}"
            continue
        if spec != expected:
            yield f"{prefix}{name} holds {_spec_text(spec)}; expected {_spec_text(expected)}"


def _spec_text(spec: ops.PackedSpec) -> str:
    bias = ", bias" if spec.has_bias else ""
    shape = f"[{spec.experts}, {spec.out_features}, {spec.in_features}]"
    return f"{scheme_of(spec)} weights {shape} ({spec.activations} activations, {spec.scales} scales{bias})"


def put_weight(builder: ops.PackedBuilder, first: int, weight: QuantizedWeight, row_order: int, name: str) -> None:
    """Packs weights [n, out, in] as the experts from ``first`` on."""
    scales = weight.row_scales()
    if weight.element == "fp8" and builder.spec.group_size == _BLOCK.columns:
        scales = scales.to(torch.float32)
    builder.put(
        first,
        weight.values,
        scales,
        weight.bias,
        row_order,
        name,
        zero_points=weight.zero_points,
        factors=weight.factors,
        input_order=weight.input_order,
        input_scales=weight.input_scales,
    )


def builder_for(
    weight: QuantizedWeight, scheme: Scheme, experts: int, out_features: int, in_features: int, gated: bool = False
) -> ops.PackedBuilder:
    """Return a builder for experts of which ``weight`` [n, out, in] are some."""
    order, inputs = weight.input_order, weight.input_scales
    spec = packed_spec(
        scheme,
        weight.scales.dtype,
        experts,
        out_features,
        in_features,
        gated=gated,
        has_bias=weight.bias is not None,
        input_orders=0 if order is None else order.shape[1],
        input_scales=0 if inputs is None else inputs.shape[1],
    )
    return ops.PackedBuilder(spec)


def unpack_weight(
    blob: Tensor, first: int = 0, count: int | None = None, scheme: Scheme | None = None
) -> QuantizedWeight:
    """Experts ``first`` to ``first + count - 1`` of packed weights (all by default), one value per byte.

    ``scheme`` is the one they were packed with, where that is known: packed weights have a scale for every row.
    """
    spec = ops.read_spec(blob)
    weight = QuantizedWeight(cast(ElementType, spec.weights), *ops.unpack(blob, first, count))
    group = (scheme_of(spec) if scheme is None else scheme).weights.group
    if spec.weights in WHOLE_FLOATS or group.rows == 1:
        return weight
    return replace(weight, scales=weight.scales[:, :: group.rows or spec.out_features].contiguous())


class ExpertsPacker:
    """Packs the experts of a layer for the native kernels, some at a time, in any order."""

    def __init__(self, config: MoEConfig) -> None:
        self._config = config
        self._builders: tuple[ops.PackedBuilder, ops.PackedBuilder] | None = None

    def put(self, first: int, experts: QuantizedExperts) -> None:
        """Experts ``first``, ``first + 1``, ... of those held here."""
        gated = bool(self._config.activation.gated)
        order = ops.ROWS_PLAIN
        if gated:
            order = ops.ROWS_GATE_UP_INTERLEAVED if experts.interleaved else ops.ROWS_GATE_THEN_UP
        if self._builders is None:  # the dtype of the scales is that of the first
            c = self._config
            rows = c.activation.gate_up_rows(c.intermediate_size)
            self._builders = (
                builder_for(experts.gate_up, c.scheme, c.local_experts, rows, c.hidden_size, gated),
                builder_for(experts.down, c.scheme, c.local_experts, c.hidden_size, c.intermediate_size),
            )
        gate_up, down = self._builders
        put_weight(gate_up, first, experts.gate_up, order, "gate_up")
        put_weight(down, first, experts.down, ops.ROWS_PLAIN, "down")

    def finish(self) -> dict[str, Tensor]:
        """The packed tensors; raises ValueError if an expert is missing."""
        if self._builders is None:
            raise ValueError("no experts were given")
        gate_up, down = self._builders
        return {"gate_up_packed": gate_up.finish(), "down_packed": down.finish()}
