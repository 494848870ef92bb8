"""What quantised weights that a caller gives must be, before anything is packed."""

from __future__ import annotations

from dataclasses import replace

import torch

from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import Scheme


def checked_weight(
    name: str, weight: QuantizedWeight, dimensions: tuple[str, ...] = ("experts", "out", "in")
) -> QuantizedWeight:
    """Refuses other devices, ranks and dtypes; scales per channel get their last dimension."""
    values, scales = weight.values, weight.scales
    parts = {"": values, "_scale": scales, "_zero_point": weight.zero_points, "_bias": weight.bias}
    for suffix, tensor in parts.items():
        if tensor is not None and tensor.device.type != "cpu":
            raise ValueError(f"{name}{suffix} is on {tensor.device}; CPU tensors are accepted")
    rank = len(dimensions)
    if values.dim() != rank:
        raise ValueError(f"{name} is {list(values.shape)}; [{', '.join(dimensions)}] is accepted")
    if values.dtype not in (torch.int8, torch.uint8):
        raise ValueError(f"{name} is {values.dtype}; int8 values or uint8 nibbles are accepted")
    scales = scales.unsqueeze(-1) if scales.dim() == rank - 1 else scales
    zeros = weight.zero_points
    zeros = zeros.unsqueeze(-1) if zeros is not None and zeros.dim() == rank - 1 else zeros
    return replace(weight, scales=scales, zero_points=zeros)


_SCALE_DTYPES = {
    "float": (torch.float32, torch.bfloat16, torch.float16),
    "e8m0": (torch.uint8,),
    "e4m3": (torch.float8_e4m3fn,),
}


def check_parts(name: str, weight: QuantizedWeight, scheme: Scheme, shape: tuple[int, ...]) -> None:
    """Refuses scales, zero points and biases that do not go with weights [..., out, in] of a scheme."""
    *experts, out, inputs = shape
    expected = (*experts, *scheme.weights.group.scale_shape(out, inputs))
    scales, zeros, bias = weight.scales, weight.zero_points, weight.bias
    if tuple(scales.shape) != expected:
        raise ValueError(f"{name}_scale is {list(scales.shape)}; {list(expected)} is accepted")
    accepted = _SCALE_DTYPES[scheme.weights.scale]
    if scales.dtype not in accepted:
        text = "float32, bfloat16 or float16" if scheme.weights.scale == "float" else str(accepted[0])
        raise ValueError(f"{name}_scale is {scales.dtype}; {text} is accepted for {scheme}")
    if (zeros is None) != scheme.weights.symmetric:
        raise ValueError(f"{name}_zero_point is {'missing' if zeros is None else 'not expected'} for {scheme}")
    if zeros is not None and (tuple(zeros.shape) != expected or zeros.dtype != torch.int8):
        raise ValueError(f"{name}_zero_point is {zeros.dtype} {list(zeros.shape)}; int8 {list(expected)} is accepted")
    order = weight.input_order
    if order is not None and (
        order.dtype != torch.int32 or order.dim() != 2 + len(experts) or order.shape[-1] != inputs
    ):
        wanted = f"int32 [{', '.join(map(str, (*experts, 'orders', inputs)))}]"
        raise ValueError(f"{name}_input_order is {order.dtype} {list(order.shape)}; {wanted} is accepted")
    if bias is not None and tuple(bias.shape) != (*experts, out):
        raise ValueError(f"{name}_bias is {list(bias.shape)}; {[*experts, out]} is accepted")
