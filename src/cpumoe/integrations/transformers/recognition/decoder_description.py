"""What a model's decoder computes, as values that the core can run in one call.

A layer is known by its parts, which transformers spells alike in nearly all models: projections, norms, a router,
experts. Everything that a layer holds must have a place in the description; whether it means what it looks like is for
``decoder_check.py`` to find out, by running both.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.layout.expert_modules import recognise_function
from cpumoe.integrations.transformers.preallocated_cache import CacheForm
from cpumoe.integrations.transformers.recognition.delta_description import describe_convolution, describe_delta
from cpumoe.integrations.transformers.recognition.described_parts import (
    NotDescribed,
    Parts,
    describe_matrix,
    describe_norm,
    refuse_widening_norms,
)
from cpumoe.integrations.transformers.replacements import routers
from cpumoe.integrations.transformers.replacements.mla import absorbed
from cpumoe.integrations.transformers.replacements.recurrent import ConvolutionForm, DeltaForm, Form, state_form
from cpumoe.layers.activation import Activation
from cpumoe.layers.backends import NativeBackend
from cpumoe.layers.experts import Experts
from cpumoe.ops import SCORING, decoder
from cpumoe.ops.exchange import RankExchange
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.linear import SplitLinear

#: Kinds of rotary embeddings whose angles depend on the length of a sequence.
_CHANGING_ROTARY = ("dynamic", "longrope")

_QUERY_NORMS = ("q_norm", "query_layernorm", "q_layernorm")
_KEY_NORMS = ("k_norm", "key_layernorm", "k_layernorm")
_GATES = ("gate_proj", "g_proj")
_MIXERS = ("self_attn", "linear_attn", "conv")
_NORMS = ("norm", "embedding_norm")
_ROTARY = ("rotary_emb", "pos_emb")
_OUTPUTS = ("o_proj", "out_proj")
#: The linears of a dense block; the second may give what the first does as well, before its own.
_DENSE = (("gate_proj", "w1"), ("up_proj", "gate_up_proj", "input_linear", "w3"), ("down_proj", "output_linear", "w2"))
_FUNCTIONS = ("act_fn", "activation")
_BLOCKS = ("mlp", "feed_forward", "block_sparse_moe")
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")


@dataclass(frozen=True)
class Choices:
    """What cannot be seen of a layer's parts, to be found by trying.

    ``rotates``: whether positions are in queries and keys. ``interleaved`` and ``separated``: see
    :class:`cpumoe.ops.decoder.Rope` and :class:`cpumoe.ops.decoder.Gqa`.
    """

    interleaved: bool = False
    norms_after_rotary: bool = False
    rotates: bool = True
    separated: bool = False


def mixer_of(layer: Any) -> nn.Module:
    """What mixes tokens in a layer: attention, or what stands in its place. Raises NotDescribed."""
    if (mixer := _first(layer, _MIXERS)) is None:
        raise NotDescribed(f"{type(layer).__name__} has no {_MIXERS[0]}")
    return mixer


def choices_for(base: Any, index: int) -> Iterator[Choices]:
    """All that a layer may be, the most common first."""
    mixer = mixer_of(base.layers[index])
    if state_form(mixer) is not None:
        yield Choices(rotates=False)
        return
    has_norms = any(hasattr(mixer, name) for name in _QUERY_NORMS)
    has_rotary = rotary_of(base) is not None
    for rotates, after in product((True, False) if has_rotary else (False,), (False, True) if has_norms else (False,)):
        yield Choices(False, after, rotates)
        if rotates:
            yield Choices(False, after, rotates, separated=True)
            yield Choices(True, after, rotates)


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
        known = name in ("embed_tokens", "layers", *_NORMS, *_ROTARY)
        if not known and (any(True for _ in child.parameters()) or any(True for _ in child.buffers())):
            raise NotDescribed(f"{type(base).__name__} has {name}, which has no place in a described decoder")


def norm_of(base: Any) -> nn.Module:
    """The norm behind all layers. Raises NotDescribed if there is none."""
    if (norm := _first(base, _NORMS)) is None:
        raise NotDescribed(f"{type(base).__name__} has no {_NORMS[0]}")
    return norm


def rotary_of(base: Any) -> nn.Module | None:
    """Return the rotary embedding, or None where no layer has positions in its queries and keys."""
    return _first(base, _ROTARY)


def _first(module: Any, names: tuple[str, ...]) -> nn.Module | None:
    """The first child that there is of these."""
    return next((m for name in names if isinstance(m := getattr(module, name, None), nn.Module)), None)


def layer_type(base: Any, index: int) -> str | None:
    """What the configuration says of a layer's attention: full_attention, sliding_attention, ..."""
    types = getattr(base.config, "layer_types", None)
    return None if types is None else types[index]


