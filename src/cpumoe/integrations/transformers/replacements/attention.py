"""Attention in transformers' registry: that of one token in one operator.

PyTorch's attention of one token in bf16 takes more than ten times as long as reading the keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.integrations.transformers.call_options import passes_by
from cpumoe.ops import wants_gradient

#: Name of the attention in transformers' registry.
ATTENTION = "cpumoe"


def register_attention() -> None:
    """Makes ``attn_implementation="cpumoe"`` known to transformers. Called once."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


#: Options that transformers passes to every attention and this one may ignore, each with the reason.
PASSED_OVER = {
    "sliding_window": "is in the mask",
    "position_ids": "are in queries, keys and the mask",
    "cache_position": "is in the mask",
    "cu_seq_lens_q": "for flash attention; the mask keeps packed sequences apart, as with eager attention",
    "cu_seq_lens_k": "likewise",
    "max_length_q": "likewise",
    "max_length_k": "likewise",
    "seq_idx": "likewise",
    "deterministic": "this attention always is",
    "input_ids": "are for the model",
    "use_cache": "is for the model",
    "output_hidden_states": "is for the model",
    "output_router_logits": "is for the model",
    "return_dict": "is for the model",
    "num_items_in_batch": "is for the loss",
}


def asks_for_something(module_class: type, name: str, option: object) -> bool:
    """Return whether an option that reached a module of this class may be meant to change its attention."""
    return option is not None and option is not False and name not in PASSED_OVER and not passes_by(module_class, name)


def is_known_attention(name: str | None) -> bool:
    """Return whether an attention implementation is transformers' or ours: what somebody registered may be anything."""
    if name in (None, "eager"):  # that of the model's file
        return True
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS.get(name)
    return getattr(function, "__module__", "").partition(".")[0] in ("transformers", "cpumoe")


# Most elements of a mask that has a column for the sinks; longer inputs are computed in parts.
_MASK_ELEMENTS = 1 << 24


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, heads, T, D], key and value [B, kv_heads, S, D] -> [B, T, heads, D].

    If there is one new token per sequence our kernel computes it, and otherwise PyTorch's attention. ``s_aux`` [heads]
    are attention sinks (gpt-oss). Options that would change the result and are not supported, such as soft-capping, are
    refused by name.
    """
    for name, option in options.items():
        if asks_for_something(type(module), name, option):
            raise _not_served(module, name, option)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shared_mask = attention_mask is None or attention_mask.shape[1:3] == (1, 1)
    ours = query.shape[2] == 1 and shared_mask and query.device.type == "cpu" and not module.training
    ours = ours and query.dtype == key.dtype == value.dtype  # autocast leaves a cache in another one
    ours = ours and position_bias is None and cache is None and not wants_gradient(query, key, value, s_aux)
    if ours:
        mask = None if attention_mask is None else _additive(attention_mask, query.shape[0], key.shape[2])
        sinks = s_aux if s_aux is None or s_aux.dtype == torch.float32 else s_aux.to(torch.float32)
        result = ops.decode_attention(query[:, :, 0], key, value, mask, scale, sinks)
        return result.unsqueeze(1), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if s_aux is not None:
        for name, option in (("position_bias", position_bias), ("cache", cache)):
            if option is not None:
                raise _not_served(module, f"s_aux with {name}", option)
        return attention_with_sinks(query, key, value, attention_mask, s_aux, dropout, scale, causal), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    extras = {"position_bias": position_bias, "cache": cache}  # older releases of transformers know neither of them
    out: tuple[Tensor, None] = sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=causal,
        **{name: extra for name, extra in extras.items() if extra is not None},
        **options,
    )
    return out


def _not_served(module: nn.Module, name: str, value: object) -> ValueError:
    seen = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
    return ValueError(
        f"attn_implementation='cpumoe' does not serve {name}={seen}, which {type(module).__name__} asks for; load the "
        "model with attn_implementation='eager'"
    )


def attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor,
    dropout: float,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attention of many tokens with a sink for each head: [B, T, heads, D].

    A sink acts like one more key that has the same score for every query and a value of zero. So a key of zeros is
    added, and the sink goes into the mask. A few queries are computed at a time, because such a mask has a row for
    every head and query.
    """
    batch, heads, tokens, _ = query.shape
    share = heads // key.shape[1]
    if mask is None and causal and tokens > 1:
        # No mask means a causal one that starts at the first key. Keys after the last query are unused cache space.
        key, value = key[:, :, :tokens], value[:, :, :tokens]
        mask = torch.ones((tokens, key.shape[2]), dtype=torch.bool, device=query.device).tril()[None, None]
    elif mask is None:
        mask = torch.ones((1, 1, 1, key.shape[2]), dtype=torch.bool, device=query.device)
    key, value = (F.pad(t, (0, 0, 0, 1)).repeat_interleave(share, 1) for t in (key, value))
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    mask = mask[..., : key.shape[2] - 1].to(query.dtype).expand(-1, -1, tokens, -1)
    column = sinks.to(query.dtype).view(1, heads, 1, 1)
    step = max(1, _MASK_ELEMENTS // (batch * heads * key.shape[2]))
    parts = []
    for first in range(0, tokens, step):
        queries = slice(first, first + step)
        rows = mask[:, :, queries]
        sizes = (rows.shape[0], heads, rows.shape[2], -1)
        with_sinks = torch.cat((rows.expand(sizes), column.expand(sizes)), -1)
        part = F.scaled_dot_product_attention(query[:, :, queries], key, value, with_sinks, dropout, scale=scale)
        parts.append(part)
    return torch.cat(parts, 2).transpose(1, 2).contiguous()


def _additive(mask: Tensor, batch: int, tokens: int) -> Tensor:
    """A mask [B or 1, 1, 1, S] of booleans (True: look) or numbers to add -> fp32 [B, S]."""
    return additive_mask(mask[:, 0, 0, :tokens].expand(batch, tokens))


def additive_mask(mask: Tensor) -> Tensor:
    """A mask of booleans (True: look) or numbers to add -> numbers to add, fp32 and contiguous."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    return mask.to(torch.float32).contiguous()
