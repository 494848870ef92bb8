"""Random layers and routings for tests, and the schemes that they are tried with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import cpumoe
from cpumoe.layers.activation_rounding import input_scale_arguments
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.rounding import quantize_weight

#: Every kind of weights and of activations; groups of 96 and 192 are held in smaller parts.
INT8_ROWS = (
    *("w4a8", "w4a8-g32", "w4a8-g64", "w4a8-g96", "w4a8-g192", "w8a8", "w8a8-g32", "w8a8-g96", "w8a8-static"),
    *("w4a16-asym+int8", "w4a16-g32-asym+int8", "w4a16-g96-asym+int8", "mxfp4a16+int8", "nvfp4a16+int8"),
)
INT16_ROWS = (
    *("w4a16", "w4a16-g32", "w4a16-g64", "w4a16-g96", "w4a16-g192", "w8a16", "w8a16-g32", "w8a16-g96"),
    *("w4a16-asym", "w4a16-g32-asym", "w4a16-g96-asym", "w4a16-g192-asym", "mxfp4a16", "nvfp4a16"),
)
#: Weights or activations that are floats, or asymmetric int8: those that are not multiplied as integers.
WEIGHT_ONLY_FLOATS = (
    *("w8a16-asym", "w8a16-g32-asym", "w8a16-g96-asym", "fp8a16", "fp8a16-tensor", "fp8a16-block", "mxfp6-e3m2a16"),
    *("mxfp6-e2m3a16", "mxfp8a16", "bf16", "fp16", "fp32"),
)
QUANTIZED_FLOATS = (
    *("w4afp8-static", "w4afp8-g32-static", "mxfp4afp8-static", "mxfp4a6-e3m2", "mxfp4a6-e2m3", "mxfp6-e3m2afp8"),
    *("mxfp6-e3m2afp8-static", "mxfp6-e2m3afp8", "mxfp6-e2m3afp8-static"),
    *("w4afp8", "w4afp8-g32", "w4afp8-g96", "fp8", "fp8-static", "fp8-tensor", "fp8-tensor-dynamic"),
    *("fp8-tensor-token", "fp8-block", "nvfp4", "mxfp4", "mxfp4a8", "mxfp4afp8", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp8"),
)
FLOAT_ROWS = (*WEIGHT_ONLY_FLOATS, *QUANTIZED_FLOATS)
SCHEMES = (*INT8_ROWS, *INT16_ROWS, *FLOAT_ROWS)


@dataclass
class RandomLayer:
    """Quantised weights of a layer, to be given to any backend."""

    scheme: str
    activation: cpumoe.Activation
    gate_up: Tensor
    gate_up_scale: Tensor | None
    down: Tensor
    down_scale: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    gate_up_zero_point: Tensor | None = None
    down_zero_point: Tensor | None = None
    gate_up_global_scale: Tensor | None = None
    down_global_scale: Tensor | None = None
    input_scales: dict[str, object] = field(default_factory=dict)

    def experts(self, backend: str | None = None, **changes: object) -> cpumoe.Experts:
        arguments: dict[str, object] = {
            "gate_up_bias": self.gate_up_bias,
            "down_bias": self.down_bias,
            "gate_up_zero_point": self.gate_up_zero_point,
            "down_zero_point": self.down_zero_point,
            "gate_up_global_scale": self.gate_up_global_scale,
            "down_global_scale": self.down_global_scale,
            "activation": self.activation,
            "backend": backend,
            **self.input_scales,
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
    gate_up = quantize_weight(torch.randn(experts, rows, hidden) / hidden**0.5, parsed)
    down = quantize_weight(torch.randn(experts, hidden, inner) / inner**0.5, parsed)
    gate_up_scale, down_scale = gate_up.scales, down.scales
    if parsed.weights.scale == "none":
        gate_up_scale = down_scale = None
    elif scale_dtype is not None and parsed.weights.scale == "float":
        gate_up_scale, down_scale = gate_up_scale.to(scale_dtype), down_scale.to(scale_dtype)
    return RandomLayer(
        scheme,
        kind,
        gate_up.values,
        gate_up_scale,
        down.values,
        down_scale,
        torch.randn(experts, rows) * 0.1 if bias else None,
        torch.randn(experts, hidden) * 0.1 if bias else None,
        gate_up.zero_points,
        down.zero_points,
        global_scale(gate_up),
        global_scale(down),
        input_scale_arguments(parsed, 5.0, 5.0),
    )


def fitting(scheme: str, size: int) -> int:
    """The next size that the blocks of a scheme divide."""
    return -(-size // 128) * 128 if "block" in scheme else size


def linear_inputs(scheme: str, largest: float = 5.0) -> dict[str, object]:
    """The scale of the input that ``QuantizedLinear`` is given for a scheme; nothing for most."""
    both = input_scale_arguments(cpumoe.Scheme.parse(scheme), 1.0, largest)
    return {name.removeprefix("down_"): scale for name, scale in both.items() if name.startswith("down_")}


def global_scale(weight: QuantizedWeight) -> Tensor | None:
    """What divides the scales of each matrix [experts]; all rows have the same."""
    return None if weight.factors is None else 1.0 / weight.factors[..., 0]


def routing(tokens: int, experts: int, topk: int) -> tuple[Tensor, Tensor]:
    """ids [tokens, topk] and weights."""
    weights, ids = cpumoe.select_experts(torch.randn(tokens, experts), topk)
    return ids, weights


def relative_error(value: Tensor, truth: Tensor) -> float:
    difference = (value.double() - truth.double()).norm()
    return float(difference / truth.double().norm().clamp(min=1e-30))
