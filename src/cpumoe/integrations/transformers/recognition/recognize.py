"""Recognise the decoder of a model by the names that transformers uses for the parts of a layer.

Every tensor of a layer must be used. Nothing in the model is changed: norms and routers are called as copies. Whether
the parts mean what their names say is for ``check.py`` to find out, which runs both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from cpumoe.integrations.transformers.layout.expert_modules import Role, marks_of
from cpumoe.integrations.transformers.recognition.block import recognize_block
from cpumoe.integrations.transformers.recognition.mixers.attention import LayerContext
from cpumoe.integrations.transformers.recognition.mixers.kinds import mixer_of, recognize_mixer, variants_for
from cpumoe.integrations.transformers.recognition.parts import Parts, refuse_widening_norms
from cpumoe.integrations.transformers.recognition.probe import probing
from cpumoe.integrations.transformers.recognition.rotary import ROTARY, RopeTables
from cpumoe.integrations.transformers.recognition.values import (
    LayerVariant,
    Recognized,
    Source,
    Stored,
    Unrecognized,
    UnsupportedDecoder,
    first_of,
    shape_of,
)
from cpumoe.layers.experts import Experts
from cpumoe.ops import decoder

_NORMS = ("norm", "embedding_norm")
_BLOCKS = ("mlp", "feed_forward", "block_sparse_moe")


def recognize(model: nn.Module) -> Recognized | Unrecognized:
    """Return a model's decoder as its parts look like, or why it cannot have one.

    The model may be on the meta device, with its experts packed or as transformers has them. What the parts do not tell
    (:class:`LayerVariant`) is as in most models.
    """
    for name, base in model.named_modules():
        if is_decoder(base):
            try:
                with probing():
                    variants = [next(variants_for(base, index)) for index in range(len(base.layers))]
                    return Recognized(name, recognize_decoder(base, variants), head_path(model, base))
            except UnsupportedDecoder as problem:
                return Unrecognized(name, str(problem))
    return Unrecognized("", "its experts are called in another way")


def head_path(model: Any, base: nn.Module) -> str | None:
    """Return the path of the output embeddings of a model around a base model; None without any."""
    get = getattr(model, "get_output_embeddings", None)
    if getattr(model, "model", None) is not base or get is None:
        return None
    head = get()
    return next((name for name, module in model.named_modules() if module is head), None)


def is_decoder(module: Any, *, packed: bool = False) -> bool:
    """Return whether a module has layers with routed experts; ``packed``: with packed ones."""
    layers = getattr(module, "layers", None)
    return isinstance(layers, nn.ModuleList) and any(_is_experts(inner, packed) for inner in layers.modules())


def _is_experts(module: nn.Module, packed: bool) -> bool:
    if packed or isinstance(module, Experts):
        return isinstance(module, Experts)
    marks = marks_of(module)
    return marks is not None and marks.role is Role.PLAIN


def recognize_decoder(base: Any, variants: Sequence[LayerVariant]) -> decoder.DecoderModel[Source]:
    """Return the decoder of a base model (embeddings, layers, norm) with a variant for each layer.

    Raise UnsupportedDecoder.
    """
    refuse_other_parts(base)
    if type(base.embed_tokens) is not nn.Embedding:
        raise UnsupportedDecoder(f"its embedding is a {type(base.embed_tokens).__name__}")
    refuse_widening_norms(base, base.embed_tokens.weight.dtype)
    paths = {id(module): name for name, module in base.named_modules()}
    tables = RopeTables(base)
    layers = tuple(_layer(base, index, variant, tables, paths) for index, variant in enumerate(variants))
    return decoder.DecoderModel[Source](
        Stored("embed_tokens", "weight", shape_of(base.embed_tokens.weight)),
        float(getattr(base, "embedding_multiplier", 1.0)),
        tables.listed(),
        layers,
        Parts(base, paths).norm(norm_of(base), "norm"),
        None,
    )


def refuse_other_parts(base: Any) -> None:
    """Raise UnsupportedDecoder for a base model with more than an embedding, layers, a norm and a rotary embedding."""
    for name in ("embed_tokens", "layers"):
        if not isinstance(getattr(base, name, None), nn.Module):
            raise UnsupportedDecoder(f"{type(base).__name__} has no {name}")
    norm_of(base)
    for name, child in base.named_children():
        known = name in ("embed_tokens", "layers", *_NORMS, *ROTARY)
        if not known and (any(True for _ in child.parameters()) or any(True for _ in child.buffers())):
            raise UnsupportedDecoder(f"{type(base).__name__} has {name}, which has no place in a described decoder")


def norm_of(base: Any) -> nn.Module:
    """Return the norm after all layers. Raise UnsupportedDecoder if there is none."""
    if (norm := first_of(base, _NORMS)) is None:
        raise UnsupportedDecoder(f"{type(base).__name__} has no {_NORMS[0]}")
    return norm


def _layer(
    base: Any, index: int, variant: LayerVariant, tables: RopeTables, paths: dict[int, str]
) -> decoder.Layer[Source]:
    layer = base.layers[index]
    parts = Parts(layer, paths)
    mixer = recognize_mixer(mixer_of(layer), LayerContext(base, index, variant, tables, parts))
    if (block := first_of(layer, _BLOCKS)) is None:
        raise UnsupportedDecoder(f"{type(layer).__name__} has no block behind its attention")
    experts, dense = recognize_block(block, layer, parts)
    norms = _layer_norms(layer, parts)
    parts.refuse_rest()
    factor = float(getattr(layer, "residual_multiplier", 1.0))
    return decoder.Layer[Source](mixer, experts, dense, **norms, residual_factor=factor)


def _layer_norms(layer: Any, parts: Parts) -> dict[str, decoder.Norm[Source]]:
    """Return the norms of a layer by their places.

    transformers calls the norm before the block post_attention_layernorm, unless there is another one for that: then
    it is after attention.
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
        is_behind = before_block is not None or after_block is not None
        names["after_mixer" if is_behind else "before_block"] = "post_attention_layernorm"
    return {place: parts.norm(getattr(layer, name), name) for place, name in names.items() if name is not None}
