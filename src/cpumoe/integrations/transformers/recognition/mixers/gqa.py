"""Grouped-query attention."""

from __future__ import annotations

from typing import Any

from cpumoe.integrations.transformers.recognition.mixers.attention import QUERY_NORMS, LayerContext, gate_of
from cpumoe.integrations.transformers.recognition.parts import check_linear
from cpumoe.integrations.transformers.recognition.rotary import query_factors_of, window_of
from cpumoe.integrations.transformers.recognition.values import Source, UnsupportedDecoder, first_of
from cpumoe.ops import decoder

_KEY_NORMS = ("k_norm", "key_layernorm", "k_layernorm")
_OUTPUTS = ("o_proj", "out_proj")


def recognize_gqa(attention: Any, context: LayerContext) -> decoder.Gqa[Source]:
    """Return grouped-query attention. Raise UnsupportedDecoder if it has other parts."""
    parts = context.parts
    projections: dict[str, Any] = {}
    for names in (("q_proj",), ("k_proj",), ("v_proj",), _OUTPUTS):
        if (projection := first_of(attention, names)) is None:
            raise UnsupportedDecoder(f"its attention ({type(attention).__name__}) has no {names[0]}")
        check_linear(projection, names[0])
        projections[names[0]] = projection
    depth, scale = getattr(attention, "head_dim", None), getattr(attention, "scaling", None)
    if not isinstance(depth, int) or not isinstance(scale, float | int):
        raise UnsupportedDecoder(f"its attention ({type(attention).__name__}) has no head_dim and scaling")
    out_features = {name: projection.out_features for name, projection in projections.items()}
    heads, kv_heads = out_features["q_proj"] // depth, max(out_features["k_proj"] // depth, 1)
    value_depth = out_features["v_proj"] // kv_heads
    gated_queries = heads == 2 * (projections["o_proj"].in_features // max(value_depth, 1))
    heads //= 2 if gated_queries else 1
    norm_modules: list[Any] = [first_of(attention, names) for names in (QUERY_NORMS, _KEY_NORMS)]
    query_norm, key_norm = (None if m is None else parts.norm(m, "a norm of heads") for m in norm_modules)
    norm_width = 0 if norm_modules[0] is None else len(norm_modules[0].weight)
    softcap = getattr(attention, "attn_logit_softcapping", None)
    return decoder.Gqa[Source](
        query=parts.matrix(projections["q_proj"], "q_proj"),
        key=parts.matrix(projections["k_proj"], "k_proj"),
        value=parts.matrix(projections["v_proj"], "v_proj"),
        out=parts.matrix(projections["o_proj"], "o_proj"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=depth,
        value_dim=value_depth,
        scale=float(scale),
        query_norm=query_norm,
        key_norm=key_norm,
        norms_whole_rows=norm_width == heads * depth != depth,
        norms_after_rope=context.variant.norms_after_rope,
        rope=context.rope(),
        window=window_of(context.base, context.index),
        query_factors=query_factors_of(context.base),
        sinks=parts.optional(attention, "sinks", as_fp32=True),
        softcap=0.0 if softcap is None else float(softcap),
        gate=gate_of(attention, parts),
        gated_queries=gated_queries,
        value_factor=float(getattr(attention, "v_scale", 1.0)),
    )
