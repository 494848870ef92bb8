"""Fewer threads for PyTorch's operators while other programs use the cores.

The threads of an OpenMP team wait for each other at the end of every operator. If one of them has to share its core,
all wait until the scheduler gives it a turn, and the others spin meanwhile, which costs them their own next turn:
quantising a small model took fifty times as long on two cores with four busy programs. One thread waits for no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch

_TASKS = Path("/proc/self/task")
_WINDOW_SECONDS = 0.05
_CROWDED = 0.2  # of the time, waiting for a core
_LEAST_PAUSE, _MOST_PAUSE = 1.0, 32.0


class TeamSize:
    """Chooses the number of threads of PyTorch's operators by how long threads wait for a core.

    Args:
        threads: the number to use while no thread waits.
        delays: returns the seconds that each thread of this process has waited for a core while it could run; None:
            what Linux reports. Without such a report the number stays the same.
        clock: returns seconds.
    """

    def __init__(
        self,
        threads: int,
        delays: Callable[[], dict[int, float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._all = self.threads = threads
        self._delays = _seconds_without_core if delays is None else delays
        self._clock = clock
        self._since, self._before = clock(), self._delays()
        self._pause, self._retry, self._raised = _LEAST_PAUSE, 0.0, self._since

    def update(self) -> int:
        """Return the number of threads to use from now on. Costs a look at the clock, mostly."""
        now = self._clock()
        passed = now - self._since
        if self._all == 1 or passed < _WINDOW_SECONDS:
            return self.threads
        delays = self._delays()
        shares = [(delay - self._before.get(thread, 0.0)) / passed for thread, delay in delays.items()]
        crowded = sum(share > _CROWDED for share in shares)
        self._since, self._before = now, delays
        if crowded and self.threads > 1:
            # The longer it lasts, the more seldom all are tried again.
            lasted = self.threads == self._all and now - self._raised > 2 * self._pause
            self._pause = _LEAST_PAUSE if lasted else min(2 * self._pause, _MOST_PAUSE)
            self._retry = now + self._pause
            self.threads = max(1, self.threads - crowded)
        elif not crowded and self.threads < self._all and now >= self._retry:
            self.threads, self._raised = self._all, now
        return self.threads


_team_size: ContextVar[TeamSize | None] = ContextVar("cpumoe_team_size", default=None)


@contextmanager
def fewer_threads_when_crowded() -> Iterator[None]:
    """Let :func:`make_room` lower the number of PyTorch's threads inside; it is restored at the end."""
    before = torch.get_num_threads()
    token = _team_size.set(TeamSize(before))
    try:
        yield
    finally:
        _team_size.reset(token)
        torch.set_num_threads(before)


def make_room() -> None:
    """Use as many threads for the next operators as the machine has cores for. Called between pieces of long work."""
    size = _team_size.get()
    if size is not None and size.threads != (threads := size.update()):
        torch.set_num_threads(threads)


def _seconds_without_core() -> dict[int, float]:
    """Return how long each thread of this process has waited for a core while it could run; empty if unknown."""
    found: dict[int, float] = {}
    try:
        tasks = list(_TASKS.iterdir())
    except OSError:
        return found
    for task in tasks:
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):  # the thread has ended, or the kernel does not count
            continue
    return found
