"""Multi-head latent attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from cpumoe.integrations.transformers.recognition.mixers.attention import gate_of, query_factors_of, rope_of
from cpumoe.integrations.transformers.recognition.mixers.variants import Choices
from cpumoe.integrations.transformers.recognition.parts import NotDescribed, Parts, describe_matrix, describe_norm
from cpumoe.integrations.transformers.recognition.rotary import RotaryTables, window_of
from cpumoe.integrations.transformers.replacements.mla import absorbed
from cpumoe.ops import decoder


def describe_mla(
    base: Any, index: int, attention: Any, chosen: Choices, tables: RotaryTables, parts: Parts
) -> decoder.Mla:
    """Return multi-head latent attention. Raise NotDescribed if it has other parts."""
    view = absorbed(attention)
    scale, heads = getattr(attention, "scaling", None), getattr(attention, "num_heads", None)
    if view is None or not isinstance(scale, float | int) or not isinstance(heads, int):
        raise NotDescribed(f"its latent attention ({type(attention).__name__}) is none that we know")
    names = ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    is_lower = getattr(attention, "q_proj", None) is None
    names += ["q_a_proj", "q_a_layernorm", "q_b_proj"] if is_lower else ["q_proj"]
    for name in names:
        if not isinstance(getattr(attention, name, None), nn.Module):
            raise NotDescribed(f"its latent attention ({type(attention).__name__}) has no {name}")
        parts.take_all_of(getattr(attention, name))
    dtype = base.embed_tokens.weight.dtype
    query = "q_b_proj" if is_lower else "q_proj"
    return decoder.Mla(
        query=describe_matrix(getattr(attention, query), query),
        out=describe_matrix(attention.o_proj, "o_proj"),
        heads=heads,
        value_dim=attention.v_head_dim,
        scale=float(scale),
        rope=rope_of(index, chosen, tables),
        window=window_of(base, index),
        query_factors=query_factors_of(base, tables.positions),
        gate=gate_of(attention, parts),
        query_down=describe_matrix(attention.q_a_proj, "q_a_proj") if is_lower else None,
        query_down_norm=describe_norm(attention.q_a_layernorm, "q_a_layernorm") if is_lower else None,
        latent=describe_matrix(attention.kv_a_proj_with_mqa, "kv_a_proj_with_mqa"),
        latent_norm=describe_norm(attention.kv_a_layernorm, "kv_a_layernorm"),
        expansion=view.weight(dtype).detach().contiguous(),
        kv_lora_rank=attention.kv_lora_rank,
        nope_dim=attention.qk_nope_head_dim,
        rope_dim=attention.qk_rope_head_dim,
    )
