"""Moves experts between ranks as they are used, while the model goes on.

The weights of a layer are gathered beside the old ones and taken all at once, when every rank has what it is to have: a
rank that ends half way leaves the others where they were. Which copy of an expert computes a token changes no number of
it; the sums of ranks are added in another grouping, which is the last bit of fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cpumoe.layers.parallel_layout import Exchange
from cpumoe.ops.packing import packed_experts, packed_like
from cpumoe.parallel.balance import plan_placement
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.placement import Placement, slowest_rank

#: A layer is left alone where its slowest rank would not become this much faster.
LEAST_GAIN = 1.05


@dataclass(frozen=True)
class Move:
    """What was done to a layer: the load of its slowest rank over the mean, before and after, and what came here."""

    before: float
    after: float
    came: int


def rebalance(
    layers: Iterable[ParallelExperts], *, spare_slots: int = 0, nodes: int = 1, least_gain: float = LEAST_GAIN
) -> list[Move]:
    """Places the experts of layers anew by how often they were chosen, where that is worth it.

    Old choices fade by half. All ranks have to call it at the same time, between two steps. Raises RankError if one of
    them is gone; what has not been moved by then is as it was.

    Args:
        layers: with whole experts on every rank.
        spare_slots: copies of experts that each rank has room for besides its share.
        nodes: machines that the ranks are spread over, in order: what can stay inside of one does.
        least_gain: how many times faster the slowest rank must become.
    """
    return [_rebalance_layer(experts, spare_slots, nodes, least_gain) for experts in layers]


def _rebalance_layer(experts: ParallelExperts, spare_slots: int, nodes: int, least_gain: float) -> Move:
    old, ranks = experts.placement, experts.ranks
    if old is None:
        raise ValueError(f"the layout {ranks.layout} has a slice of every expert on each rank; nothing can be moved")
    if not all(old.by_rank):
        raise ValueError(f"{old.expert_count} experts on {ranks.size} ranks; one or more for each rank is accepted")
    counts = experts.loads
    if ranks.layout.chosen_exchange is not Exchange.ALL_REDUCE:  # else every rank has counted all tokens
        counts = torch.stack(ranks.gather(counts[None])).sum(0)[0]
    loads = [float(count) for count in counts.tolist()]
    new = plan_placement(loads, ranks.size, -(-old.expert_count // ranks.size) + spare_slots, nodes)
    before, after = slowest_rank(old, loads), slowest_rank(new, loads)
    experts.loads //= 2
    if before < least_gain * after:
        return Move(before, before, 0)
    packed, came = _gathered(experts, old, new)
    ranks.gather_numbers([came])  # all have theirs: now, and not before, the old ones go
    experts.move(packed, new)
    return Move(before, after, came)


def _gathered(experts: ParallelExperts, old: Placement, new: Placement) -> tuple[dict[str, Tensor], int]:
    """The packed experts that a placement has on this rank, and how many of them came from others."""
    ranks = experts.ranks
    # For every rank the experts that it lacks, each from one of those that have it, in turn.
    wanted: list[list[tuple[int, int]]] = []  # (from, expert)
    for rank in range(ranks.size):
        lacking = sorted(set(new.experts_of(rank)) - set(old.experts_of(rank)))
        holders = [[old.rank_of[slot] for slot in old.physical[expert]] for expert in lacking]
        wanted.append([(has[rank % len(has)], expert) for has, expert in zip(holders, lacking, strict=True)])
    sent = [[expert for source, expert in of_rank if source == ranks.rank] for of_rank in wanted]
    mine = sorted(wanted[ranks.rank])  # as they come: by rank
    given = [sum(source == rank for source, _ in mine) for rank in range(ranks.size)]
    here = {expert: place for place, expert in reversed(list(enumerate(old.experts_of(ranks.rank))))}
    packed: dict[str, Tensor] = {}
    for name in ("gate_up_packed", "down_packed"):
        blob = experts.get_buffer(name)
        rows = packed_experts(blob)
        order = [here[expert] for of_rank in sent for expert in of_rank]
        came = ranks.trade(rows[order], [len(of_rank) for of_rank in sent], given)
        arrived = {expert: came[index] for index, (_, expert) in enumerate(mine)}
        packed[name] = packed_like(blob, len(new.experts_of(ranks.rank)))
        for target, expert in zip(packed_experts(packed[name]), new.experts_of(ranks.rank), strict=True):
            target.copy_(rows[here[expert]] if expert in here else arrived[expert])
    return packed, len(mine)
