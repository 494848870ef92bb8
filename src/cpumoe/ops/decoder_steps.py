"""Steps of a decoder: one forward pass of the whole model in one call into the core; layouts of its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe.ops.decoder import DecoderModel

#: The cache of a layer: a tensor for each part that its mixer keeps and, where these are per token and not in pages,
#: the place of the first token. GQA keeps keys and values, MLA latents, the others recurrent states.
LayerCache = tuple[Tensor | int, ...]


@dataclass(frozen=True)
class CachePart:
    """One tensor of a layer's cache.

    Attributes:
        per_token: whether there is one for each token, of ``shape`` [heads, width], or one for each sequence.
        may_be_int8: whether it may be held in int8 KV records.
    """

    name: str
    per_token: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    may_be_int8: bool


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # by their numbers in the core

#: What the seconds of a decoder are counted for, in their order.
STEP_PARTS = ("rows", "products", "attention", "routing", "experts", "head", "exchange")


class Decoder:
    """A decoder that computes steps. Threads may share one if each has its own caches; their steps run in turn."""

    def __init__(self, model: DecoderModel[Tensor]) -> None:
        self.model = model
        self._core = _core.Decoder(model)
        self._hidden = model.embedding.shape[1]
        self._dtype = model.embedding.dtype
        self._vocabulary = 0 if model.head is None else self._core.vocabulary
        #: The parts of each layer's cache.
        self.cache_layouts = tuple(
            tuple(
                CachePart(name, per_token, tuple(shape), _DTYPES[dtype], may_be_int8)
                for name, per_token, shape, dtype, may_be_int8 in layout
            )
            for layout in self._core.cache_layouts()
        )

    def step(
        self,
        tokens: Tensor,
        caches: Sequence[LayerCache],
        past: int,
        *,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        keep: int = 0,
        logits: bool = False,
    ) -> Tensor:
        """Computes T tokens behind ``past`` ones of each of B sequences, whose keys and values go into the caches.

        Args:
            tokens: int64 [B, T], or hidden states [B, T, H].
            caches: for each layer keys and values [B, kv_heads, room, dim], or latents [B, 1, room, dim], and the place
                of their first token; as int8 KV records they are [.., room, cache_record_bytes(dim)]. Of a delta net
                the state [B, channels, taps] of its convolution and, in fp32, [B, heads, key_dim, value_dim]; of a
                short convolution its state alone.
            past: places that are filled.
            positions: int64 [B, T] or [1, T]; by default those behind ``past``.
            padding: int64 [B], the places at the beginning of each sequence that no token sees.
            keep: results are those of the last so many tokens; 0 for all of them.
            logits: whether results are logits rather than hidden states after the last norm.

        Returns:
            [B, T or keep, H or vocabulary].
        """
        batch, count = tokens.shape[:2]
        kept = min(keep, count) if keep > 0 else count
        out = torch.empty((batch, kept, self._vocabulary if logits else self._hidden), dtype=self._dtype)
        self._core.step(
            tokens, caches, past, positions, padding, kept, None if logits else out, out if logits else None
        )
        return out

    def step_rows(
        self,
        tokens: Tensor,
        sequences: Tensor,
        places: Tensor,
        pages: Tensor,
        page_tokens: int,
        caches: Sequence[tuple[Tensor, ...]],
        wanted: Tensor,
    ) -> Tensor:
        """Computes N tokens of any sequences, whose keys and values lie in pages.

        States of layers that have some go on from where the step before has left them, or begin with token 0.

        Args:
            tokens: int64 [N]; those of a sequence side by side, sequences and places ascending.
            sequences: int64 [N], the sequence of each. places: int64 [N], where in its sequence each is.
            pages: int32 [S, P]: the page of tokens p * page_tokens and the following of sequence s is pages[s, p].
            page_tokens: tokens of a page, a power of two from 16 on.
            caches: for each layer keys and values, or latents, [pages, kv_heads, page_tokens, dim], or states as in
                :meth:`step`, [S, ..].
            wanted: int64 [W], ascending: the rows whose logits are asked for.

        Returns:
            Logits [W, vocabulary].
        """
        out = torch.empty((len(wanted), self._vocabulary), dtype=self._dtype)
        self._core.step_rows(tokens, sequences, places, pages, page_tokens, caches, wanted, out)
        return out

    def help(self) -> bool:
        """Computes what the rows of other groups of ranks need of the experts here, in a step without rows of its own.

        Where groups have rows of their own, all ranks must take part in every step. Returns whether any group had rows.
        """
        return bool(self._core.help())

    def take_seconds(self) -> dict[str, float]:
        """Seconds of each part of the steps since the last call."""
        return dict(zip(STEP_PARTS, self._core.take_seconds(), strict=True))
