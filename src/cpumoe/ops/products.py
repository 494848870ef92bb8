"""The fused layer, under our name and under that of the 4-bit operator that others call, and the linear."""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe.ops.exchange import exchange_of
from cpumoe.ops.packing import read_spec
from cpumoe.ops.registration import like_first, register, register_into


def _fused_experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: int,
    gated: bool,
    alpha: float,
    limit: float,
    apply_router_weight_on_input: bool,
    fp32_out: bool = False,
    slices: int = 0,
) -> Tensor:
    if topk_weights.dtype != torch.float32:  # asked first: even a conversion that does nothing costs a microsecond
        if not topk_weights.is_floating_point():
            raise ValueError(f"topk_weights are {topk_weights.dtype}; a floating point dtype is accepted")
        topk_weights = topk_weights.to(torch.float32)
    x = hidden_states.contiguous()
    out = torch.empty_like(x, dtype=torch.float32) if fp32_out else torch.empty_like(x)
    _core.moe(
        x,
        topk_ids.contiguous(),
        topk_weights.contiguous(),
        gate_up,
        down,
        out,
        activation,
        gated,
        alpha,
        limit,
        apply_router_weight_on_input,
        exchange_of(slices),
    )
    return out


def _fused_experts_fake(hidden_states: Tensor, *others: object) -> Tensor:
    fp32_out = len(others) > 9 and others[9]  # may be left out
    return torch.empty_like(
        hidden_states,
        dtype=torch.float32 if fp32_out else hidden_states.dtype,
        memory_format=torch.contiguous_format,
    )


# fp32_out: the sums before they are rounded to the dtype of hidden_states, for ranks that add theirs first.
# slices: the number of the exchange of ranks that have slices of the same experts.
fused_experts = register(
    "fused_experts(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor down, "
    "int activation, bool gated, float alpha, float limit, bool apply_router_weight_on_input, "
    "bool fp32_out=False, int slices=0) -> Tensor",
    _fused_experts,
    _fused_experts_fake,
)


# activation_kind -> the kernel's activation: 0 and 2 are silu(gate) * up, 1 is gpt-oss' swiglu
_ACTIVATION_KINDS = {0: 0, 1: 1, 2: 0}


def _dynamic_4bit_int_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up_packed: Tensor,
    down_packed: Tensor,
    hidden_size: int,
    intermediate_size: int,
    gate_up_size: int,
    group_size: int,
    apply_router_weight_on_input: bool,
    activation_kind: int,
) -> Tensor:
    if activation_kind not in _ACTIVATION_KINDS:
        raise ValueError(f"activation_kind={activation_kind}; 0, 1 and 2 are accepted")
    if gate_up_size != 2 * intermediate_size:
        raise ValueError(f"gate_up_size={gate_up_size}; twice intermediate_size={intermediate_size} is accepted")
    if group_size == 0:
        raise ValueError("group_size=0; -1 (per channel) or a multiple of 32 is accepted")
    group = None if group_size == -1 else group_size
    sizes = {
        "gate_up_packed": (gate_up_packed, gate_up_size, hidden_size),
        "down_packed": (down_packed, hidden_size, intermediate_size),
    }
    for name, (blob, out_features, in_features) in sizes.items():
        held = read_spec(blob)
        wanted = {
            "weights": "int4",
            "has_zero_points": False,
            "activations": "int8",
            "group_size": group,
            "out_features": out_features,
            "in_features": in_features,
        }
        for key, value in wanted.items():
            if (found := getattr(held, key)) != value:
                raise ValueError(f"{name} was packed with {key}={found}, but the call says {value}")
    return _fused_experts(
        x,
        topk_ids,
        topk_weights,
        gate_up_packed,
        down_packed,
        _ACTIVATION_KINDS[activation_kind],
        True,
        1.702,
        7.0,
        apply_router_weight_on_input,
    )


dynamic_4bit_int_moe = register(
    "dynamic_4bit_int_moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up_packed, Tensor down_packed, "
    "int hidden_size, int intermediate_size, int gate_up_size, int group_size, bool apply_router_weight_on_input, "
    "int activation_kind) -> Tensor",
    _dynamic_4bit_int_moe,
    like_first,
)


def _linear_out(x: Tensor, weight: Tensor, out_features: int, fp32_out: bool = False) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=torch.float32 if fp32_out else x.dtype)


def _linear(out: Tensor, x: Tensor, weight: Tensor, out_features: int, fp32_out: bool = False) -> None:
    if x.dim() == 2:  # views cost as much as the seam
        _core.linear(x.contiguous(), weight, out)
    else:
        _core.linear(x.contiguous().view(-1, x.shape[-1]), weight, out.view(-1, out_features))


linear = register_into(
    "linear(Tensor x, Tensor weight, int out_features, bool fp32_out=False) -> Tensor", _linear_out, _linear
)
