"""Experts that move between ranks by their load, in real processes."""

from __future__ import annotations

import pytest
from rank_processes import RankProcesses, refuse_failures, run_ranks, shared_files
from sampling import first_of


@pytest.mark.parametrize("ranks", first_of([2, 3], 1))
def test_experts_move_and_results_stay(ranks: int) -> None:
    refuse_failures(run_ranks(ranks, "rebalance_cases:run", ranks))


def test_a_rank_that_ends_half_way_leaves_the_old_placement() -> None:
    with RankProcesses(3, "rebalance_cases:lose_a_rank") as processes:
        first, second, lost = processes.wait(60)
    assert lost.code == -9
    for survivor in (first, second):
        assert survivor.code == 0, survivor.output
        assert "rank 2 has ended" in survivor.result
    assert not shared_files()
