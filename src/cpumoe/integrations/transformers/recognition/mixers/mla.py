"""Multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.recognition.mixers.attention import LayerContext, gate_of
from cpumoe.integrations.transformers.recognition.rotary import query_factors_of, window_of
from cpumoe.integrations.transformers.recognition.values import BuildContext, Source, UnsupportedDecoder
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.packed_weights import unpack_weight
from cpumoe.layers.reference import dequantize
from cpumoe.ops import decoder, read_spec

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class LatentExpansion(Source):
    """The weight of kv_b_proj in the dtype of hidden states."""

    module: str
    shape: tuple[int, int]

    def tensor(self, context: BuildContext) -> Tensor:
        return expansion_of(context.module(self.module), context.dtype).detach().contiguous()

    def __str__(self) -> str:
        return f"{self.module} {list(self.shape)}"


# Unpacked weights of kv_b_proj, each with the packed weight that it was unpacked from, its address and its version.
_unpacked: WeakKeyDictionary[nn.Module, tuple[Tensor, tuple[int, int | None], Tensor]] = WeakKeyDictionary()


def expansion_of(linear: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight of a kv_b_proj, [heads * (nope + V), rank]. A packed one is unpacked once, then kept."""
    if type(linear) is nn.Linear:
        return linear.weight.to(dtype)
    packed: Tensor = linear.weight_packed
    written = packed.data_ptr(), None if packed.is_inference() else packed._version
    held = _unpacked.get(linear)
    if held is None or held[0] is not packed or held[1] != written or held[2].dtype != dtype:
        weight = dequantize(unpack_weight(packed, scheme=linear.scheme))[0].to(dtype)
        held = _unpacked[linear] = packed, written, weight
    return held[2]


def is_mla(module: nn.Module) -> bool:
    """Return whether a module has latents and its class the method that expands keys and values from them."""
    if not callable(getattr(type(module), "expand_kv", None)) or "expand_kv" in vars(module):
        return False
    sizes: list[Any] = [getattr(module, name, None) for name in _SIZES]
    if not all(isinstance(size, int) for size in sizes) or not hasattr(module, "config"):
        return False
    rank, nope, _, value_depth = sizes
    weight: Any = getattr(module, "kv_b_proj", None)
    return (
        is_plain_weight(weight)
        and weight.in_features == rank
        and weight.out_features % (nope + value_depth) == 0
        and getattr(module, "num_key_value_groups", 1) == 1
    )


def is_plain_weight(linear: Any) -> bool:
    """Return whether a linear is its weight and no more: no bias, and no hooks."""
    if type(linear) is nn.Linear:
        has_bias = linear.bias is not None
    elif type(linear) is QuantizedLinear:
        has_bias = read_spec(linear.weight_packed).has_bias
    else:
        return False
    return not (has_bias or linear._forward_hooks or linear._forward_pre_hooks)


def recognize_mla(attention: Any, context: LayerContext) -> decoder.Mla[Source]:
    """Return multi-head latent attention. Raise UnsupportedDecoder if it has other parts."""
    parts = context.parts
    scale, heads = getattr(attention, "scaling", None), getattr(attention, "num_heads", None)
    if not is_mla(attention) or not isinstance(scale, float | int) or not isinstance(heads, int):
        raise UnsupportedDecoder(f"its latent attention ({type(attention).__name__}) is none that we know")
    names = ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    is_lower = getattr(attention, "q_proj", None) is None
    names += ["q_a_proj", "q_a_layernorm", "q_b_proj"] if is_lower else ["q_proj"]
    for name in names:
        if not isinstance(getattr(attention, name, None), nn.Module):
            raise UnsupportedDecoder(f"its latent attention ({type(attention).__name__}) has no {name}")
    expansion = attention.kv_b_proj
    parts.take(expansion)
    query = "q_b_proj" if is_lower else "q_proj"
    return decoder.Mla[Source](
        query=parts.matrix(getattr(attention, query), query),
        out=parts.matrix(attention.o_proj, "o_proj"),
        heads=heads,
        value_dim=attention.v_head_dim,
        scale=float(scale),
        rope=context.rope(),
        window=window_of(context.base, context.index),
        query_factors=query_factors_of(context.base),
        gate=gate_of(attention, parts),
        query_down=parts.matrix(attention.q_a_proj, "q_a_proj") if is_lower else None,
        query_down_norm=parts.norm(attention.q_a_layernorm, "q_a_layernorm") if is_lower else None,
        latent=parts.matrix(attention.kv_a_proj_with_mqa, "kv_a_proj_with_mqa"),
        latent_norm=parts.norm(attention.kv_a_layernorm, "kv_a_layernorm"),
        expansion=LatentExpansion(parts.path(expansion), (expansion.out_features, expansion.in_features)),
        kv_lora_rank=attention.kv_lora_rank,
        nope_dim=attention.qk_nope_head_dim,
        rope_dim=attention.qk_rope_head_dim,
    )
