"""Attention of one token, and root-mean-square norms."""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe.ops.registration import like_first, register


def _decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    query = query.contiguous()
    out = query.new_empty((*query.shape[:2], values.shape[3]))
    _core.decode_attention(query, keys.contiguous(), values.contiguous(), mask, sinks, scale, out)
    return out


def _decode_attention_fake(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    return query.new_empty((*query.shape[:2], values.shape[3]))


# query [batch, heads, D] over keys and values [batch, kv_heads, tokens, D] with mask [batch, tokens] fp32 added to the
# scores -> [batch, heads, D]. Values may have another D than keys; then the result has theirs. sinks [heads] fp32: one
# score more for each head, which takes its share of the softmax and has no value.
decode_attention = register(
    "decode_attention(Tensor query, Tensor keys, Tensor values, Tensor? mask, float scale, Tensor? sinks=None) "
    "-> Tensor",
    _decode_attention,
    _decode_attention_fake,
)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float, round_first: bool, plus_one: bool = False) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.dim() == 2:
        _core.rms_norm(x, weight, epsilon, round_first, plus_one, out)
    else:
        width = x.shape[-1]
        _core.rms_norm(x.view(-1, width), weight, epsilon, round_first, plus_one, out.view(-1, width))
    return out


# [..., H] and weight [H] of any float dtype -> [..., H]; round_first: rounded to the dtype of x before the product with
# the weight too; plus_one: the factor is 1 + weight, in fp32.
rms_norm = register(
    "rms_norm(Tensor x, Tensor weight, float epsilon, bool round_first, bool plus_one=False) -> Tensor",
    _rms_norm,
    like_first,
)
