"""Plans where experts go so that no rank has much more to do than the others.

Spare slots go to further copies of hot experts, the copies are packed on ranks by their load, and swaps improve that
until none helps. Slots whose copies would make the slowest rank slower stay empty. How far the result may be from an
even load is stated and proved below.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from cpumoe.parallel.placement import Placement, rank_loads

#: Sums that differ by less, as a share of them, count as equal.
_ROUNDING = 1e-9


def plan_placement(
    loads: Sequence[float], ranks: int, slots_per_rank: int, nodes: int = 1, groups: int | None = None
) -> Placement:
    """Places the experts of a layer by their load. The same arguments give the same placement.

    A copy has an equal share of its expert's load, and a rank has at most one copy of an expert. More slots never make
    the slowest rank slower: ``[10, 20, 30, 40]`` is even on two ranks with two slots each, and not with three, since
    both ranks have the experts with two copies, and the other two differ. Ranks have fewer experts than slots then, all
    the same number. With ``n`` ranks and
    ``copy`` for the loads of all copies, no rank has more than::

        mean + (1 - 1/n) * (max(copy) - min(copy))

    which is at most ``2 - 1/n`` times what the slowest rank has in the best placement of all with these slots; there
    are loads for which it is no less (``[2, 1, 0, 0]`` on three ranks with two slots), so that the 4/3 of packing
    without slots and copies does not hold. Both are true to the rounding of sums. With more nodes than one they hold as
    well, unless groups stay together: a rank of a node with ``m`` ranks then has at most::

        mean + (1 - 1/nodes) * (max(group) - min(group)) / m + (1 - 1/m) * (max(copy) - min(copy))

    where ``group`` are the loads of the groups, and ``copy`` those of the copies in its node.

    Args:
        loads: of each logical expert: how often it is chosen, in any unit.
        ranks: how many there are.
        slots_per_rank: how many experts a rank may hold. Slots beyond one for each expert are for further copies.
        nodes: the ranks lie on so many nodes in order, the same number on each. Nodes are balanced first, and then the
            ranks in each.
        groups: the experts are so many groups, consecutive and of one size, of which a token chooses few
            (``n_group``). Where they divide by the nodes, a group stays on one node with all copies of its experts, so
            that a token visits few nodes. A node must have no more slots a rank than experts then; otherwise, as where
            groups do not divide, experts are placed one by one.
    """
    _check(loads, ranks, slots_per_rank, nodes, groups)
    mean = math.fsum(loads) / ranks
    best, least = None, math.inf
    # Of equal ones the first is taken, which has the most copies: loads change, and copies even that out.
    for slots in range(slots_per_rank, -(-len(loads) // ranks) - 1, -1):
        placement = _placement_that_fills(loads, ranks, slots, nodes, groups)
        slowest = max(rank_loads(placement, loads))
        if best is None or slowest < least * (1 - _ROUNDING):
            best, least = placement, slowest
        if least <= mean * (1 + _ROUNDING):
            break
    assert best is not None  # slots_per_rank has been checked
    return best


def _placement_that_fills(
    loads: Sequence[float], ranks: int, slots_per_rank: int, nodes: int, groups: int | None
) -> Placement:
    """Return a placement with exactly this many experts on every rank."""
    experts, per_node = len(loads), ranks // nodes
    keeps_groups = groups is not None and nodes > 1 and groups % nodes == 0 and slots_per_rank * nodes <= experts
    if groups is not None and keeps_groups:
        of_nodes = _groups_on_nodes(loads, groups, nodes, per_node, slots_per_rank)
    else:
        of_nodes = _copies_on_nodes(loads, nodes, per_node, slots_per_rank)
    by_rank: list[tuple[int, ...]] = []
    for copies, each in of_nodes:
        by_rank += (tuple(sorted(packed)) for packed in _pack(each, copies, per_node))
    return Placement(experts, tuple(by_rank))


def _check(loads: Sequence[float], ranks: int, slots_per_rank: int, nodes: int, groups: int | None) -> None:
    experts = len(loads)
    if experts == 0 or not all(load >= 0 for load in loads) or not math.isfinite(sum(loads)):
        raise ValueError("loads must be numbers from 0 on, one for each expert, with a finite sum")
    if ranks < 1 or nodes < 1 or ranks % nodes != 0:
        raise ValueError(f"ranks={ranks} on nodes={nodes}; a multiple of the nodes is accepted")
    if not experts <= ranks * slots_per_rank:
        raise ValueError(
            f"{ranks} ranks with slots_per_rank={slots_per_rank} have no room for {experts} experts; "
            f"{-(-experts // ranks)} or more is accepted"
        )
    if slots_per_rank > experts:
        raise ValueError(
            f"slots_per_rank={slots_per_rank} for {experts} experts: a second copy on the same rank takes no load off "
            f"it; at most {experts} is accepted"
        )
    if groups is not None and (groups < 1 or experts % groups != 0):
        raise ValueError(f"groups={groups} of {experts} experts; a divisor is accepted")


# ---- how many copies -----------------------------------------------------------------------------------------------


def copies_of(loads: Sequence[float], slots: int, most: int) -> list[int]:
    """How many copies each expert gets: at least one, at most ``most``, ``slots`` in all.

    The next one always goes to the expert with the largest load per copy. No other choice has a smaller maximum of the
    loads per copy.
    """
    # Proof. Let expert e have the largest load per copy in the end, m = loads[e] / c[e], and let other numbers c' have
    # a smaller maximum. Then c'[e] > c[e], so e was never at its most here, and since all slots are used, an expert f
    # has c'[f] < c[f]. It got its last copy here when it had the largest load per copy, while e was there to be chosen:
    # loads[f] / (c[f] - 1) >= (load per copy of e then) >= m. But c'[f] <= c[f] - 1, so that c' has m or more at f.
    copies = [1] * len(loads)
    hottest = [(-load, expert) for expert, load in enumerate(loads)] if most > 1 else []
    heapq.heapify(hottest)
    for _ in range(slots - len(loads)):
        _, expert = heapq.heappop(hottest)
        copies[expert] += 1
        if copies[expert] < most:
            heapq.heappush(hottest, (-loads[expert] / copies[expert], expert))
    return copies


# ---- nodes ---------------------------------------------------------------------------------------------------------
# Each gives for every node how many copies of each expert it has, and the load of a copy.

_OfNode = tuple[list[int], list[float]]


def _copies_on_nodes(loads: Sequence[float], nodes: int, per_node: int, slots_per_rank: int) -> list[_OfNode]:
    """Copies one by one. No node has more of an expert than it has ranks."""
    ranks = nodes * per_node
    copies = copies_of(loads, ranks * slots_per_rank, ranks)
    each = _shares(loads, copies)
    # What every node gets alike changes no difference between nodes: the rest is packed. An expert with c copies has
    # at most ceil(c / nodes) <= per_node on a node.
    rest = _pack(each, [count % nodes for count in copies], nodes)
    return [([count // nodes + (e in more) for e, count in enumerate(copies)], each) for more in map(set, rest)]


def _groups_on_nodes(
    loads: Sequence[float], groups: int, nodes: int, per_node: int, slots_per_rank: int
) -> list[_OfNode]:
    """Whole groups, the same number on each node, and copies of their experts there only."""
    size = len(loads) // groups
    by_group = [math.fsum(loads[first : first + size]) for first in range(0, len(loads), size)]
    of_nodes: list[_OfNode] = []
    for packed in _pack(by_group, [1] * groups, nodes):
        here = [e for group in sorted(packed) for e in range(group * size, (group + 1) * size)]
        copies, each = [0] * len(loads), [0.0] * len(loads)
        found = copies_of([loads[e] for e in here], per_node * slots_per_rank, per_node)
        for e, count in zip(here, found, strict=True):
            copies[e], each[e] = count, loads[e] / count
        of_nodes.append((copies, each))
    return of_nodes


def _shares(loads: Sequence[float], copies: Sequence[int]) -> list[float]:
    return [load / count for load, count in zip(loads, copies, strict=True)]


# ---- packing -------------------------------------------------------------------------------------------------------
#
# The bound. Let the loads of bins be L, and H be a bin with the largest, of which no swap with another bin lowers the
# larger load of the two. For every other bin B:
#
#   Experts that both have cancel out: their copies have the same load. Of the others, H and B have equally many, since
#   bins have equally many slots and no expert twice, and each of H may be swapped with each of B. Pair them in any way,
#   x of H with y of B; the differences x - y add up to L[H] - L[B]. If that is above 0, one of them is. Swapping that
#   pair would make H smaller by x - y, and B larger by as much; as this does not help, x - y >= L[H] - L[B]. So
#   L[H] - L[B] <= x - y <= max(copy) - min(copy).
#
# With the mean over all n bins: L[H] - mean = sum(L[H] - L[B]) / n <= (1 - 1/n) * (max(copy) - min(copy)).    (1)
#
# Nodes, copies one by one. (1) holds for N nodes, where what all have alike cancels out too, and for the m ranks of a
# node, whose mean is the node's load / m. Together with D = max(copy) - min(copy): at most
# (N-mean + (1 - 1/N) * D) / m + (1 - 1/m) * D = mean + (1 - 1/(N m)) * D, which is (1) for all N m ranks. With groups,
# the D of nodes is that of groups.
#
# The best placement that fills so many slots has max(copy) or more on some rank: an expert that is on c of its ranks
# has load / c or more on one of them, and `copies_of` has the smallest maximum of these. It has the mean or more, too.
# So (1) is at most 2 - 1/n times the best.
#
# Slots that stay empty. Let P(s) be what (1) is about, with s slots filled on every rank, and B(s) the best such
# placement: P(s) <= (2 - 1/n) * B(s). The result R(s) is the least of P(t) over all t <= s that have room for the
# experts. So R(s + 1) <= R(s): the least of more. It is some P(t), for whose copies (1) holds. And
# R(s) = min P(t) <= (2 - 1/n) * min B(t), the best of all placements with s slots or fewer.


def _pack(each: Sequence[float], copies: Sequence[int], bins: int) -> list[list[int]]:
    """Experts of each bin: as many in all bins, and none twice in one.

    Args:
        each: the load of a copy of each expert.
        copies: how many copies of each expert there are, no more than bins; their sum divides by the bins.
        bins: how many there are.
    """
    packed: list[list[int]] = [[] for _ in range(bins)]
    loads = [0.0] * bins
    # Largest first. The copies of an expert go to different bins, those with the fewest so far and of these the least
    # loaded. Numbers of bins differ by one at most meanwhile, so there is always room: as long as bins have two free
    # slots all have one, and then as many as there are copies left.
    for expert in sorted(range(len(each)), key=lambda expert: (-each[expert], expert)):
        order = sorted(range(bins), key=lambda b: (len(packed[b]), loads[b], b))
        for b in order[: copies[expert]]:
            packed[b].append(expert)
            loads[b] += each[expert]
    _swap(packed, each)
    return packed


def _swap(packed: list[list[int]], each: Sequence[float]) -> None:
    """Swaps copies between a bin with the largest load and others, until no swap lowers the larger load of the two.

    Ends: a swap lowers the maximum, or the number of bins that have it, and the sums are rounded correctly, so that a
    bin's load depends on its experts alone.
    """

    def load_of(experts: list[int]) -> float:
        return math.fsum(each[expert] for expert in experts)

    loads = list(map(load_of, packed))
    while True:
        heaviest = max(range(len(packed)), key=lambda b: (loads[b], -b))
        found = _best_swap(packed, each, loads, heaviest)
        if found is None:
            return
        b, x, y = found
        first, second = list(packed[heaviest]), list(packed[b])
        first[x], second[y] = second[y], first[x]
        after = load_of(first), load_of(second)
        if max(after) >= loads[heaviest]:  # what was gained is less than sums are rounded by
            return
        packed[heaviest], packed[b] = first, second
        loads[heaviest], loads[b] = after


def _best_swap(
    packed: list[list[int]], each: Sequence[float], loads: Sequence[float], heaviest: int
) -> tuple[int, int, int] | None:
    """Another bin and the places of two copies, in the heaviest bin and in it, whose swap leaves the least maximum."""
    best, found = 0.0, None
    own = packed[heaviest]
    for b, others in enumerate(packed):
        gap = loads[heaviest] - loads[b]
        if gap <= 2 * best:  # a swap takes at most half of it off the maximum of the two
            continue
        incoming = [(y, each[expert]) for y, expert in enumerate(others) if expert not in own]
        for x, expert in enumerate(own):
            if expert in others:
                continue
            for y, load in incoming:
                moved = each[expert] - load
                gained = min(moved, gap - moved)
                if gained > best:
                    best, found = gained, (b, x, y)
    return found
