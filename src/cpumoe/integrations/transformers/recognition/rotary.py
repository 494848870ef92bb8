"""RoPE: tables of cosines and sines, layer types and sliding windows."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.recognition.values import (
    BuildContext,
    LayerVariant,
    Source,
    UnsupportedDecoder,
    first_of,
)
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
    """Return the sliding window of a layer in tokens; 0 for none. Raise UnsupportedDecoder for other kinds."""
    config, kind = base.config, layer_type(base, index)
    window = getattr(config, "sliding_window", None)
    if kind is None:
        return window if isinstance(window, int) and getattr(config, "use_sliding_window", True) else 0
    if kind == "full_attention":
        return 0
    if kind != "sliding_attention" or not isinstance(window, int):
        raise UnsupportedDecoder(f"its layers have {kind}")
    return window


class RopeTables:
    """The RoPE tables of a model: one for each type of layers that has its own, and for each order of pairs."""

    def __init__(self, base: Any) -> None:
        self._base = base
        self._module = module = rotary_of(base)
        rope_type = getattr(module, "rope_type", None)
        kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
        if changing := [kind for kind in kinds if kind in _CHANGING_ROTARY]:
            raise UnsupportedDecoder(f"its rotary embedding ({changing[0]}) depends on the length of a sequence")
        self._by_type = module is not None and "layer_type" in inspect.signature(type(module).forward).parameters
        self._tables: list[decoder.RopeTable[Source]] = []

    def rope(self, index: int, variant: LayerVariant) -> decoder.Rope:
        """Return how a layer applies RoPE; its table is listed if no other layer has the same."""
        if not variant.rotates:
            return decoder.Rope()
        kind = layer_type(self._base, index) if self._by_type else None
        name = next(name for name in ROTARY if getattr(self._base, name, None) is self._module)
        table = decoder.RopeTable[Source](
            *(RopeAngles(name, part, kind, variant.interleaved) for part in ("cos", "sin"))
        )
        if table not in self._tables:
            self._tables.append(table)
        return decoder.Rope(self._tables.index(table), variant.interleaved, variant.separated)

    def listed(self) -> tuple[decoder.RopeTable[Source], ...]:
        return tuple(self._tables)


@dataclass(frozen=True)
class RopeAngles(Source):
    """Cosines or sines [positions, width] as a rotary embedding gives them in the dtype of hidden states.

    Attributes:
        part: "cos" or "sin".
        layer_type: type of the layers that they are for; None if all layers have the same.
        interleaved: order of pairs; see :class:`cpumoe.ops.decoder.Rope`.
    """

    module: str
    part: str
    layer_type: str | None
    interleaved: bool

    def tensor(self, context: BuildContext) -> Tensor:
        key = self.module, self.layer_type
        if key not in context.cache:
            context.cache[key] = self._halves(context)
        angles: Tensor = context.cache[key][self.part == "sin"]
        return angles.repeat_interleave(2, 1) if self.interleaved else torch.cat((angles, angles), 1)

    def _halves(self, context: BuildContext) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of one angle for each pair of values."""
        x = torch.empty(1, dtype=context.dtype)
        options = {} if self.layer_type is None else {"layer_type": self.layer_type}
        try:
            with torch.no_grad():
                given = context.module(self.module)(x, context.positions.unsqueeze(0), **options)
                cos, sin = (given.real, given.imag) if isinstance(given, Tensor) else given  # complex numbers, or both
        except Exception as problem:  # one that is called in another way
            raise UnsupportedDecoder(
                f"its rotary embedding is called in another way ({type(problem).__name__})"
            ) from None
        if not isinstance(cos, Tensor) or cos.is_complex() or cos.dim() != 3 or cos.shape != sin.shape:
            raise UnsupportedDecoder("its rotary embedding gives no cosines and sines")
        cos, sin = cos[0].float().contiguous(), sin[0].float().contiguous()
        # Models hold each angle once, or twice: in both halves, or next to each other.
        half = cos.shape[1] // 2
        if torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:]):
            return cos[:, :half], sin[:, :half]
        if torch.equal(cos[:, ::2], cos[:, 1::2]) and torch.equal(sin[:, ::2], sin[:, 1::2]):
            return cos[:, ::2], sin[:, ::2]
        return cos, sin

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.module}.{self.part}", self.layer_type)))


@dataclass(frozen=True)
class QueryFactors(Source):
    """Factors of queries [positions] that grow with the position beyond the original context length (Llama 4)."""

    beta: float
    length: int

    def tensor(self, context: BuildContext) -> Tensor:
        factors: Tensor = 1 + self.beta * torch.log(1 + torch.floor(context.positions / self.length))
        return factors

    def __str__(self) -> str:
        return f"beta {self.beta:g}, length {self.length}"


def query_factors_of(base: Any) -> QueryFactors | None:
    """Return the factors of queries that a configuration asks for."""
    rope = getattr(base.config, "rope_parameters", None) or {}
    beta, length = (rope.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    return QueryFactors(beta, length) if beta and length else None
