"""Which rank has which experts of a layer, and which copy of an expert a token goes to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property

import torch
from torch import Tensor

from cpumoe.layers.parallel_layout import ParallelLayout
from cpumoe.ops.exchange import choose_slots


@dataclass(frozen=True)
class Placement:
    """Where the experts of one layer are.

    A router chooses *logical* experts. A *physical* one is a slot on a rank, which holds a copy of a logical expert;
    slots are numbered through all ranks, those of rank 0 first.

    Attributes:
        expert_count: how many logical experts there are; each of them must be somewhere.
        by_rank: the logical experts that each rank holds, in the order of its slots.
        uneven: whether ranks may have different numbers of slots.
    """

    expert_count: int
    by_rank: tuple[tuple[int, ...], ...]
    uneven: InitVar[bool] = False

    def __post_init__(self, uneven: bool) -> None:
        if not self.by_rank:
            raise ValueError("by_rank is empty; one rank or more is accepted")
        for rank, experts in enumerate(self.by_rank):
            for expert in experts:
                if not 0 <= expert < self.expert_count:
                    raise ValueError(f"rank {rank} has expert {expert}; 0 to {self.expert_count - 1} are accepted")
        if missing := [str(expert) for expert, slots in enumerate(self.physical) if not slots]:
            raise ValueError(f"no rank has the experts {', '.join(missing)}; every expert must be somewhere")
        sizes = [len(experts) for experts in self.by_rank]
        if not uneven and min(sizes) != max(sizes):
            raise ValueError(f"ranks have {min(sizes)} to {max(sizes)} slots; the same number is accepted, or uneven")

    @classmethod
    def of_layout(cls, expert_count: int, layout: ParallelLayout) -> Placement:
        """Return where the layout has each expert, once: see :meth:`ParallelLayout.part_of`."""
        if layout.experts_tp_size > 1:
            raise ValueError(f"the layout {layout} splits every expert; one with expert parallelism is accepted")
        inner = 1  # the intermediate size, which is not split
        by_rank = tuple(rank.part_of(expert_count, inner).experts for rank in layout.ranks())
        return cls(expert_count, by_rank, uneven=True)

    @property
    def rank_count(self) -> int:
        return len(self.by_rank)

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """The logical experts that a rank holds: those of its :class:`ExpertsPart`."""
        return self.by_rank[rank]

    def replicas(self, expert: int) -> int:
        """How many copies of a logical expert there are."""
        return len(self.physical[expert])

    # ---- by slot -----------------------------------------------------------------------------------------------------

    @cached_property
    def logical(self) -> tuple[int, ...]:
        """For each slot its logical expert."""
        return tuple(expert for experts in self.by_rank for expert in experts)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """For each slot the rank that it is on."""
        return tuple(rank for rank, experts in enumerate(self.by_rank) for _ in experts)

    @cached_property
    def physical(self) -> tuple[tuple[int, ...], ...]:
        """For each logical expert the slots that hold it, in ascending order."""
        slots: list[list[int]] = [[] for _ in range(self.expert_count)]
        for slot, expert in enumerate(self.logical):
            slots[expert].append(slot)
        return tuple(map(tuple, slots))

    @cached_property
    def slots_by_expert(self) -> tuple[Tensor, Tensor]:
        """:attr:`physical` for the core: where the slots of each expert begin, int32 [experts + 1], and all, int32."""
        begins = [0, *itertools.accumulate(map(len, self.physical))]
        slots = list(itertools.chain.from_iterable(self.physical))
        return torch.tensor(begins, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)

    def __str__(self) -> str:
        spare = len(self.logical) - self.expert_count
        return f"{self.expert_count} experts on {self.rank_count} ranks" + (f", {spare} copies more" if spare else "")


def physical_ids(topk_ids: Tensor, placement: Placement, first_token: int = 0) -> Tensor:
    """The slots that the tokens of a call go to: [tokens, K], of the dtype of the ids.

    Copies take turns: token ``t`` uses copy ``t % copies`` of each of its experts. That needs no word between ranks,
    and a token's slots do not depend on the tokens beside it.

    Args:
        topk_ids: [tokens, K] int32 or int64, logical. Ids outside of the range, which stand for no expert, become -1.
        placement: of the layer's experts.
        first_token: index of the first token, where a call has but some of them: tokens of one call each would take
            the first copy otherwise.
    """
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"topk_ids is {topk_ids.dtype} with {topk_ids.dim()} dimensions; int32 or int64 [tokens, K] is accepted"
        )
    known = (topk_ids >= 0) & (topk_ids < placement.expert_count)
    counted = torch.zeros(placement.expert_count, dtype=torch.int64)
    return choose_slots(topk_ids.where(known, -1), placement.slots_by_expert, first_token, counted).to(topk_ids.dtype)


def rank_loads(placement: Placement, loads: Sequence[float]) -> list[float]:
    """The load of each rank. Copies share the load of their expert equally."""
    if len(loads) != placement.expert_count:
        raise ValueError(f"loads of {len(loads)} experts, where the placement has {placement.expert_count}")
    each = [load / placement.replicas(expert) for expert, load in enumerate(loads)]
    return [sum(each[expert] for expert in experts) for experts in placement.by_rank]


def slowest_rank(placement: Placement, loads: Sequence[float]) -> float:
    """The load of the slowest rank over the mean: 1 is even, and what all ranks wait for. 1 without any load."""
    by_rank = rank_loads(placement, loads)
    mean = sum(by_rank) / len(by_rank)
    return max(by_rank) / mean if mean > 0 else 1.0
