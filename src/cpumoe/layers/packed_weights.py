"""Packed weights and the schemes they stand for; packing the experts of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe import ops
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight
from cpumoe.layers.scheme import PER_TOKEN_INT8, GroupShape, ScaleType, Scheme, TensorFormat


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
) -> ops.PackedSpec:
    """What packed weights of a scheme are; floating point scales are held as they are."""
    weights = scheme.weights
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
        activations=f"int{scheme.activation_bits}",
    )


def scheme_of(spec: ops.PackedSpec) -> Scheme:
    """The scheme of packed weights.

    Symmetric integers that are multiplied with int8 activations are ``w4a8`` or ``w8a8``, also if a weight-only scheme
    was run with these on request: packed weights do not tell the difference, and there is none to the result.
    """
    group = GroupShape.per_row() if spec.group_size is None else GroupShape.per_group(spec.group_size)
    scale: ScaleType = spec.scales if spec.scales in ("e8m0", "e4m3") else "float"
    weights = TensorFormat(spec.weights, group, symmetric=not spec.has_zero_points, scale=scale)
    if spec.activations == "int16":
        return Scheme(weights, None)
    if weights.symmetric and weights.element != "fp4":
        return Scheme(weights, PER_TOKEN_INT8)
    return Scheme(weights, None).with_int8_activations()


def put_weight(builder: ops.PackedBuilder, first: int, weight: QuantizedWeight, row_order: int, name: str) -> None:
    """Packs weights [n, out, in] as the experts from ``first`` on."""
    builder.put(
        first,
        weight.values,
        weight.scales,
        weight.bias,
        row_order,
        name,
        zero_points=weight.zero_points,
        factors=weight.factors,
        input_order=weight.input_order,
    )


def input_orders_of(weight: QuantizedWeight) -> int:
    """How many orders of inputs weights [n, out, in] have."""
    return 0 if weight.input_order is None else weight.input_order.shape[1]


def unpack_weight(blob: Tensor, first: int = 0, count: int | None = None) -> QuantizedWeight:
    """Experts ``first`` to ``first + count - 1`` of packed weights (all by default), one value per byte."""
    return QuantizedWeight(ops.read_spec(blob).weights, *ops.unpack(blob, first, count))


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
            self._builders = self._make_builders(experts, gated)
        gate_up, down = self._builders
        put_weight(gate_up, first, experts.gate_up, order, "gate_up")
        put_weight(down, first, experts.down, ops.ROWS_PLAIN, "down")

    def _make_builders(self, experts: QuantizedExperts, gated: bool) -> tuple[ops.PackedBuilder, ops.PackedBuilder]:
        c = self._config
        rows = c.activation.gate_up_rows(c.intermediate_size)

        def builder(weight: QuantizedWeight, out: int, inputs: int, gated: bool) -> ops.PackedBuilder:
            has_bias, dtype = weight.bias is not None, weight.scales.dtype
            orders = input_orders_of(weight)
            sizes = (c.local_experts, out, inputs)
            return ops.PackedBuilder(
                packed_spec(c.scheme, dtype, *sizes, gated=gated, has_bias=has_bias, input_orders=orders)
            )

        return (
            builder(experts.gate_up, rows, c.hidden_size, gated),
            builder(experts.down, c.hidden_size, c.intermediate_size, False),
        )

    def finish(self) -> dict[str, Tensor]:
        """The packed tensors; raises ValueError if an expert is missing."""
        if self._builders is None:
            raise ValueError("no experts were given")
        gate_up, down = self._builders
        return {"gate_up_packed": gate_up.finish(), "down_packed": down.finish()}
