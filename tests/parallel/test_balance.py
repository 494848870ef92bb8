"""Planned placements: small cases against all placements there are, large ones against the stated bound."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpumoe import ParallelLayout
from cpumoe.layers.parallel_layout import ExpertsPart
from cpumoe.ops.exchange import choose_slots
from cpumoe.parallel import balance
from cpumoe.parallel.balance import copies_of, plan_placement
from cpumoe.parallel.load_counter import LoadCounter
from cpumoe.parallel.placement import Placement, physical_ids, rank_loads, slowest_rank

ROUNDING = 1 + 1e-12


def check_promises(loads: list[float], ranks: int, slots: int, nodes: int = 1) -> Placement:
    """Every expert somewhere, equal slots (the placement itself checks both), none twice on a rank, and the bound.

    Slots stay empty only where fewer of them are better.
    """
    placement = plan_placement(loads, ranks, slots, nodes)
    assert placement == plan_placement(loads, ranks, slots, nodes)
    held = len(placement.by_rank[0])
    assert placement.rank_count == ranks and held <= slots
    assert all(len(set(experts)) == held for experts in placement.by_rank)
    if held < slots:
        filled = balance._placement_that_fills(loads, ranks, slots, nodes, None)
        assert max(rank_loads(placement, loads)) < max(rank_loads(filled, loads))
    copy = [load / placement.replicas(expert) for expert, load in enumerate(loads)]
    bound = sum(loads) / ranks + (1 - 1 / ranks) * (max(copy) - min(copy))
    assert max(rank_loads(placement, loads)) <= bound * ROUNDING
    return placement


# ---- small cases, against everything -------------------------------------------------------------------------------


def best_of_all(loads: list[int], ranks: int, slots: int) -> Fraction:
    """The smallest load that the slowest rank can have: every choice of experts for every rank is tried.

    A second copy on a rank would leave the load where it is, so that ranks with each expert once are all there are.
    """
    found = []
    rank_choices = list(itertools.combinations(range(len(loads)), slots))
    for chosen in itertools.combinations_with_replacement(rank_choices, ranks):
        copies = [sum(expert in rank for rank in chosen) for expert in range(len(loads))]
        if all(copies):
            found.append(max(sum(Fraction(loads[e], copies[e]) for e in rank) for rank in chosen))
    return min(found)


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[list[int], int, int]:
    ranks = draw(st.integers(2, 3))
    loads = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8 if ranks == 2 else 6))
    least = -(-len(loads) // ranks)
    return loads, ranks, draw(st.integers(least, min(len(loads), least + 2)))


@settings(max_examples=150, deadline=None)
@given(small_cases())
def test_against_brute_force(case: tuple[list[int], int, int]) -> None:
    loads, ranks, slots = case
    placement = check_promises([float(load) for load in loads], ranks, slots)
    slowest = max(rank_loads(placement, loads))
    least = -(-len(loads) // ranks)
    best = float(min(best_of_all(loads, ranks, fewer) for fewer in range(least, slots + 1)))
    assert best / ROUNDING <= slowest <= (2 - 1 / ranks) * best * ROUNDING


def slowest_by_slots(loads: list[float], ranks: int, nodes: int = 1, groups: int | None = None) -> list[float]:
    least = -(-len(loads) // ranks)
    placements = (plan_placement(loads, ranks, s, nodes, groups) for s in range(least, len(loads) + 1))
    return [slowest_rank(placement, loads) for placement in placements]


def never_slower(found: list[float]) -> bool:
    return all(more <= fewer * (1 + 1e-8) for fewer, more in itertools.pairwise(found))


def test_a_spare_slot_never_makes_the_slowest_rank_slower() -> None:
    assert slowest_by_slots([10.0, 20.0, 30.0, 40.0], 2) == [1.0, 1.0, 1.0]
    for ranks in (2, 3, 4):
        for loads in itertools.combinations_with_replacement((0.0, 1.0, 2.0, 3.0, 5.0, 8.0), 5):
            assert never_slower(slowest_by_slots(list(loads), ranks)), (ranks, loads)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_nor_with_nodes_and_groups(data: st.DataObject) -> None:
    nodes, per_node = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    groups = data.draw(st.sampled_from([None, 2, 3]))
    count = data.draw(st.integers(1, 4)) * (groups or 1)
    loads = data.draw(st.lists(st.integers(0, 40).map(float), min_size=count, max_size=count))
    assert never_slower(slowest_by_slots(loads, nodes * per_node, nodes, groups))


def test_the_factor_is_reached() -> None:
    loads, ranks, slots = [2, 1, 0, 0], 3, 2
    slowest = max(rank_loads(plan_placement(loads, ranks, slots), loads))
    assert slowest == pytest.approx((2 - 1 / ranks) * best_of_all(loads, ranks, slots))


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(0, 5), st.integers(1, 4))
def test_no_other_copies_have_a_smaller_maximum(loads: list[int], spare: int, most: int) -> None:
    slots = min(len(loads) + spare, len(loads) * most)
    copies = copies_of(loads, slots, most)
    assert sum(copies) == slots and min(copies) >= 1 and max(copies) <= most
    others = (c for c in itertools.product(range(1, most + 1), repeat=len(loads)) if sum(c) == slots)
    assert max(map(Fraction, loads, copies)) == min(max(map(Fraction, loads, c)) for c in others)


# ---- large cases, against the bound --------------------------------------------------------------------------------


def skewed(kind: str, experts: int) -> list[float]:
    draw = random.Random(experts)
    loads = {
        "zipf": lambda: [1 / (i + 1) for i in range(experts)],
        "steep": lambda: [1 / (i + 1) ** 2 for i in range(experts)],
        "uniform": lambda: [draw.random() for _ in range(experts)],
        "one hot": lambda: [1e6, *(draw.random() for _ in range(experts - 1))],
        "zeros": lambda: [0.0] * experts,
        "mostly zeros": lambda: [float(i % 7 == 0) for i in range(experts)],
        "ties": lambda: [float(draw.randint(1, 3)) for _ in range(experts)],
    }[kind]()
    draw.shuffle(loads)
    return loads


KINDS = ["zipf", "steep", "uniform", "one hot", "zeros", "mostly zeros", "ties"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("experts", "ranks", "slots", "nodes"),
    [(128, 8, 16, 1), (128, 8, 17, 2), (256, 32, 9, 4), (256, 32, 10, 1), (60, 24, 3, 8), (64, 64, 2, 4), (7, 1, 7, 1)],
)
def test_the_bound(kind: str, experts: int, ranks: int, slots: int, nodes: int) -> None:
    loads = skewed(kind, experts)
    placement = check_promises(loads, ranks, slots, nodes)
    by_rank, per_node = rank_loads(placement, loads), ranks // nodes
    on_node = [sum(by_rank[first : first + per_node]) for first in range(0, ranks, per_node)]
    copy = [load / placement.replicas(expert) for expert, load in enumerate(loads)]
    assert max(on_node) <= (sum(loads) / nodes + (1 - 1 / nodes) * (max(copy) - min(copy))) * ROUNDING


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_bound_on_any_loads(data: st.DataObject) -> None:
    nodes, per_node = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    loads = data.draw(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
    least = -(-len(loads) // (nodes * per_node))
    check_promises(loads, nodes * per_node, data.draw(st.integers(least, min(len(loads), least + 3))), nodes)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_stay_on_a_node(kind: str) -> None:
    loads, ranks, slots, nodes, groups = skewed(kind, 64), 16, 5, 4, 8
    placement = plan_placement(loads, ranks, slots, nodes, groups)
    assert all(len(set(experts)) == slots for experts in placement.by_rank)
    by_rank, per_node = rank_loads(placement, loads), ranks // nodes
    by_group = [sum(loads[first : first + 8]) for first in range(0, 64, 8)]
    for node in range(nodes):
        here = placement.by_rank[node * per_node : (node + 1) * per_node]
        experts = {expert for rank in here for expert in rank}
        assert len({expert // 8 for expert in experts}) == groups // nodes and len(experts) == 16
        copy = [loads[expert] / placement.replicas(expert) for expert in experts]
        bound = sum(loads) / ranks + (1 - 1 / nodes) * (max(by_group) - min(by_group)) / per_node
        bound += (1 - 1 / per_node) * (max(copy) - min(copy))
        assert max(by_rank[node * per_node : (node + 1) * per_node]) <= bound * ROUNDING


def test_groups_that_do_not_fit_are_placed_one_by_one() -> None:
    loads = skewed("zipf", 12)
    assert plan_placement(loads, 3, 5, 3, groups=4) == plan_placement(loads, 3, 5, 3)  # 4 groups on 3 nodes
    assert plan_placement(loads, 4, 7, 2, groups=2) == plan_placement(loads, 4, 7, 2)  # 6 experts for 7 slots
    assert plan_placement(loads, 4, 4, 1, groups=2) == plan_placement(loads, 4, 4)


def test_spare_slots_go_to_the_hot_experts() -> None:
    loads = [8.0, 1.0, 1.0, 1.0, 4.0, 1.0]
    placement = plan_placement(loads, 4, 2)
    assert [placement.replicas(expert) for expert in range(6)] == [3, 1, 1, 1, 1, 1]
    linear = Placement.of_layout(6, ParallelLayout(dp_size=4, expert_parallel=True))
    assert slowest_rank(linear, loads) == pytest.approx(9 / 4)
    assert slowest_rank(linear, loads) / slowest_rank(placement, loads) > 1.5
    assert slowest_rank(placement, [0.0] * 6) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0] * 9, 2, 4), "2 ranks with slots_per_rank=4 have no room for 9 experts; 5 or more"),
        (([1.0] * 4, 2, 5), "slots_per_rank=5 for 4 experts: a second copy on the same rank"),
        (([1.0] * 4, 3, 2, 2), "ranks=3 on nodes=2"),
        (([1.0] * 4, 0, 2), "ranks=0"),
        (([1.0] * 4, 2, 2, 2, 3), "groups=3 of 4 experts"),
        (([], 2, 2), "loads must be numbers from 0 on"),
        (([1.0, -1.0], 2, 2), "loads must be numbers from 0 on"),
        (([1.0, float("nan")], 2, 2), "loads must be numbers from 0 on"),
        (([1e308] * 4, 2, 2), "finite sum"),
    ],
)
def test_refused(arguments: tuple[list[float], int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_placement(*arguments)


# ---- placements ----------------------------------------------------------------------------------------------------


def test_slots_and_experts() -> None:
    placement = Placement(3, ((0, 2), (1, 2), (2, 0)))
    assert placement.logical == (0, 2, 1, 2, 2, 0) and placement.rank_of == (0, 0, 1, 1, 2, 2)
    assert placement.physical == ((0, 5), (2,), (1, 3, 4))
    assert [placement.replicas(expert) for expert in range(3)] == [2, 1, 3]
    assert ExpertsPart(placement.experts_of(1)) == ExpertsPart((1, 2))
    assert str(placement) == "3 experts on 3 ranks, 3 copies more"


@pytest.mark.parametrize(
    ("by_rank", "message"),
    [
        (((0, 1), (2, 3)), "rank 1 has expert 3; 0 to 2"),
        (((0, 1), (0, 1)), "no rank has the experts 2"),
        (((0, 1), (2,)), "ranks have 1 to 2 slots"),
        ((), "by_rank is empty"),
    ],
)
def test_impossible_placements(by_rank: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(3, by_rank)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3))
def test_linear_is_what_layouts_do(experts: int, dp_size: int, tp_size: int) -> None:
    layout = ParallelLayout(dp_size=dp_size, tp_size=tp_size, expert_parallel=True)
    placement = Placement.of_layout(experts, layout)
    assert [ExpertsPart(placement.experts_of(r)) for r in range(layout.flat_size)] == [
        rank.part_of(experts, 32) for rank in layout.ranks()
    ]
    assert placement.logical == tuple(range(experts))


def test_split_experts_have_no_placement() -> None:
    with pytest.raises(ValueError, match="tp 2 splits every expert"):
        Placement.of_layout(8, ParallelLayout(tp_size=2))
    assert Placement(2, ((0, 1), (1,)), uneven=True) == Placement(2, ((0, 1), (1,)), uneven=True)


# ---- which copy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copies_take_turns(dtype: torch.dtype) -> None:
    placement = Placement(3, ((0, 2), (1, 2), (2, 0)))
    ids = torch.tensor([[0, 2], [0, 2], [2, 1], [2, -1], [3, 0]], dtype=dtype)
    physical = physical_ids(ids, placement)
    assert physical.dtype == dtype
    assert physical.tolist() == [[0, 1], [5, 3], [4, 2], [1, -1], [-1, 0]]
    assert physical_ids(ids[:0], placement).shape == (0, 2)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 50))
def test_every_choice_reaches_its_expert(seed: int, cut: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    loads = torch.rand(24, generator=draw).pow(4)
    placement = plan_placement(loads.tolist(), 6, 6)
    ids = torch.multinomial(loads + 1e-3, 50 * 4, replacement=True, generator=draw).view(50, 4)
    physical = physical_ids(ids, placement)
    assert torch.equal(torch.tensor(placement.logical)[physical], ids)
    parts = [physical_ids(ids[:cut], placement), physical_ids(ids[cut:], placement, first_token=cut)]
    assert torch.equal(torch.cat(parts), physical)  # a token's slots depend on its index alone
    for expert in range(24):  # equal shares over a whole number of turns
        slots = physical_ids(torch.full((placement.replicas(expert) * 3, 1), expert), placement).flatten().tolist()
        assert all(slots.count(slot) == 3 for slot in placement.physical[expert])


def test_ids_of_another_kind_are_refused() -> None:
    placement = Placement(2, ((0,), (1,)))
    for ids in (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"int32 or int64 \[tokens, K\]"):
            physical_ids(ids, placement)


# ---- counters ------------------------------------------------------------------------------------------------------


def test_counting_without_forgetting() -> None:
    counter = LoadCounter({"a": 3, "b": 2})
    counter.add("a", torch.tensor([[0, 2], [2, -1], [3, 2]]))
    assert counter.counts["a"].dtype == torch.int64 and counter.counts["a"].tolist() == [1, 0, 3]
    assert counter.tokens == {"a": 3, "b": 0} and counter.loads("a") == [1.0, 0.0, 3.0]


def test_choices_fade_however_they_are_cut_into_calls() -> None:
    ids = torch.randint(-1, 5, (40, 2), generator=torch.Generator().manual_seed(0))
    expected = [
        sum(0.5 ** ((39 - token) / 8) for token in range(40) for choice in ids[token].tolist() if choice == expert)
        for expert in range(5)
    ]
    for sizes in ([40], [1] * 40, [7, 0, 20, 13]):
        counter = LoadCounter({"layer": 5}, half_life=8)
        for part in ids.split(sizes):
            counter.add("layer", part)
        assert counter.loads("layer") == pytest.approx(expected, rel=1e-12) and counter.tokens["layer"] == 40
    with pytest.raises(ValueError, match="half_life=0"):
        LoadCounter({"layer": 5}, half_life=0)


def test_a_placement_follows_what_is_used_now() -> None:
    counter = LoadCounter({"layer": 8}, half_life=100)
    for hot in (1, 6):
        counter.add("layer", torch.full((2000, 1), hot))
    placement = plan_placement(counter.loads("layer"), 4, 3)
    assert placement.replicas(6) == 4 and placement.replicas(1) < 4


def test_copies_that_overlap_are_refused() -> None:
    """Numbers from a caller must not lead outside of the lists."""
    ids, loads = torch.zeros((1, 1), dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    slots = torch.arange(4, dtype=torch.int32)
    for begins in ([0, 100000, 4], [1, 2, 4], [0, -5, 4]):
        with pytest.raises(ValueError, match="begins"):
            choose_slots(ids, (torch.tensor(begins, dtype=torch.int32), slots), 0, loads)
