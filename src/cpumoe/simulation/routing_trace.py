"""Which experts tokens choose: recorded, or drawn at random from a load that is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cpumoe.parallel.load_counter import LoadCounter


@dataclass(frozen=True)
class RoutingTrace:
    """Choices of the same tokens in one or more layers.

    Attributes:
        experts: how many a layer has.
        layers: of each layer the ids [tokens, K].
    """

    experts: int
    layers: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not self.layers or any(ids.dim() != 2 or ids.is_floating_point() for ids in self.layers):
            raise ValueError("a trace without ids [tokens, K] of a layer")
        if len({tuple(ids.shape) for ids in self.layers}) > 1:
            raise ValueError("the layers of a trace have different numbers of tokens or choices")
        for ids in self.layers:
            if ids.numel() == 0 or not 0 <= int(ids.min()) <= int(ids.max()) < self.experts:
                raise ValueError(f"the ids of a trace are not within 0 to {self.experts - 1}, or there are none")

    @property
    def tokens(self) -> int:
        return len(self.layers[0])

    @property
    def topk(self) -> int:
        return self.layers[0].shape[1]

    def loads(self, layer: int) -> list[float]:
        """How often each expert of a layer was chosen."""
        counter = LoadCounter({"layer": self.experts})
        counter.add("layer", self.layers[layer])
        return counter.loads("layer")

    def halves(self) -> tuple[RoutingTrace, RoutingTrace]:
        """What a placement is planned from, and what it is judged by."""
        middle = self.tokens // 2
        return (
            RoutingTrace(self.experts, tuple(ids[:middle] for ids in self.layers)),
            RoutingTrace(self.experts, tuple(ids[middle:] for ids in self.layers)),
        )

    def steps(self, tokens: int, most: int = 4) -> Iterator[tuple[int, Tensor]]:
        """Layers and ids [tokens, K] of steps with so many tokens, ``most`` at most in each layer."""
        if tokens > self.tokens:
            raise ValueError(f"a step of {tokens} tokens, where the trace has {self.tokens}")
        for number, ids in enumerate(self.layers):
            for step in list(ids.split(tokens))[: min(most, self.tokens // tokens)]:
                yield number, step

    # ---- where they come from ----------------------------------------------------------------------------------------

    @classmethod
    def drawn(
        cls,
        loads: Sequence[float],
        topk: int,
        tokens: int,
        layers: int = 2,
        groups: int = 1,
        topk_groups: int = 1,
        seed: int = 0,
    ) -> RoutingTrace:
        """Chooses without putting back, by relative loads in an order of each layer's own.

        With groups (consecutive experts) a token takes part of its experts from the best ``topk_groups`` only, where a
        group is worth its two best.
        """
        experts = len(loads)
        if not 1 <= topk <= experts // groups * topk_groups:
            raise ValueError(f"{topk} experts of a token, where it can choose of {experts // groups * topk_groups}")
        chosen = []
        for layer in range(layers):
            draw = torch.Generator().manual_seed(seed * 1000 + layer)
            weights = torch.tensor(loads, dtype=torch.float32)[torch.randperm(experts, generator=draw)]
            noise = torch.empty(tokens, experts).exponential_(generator=draw)
            chosen.append(_best((weights / noise).log(), topk, groups, topk_groups))
        return cls(experts, tuple(chosen))

    @classmethod
    def zipf(cls, experts: int, topk: int, tokens: int, exponent: float = 1.0, **more: int) -> RoutingTrace:
        """Loads 1, 1/2, 1/3, ... to the power of ``exponent``; 0 is uniform."""
        return cls.drawn([rank**-exponent for rank in range(1, experts + 1)], topk, tokens, **more)

    @classmethod
    def load(cls, path: Path, experts: int) -> RoutingTrace:
        """Recorded ids: a safetensors file with a tensor [tokens, K] of each layer."""
        try:
            told = load_file(path)
        except OSError as problem:
            raise ValueError(f"{path}: {problem.strerror or problem}") from None
        except SafetensorError as problem:
            raise ValueError(f"{path} is no safetensors file: {problem}") from None
        try:
            return cls(experts, tuple(told[name] for name in sorted(told)))
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from None


def save_routing(routing: Mapping[str, Tensor], path: Path) -> None:
    """Writes ids [tokens, K] of layers, by their names, for :meth:`RoutingTrace.load`."""
    save_file({name: ids.contiguous() for name, ids in routing.items()}, path)


def _best(scores: Tensor, topk: int, groups: int, topk_groups: int) -> Tensor:
    if groups > 1:
        by_group = scores.view(len(scores), groups, -1)  # [tokens, groups, experts of one]
        worth = by_group.topk(min(2, by_group.shape[2])).values.sum(2)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, worth.topk(topk_groups).indices, True)
        scores = by_group.masked_fill(~kept.unsqueeze(2), -torch.inf).view(scores.shape)
    return scores.topk(topk).indices