def _window(base: Any, index: int) -> int:
    config, kind = base.config, layer_type(base, index)
    window = getattr(config, "sliding_window", None)
    if kind is None:
        return window if isinstance(window, int) and getattr(config, "use_sliding_window", True) else 0
    if kind == "full_attention":
        return 0
    if kind != "sliding_attention" or not isinstance(window, int):
        raise NotDescribed(f"its layers have {kind}")
    return window


class RotaryTables:
    """The cosines and sines of a model's rotary embedding, one table for each type of layers that has its own."""

    def __init__(self, base: Any, positions: Tensor) -> None:
        self._base = base
        self.positions = positions
        self._module = module = rotary_of(base)
        rope_type = getattr(module, "rope_type", None)
        kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
        if changing := [kind for kind in kinds if kind in _CHANGING_ROTARY]:
            raise NotDescribed(f"its rotary embedding ({changing[0]}) depends on the length of a sequence")
        self._by_type = module is not None and "layer_type" in inspect.signature(type(module).forward).parameters
        self._tables: list[tuple[str | None, bool]] = []

    def number(self, index: int, interleaved: bool) -> int:
        """The number of a layer's table."""
        key = (layer_type(self._base, index) if self._by_type else None, interleaved)
        if key not in self._tables:
            self._tables.append(key)
        return self._tables.index(key)

    def made(self) -> tuple[decoder.RopeTable, ...]:
        """Return the tables for all positions, with values as the model has them in its dtype."""
        x = torch.empty(1, dtype=self._base.embed_tokens.weight.dtype)
        where = self.positions.unsqueeze(0)
        return tuple(self._table(x, where, *key) for key in self._tables)

    def _table(self, x: Tensor, where: Tensor, kind: str | None, interleaved: bool) -> decoder.RopeTable:
        assert self._module is not None  # or no layer would have asked for a table
        options = {} if kind is None else {"layer_type": kind}
        try:
            with torch.no_grad():
                given = self._module(x, where, **options)
                cos, sin = (given.real, given.imag) if isinstance(given, Tensor) else given  # complex numbers, or both
        except Exception as problem:  # one that is called in another way
            raise NotDescribed(f"its rotary embedding is called in another way ({type(problem).__name__})") from None
        if not isinstance(cos, Tensor) or cos.is_complex() or cos.dim() != 3 or cos.shape != sin.shape:
            raise NotDescribed("its rotary embedding gives no cosines and sines")
        cos, sin = cos[0].float().contiguous(), sin[0].float().contiguous()
        # Every pair of values has one angle. Models hold each once, or twice: in both halves, or side by side.
        half = cos.shape[1] // 2
        if torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:]):
            cos, sin = cos[:, :half], sin[:, :half]
        elif torch.equal(cos[:, ::2], cos[:, 1::2]) and torch.equal(sin[:, ::2], sin[:, 1::2]):
            cos, sin = cos[:, ::2], sin[:, ::2]
        if interleaved:
            return decoder.RopeTable(cos.repeat_interleave(2, 1), sin.repeat_interleave(2, 1))
        return decoder.RopeTable(torch.cat((cos, cos), 1), torch.cat((sin, sin), 1))


def _activation(activation: Activation) -> decoder.Activation:
    return decoder.Activation(activation.kind, bool(activation.gated), *activation.parameters)


