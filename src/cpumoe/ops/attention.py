"""Decode attention (one query per sequence), and root-mean-square norms."""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe.ops.registration import like_first, register_into

_SCORES_AT_ONCE = 1 << 24  # of attention by PyTorch: 64 MB


def _decode_attention_out(query: Tensor, keys: Tensor, values: Tensor, *_: object) -> Tensor:
    return query.new_empty((*query.shape[:2], values.shape[3]))


def _decode_attention(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
) -> None:
    if not _core.decode_attention(query.contiguous(), with_rows(keys), with_rows(values), mask, sinks, scale, out):
        assert mask is not None
        out.copy_(masked_attention(query[:, :, None], keys, values, mask[:, None], scale, sinks)[:, 0])


def with_rows(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if the numbers of its last dimension are not side by side."""
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def masked_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attend under any additive mask [batch, T, tokens], by PyTorch in fp32; return [batch, T, heads, D].

    ``query`` is [batch, heads, T, D], ``keys`` and ``values`` [batch, kv_heads, tokens, D]. The core's attention takes
    ranges of tokens only. Attends a few queries at a time, so that there are at most about _SCORES_AT_ONCE scores.
    """
    batch, heads, queries, _ = query.shape
    at_once = max(1, _SCORES_AT_ONCE // max(1, batch * heads * keys.shape[2]))
    keys, values = keys.to(torch.float32), values.to(torch.float32)
    starts = range(0, max(1, queries), at_once)
    parts = [slice(start, start + at_once) for start in starts]
    return torch.cat([_attend_all(query[:, :, p], keys, values, mask[:, p], scale, sinks) for p in parts], 1)


def _attend_all(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    batch, heads, queries, depth = query.shape
    kv_heads, tokens = keys.shape[1:3]
    rows = query.to(torch.float32).reshape(batch, kv_heads, -1, depth)
    scores = (rows @ keys.transpose(2, 3)).mul_(scale).view(batch, heads, queries, tokens)
    scores = scores.add_(mask[:, None])
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(batch, -1, queries, 1)), -1)
    weights = scores.softmax(-1)[..., :tokens]
    if sinks is None:
        weights = weights.masked_fill((mask == -torch.inf).all(-1)[:, None, :, None], 0.0)
    out = weights.reshape(batch, kv_heads, -1, tokens) @ values
    return out.view(batch, heads, queries, -1).transpose(1, 2)


# query [batch, heads, D] over keys and values [batch, kv_heads, tokens, D] with mask [batch, tokens] fp32 added to the
# scores -> [batch, heads, D]. Values may have another D than keys; then the result has theirs. sinks [heads] fp32: one
# score more for each head, which takes its share of the softmax and has no value. Keys and values may have any strides.
# A mask that is 0 for one range of tokens and -60,000 or less for the others, -inf if the query sees none, goes to the
# core's attention, any other one to PyTorch.
decode_attention = register_into(
    "decode_attention(Tensor query, Tensor keys, Tensor values, Tensor? mask, float scale, Tensor? sinks=None) "
    "-> Tensor",
    _decode_attention_out,
    _decode_attention,
)


def _rms_norm(
    out: Tensor, x: Tensor, weight: Tensor, epsilon: float, round_first: bool, plus_one: bool = False
) -> None:
    x = x.contiguous()
    if x.dim() != 2:
        x, out = x.view(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    _core.rms_norm(x, weight, epsilon, round_first, plus_one, out)


# [..., H] and weight [H] of any float dtype -> [..., H]; round_first: rounded to the dtype of x before the product with
# the weight too; plus_one: the factor is 1 + weight, in fp32.
rms_norm = register_into(
    "rms_norm(Tensor x, Tensor weight, float epsilon, bool round_first, bool plus_one=False) -> Tensor",
    like_first,
    _rms_norm,
)
