"""Latent attention in its absorbed form: straight over the cached latents, from which keys and values would be made.

All families with latent attention (DeepSeek, GLM, Kimi, Mistral 4 and others) cache a latent and the rotated part of a
key for each token. transformers makes keys and values of all heads from the whole cache again for every new token, in
one method, ``expand_kv``, and hands them to the attention interface. Here that pair is replaced and nothing else: the
module's own forward runs with another ``self``, on which ``expand_kv`` keeps the latents as they are and the attention
is the one of this file. Projections, rotation, gates, sinks and the choice of keys by an indexer stay the model's code,
and so does what is in the cache.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.integrations.transformers.preallocated_cache import make_roomy
from cpumoe.integrations.transformers.recognition.mixers.mla import expansion_of, is_mla, is_plain_weight
from cpumoe.integrations.transformers.recognition.norms import find_form
from cpumoe.integrations.transformers.replacements.attention import (
    ATTENTION,
    additive_mask,
    asks_for_something,
    attention_with_sinks,
)
from cpumoe.integrations.transformers.replacements.mla_check import first_difference, kind_of
from cpumoe.integrations.transformers.replacements.module_view import ModuleView
from cpumoe.integrations.transformers.replacements.norms import rms_norm
from cpumoe.integrations.transformers.replacements.replaced_forward import ReplacedForward
from cpumoe.ops import wants_gradient

_log = logging.getLogger("cpumoe")

#: Name of this attention in transformers' registry. It is not for ``attn_implementation``: keys are latents.
LATENT_ATTENTION = "cpumoe_latent"

# Up to here the absorbed form is faster behind a long text: with more new tokens keys and values, once made, are used
# often enough.
_FEW_TOKENS = 32

# Up to here our product is faster, which reads a weight as fast as memory gives it and meets it with every row in fp32.
_FEW_ROWS = 4

# Keys and values of some heads at a time are made for many tokens: 64 MB in bf16.
_EXPANDED_NUMBERS = 1 << 25

# The attentions whose masks are known here.
_SERVED_ATTENTIONS = frozenset(("eager", "sdpa", ATTENTION))


def absorb_latents(model: nn.Module) -> None:
    """Replaces the forward of a model's latent attentions, and of the linears in them, by faster forms.

    Each kind of module is compared once with the code that it replaces. Where they differ, that code stays, and a line
    in the log says so.
    """
    _registered()
    compared: dict[Any, str | None] = {}
    for name, module in model.named_modules():
        if not _is_latent_attention(module):
            continue
        kind = kind_of(module)
        if kind not in compared:
            compared[kind] = first_difference(model, name, module, AbsorbedAttention(module))
            if compared[kind] is not None:
                _log.warning("%s keeps the latent attention of transformers: %s", name, compared[kind])
        if compared[kind] is None:
            _replace(module)


def _replace(module: Any) -> None:
    module.forward = partial(_forward, AbsorbedAttention(module))
    child: Any
    for child in module.modules():
        if "forward" in vars(child):
            continue
        if type(child).forward is nn.Linear.forward:
            child.forward = partial(_linear, child)
        elif (form := find_form(child)) is not None:
            child.forward = ReplacedForward(rms_norm, child, form)


def _is_latent_attention(module: nn.Module) -> bool:
    """Return whether a module is an MLA layer whose forward is that of its class."""
    return "forward" not in vars(module) and is_mla(module)


class Latents:
    """Stands for keys [B, heads, S, D], of which the forward of a module asks no more than the shape."""

    def __init__(self, latents: Tensor, rotated: Tensor, shape: tuple[int, ...]) -> None:
        self.latents, self.rotated = latents, rotated
        self.shape = torch.Size(shape)


class AbsorbedAttention(ModuleView):
    """A latent attention whose keys and values are never made, or for many tokens those of some heads at a time."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, LATENT_ATTENTION)
        self.few_tokens = _FEW_TOKENS

    def run(self, *arguments: Any, **options: Any) -> Any:
        if (held := options.get("past_key_values")) is not None:
            make_roomy(held, self.module.layer_idx)
        return super().run(*arguments, **options)

    def expand_kv(self, latents: Tensor, rotated: Tensor) -> tuple[Latents, None]:
        """[B, 1, S, rank] and [B, 1, S, rotary], as they come from the cache."""
        module = self.module
        per_head = module.qk_nope_head_dim + module.v_head_dim
        heads = module.kv_b_proj.out_features // per_head
        depth = module.qk_nope_head_dim + rotated.shape[-1]
        return Latents(latents, rotated, (latents.shape[0], heads, latents.shape[2], depth)), None

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight of kv_b_proj, [heads * (nope + V), rank]."""
        return expansion_of(self.module.kv_b_proj, dtype)


def _forward(view: AbsorbedAttention, *arguments: Any, **options: Any) -> Any:
    """The forward of a latent attention: its own code, on ``view`` where that serves the call."""
    module = view.module
    hidden_states = arguments[0] if arguments else options.get("hidden_states")
    if _is_served(module, hidden_states, options):
        return view.run(*arguments, **options)
    return type(module).forward(module, *arguments, **options)


def _is_served(module: Any, hidden_states: Any, options: dict[str, Any]) -> bool:
    weight = module.kv_b_proj
    return (
        isinstance(hidden_states, Tensor)
        and hidden_states.is_cpu
        and not module.training
        and module.config._attn_implementation in _SERVED_ATTENTIONS
        and is_plain_weight(weight)
        and not wants_gradient(hidden_states, *module._parameters.values(), getattr(weight, "weight", None))
        and not torch.compiler.is_compiling()
        and not any(
            name not in _options_of(type(module).forward) and asks_for_something(type(module), name, option)
            for name, option in options.items()
        )
        and not _wants_attention_weights()
        and _registered()
    )


@cache
def _options_of(forward: Callable[..., Any]) -> frozenset[str]:
    """What a forward takes itself."""
    return frozenset(inspect.signature(forward).parameters)


def _wants_attention_weights() -> bool:
    """Whether the caller of the model asked for the weights of the attention, which eager attention gives."""
    collected = _collector().get()
    return collected is not None and "attentions" in collected


@cache
def _collector() -> Any:
    from transformers.utils.output_capturing import _active_collector

    return _active_collector


@cache
def _registered() -> bool:
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(LATENT_ATTENTION, attend_latents)
    return True


def attend_latents(
    module: AbsorbedAttention,
    query: Tensor,
    key: Latents,
    value: None,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, heads, T, D] over latents -> [B, T, heads, V].

    Without a mask attention is causal unless ``is_causal``, or the module's attribute of that name, says otherwise.

    ``indices`` [B, T, K] are the tokens that an indexer chose; the others are not looked at. ``s_aux`` [heads] are
    attention sinks.
    """
    latents, rotated, tokens = key.latents, key.rotated, key.shape[2]
    if latents.dtype != query.dtype or rotated.dtype != query.dtype:  # a cache that holds another dtype
        latents, rotated = latents.to(query.dtype), rotated.to(query.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    weight = module.weight(query.dtype)
    if indices is not None and indices.shape[-1] >= tokens:  # all of them
        indices = None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    few = query.shape[2] <= module.few_tokens and (attention_mask is None or attention_mask.shape[1] == 1)
    if few and indices is not None and query.shape[2] == 1:
        chosen = indices[:, 0].long()
        latents, rotated = (rows[:, 0].take_along_dim(chosen[..., None], 1)[:, None] for rows in (latents, rotated))
        if attention_mask is not None:
            attention_mask = attention_mask.expand(len(chosen), -1, -1, -1).take_along_dim(chosen[:, None, None], -1)
    elif indices is not None:
        attention_mask = _without_others(attention_mask, indices, query.shape[2], tokens, causal)
    if few:
        mask = _additive(attention_mask, query, latents.shape[2], causal)
        sinks = s_aux if s_aux is None or s_aux.dtype == torch.float32 else s_aux.to(torch.float32)
        return ops.latent_attention(query, latents, rotated, weight, mask, scale, sinks), None
    return _expanded(query, latents, rotated, weight, attention_mask, scale, s_aux, causal), None


def _without_others(mask: Tensor | None, indices: Tensor, queries: int, tokens: int, causal: bool) -> Tensor:
    """A mask that hides, besides what ``mask`` does, all tokens that are not in ``indices`` [B, T, K]: booleans."""
    seen = torch.zeros((len(indices), queries, tokens), dtype=torch.bool, device=indices.device)
    seen = seen.scatter_(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return seen & _causal(queries, tokens) if causal and queries > 1 else seen
    mask = mask[..., :tokens]
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _causal(queries: int, tokens: int) -> Tensor:
    """Return what no mask means for several tokens of causal attention: they are the first ones."""
    return torch.ones((queries, tokens), dtype=torch.bool).tril()


def _additive(mask: Tensor | None, query: Tensor, tokens: int, causal: bool) -> Tensor | None:
    """A mask [B or 1, 1, T or 1, S] of booleans (True: look) or numbers to add -> fp32 [B, T, S]."""
    batch, _, queries, _ = query.shape
    if mask is None:
        if queries == 1 or not causal:
            return None
        mask = _causal(queries, tokens)[None, None]
    return additive_mask(mask[:, 0, :, :tokens].expand(batch, queries, tokens))


def _expanded(
    query: Tensor,
    latents: Tensor,
    rotated: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    causal: bool,
) -> Tensor:
    """Attention of many tokens, [B, T, heads, V]: keys and values of some heads are made, used and forgotten."""
    batch, heads, queries, depth = query.shape
    tokens, rotary = latents.shape[2], rotated.shape[3]
    per_head, nope = weight.shape[0] // heads, depth - rotary
    out = query.new_empty((batch, queries, heads, per_head - nope))
    step = max(1, _EXPANDED_NUMBERS // (batch * tokens * (per_head + depth)))
    if mask is not None:
        mask = mask[..., :tokens]
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
    for first in range(0, heads, step):
        some = slice(first, min(first + step, heads))
        made = F.linear(latents[:, 0], weight[some.start * per_head : some.stop * per_head])
        made = made.view(batch, tokens, -1, per_head).transpose(1, 2)
        key = torch.cat((made[..., :nope], rotated.expand(-1, made.shape[1], -1, -1)), -1)
        value = made[..., nope:]
        own_mask = mask if mask is None or mask.shape[1] == 1 else mask[:, some]
        if sinks is not None:
            out[:, :, some] = attention_with_sinks(
                query[:, some], key, value, own_mask, sinks[some], dropout=0.0, scale=scale, causal=causal
            )
            continue
        part = F.scaled_dot_product_attention(
            query[:, some], key, value, own_mask, is_causal=causal and own_mask is None and queries > 1, scale=scale
        )
        out[:, :, some] = part.transpose(1, 2)
    return out


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    """The forward of a linear: for few rows one operator, which reads the weight as fast as memory gives it."""
    weight, bias = module.weight, module.bias
    rows = x.numel() // max(x.shape[-1], 1)
    plain = x.is_cpu and x.dtype == weight.dtype and weight.is_contiguous() and 0 < rows <= _FEW_ROWS
    if (
        not plain
        or torch.is_autocast_enabled("cpu")
        or wants_gradient(x, weight, bias)
        or torch.compiler.is_compiling()
    ):
        return F.linear(x, weight, bias)
    bias32 = None if bias is None else bias.to(torch.float32)
    out = ops.router_logits(x.reshape(rows, x.shape[-1]), weight, bias32, False)
    return out.view(*x.shape[:-1], weight.shape[0])
