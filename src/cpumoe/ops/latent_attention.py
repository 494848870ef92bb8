"""Attention over latents, from which keys and values would be made."""

from __future__ import annotations

from torch import Tensor

from cpumoe import _core
from cpumoe.ops.registration import register


def _values_of(query: Tensor, latents: Tensor, rotated: Tensor, weight: Tensor) -> Tensor:
    batch, heads, queries, depth = query.shape
    value_depth = weight.shape[0] // heads - depth + rotated.shape[3]
    return query.new_empty((batch, queries, heads, value_depth))


def _latent_attention(
    query: Tensor,
    latents: Tensor,
    rotated: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    out = _values_of(query, latents, rotated, weight)
    latents, rotated = _sequences(latents), _sequences(rotated)
    _core.latent_attention(query.contiguous(), latents, rotated, weight.contiguous(), mask, sinks, scale, out)
    return out


def _sequences(rows: Tensor) -> Tensor:
    """[batch, 1, tokens, D], each sequence in one piece; a cache with room for more tokens is so already."""
    _, _, row, number = rows.stride()
    return rows if number == 1 and row == rows.shape[3] else rows.contiguous()


def _latent_attention_fake(query: Tensor, latents: Tensor, rotated: Tensor, weight: Tensor, *_: object) -> Tensor:
    return _values_of(query, latents, rotated, weight)


# query [batch, heads, T, nope + rotary] over latents [batch, 1, tokens, rank] and the rotated parts of keys [batch, 1,
# tokens, rotary]. weight [heads * (nope + V), rank] has, head by head, the rows that would make a key's first numbers
# from a latent and then those of its value. mask [batch, T, tokens] fp32 is added to the scores; sinks [heads] fp32:
# one score more for each head, which takes its share of the softmax and has no value -> [batch, T, heads, V].
latent_attention = register(
    "latent_attention(Tensor query, Tensor latents, Tensor rotated, Tensor weight, Tensor? mask, float scale, "
    "Tensor? sinks=None) -> Tensor",
    _latent_attention,
    _latent_attention_fake,
)
