"""Whether the machine is quiet enough for a comparison of times."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpumoe.bench.machine_load import MachineLoad, doubt, scatter
from cpumoe.cli import main

BURN = "import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: pass"


@contextmanager
def busy_machine() -> Iterator[None]:
    burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def test_other_programs_are_seen() -> None:
    with busy_machine():
        time.sleep(0.3)
        load = MachineLoad()
        time.sleep(1)
        taken = load.taken_by_others()
    assert taken is not None and taken > 0.5
    said = doubt(taken, [1.0, 1.0, 1.0])
    assert said is not None and f"other programs took {taken:.0%} of its CPU time" in said


def test_our_own_work_is_not_others() -> None:
    """On a machine with nothing else to do all of the time is ours; here others may run, and take what they take."""
    load = MachineLoad()
    end = time.monotonic() + 0.5
    own = time.process_time()
    while time.monotonic() < end:
        pass
    own = time.process_time() - own
    taken = load.taken_by_others()
    share = own / 0.5 / len(os.sched_getaffinity(0))
    assert taken is not None and taken + share < 1.15


def test_a_kernel_that_does_not_tell(tmp_path: Path) -> None:
    for content in ("", "cpu 1 2 3\n", "cpu0 x\n", "nonsense\n"):
        (tmp_path / "stat").write_text(content)
        load = MachineLoad(tmp_path / "stat")
        assert load.taken_by_others() is None
    assert MachineLoad(tmp_path / "missing").taken_by_others() is None
    assert doubt(None, [1.0, 1.1, 0.9, 1.0]) is None


def test_times_that_scatter() -> None:
    quiet, restless = [1.0, 1.01, 0.99, 1.02, 1.0], [1.0, 3.0, 0.9, 2.8, 1.1]
    assert scatter(quiet) < 0.05 < 1 < scatter(restless)
    assert doubt(0.01, quiet) is None
    said = doubt(0.01, quiet, restless)
    assert said is not None and "The times scatter" in said and f"{scatter(restless):.0%}" in said


@pytest.mark.full
def test_demo_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with busy_machine():
        assert main(["demo", "--layer", "--experts", "8"]) == 0
    assert "This machine is busy: other programs took" in capsys.readouterr().out
