"""Rotary embeddings: tables of cosines and sines, layer types and sliding windows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.recognition.parts import NotDescribed, first_of
from cpumoe.ops import decoder

#: Kinds of rotary embeddings whose angles depend on the length of a sequence.
_CHANGING_ROTARY = ("dynamic", "longrope")
ROTARY = ("rotary_emb", "pos_emb")


def rotary_of(base: Any) -> nn.Module | None:
    """Return the rotary embedding, or None where no layer has positions in its queries and keys."""
    return first_of(base, ROTARY)


def layer_type(base: Any, index: int) -> str | None:
    """What the configuration says of a layer's attention: full_attention, sliding_attention, ..."""
    types = getattr(base.config, "layer_types", None)
    return None if types is None else types[index]


def window_of(base: Any, index: int) -> int:
    """Return the sliding window of a layer in tokens; 0 for none. Raise NotDescribed for another kind of layer."""
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
