"""Multi-head latent attention (MLA) over cached latents, in its absorbed form."""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe.ops.attention import masked_attention, with_rows
from cpumoe.ops.registration import register_into


def _latent_attention_out(query: Tensor, latents: Tensor, rotated: Tensor, weight: Tensor, *_: object) -> Tensor:
    batch, heads, queries, depth = query.shape
    value_depth = weight.shape[0] // heads - depth + rotated.shape[3]
    return query.new_empty((batch, queries, heads, value_depth))


def _latent_attention(
    out: Tensor,
    query: Tensor,
    latents: Tensor,
    rotated: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
) -> None:
    query, latents, rotated, weight = with_rows(query), with_rows(latents), with_rows(rotated), weight.contiguous()
    if not _core.latent_attention(query, latents, rotated, weight, mask, sinks, scale, out):
        assert mask is not None
        nope = query.shape[3] - rotated.shape[3]
        expansion = weight.to(torch.float32).view(query.shape[1], -1, latents.shape[3])
        absorbed = query[..., :nope].to(torch.float32) @ expansion[:, :nope]
        absorbed = torch.cat((absorbed, query[..., nope:].to(torch.float32)), -1)
        sums = masked_attention(absorbed, torch.cat((latents, rotated), -1), latents, mask, scale, sinks)
        out.copy_(torch.einsum("bthr,hvr->bthv", sums, expansion[:, nope:]))


# query [batch, heads, T, nope + rotary] over latents [batch, 1, tokens, rank] and the rotated parts of keys [batch, 1,
# tokens, rotary]. weight [heads * (nope + V), rank] has, head by head, the rows that would make a key's first numbers
# from a latent and then those of its value. mask [batch, T, tokens] fp32 is added to the scores; sinks [heads] fp32:
# one score more for each head, which takes its share of the softmax and has no value -> [batch, T, heads, V]. Masks are
# as in decode_attention, for each query; latents and rotated may have any strides.
latent_attention = register_into(
    "latent_attention(Tensor query, Tensor latents, Tensor rotated, Tensor weight, Tensor? mask, float scale, "
    "Tensor? sinks=None) -> Tensor",
    _latent_attention_out,
    _latent_attention,
)
