"""The arithmetic in plain PyTorch: the truth that the other backends are tested against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cpumoe.layers.activation import Activation

_SMALLEST = 2.0**-149  # subnormal number of fp32
_LIFT = 2.0**100  # takes the smallest ranges to where their reciprocals are numbers


def quantize_activations(x: Tensor) -> Tensor:
    """[tokens, in] -> the same after int8 quantisation: asymmetric, per token, ties away from zero.

    A token with a NaN or an infinity becomes NaN.
    """
    x = x.to(torch.float32)
    low = x.amin(-1, keepdim=True).clamp(max=0)
    high = x.amax(-1, keepdim=True).clamp(min=0)
    span = high - low
    # Tensors on the left: PyTorch computes `255.0 / span` as a reciprocal times 255, rounded twice.
    quanta = torch.full_like(span, 255.0)
    factor = torch.where(span == 0, 1.0, quanta / span)
    factor = torch.where(torch.isinf(span), quanta / 2 / (high / 2 - low / 2), factor)  # the range overflows
    step = torch.where(span == 0, 0.0, 1.0 / factor)
    # A range below 1e-36, whose factor overflows: the step is subnormal, rounded up so that 255 of them hold the range,
    # and values are counted in the step as it came out.
    small = span / 255
    small = torch.where(small * 255 < span, small + _SMALLEST, small)
    tiny = torch.isinf(factor)
    step = torch.where(tiny, small, step)
    lift = torch.where(tiny, _LIFT, 1.0)
    factor = torch.where(tiny, 1.0 / (small * _LIFT), factor)
    scaled_low, scaled_high = low * lift * factor, high * lift * factor
    near_low = (-128 + scaled_low) + (127 + scaled_high) > 0
    zero = torch.where(near_low, -128 - scaled_low, 127 - scaled_high).clamp(-128, 127).round()
    scaled = x * lift * factor
    rounded = torch.trunc(scaled + torch.copysign(torch.tensor(0.49999997), scaled))
    value = ((rounded + zero).clamp(-128, 127) - zero) * step
    return torch.where(torch.isfinite(x).all(-1, keepdim=True), value, torch.nan)


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """[..., out, in] integers and [..., out, groups] scales -> fp32 weights."""
    grouped: Tensor = values.to(torch.float32).unflatten(-1, (scales.shape[-1], -1))
    return (grouped * scales.to(torch.float32).unsqueeze(-1)).flatten(-2)


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, quantize: bool = True) -> Tensor:
    """x [tokens, in] and dequantised weight [out, in] -> [tokens, out] fp32."""
    return F.linear(quantize_activations(x) if quantize else x.to(torch.float32), weight, bias)


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


def expert(
    inputs: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: Activation,
    *,
    quantize: bool,
) -> Tensor:
    """One expert: inputs [rows, H] (quantised already, if they are to be) -> [rows, H] fp32."""
    h = apply_activation(F.linear(inputs, gate_up, gate_up_bias), activation)
    return linear(h, down, down_bias, quantize=quantize)


def experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: Activation,
    *,
    apply_router_weight_on_input: bool = False,
    quantize: bool = True,
) -> Tensor:
    """One layer with dequantised weights gate_up [E, rows, H] and down [E, H, I].

    ``quantize=False`` leaves the activations as they are: the error of the weights alone.
    """

    def one(index: int, inputs: Tensor) -> Tensor:
        bias = None if gate_up_bias is None else gate_up_bias[index]
        second_bias = None if down_bias is None else down_bias[index]
        return expert(inputs, gate_up[index], down[index], bias, second_bias, activation, quantize=quantize)

    x = hidden_states.to(torch.float32)
    out = sum_of_experts(
        quantize_activations(x) if quantize else x, topk_ids, topk_weights, one, apply_router_weight_on_input
    )
    return out.to(hidden_states.dtype)
