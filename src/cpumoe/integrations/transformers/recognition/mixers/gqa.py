"""Grouped-query attention."""

from __future__ import annotations

from typing import Any

from cpumoe.integrations.transformers.recognition.mixers.attention import gate_of, query_factors_of, rope_of
from cpumoe.integrations.transformers.recognition.mixers.variants import QUERY_NORMS, Choices
from cpumoe.integrations.transformers.recognition.parts import (
    NotDescribed,
    Parts,
    describe_matrix,
    describe_norm,
    first_of,
)
from cpumoe.integrations.transformers.recognition.rotary import RotaryTables, window_of
from cpumoe.ops import decoder

_KEY_NORMS = ("k_norm", "key_layernorm", "k_layernorm")
_OUTPUTS = ("o_proj", "out_proj")


def describe_gqa(
    base: Any, index: int, attention: Any, chosen: Choices, tables: RotaryTables, parts: Parts
) -> decoder.Gqa:
    """Return grouped-query attention. Raise NotDescribed if it has other parts."""
    projections: dict[str, Any] = {}
    for names in (("q_proj",), ("k_proj",), ("v_proj",), _OUTPUTS):
        if (projection := first_of(attention, names)) is None:
            raise NotDescribed(f"its attention ({type(attention).__name__}) has no {names[0]}")
        projections[names[0]] = projection
        parts.take_all_of(projection)
    depth, scale = getattr(attention, "head_dim", None), getattr(attention, "scaling", None)
    if not isinstance(depth, int) or not isinstance(scale, float | int):
        raise NotDescribed(f"its attention ({type(attention).__name__}) has no head_dim and scaling")
    out_features = {name: projection.out_features for name, projection in projections.items()}
    heads, kv_heads = out_features["q_proj"] // depth, max(out_features["k_proj"] // depth, 1)
    value_depth = out_features["v_proj"] // kv_heads
    gated_queries = heads == 2 * (projections["o_proj"].in_features // max(value_depth, 1))
    heads //= 2 if gated_queries else 1
    norm_modules = [first_of(attention, names) for names in (QUERY_NORMS, _KEY_NORMS)]
    query_norm, key_norm = (None if m is None else describe_norm(m, "a norm of heads") for m in norm_modules)
    parts.take_all_of(*norm_modules)
    sinks = getattr(attention, "sinks", None)
    parts.take(sinks)
    softcap = getattr(attention, "attn_logit_softcapping", None)
    return decoder.Gqa(
        query=describe_matrix(projections["q_proj"], "q_proj"),
        key=describe_matrix(projections["k_proj"], "k_proj"),
        value=describe_matrix(projections["v_proj"], "v_proj"),
        out=describe_matrix(projections["o_proj"], "o_proj"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=depth,
        value_dim=value_depth,
        scale=float(scale),
        query_norm=query_norm,
        key_norm=key_norm,
        norms_whole_rows=query_norm is not None and len(query_norm.weight) == heads * depth != depth,
        norms_after_rope=chosen.norms_after_rotary,
        rope=rope_of(index, chosen, tables),
        window=window_of(base, index),
        query_factors=query_factors_of(base, tables.positions),
        sinks=None if sinks is None else sinks.detach().float().contiguous(),
        softcap=0.0 if softcap is None else float(softcap),
        gate=gate_of(attention, parts),
        gated_queries=gated_queries,
        value_factor=float(getattr(attention, "v_scale", 1.0)),
    )
