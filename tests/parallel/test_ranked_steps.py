"""A server's steps on real processes: groups of ranks with requests of their own, against one process."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from rank_processes import RankProcesses, refuse_failures, run_ranks, shared_files
from sampling import first_of
from tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), moe_intermediate_size=64)  # of which two have slices


@pytest.mark.parametrize(
    ("ranks", "name", "shared"),
    first_of(
        [
            (2, "tp ep", "1"),
            (2, "dp ep", "1"),
            (2, "dp ep", "0"),
            (2, "dp", "1"),
            (4, "tp dp ep", "1"),
            (4, "tp dp ep by expert", "1"),
        ],
        2,
    ),
)
def test_answers_are_those_of_one_process(ranks: int, name: str, shared: str, folder: Path) -> None:
    environment = {"CPUMOE_SHARED_MEMORY": shared}
    first, *others = run_ranks(ranks, "step_cases:serve", str(folder), name, environment=environment)
    refuse_failures([first["outcomes"]])
    for other in others:
        assert len(other["rows"]) == len(first["rows"])  # all take part in every step
    if "dp" in name:
        last = others[-1]["rows"]
        assert any(a and not b for a, b in zip(first["rows"], last, strict=True))  # one group helps the other
        assert any(a and b for a, b in zip(first["rows"], last, strict=True))
        assert others[-2 if ranks == 4 else -1]["rows"] == last  # a tensor parallel group has the same rows
    assert not shared_files()


@pytest.mark.parametrize(
    ("ranks", "name", "shared"), first_of([(2, "dp ep", "1"), (4, "tp dp ep", "1"), (4, "tp dp ep", "0")], 1)
)
def test_a_rank_is_lost_in_a_step(ranks: int, name: str, shared: str, folder: Path) -> None:
    """Requests fail, and all other ranks say which one it was; without shared memory perhaps also who waits for it."""
    doomed, environment = ranks - 1, {"CPUMOE_SHARED_MEMORY": shared}
    with RankProcesses(ranks, "step_cases:lose_a_rank", str(folder), name, environment=environment) as processes:
        processes.wait_for(0, "at steps")
        processes.signal(doomed, signal.SIGKILL)
        leader, *others = processes.wait(60)
    assert leader.code == 0, leader.output
    lost, *told = leader.result
    named = re.compile(rf"ranks? ([0-9, ]*\b)?{doomed}\b")
    assert named.search(lost), lost
    assert all("could not compute" in sentence for sentence in told)
    for other in others[:-1]:
        assert other.code > 0
        assert named.search(other.output.splitlines()[-1]), other.output
    assert not shared_files()
