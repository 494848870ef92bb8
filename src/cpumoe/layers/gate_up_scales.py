"""Gate and up in one matrix, where each came with a scale of its own for all of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.small_floats import nearest_fp8


def with_the_larger_scale(gate: QuantizedWeight, up: QuantizedWeight) -> QuantizedWeight:
    """fp8 weights [..., I, in] with scales [..., 1, 1] -> gate rows, then up rows, with one scale: the larger.

    The values of the other are rounded again. Stored scales of the input become one, too: the larger.
    """
    for name, part in (("gate", gate), ("up", up)):
        if part.element != "fp8" or part.scales.shape[-2:] != (1, 1):
            shape = list(part.scales.shape)
            raise ValueError(f"{name} has {part.element} values with scales {shape}; fp8 with [..., 1, 1] is accepted")
        if not bool((torch.isfinite(part.scales) & (part.scales >= 0)).all()):
            raise ValueError(f"{name}_scale is negative or not finite; 0 and positive numbers are accepted")
    for part_name in ("bias", "input_scales"):
        if (getattr(gate, part_name) is None) != (getattr(up, part_name) is None):
            raise ValueError(f"only one of gate and up has {part_name}; both or neither is accepted")
    larger = torch.maximum(gate.scales, up.scales)
    inputs = None
    if gate.input_scales is not None and up.input_scales is not None:
        inputs = torch.cat((gate.input_scales, up.input_scales), -1).amax(-1, keepdim=True)
    return replace(
        gate,
        values=torch.cat([_at_scale(part, larger) for part in (gate, up)], -2),
        scales=larger,
        bias=None if gate.bias is None or up.bias is None else torch.cat((gate.bias, up.bias), -1),
        input_scales=inputs,
    )


def _at_scale(weight: QuantizedWeight, scales: torch.Tensor) -> torch.Tensor:
    """The values of a weight at scales that are as large or larger."""
    values = weight.values.to(torch.float32) * weight.scales.to(torch.float32)
    again = nearest_fp8(values / scales.to(torch.float32))
    return torch.where(weight.scales == scales, weight.values, again)
