"""The arithmetic in plain PyTorch: the truth that the other backends are tested against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cpumoe.layers.activation import Activation
from cpumoe.layers.activation_rounding import Held, activations
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight
from cpumoe.layers.scheme import WHOLE_FLOATS
from cpumoe.layers.small_floats import SMALL_FLOATS, scale_values, values_of

__all__ = [
    "Dense",
    "activations",
    "apply_activation",
    "dense",
    "dense_expert",
    "dequantize",
    "expert",
    "experts",
    "linear",
    "scale_values",
    "stacked",
    "sum_of_experts",
]


def dequantize(weight: QuantizedWeight) -> Tensor:
    """A quantised weight [..., out, in] in fp32."""
    if weight.element in WHOLE_FLOATS:
        return weight.values.to(torch.float32)
    if weight.input_order is not None and weight.input_order.shape[-2] == 2:
        return torch.cat([dequantize(half) for half in weight.plain().halves()], -2)
    weight = weight.plain()
    small = weight.element in SMALL_FLOATS
    values = values_of(weight.values, weight.element) if small else weight.values.to(torch.float32)
    order = None if weight.input_order is None else weight.input_order.long().expand(values.shape)
    scales = scale_values(weight.row_scales())
    grouped: Tensor = (values if order is None else values.gather(-1, order)).unflatten(-1, (scales.shape[-1], -1))
    if weight.zero_points is not None:
        grouped = grouped - weight.zero_points.to(torch.float32).unsqueeze(-1)
    scaled = (grouped * scales.unsqueeze(-1)).flatten(-2)
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
        return F.silu(gate).clamp(max=activation.parameters[0]) * up.clamp(-limit, limit)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
        "relu2": lambda g: F.relu(g).square(),
    }
    value = functions[activation.name](gate)
    return value if up is None else value * up


class Dense(NamedTuple):
    """A weight [out, in] and its bias [out] or None, in fp32, and the stored scales of its input: [1], or [2] of gate
    and up rows, or None."""

    weight: Tensor
    bias: Tensor | None = None
    input_scales: Tensor | None = None


def dense(weight: QuantizedWeight) -> Dense:
    """What a quantised weight [out, in] stands for."""
    bias = None if weight.bias is None else weight.bias.to(torch.float32)
    return Dense(dequantize(weight), bias, weight.input_scales)


def dense_expert(experts: QuantizedExperts) -> tuple[Dense, Dense]:
    """Return gate_up and down of one expert; ``experts`` has no other."""
    expert = experts[0]
    return dense(expert.gate_up), dense(expert.down)


def stacked(gate: Dense, up: Dense) -> Dense:
    """Gate rows before up rows."""
    bias = None if gate.bias is None or up.bias is None else torch.cat((gate.bias, up.bias))
    scales = None
    if gate.input_scales is not None and up.input_scales is not None:
        scales = torch.cat((gate.input_scales, up.input_scales))
    return Dense(torch.cat((gate.weight, up.weight)), bias, scales)


def linear(x: Tensor, weight: Dense, form: Held, row_factors: Tensor | None = None) -> Tensor:
    """x [tokens, in] -> [tokens, out] fp32. ``form`` is what the activations are held as; None: as they are.

    ``row_factors`` [tokens, 1] multiply the activations once these are quantised.
    """

    def inputs(scale: Tensor | None) -> Tensor:
        quantised = activations(x, form, scale)
        return quantised if row_factors is None else quantised * row_factors

    scales = weight.input_scales
    if scales is None or scales.numel() == 1:
        return F.linear(inputs(scales), weight.weight, weight.bias)
    halves = zip(scales.flatten(), weight.weight.chunk(2), strict=True)
    out = torch.cat([F.linear(inputs(scale), rows) for scale, rows in halves], -1)
    return out if weight.bias is None else out + weight.bias


def _chosen(topk_ids: Tensor, topk_weights: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The experts that are chosen, ascending, with their tokens and the weights [rows, 1]. Ids of -1 are none."""
    for index in topk_ids[topk_ids >= 0].unique().tolist():
        token, slot = torch.where(topk_ids == index)
        yield index, token, topk_weights[token, slot].to(torch.float32).unsqueeze(-1)


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
    for index, token, weight in _chosen(topk_ids, topk_weights):
        y = expert(index, x[token] * weight if apply_router_weight_on_input else x[token])
        out.index_add_(0, token, y.to(torch.float32) if apply_router_weight_on_input else y * weight)
    return out


def expert(
    inputs: Tensor, gate_up: Dense, down: Dense, activation: Activation, form: Held, row_factors: Tensor | None = None
) -> Tensor:
    """One expert: all of its tokens [rows, H] -> [rows, H] fp32; the activations of both products are held as ``form``.

    ``gate_up`` is [rows of gate_up, H], ``down`` [H, I]. ``row_factors`` [rows, 1] multiply the first activations.
    """
    return linear(apply_activation(linear(inputs, gate_up, form, row_factors), activation), down, form)


def experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Callable[[int], tuple[Dense, Dense]],
    activation: Activation,
    *,
    form: Held,
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """One layer, [tokens, H] -> [tokens, H] fp32.

    Args:
        weights: gives gate_up [rows, H] and down [H, I] of an expert.
        form: of the activations; None leaves them as they are: the error of the weights alone.
        apply_router_weight_on_input: the weight multiplies a token after it is quantised, before the first product.
    """
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for index, token, weight in _chosen(topk_ids, topk_weights):
        on_input = weight if apply_router_weight_on_input else None
        y = expert(hidden_states[token], *weights(index), activation, form, on_input)
        out.index_add_(0, token, y * weight if on_input is None else y)
    return out