def _layer(base: Any, index: int, chosen: Choices, tables: RotaryTables) -> decoder.Layer:
    layer = base.layers[index]
    parts = Parts(type(layer).__name__, layer)
    mixer: Any = mixer_of(layer)
    described = _mixer(base, index, mixer, chosen, tables, parts)
    block_name = next((name for name in _BLOCKS if isinstance(getattr(layer, name, None), nn.Module)), None)
    if block_name is None:
        raise NotDescribed(f"{type(layer).__name__} has no block behind its attention")
    experts, dense = _block(getattr(layer, block_name), layer, parts, base.embed_tokens.weight.dtype)
    factor = float(getattr(layer, "residual_multiplier", 1.0))
    found = _layer_norms(layer, parts)
    parts.refuse_rest()
    return decoder.Layer(described, experts, dense, **found, residual_factor=factor)


def _mixer(base: Any, index: int, mixer: Any, chosen: Choices, tables: RotaryTables, parts: Parts) -> decoder.Mixer:
    form = state_form(mixer)
    if isinstance(form, DeltaForm):
        return describe_delta(mixer, form, parts)
    if isinstance(form, ConvolutionForm):
        return describe_convolution(mixer, parts)
    return _attention(base, index, mixer, chosen, tables, parts)


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


def _attention(
    base: Any, index: int, attention: Any, chosen: Choices, tables: RotaryTables, parts: Parts
) -> decoder.Gqa | decoder.Mla:
    if not getattr(attention, "is_causal", True):
        raise NotDescribed(f"its attention ({type(attention).__name__}) is not causal")
    if hasattr(attention, "kv_lora_rank"):
        return _latent_attention(base, index, attention, chosen, tables, parts)
    projections: dict[str, Any] = {}
    for names in (("q_proj",), ("k_proj",), ("v_proj",), _OUTPUTS):
        if (projection := _first(attention, names)) is None:
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
    norm_modules = [_first(attention, names) for names in (_QUERY_NORMS, _KEY_NORMS)]
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
        rope=_rope(index, chosen, tables),
        window=_window(base, index),
        query_factors=_query_factors(base, tables.positions),
        sinks=None if sinks is None else sinks.detach().float().contiguous(),
        softcap=0.0 if softcap is None else float(softcap),
        gate=_gate_of(attention, parts),
        gated_queries=gated_queries,
        value_factor=float(getattr(attention, "v_scale", 1.0)),
    )


def _latent_attention(
    base: Any, index: int, attention: Any, chosen: Choices, tables: RotaryTables, parts: Parts
) -> decoder.Mla:
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
        rope=_rope(index, chosen, tables),
        window=_window(base, index),
        query_factors=_query_factors(base, tables.positions),
        gate=_gate_of(attention, parts),
        query_down=describe_matrix(attention.q_a_proj, "q_a_proj") if is_lower else None,
        query_down_norm=describe_norm(attention.q_a_layernorm, "q_a_layernorm") if is_lower else None,
        latent=describe_matrix(attention.kv_a_proj_with_mqa, "kv_a_proj_with_mqa"),
        latent_norm=describe_norm(attention.kv_a_layernorm, "kv_a_layernorm"),
        expansion=view.weight(dtype).detach().contiguous(),
        kv_lora_rank=attention.kv_lora_rank,
        nope_dim=attention.qk_nope_head_dim,
        rope_dim=attention.qk_rope_head_dim,
    )


def _rope(index: int, chosen: Choices, tables: RotaryTables) -> decoder.Rope:
    table = tables.number(index, chosen.interleaved) if chosen.rotates else -1
    return decoder.Rope(table, chosen.interleaved, chosen.separated)


