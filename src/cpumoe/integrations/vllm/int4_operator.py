"""vLLM's 4-bit operator, which it computes on Arm alone, on every other CPU.

``torch.ops._C.dynamic_4bit_int_moe`` takes weights that were packed by ``torch.ops.cpumoe.pack``, or as vLLM's
``convert_to_w4a8_int8_moe_format`` leaves them. Those are floats where PyTorch has no kernel of its own, one for two
weights; they are packed when they are first seen.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from vllm.platforms import current_platform

from cpumoe import ops
from cpumoe.ops.products import dynamic_4bit_int_moe

_OPERATOR = "dynamic_4bit_int_moe"

_packed = WeakTensorKeyDictionary()
_library: torch.library.Library | None = None


def register() -> None:
    """Gives the operator a kernel where vLLM's refuses to run."""
    global _library
    if platform.machine() in ("aarch64", "arm64"):
        return
    current_platform.import_kernels()  # vLLM's operators
    if not hasattr(torch.ops._C, _OPERATOR):
        return
    _library = torch.library.Library("_C", "IMPL")
    _library.impl(_OPERATOR, _dynamic_4bit_int_moe, "CPU", allow_override=True)


def _dynamic_4bit_int_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13_packed: Tensor,
    w2_packed: Tensor,
    hidden_size: int,
    intermediate_size: int,
    group_size: int,
    apply_router_weight_on_input: bool,
    activation_kind: int,
) -> Tensor:
    gate_up_size = 2 * intermediate_size
    return dynamic_4bit_int_moe(
        x,
        topk_ids,
        topk_weights,
        _packed_weights(w13_packed, gate_up_size, hidden_size, group_size, ops.ROWS_GATE_THEN_UP, "w13_packed"),
        _packed_weights(w2_packed, hidden_size, intermediate_size, group_size, ops.ROWS_PLAIN, "w2_packed"),
        hidden_size,
        intermediate_size,
        gate_up_size,
        group_size,
        apply_router_weight_on_input,
        activation_kind,
    )


def _packed_weights(weights: Tensor, rows: int, columns: int, group_size: int, row_order: int, name: str) -> Tensor:
    """Weights as the kernels want them, [experts, ...] as PyTorch's reference has packed them or packed already."""
    if weights.dtype == torch.uint8:
        return weights
    if weights not in _packed:
        _packed[weights] = pack_reference_weights(weights, rows, columns, group_size, row_order, name)
    found: Tensor = _packed[weights]
    return found


def pack_reference_weights(
    weights: Tensor, rows: int, columns: int, group_size: int, row_order: int, name: str = "weights"
) -> Tensor:
    """fp32 [experts, n] of ``aten::_dyn_quant_pack_4bit_weight`` without a kernel of its own -> packed weights.

    It has the bytes of the nibbles, the scales, and the biases if there are any, one behind the other.
    """
    groups = 1 if group_size == -1 else columns // group_size
    nibbles, scales = rows * columns // 2, rows * groups
    size = weights.shape[-1] if weights.dim() == 2 else 0
    if weights.dtype != torch.float32 or size not in (nibbles + scales, nibbles + scales + rows):
        raise ValueError(
            f"{name} is {weights.dtype} {list(weights.shape)}; packed weights, or float32 [experts, "
            f"{nibbles + scales}] or [experts, {nibbles + scales + rows}] for [{rows}, {columns}] weights with "
            f"group_size={group_size} are accepted"
        )
    experts = len(weights)
    values = weights[:, :nibbles].to(torch.uint8).view(experts, rows, columns // 2)
    scale = weights[:, nibbles : nibbles + scales].view(experts, rows, groups).contiguous()
    bias = weights[:, nibbles + scales :].contiguous() if size > nibbles + scales else None
    if group_size != -1:  # they were so before
        scale = scale.to(torch.bfloat16)
    return ops.pack(values, scale, bias, columns, group_size, "int4", row_order, name)
