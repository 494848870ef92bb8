"""Paged KV cache and recurrent states, made from the cache layouts of a decoder's mixers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cpumoe.ops.cache_records import cache_record_bytes
from cpumoe.ops.decoder_steps import CachePart

#: The parts of each layer.
Layouts = Sequence[tuple[CachePart, ...]]
#: The tensors of each layer.
Caches = Sequence[tuple[Tensor, ...]]


def new_pages(
    layouts: Layouts, pages: int, page_tokens: int, sequences: int, *, is_int8: bool
) -> list[tuple[Tensor, ...]]:
    """Return the tensors of each layer: parts per token in pages, parts per sequence for ``sequences`` of them.

    Parts per token are [pages, heads, page_tokens, width], in int8 with the width of a record. Parts per sequence are
    [sequences, ..], zeros.
    """

    def made(part: CachePart) -> Tensor:
        if not part.per_token:
            return torch.zeros((sequences, *part.shape), dtype=part.dtype)
        heads, width = part.shape
        if is_int8 and part.may_be_int8:
            return torch.empty((pages, heads, page_tokens, cache_record_bytes(width)), dtype=torch.int8)
        return torch.empty((pages, heads, page_tokens, width), dtype=part.dtype)

    with torch.inference_mode(False):
        return [tuple(made(part) for part in layout) for layout in layouts]


def token_bytes(layouts: Layouts, *, is_int8: bool) -> int:
    """Return the bytes of a token in all layers."""

    def size(part: CachePart) -> int:
        heads, width = part.shape
        return heads * (cache_record_bytes(width) if is_int8 and part.may_be_int8 else width * part.dtype.itemsize)

    return sum(size(part) for part in _parts(layouts) if part.per_token)


def state_bytes(layouts: Layouts) -> int:
    """Return the bytes of recurrent states that a sequence takes in all layers, however long it is."""
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in _parts(layouts) if not part.per_token)


def snapshot(layouts: Layouts, caches: Caches, sequence: int) -> Tensor:
    """Return the recurrent states of a sequence, uint8 [state_bytes].

    To continue from there again, :func:`restore` them and set the count of computed tokens back: KV pages are
    overwritten by the tokens that follow.
    """
    states = [_bytes_of(state[sequence]) for state in _states(layouts, caches)]
    return torch.cat([*states, torch.empty(0, dtype=torch.uint8)])


def restore(layouts: Layouts, caches: Caches, sequence: int, saved: Tensor) -> None:
    """Write a snapshot, of any sequence of this decoder, into the recurrent states of a sequence."""
    states = [_bytes_of(state[sequence]) for state in _states(layouts, caches)]
    for state, part in zip(states, saved.split([len(state) for state in states]), strict=True):
        state.copy_(part)


def _states(layouts: Layouts, caches: Caches) -> Iterator[Tensor]:
    pairs = (pair for layer in zip(layouts, caches, strict=True) for pair in zip(*layer, strict=True))
    return (tensor for part, tensor in pairs if not part.per_token)


def _bytes_of(state: Tensor) -> Tensor:
    return state.view(-1).view(torch.uint8)


def _parts(layouts: Layouts) -> Iterator[CachePart]:
    return (part for layout in layouts for part in layout)
