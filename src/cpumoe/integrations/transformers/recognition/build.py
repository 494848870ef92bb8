"""Build the native decoder of a base model: recognise each layer's parts by the names that transformers uses.

Every tensor of a layer must be used. Whether the parts mean what their names say is for ``check.py`` to find out, by
running both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from cpumoe.integrations.transformers.recognition.block import describe_block
from cpumoe.integrations.transformers.recognition.mixers.kinds import describe_mixer, mixer_of
from cpumoe.integrations.transformers.recognition.mixers.variants import Choices
from cpumoe.integrations.transformers.recognition.parts import (
    NotDescribed,
    Parts,
    describe_norm,
    first_of,
    refuse_widening_norms,
)
from cpumoe.integrations.transformers.recognition.rotary import ROTARY, RotaryTables
from cpumoe.ops import decoder
from cpumoe.ops.exchange import RankExchange
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.linear import SplitLinear

_NORMS = ("norm", "embedding_norm")
_BLOCKS = ("mlp", "feed_forward", "block_sparse_moe")


def describe_decoder(base: Any, choices: tuple[Choices, ...], positions: Tensor) -> decoder.DecoderModel:
    """Return the decoder of a base model (embeddings, layers, norm), each layer with its choices. Raises NotDescribed.

    ``positions``: int64 [P]; position p of a step is position ``positions[p]`` of the model.
    """
    if type(base.embed_tokens) is not nn.Embedding:
        raise NotDescribed(f"its embedding is a {type(base.embed_tokens).__name__}")
    embedding = base.embed_tokens.weight.detach()
    refuse_widening_norms(base, embedding.dtype)
    tables = RotaryTables(base, positions)
    layers = tuple(_layer(base, index, chosen, tables) for index, chosen in enumerate(choices))
    return decoder.DecoderModel(
        embedding.contiguous(),
        float(getattr(base, "embedding_multiplier", 1.0)),
        tables.made(),
        layers,
        describe_norm(norm_of(base), "norm"),
        None,
        *_exchanges_of(base),
    )


def _exchanges_of(base: Any) -> tuple[RankExchange | None, RankExchange | None]:
    """Those of the ranks that a model's experts are spread over, and of the group that shares its linears."""
    modules = list(base.modules())
    if (experts := next((m for m in modules if isinstance(m, ParallelExperts)), None)) is not None:
        return experts.ranks.exchange, experts.ranks.group.exchange
    # A layer without experts, alone: then it is the group that has its rows.
    linear = next((m for m in modules if isinstance(m, SplitLinear)), None)
    return (None, None) if linear is None else (linear.ranks.exchange, linear.ranks.exchange)


def with_own_heads(model: decoder.DecoderModel, rank: int, ranks: int) -> decoder.DecoderModel:
    """The same decoder with the heads of one rank in every attention whose projections are split.

    Results are the same; keys and values are those of a rank's own heads. Attention whose heads do not divide, or are
    normed together, stays whole: what its projections give is gathered.
    """

    def own(mixer: decoder.Mixer) -> decoder.Mixer:
        if not isinstance(mixer, decoder.Attention):
            return mixer
        names = ("query", "gate") if isinstance(mixer, decoder.Mla) else ("query", "key", "value", "gate")
        split = {name: m for name in names if (m := getattr(mixer, name)) is not None}
        if mixer.heads % ranks or any(m.ranks != ranks for m in (*split.values(), mixer.out)):
            return mixer
        local = {name: replace(m, ranks=1) for name, m in split.items()}
        sinks = None if mixer.sinks is None else mixer.sinks.chunk(ranks)[rank].contiguous()
        heads = mixer.heads // ranks
        if isinstance(mixer, decoder.Mla):
            expansion = mixer.expansion.chunk(ranks)[rank].contiguous()
            return replace(mixer, **local, heads=heads, sinks=sinks, expansion=expansion, ranks=ranks)
        if mixer.kv_heads % ranks or mixer.norms_whole_rows:
            return mixer
        return replace(mixer, **local, heads=heads, kv_heads=mixer.kv_heads // ranks, sinks=sinks, ranks=ranks)

    return replace(model, layers=tuple(replace(layer, mixer=own(layer.mixer)) for layer in model.layers))


def refuse_other_parts(base: Any) -> None:
    """Raises NotDescribed for a base model that is more than an embedding, layers, a norm and a rotary embedding."""
    for name in ("embed_tokens", "layers"):
        if not isinstance(getattr(base, name, None), nn.Module):
            raise NotDescribed(f"{type(base).__name__} has no {name}")
    norm_of(base)
    for name, child in base.named_children():
        known = name in ("embed_tokens", "layers", *_NORMS, *ROTARY)
        if not known and (any(True for _ in child.parameters()) or any(True for _ in child.buffers())):
            raise NotDescribed(f"{type(base).__name__} has {name}, which has no place in a described decoder")


def norm_of(base: Any) -> nn.Module:
    """The norm behind all layers. Raises NotDescribed if there is none."""
    if (norm := first_of(base, _NORMS)) is None:
        raise NotDescribed(f"{type(base).__name__} has no {_NORMS[0]}")
    return norm


def _layer(base: Any, index: int, chosen: Choices, tables: RotaryTables) -> decoder.Layer:
    layer = base.layers[index]
    parts = Parts(type(layer).__name__, layer)
    mixer: Any = mixer_of(layer)
    described = describe_mixer(base, index, mixer, chosen, tables, parts)
    block_name = next((name for name in _BLOCKS if isinstance(getattr(layer, name, None), nn.Module)), None)
    if block_name is None:
        raise NotDescribed(f"{type(layer).__name__} has no block behind its attention")
    experts, dense = describe_block(getattr(layer, block_name), layer, parts, base.embed_tokens.weight.dtype)
    factor = float(getattr(layer, "residual_multiplier", 1.0))
    found = _layer_norms(layer, parts)
    parts.refuse_rest()
    return decoder.Layer(described, experts, dense, **found, residual_factor=factor)


def _layer_norms(layer: Any, parts: Parts) -> dict[str, decoder.Norm]:
    """The norms of a layer, by where they stand.

    transformers calls the norm before the block post_attention_layernorm, unless there is another one for that: then
    it is behind attention.
    """
    before_block = next(
        (n for n in ("pre_feedforward_layernorm", "pre_mlp_layernorm", "ffn_norm") if hasattr(layer, n)), None
    )
    after_block = next((n for n in ("post_feedforward_layernorm", "post_mlp_layernorm") if hasattr(layer, n)), None)
    names = {
        "before_mixer": next((n for n in ("input_layernorm", "operator_norm") if hasattr(layer, n)), None),
        "before_block": before_block,
        "after_block": after_block,
    }
    if hasattr(layer, "post_attention_layernorm"):
        behind = before_block is not None or after_block is not None
        names["after_mixer" if behind else "before_block"] = "post_attention_layernorm"
    found = {}
    for place, name in names.items():
        if name is not None:
            module = getattr(layer, name)
            found[place] = describe_norm(module, name)
            parts.take(module.weight)
    return found
