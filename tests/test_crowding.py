"""Fewer threads while other programs use the cores, with invented clocks and delays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tiny_architectures import write_float

import cpumoe
from cpumoe import crowding
from cpumoe.crowding import TeamSize, fewer_threads_when_crowded, make_room


class Machine:
    """Threads that wait for a core for a share of the time."""

    def __init__(self, threads: int) -> None:
        self.now = 0.0
        self.delays = dict.fromkeys(range(threads), 0.0)

    def pass_by(self, seconds: float, *shares: float) -> None:
        self.now += seconds
        for thread, share in enumerate(shares):
            self.delays[thread] += seconds * share

    def team(self, threads: int) -> TeamSize:
        return TeamSize(threads, lambda: dict(self.delays), lambda: self.now)


def test_one_thread_less_for_each_that_waits() -> None:
    machine = Machine(4)
    size = machine.team(4)
    machine.pass_by(1.0, 0.1, 0.1, 0.1, 0.1)
    assert size.update() == 4
    machine.pass_by(1.0, 0.0, 0.5)
    assert size.update() == 3
    machine.pass_by(1.0, 0.5, 0.5, 0.5)
    assert size.update() == 1
    machine.pass_by(1.0, 0.9)
    assert size.update() == 1


def test_one_slice_is_no_crowd() -> None:
    machine = Machine(2)
    size = machine.team(2)
    machine.pass_by(0.004, 1.0)
    assert size.update() == 2
    machine.pass_by(0.05)
    assert size.update() == 2


def test_all_are_tried_again_and_more_seldom_each_time() -> None:
    machine = Machine(2)
    size = machine.team(2)
    pauses = []
    for _ in range(8):
        machine.pass_by(0.125, 0.9, 0.9)
        assert size.update() == 1
        began = machine.now
        while size.update() == 1:
            machine.pass_by(0.25, 0.0)
        pauses.append(machine.now - began)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0, 32.0]
    for _ in range(100):  # all of them work for long
        machine.pass_by(1.0, 0.0, 0.0)
        assert size.update() == 2
    machine.pass_by(1.0, 0.9, 0.9)
    assert size.update() == 1
    machine.pass_by(1.0)
    assert size.update() == 2  # it begins anew
    machine.pass_by(1.0, 0.9)
    assert size.update() == 1
    for _ in range(50):
        machine.pass_by(1.0, 0.9)
        assert size.update() == 1  # one still waits: there is no room for two


def test_without_a_report() -> None:
    size = TeamSize(2, dict, iter(range(100)).__next__)
    assert [size.update() for _ in range(5)] == [2] * 5


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count")
def test_linux_reports_delays() -> None:
    delays = crowding._seconds_without_core()
    assert os.getpid() in delays
    assert all(delay >= 0 for delay in delays.values())


def test_quantize_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads always wait: PyTorch gets one for nearly all of the work, and all again at the end."""
    source = write_float(tmp_path / "float", "qwen3_moe")
    monkeypatch.setattr(crowding, "_WINDOW_SECONDS", 0.0)
    ticks = iter(range(1, 1_000_000))
    monkeypatch.setattr(crowding, "_seconds_without_core", lambda: dict.fromkeys((1, 2), 1e3 * next(ticks)))
    seen = []
    stock = torch.set_num_threads
    before = torch.get_num_threads()
    try:
        stock(3)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: (seen.append(count), stock(count)))
        cpumoe.quantize_checkpoint(source, tmp_path / "quantised", "w4a8-g32")
        assert seen == [1, 3]
    finally:
        stock(before)


def test_only_inside() -> None:
    before = torch.get_num_threads()
    make_room()
    with fewer_threads_when_crowded():
        make_room()
    assert torch.get_num_threads() == before