def _query_factors(base: Any, positions: Tensor) -> Tensor | None:
    """Return the factors of queries that grow with the position beyond the original context length (Llama 4)."""
    rope = getattr(base.config, "rope_parameters", None) or {}
    beta, length = (rope.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if not beta or not length:
        return None
    factors: Tensor = 1 + beta * torch.log(1 + torch.floor(positions / length))
    return factors


def _gate_of(attention: Any, parts: Parts) -> decoder.Matrix | None:
    gate = _first(attention, _GATES)
    parts.take_all_of(gate)
    return None if gate is None else describe_matrix(gate, "the gate of attention")


def cache_form(layer: Any, described: decoder.Layer, dtype: torch.dtype, records: bool = False) -> CacheForm | Form:
    """What a layer keeps of tokens: keys and values, latents and rotated parts of keys side by side, or states."""
    mixer = described.mixer
    if isinstance(mixer, decoder.Mla):
        return CacheForm(1, (mixer.kv_lora_rank, mixer.rope_dim), dtype, joined=True, records=records)
    if isinstance(mixer, decoder.Gqa):
        return CacheForm(mixer.kv_heads, (mixer.head_dim, mixer.value_dim), dtype, records=records)
    form = state_form(mixer_of(layer))
    assert form is not None  # it was described as one
    return form


def _block(
    block: Any, layer: Any, parts: Parts, dtype: torch.dtype
) -> tuple[decoder.RoutedExperts | None, decoder.DenseBlock | None]:
    """The experts of a block and what all tokens take, which may be the layer's, or a block without experts.

    ``dtype``: of the rows that it is given.
    """
    children = dict(block.named_children())
    packed = [name for name, child in children.items() if isinstance(child, Experts)]
    if not packed:
        return None, _dense(block, parts)
    if len(packed) > 1:
        raise NotDescribed(f"{type(block).__name__} has {len(packed)} modules with experts")
    experts: Any = children[packed[0]]
    if not isinstance(experts.backend, NativeBackend) or experts.config.held_experts is not None:
        raise NotDescribed("its experts are not all here, or not served by the native kernels")
    found = [child for child in children.values() if routers.is_replaced(child)]
    form = routers.form_of(found[0], block) if len(found) == 1 else None
    if form is None:
        raise NotDescribed(f"{type(block).__name__} has a router that is none we know")
    correction = routers.correction_of(found[0], block)
    parts.take_all_of(experts, found[0])
    parts.take(correction)
    routed = decoder.RoutedExperts(
        _router(found[0], form, correction),
        getattr(experts, "gate_up_packed", None),
        getattr(experts, "down_packed", None),
        _activation(experts.config.activation),
    )
    if isinstance(experts, ParallelExperts):
        travels = experts.travel is not decoder.Travel.STAY
        routed = replace(
            routed,
            spread=True,
            copies=experts.copies,
            loads=experts.loads,
            travel=experts.travel,
            prepared_rows=travels and experts.sends_prepared(dtype),
        )
    holders = (block, layer)
    shared = next((m for h, name in product(holders, _SHARED) if (m := getattr(h, name, None)) is not None), None)
    if shared is None:
        return routed, None
    dense = _dense(shared, parts)
    gate = children.get("shared_expert_gate")
    if gate is not None:
        parts.take_all_of(gate)
        dense = replace(dense, share=describe_matrix(gate, "shared_expert_gate"))
    return routed, dense


def _router(module: Any, form: routers.RouterForm, correction: Tensor | None) -> decoder.Router:
    linear = routers.linear_of(module)
    bias = getattr(linear, "bias", None)
    return decoder.Router(
        decoder.Matrix(linear.weight.detach().contiguous(), None if bias is None else bias.detach().float()),
        module.top_k,
        SCORING[form.scoring],
        form.score_chosen,
        form.renormalize,
        None if correction is None else correction.detach().float().flatten().contiguous(),
        *form.groups,
        form.scale,
        form.in_fp32,
    )


def _dense(block: Any, parts: Parts) -> decoder.DenseBlock:
    linears: list[Any] = [_first(block, names) for names in _DENSE]
    gate, up, down = linears
    function = next((f for name in _FUNCTIONS if (f := getattr(block, name, None)) is not None), nn.functional.silu)
    if up is None or down is None:
        raise NotDescribed(f"{type(block).__name__} has no gate_proj, up_proj, down_proj and act_fn")
    parts.take_all_of(gate, up, down)
    has_both = up.out_features == 2 * down.in_features
    activation = recognise_function(function, gated=gate is not None or has_both)
    if activation is None:
        raise NotDescribed(f"{type(block).__name__} has an activation ({type(function).__name__}) that is none we know")
    described = None if gate is None else describe_matrix(gate, "gate_proj")
    return decoder.DenseBlock(
        described, describe_matrix(up, "up_proj"), describe_matrix(down, "down_proj"), _activation(activation)
    )
