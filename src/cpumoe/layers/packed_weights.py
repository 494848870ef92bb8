"""Packed weights and the schemes they stand for; packing the experts of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe import ops
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.layers.scheme import PER_TOKEN_INT8, GroupShape, Scheme, TensorFormat


def packed_spec(
    scheme: Scheme,
    scale_dtype: torch.dtype,
    experts: int,
    out_features: int,
    in_features: int,
    *,
    gated: bool = False,
    has_bias: bool = False,
) -> ops.PackedSpec:
    """What packed weights of a scheme are; scales that are not bf16 are held as fp32."""
    return ops.PackedSpec(
        weights=scheme.weights.element,
        group_size=scheme.group_size,
        scales=ops.scales_name(scale_dtype),
        experts=experts,
        out_features=out_features,
        in_features=in_features,
        gated=gated,
        has_bias=has_bias,
    )


def scheme_of(spec: ops.PackedSpec) -> Scheme:
    """The scheme of packed weights."""
    group = GroupShape.per_row() if spec.group_size is None else GroupShape.per_group(spec.group_size)
    return Scheme(TensorFormat(spec.weights, group), PER_TOKEN_INT8)


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
        gate_up.put(first, experts.gate_up, experts.gate_up_scale, experts.gate_up_bias, order, "gate_up")
        down.put(first, experts.down, experts.down_scale, experts.down_bias, ops.ROWS_PLAIN, "down")

    def _make_builders(self, experts: QuantizedExperts, gated: bool) -> tuple[ops.PackedBuilder, ops.PackedBuilder]:
        c = self._config
        rows = c.activation.gate_up_rows(c.intermediate_size)

        def builder(scale: Tensor, out: int, inputs: int, gated: bool, bias: Tensor | None) -> ops.PackedBuilder:
            return ops.PackedBuilder(
                packed_spec(c.scheme, scale.dtype, c.local_experts, out, inputs, gated=gated, has_bias=bias is not None)
            )

        return (
            builder(experts.gate_up_scale, rows, c.hidden_size, gated, experts.gate_up_bias),
            builder(experts.down_scale, c.hidden_size, c.intermediate_size, False, experts.down_bias),
        )

    def finish(self) -> dict[str, Tensor]:
        """The packed tensors; raises ValueError if an expert is missing."""
        if self._builders is None:
            raise ValueError("no experts were given")
        gate_up, down = self._builders
        return {"gate_up_packed": gate_up.finish(), "down_packed": down.finish()}
