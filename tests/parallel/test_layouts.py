"""Layouts as values: the flattening rule, the switch to expert parallelism, and what a rank holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import run_ranks

from cpumoe import ParallelLayout
from cpumoe.layers.parallel_layout import Exchange, ExpertPlacement, ExpertsPart
from cpumoe.parallel.placement import Placement

sizes = st.integers(1, 5)


def layouts(**facts: object) -> st.SearchStrategy[ParallelLayout]:
    given_facts = {name: st.just(value) for name, value in facts.items()}
    return st.builds(ParallelLayout, tp_size=sizes, dp_size=sizes, pcp_size=sizes, **given_facts)


@given(layouts())
def test_flat_ranks_count_dp_then_pcp_then_tp(layout: ParallelLayout) -> None:
    ranks = list(layout.ranks())
    assert len(ranks) == layout.flat_size == layout.dp_size * layout.pcp_size * layout.tp_size
    for flat, rank in enumerate(ranks):
        assert rank.flat_rank == flat
        assert flat == rank.dp_rank * layout.pcp_size * layout.tp_size + rank.pcp_rank * layout.tp_size + rank.tp_rank


@given(layouts())
def test_without_ep_every_expert_is_split_over_all_ranks(layout: ParallelLayout) -> None:
    for rank in layout.ranks():
        assert (rank.ep_size, rank.ep_rank) == (1, 0)
        assert (rank.experts_tp_size, rank.experts_tp_rank) == (layout.flat_size, rank.flat_rank)
        part = rank.part_of(7, 32 * layout.flat_size)
        assert part == ExpertsPart(tuple(range(7)), layout.flat_size, rank.flat_rank)


@given(layouts(expert_parallel=True), st.integers(1, 40))
def test_with_ep_each_expert_is_on_one_rank(layout: ParallelLayout, experts: int) -> None:
    held: list[int] = []
    counts = []
    for rank in layout.ranks():
        assert (rank.experts_tp_size, rank.experts_tp_rank) == (1, 0)
        assert rank.ep_size == layout.flat_size
        part = rank.part_of(experts, 96)
        assert part.slices == 1
        held += part.experts
        counts.append(len(part.experts))
    assert held == list(range(experts))
    assert max(counts) - min(counts) <= 1
    assert layout.uses_ep == (layout.flat_size > 1)  # one rank has all experts, whatever was asked for


@given(layouts(expert_parallel=True, expert_placement_strategy="round_robin"), st.integers(1, 40))
def test_round_robin_gives_a_rank_every_nth_expert(layout: ParallelLayout, experts: int) -> None:
    for rank in layout.ranks():
        assert rank.part_of(experts, 96).experts == tuple(e for e in range(experts) if e % rank.ep_size == rank.ep_rank)
    placement = Placement.of_layout(experts, layout)
    flat = ParallelLayout(dp_size=layout.flat_size, expert_parallel=True, expert_placement_strategy="round_robin")
    assert placement == Placement.of_layout(experts, flat)
    assert ("round_robin" in str(layout)) == layout.uses_ep


def test_placement_strategies_have_names() -> None:
    with pytest.raises(ValueError, match="expert_placement_strategy='random' is not known; accepted are linear, round"):
        ParallelLayout(tp_size=2, expert_parallel=True, expert_placement_strategy="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expert_placement_strategy=round_robin without expert parallelism"):
        ParallelLayout(tp_size=2, expert_placement_strategy=ExpertPlacement.ROUND_ROBIN)


def test_exchanges_have_names() -> None:
    by_name = ParallelLayout(tp_size=2, expert_parallel=True, exchange="all_to_all")  # type: ignore[arg-type]
    assert by_name.exchange is by_name.chosen_exchange is Exchange.ALL_TO_ALL
    for make in (Exchange, lambda name: ParallelLayout(tp_size=2, exchange=name)):
        with pytest.raises(ValueError, match="exchange='nccl' is not known; accepted are all_reduce, allgather"):
            make("nccl")


def test_how_tokens_travel() -> None:
    assert ParallelLayout().chosen_exchange is None
    assert ParallelLayout(expert_parallel=True).chosen_exchange is None
    assert ParallelLayout(tp_size=2).chosen_exchange is Exchange.ALL_REDUCE
    assert ParallelLayout(tp_size=2, expert_parallel=True).chosen_exchange is Exchange.ALL_REDUCE
    assert ParallelLayout(dp_size=2).chosen_exchange is Exchange.ALLGATHER_REDUCESCATTER
    assert ParallelLayout(pcp_size=2, tp_size=2).chosen_exchange is Exchange.ALLGATHER_REDUCESCATTER
    in_sequence = ParallelLayout(tp_size=2, expert_parallel=True, sequence_parallel=True)
    assert in_sequence.chosen_exchange is Exchange.ALLGATHER_REDUCESCATTER
    by_expert = ParallelLayout(dp_size=2, expert_parallel=True, exchange=Exchange.ALL_TO_ALL)
    assert by_expert.chosen_exchange is Exchange.ALL_TO_ALL


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"tp_size": 0}, "tp_size=0; 1 or more"),
        ({"dp_size": 2, "dp_rank": 2}, "dp_rank=2 of dp_size=2; 0 to 1"),
        ({"pcp_rank": -1}, "pcp_rank=-1"),
        ({"sequence_parallel": True}, "sequence_parallel with tp_size=1"),
        ({"dp_size": 2, "exchange": Exchange.ALL_REDUCE}, "exchange=all_reduce, and ranks have different tokens"),
        ({"tp_size": 2, "exchange": Exchange.ALL_TO_ALL}, "all_to_all without expert parallelism"),
    ],
)
def test_impossible_layouts(facts: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**facts)  # type: ignore[arg-type]


def test_slices_are_whole_units_and_cover_everything() -> None:
    cuts = [ExpertsPart((0,), 4, index).cut(704, 32) for index in range(4)]
    assert cuts == [(0, 192), (192, 192), (384, 160), (544, 160)]
    for size, unit, slices in ((768, 128, 4), (704, 64, 3), (96, 32, 3), (2048, 32, 7), (64, 64, 1)):
        ends = [ExpertsPart((0,), slices, index).cut(size, unit) for index in range(slices)]
        assert [first for first, _ in ends] == [sum(count for _, count in ends[:index]) for index in range(slices)]
        assert sum(count for _, count in ends) == size
        assert {count // unit for _, count in ends} <= {size // unit // slices, size // unit // slices + 1}
        assert all(count % unit == 0 for _, count in ends)
    with pytest.raises(ValueError, match="768 of the experts in 7 slices, which are multiples of 128; up to 6"):
        ExpertsPart((0,), 7, 0).cut(768, 128)


def test_what_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="64 of the experts in 3 slices, which are multiples of 32; up to 2"):
        ParallelLayout(tp_size=3).part_of(8, 64)
    with pytest.raises(ValueError, match="flat_rank=4; 0 to 3"):
        ParallelLayout(tp_size=4).of_rank(4)
    with pytest.raises(ValueError, match="slice=2 of 2"):
        ExpertsPart((0,), 2, 2)


def test_printed() -> None:
    assert str(ParallelLayout()) == "one rank"
    assert str(ParallelLayout(tp_size=2, dp_size=4, expert_parallel=True)) == "tp 2 dp 4 ep"
    assert str(ExpertsPart((4, 5, 6))) == "experts 4..6"
    assert str(ExpertsPart((4, 5, 4), 2, 1)) == "experts 4,5,4, slice 1 of 2"
    assert str(ExpertsPart(())) == "experts none"


@pytest.mark.full
def test_layouts_of_device_meshes() -> None:
    refused = run_ranks(4, "mesh_cases:run")
    assert refused[0] == refused[3]
    order, unknown, unnamed, descending = refused[0]
    assert "dimensions ('tp', 'dp'); some of ('dp', 'pcp', 'tp') in this order" in order
    assert "dimensions ('pp',)" in unknown
    assert "dimensions ()" in unnamed
    assert "[3, 2, 1, 0]; the ranks in ascending order are accepted" in descending
