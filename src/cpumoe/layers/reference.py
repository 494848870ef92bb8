"""The arithmetic in plain PyTorch: the truth that the other backends are tested against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cpumoe.layers.activation import Activation
from cpumoe.layers.quantized_experts import QuantizedWeight

_SMALLEST = 2.0**-149  # subnormal number of fp32
_LIFT = 2.0**100  # takes the smallest ranges to where their reciprocals are numbers


def quantize_activations(x: Tensor, bits: int = 8) -> Tensor:
    """[tokens, in] -> the same after quantisation to 8 or 16 bits: asymmetric, per token, ties away from zero.

    A token with a NaN or an infinity becomes NaN.
    """
    x = x.to(torch.float32)
    low = x.amin(-1, keepdim=True).clamp(max=0)
    high = x.amax(-1, keepdim=True).clamp(min=0)
    span = high - low
    steps, first, last = 2.0**bits - 1, -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1
    # Tensors on the left: PyTorch computes `255.0 / span` as a reciprocal times 255, rounded twice.
    quanta = torch.full_like(span, steps)
    factor = torch.where(span == 0, 1.0, quanta / span)
    factor = torch.where(torch.isinf(span), quanta / 2 / (high / 2 - low / 2), factor)  # the range overflows
    step = torch.where(span == 0, 0.0, 1.0 / factor)
    # A range so small that its factor overflows: the step is subnormal, rounded up so that the steps hold the range,
    # and values are counted in the step as it came out.
    small = span / steps
    small = torch.where(small * steps < span, small + _SMALLEST, small)
    tiny = torch.isinf(factor)
    step = torch.where(tiny, small, step)
    lift = torch.where(tiny, _LIFT, 1.0)
    factor = torch.where(tiny, 1.0 / (small * _LIFT), factor)
    scaled_low, scaled_high = low * lift * factor, high * lift * factor
    near_low = (first + scaled_low) + (last + scaled_high) > 0
    zero = torch.where(near_low, first - scaled_low, last - scaled_high).clamp(first, last).round()
    scaled = x * lift * factor
    rounded = torch.trunc(scaled + torch.copysign(torch.tensor(0.49999997), scaled))
    value = ((rounded + zero).clamp(first, last) - zero) * step
    return torch.where(torch.isfinite(x).all(-1, keepdim=True), value, torch.nan)


#: The values of e2m1 by their code.
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def scale_values(scales: Tensor) -> Tensor:
    """Scales in fp32: uint8 are codes of E8M0."""
    if scales.dtype == torch.uint8:
        ones = torch.ones(scales.shape, dtype=torch.float64)
        values = torch.ldexp(ones, scales.to(torch.int32) - 127).to(torch.float32)
        return torch.where(scales == 255, torch.nan, values)
    return scales.to(torch.float32)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """A quantised weight [..., out, in] in fp32."""
    if weight.input_order is not None and weight.input_order.shape[-2] == 2:
        return torch.cat([dequantize(half) for half in weight.plain().halves()], -2)
    weight = weight.plain()
    values = FP4_VALUES[weight.values.long()] if weight.element == "fp4" else weight.values.to(torch.float32)
    order = None if weight.input_order is None else weight.input_order.long().expand(values.shape)
    grouped: Tensor = (values if order is None else values.gather(-1, order)).unflatten(
        -1, (weight.scales.shape[-1], -1)
    )
    if weight.zero_points is not None:
        grouped = grouped - weight.zero_points.to(torch.float32).unsqueeze(-1)
    scaled = (grouped * scale_values(weight.scales).unsqueeze(-1)).flatten(-2)
    if weight.factors is not None:
        scaled = scaled * weight.factors.unsqueeze(-1)
    return scaled if order is None else torch.empty_like(scaled).scatter_(-1, order, scaled)


def apply_activation(h: Tensor, activation: Activation) -> Tensor:
    """[tokens, rows of gate_up] -> [tokens, intermediate]; gate rows come before up rows."""
    gate, up = h.chunk(2, -1) if activation.gated else (h, None)
    limit = activation.limit
    if activation.name == "swiglu_oai":
        assert up is not None  # swiglu_oai is always gated
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    if activation.name == "swiglu_step":
        assert up is not None  # swiglu_step is always gated
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
        "relu2": lambda g: F.relu(g).square(),
    }
    value = functions[activation.name](gate)
    return value if up is None else value * up


def activations(x: Tensor, bits: int | None) -> Tensor:
    """[tokens, in] in fp32, quantised to 8 or 16 bits, or left as they are."""
    return x.to(torch.float32) if bits is None else quantize_activations(x, bits)


#: A weight [out, in] and its bias [out] or None, in fp32.
Dense = tuple[Tensor, Tensor | None]


def dense(weight: QuantizedWeight) -> Dense:
    """What a quantised weight stands for."""
    return dequantize(weight), None if weight.bias is None else weight.bias.to(torch.float32)


def linear(x: Tensor, weight: Dense, bits: int | None) -> Tensor:
    """x [tokens, in] -> [tokens, out] fp32; ``bits`` of the activations, None: as they are."""
    return F.linear(activations(x, bits), *weight)


def sum_of_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert: Callable[[int, Tensor], Tensor],
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """Runs ``expert(index, its tokens [rows, H])`` for every chosen expert, ascending, and sums the weighted results.

    Returns [tokens, H] fp32. Ids of -1 contribute nothing.
    """
    out = torch.zeros(x.shape, dtype=torch.float32)
    for index in topk_ids[topk_ids >= 0].unique().tolist():
        token, slot = torch.where(topk_ids == index)
        weight = topk_weights[token, slot].to(torch.float32).unsqueeze(-1)
        y = expert(index, x[token] * weight if apply_router_weight_on_input else x[token])
        out.index_add_(0, token, y.to(torch.float32) if apply_router_weight_on_input else y * weight)
    return out


def expert(inputs: Tensor, gate_up: Dense, down: Dense, activation: Activation, bits: int | None) -> Tensor:
    """One expert: inputs [rows, H] (quantised already, if they are to be) -> [rows, H] fp32.

    ``gate_up`` is [rows of gate_up, H], ``down`` [H, I]; ``bits`` are those of the activations in between.
    """
    return linear(apply_activation(linear(inputs, gate_up, None), activation), down, bits)


def experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Callable[[int], tuple[Dense, Dense]],
    activation: Activation,
    *,
    bits: int | None,
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """One layer, [tokens, H] -> [tokens, H] fp32.

    Args:
        weights: gives gate_up [rows, H] and down [H, I] of an expert.
        bits: of the activations; None leaves them as they are: the error of the weights alone.
    """

    def one(index: int, inputs: Tensor) -> Tensor:
        return expert(inputs, *weights(index), activation, bits)

    x = activations(hidden_states, bits)
    return sum_of_experts(x, topk_ids, topk_weights, one, apply_router_weight_on_input)
