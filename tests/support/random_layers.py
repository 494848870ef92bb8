"""Random layers and routings for tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import cpumoe
from cpumoe.layers.rounding import quantize_weight


@dataclass
class RandomLayer:
    """Quantised weights of a layer, to be given to any backend."""

    scheme: str
    activation: cpumoe.Activation
    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def experts(self, backend: str | None = None, **changes: object) -> cpumoe.Experts:
        arguments: dict[str, object] = {
            "gate_up_bias": self.gate_up_bias,
            "down_bias": self.down_bias,
            "activation": self.activation,
            "backend": backend,
        }
        arguments.update(changes)
        return cpumoe.Experts.from_quantized(
            self.gate_up, self.gate_up_scale, self.down, self.down_scale, self.scheme, **arguments
        )


def random_layer(
    scheme: str,
    *,
    experts: int = 4,
    hidden: int = 128,
    inner: int = 96,
    activation: str = "silu",
    gated: bool = True,
    bias: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> RandomLayer:
    parsed = cpumoe.Scheme.parse(scheme)
    kind = cpumoe.Activation(activation, gated=gated)
    rows = kind.gate_up_rows(inner)
    gate_up, gate_up_scale = quantize_weight(torch.randn(experts, rows, hidden) / hidden**0.5, parsed)
    down, down_scale = quantize_weight(torch.randn(experts, hidden, inner) / inner**0.5, parsed)
    if scale_dtype is not None:
        gate_up_scale, down_scale = gate_up_scale.to(scale_dtype), down_scale.to(scale_dtype)
    return RandomLayer(
        scheme,
        kind,
        gate_up,
        gate_up_scale,
        down,
        down_scale,
        torch.randn(experts, rows) * 0.1 if bias else None,
        torch.randn(experts, hidden) * 0.1 if bias else None,
    )


def routing(tokens: int, experts: int, topk: int) -> tuple[Tensor, Tensor]:
    """ids [tokens, topk] and weights."""
    weights, ids = cpumoe.select_experts(torch.randn(tokens, experts), topk)
    return ids, weights


def relative_error(value: Tensor, truth: Tensor) -> float:
    difference = (value.double() - truth.double()).norm()
    return float(difference / truth.double().norm().clamp(min=1e-30))
