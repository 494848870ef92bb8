"""Finds out whether the machine was idle otherwise while something was measured, so that the times can be trusted."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

_STAT = Path("/proc/stat")
# If other programs take a seventh of the time of two CPUs, one of our two threads may lose more than a quarter of its
# own, and the other thread waits for it. And if the quartiles of the times are half a median apart, a comparison may
# come out either way.
_BUSY = 0.15  # of the CPUs' time
_SCATTERED = 0.5  # of the median


class MachineLoad:
    """What other programs do on the CPUs that this process may use, counted from when the object is made."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._start = self._now()

    def taken_by_others(self) -> float | None:
        """Share of the CPUs' time that others used: other programs, or other virtual machines on the same host.

        None if the kernel does not say, or if too little time has passed for the resolution of its clock.
        """
        if self._start is None or (now := self._now()) is None:
            return None
        seconds, busy, own = (after - before for after, before in zip(now, self._start, strict=True))
        available = seconds * len(os.sched_getaffinity(0))
        return max(0.0, busy - own) / available if seconds >= 0.1 else None

    def _now(self) -> tuple[float, float, float] | None:
        """Three times in seconds: the clock, how long our CPUs were busy, and how much of that was this process."""
        tick = os.sysconf("SC_CLK_TCK")
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines()]
            # The columns are user, nice, system, idle, iowait, irq, softirq, steal. All but idle and iowait count.
            busy = sum(sum(map(int, line[1:4])) + sum(map(int, line[6:9])) for line in lines if line[0] in ours)
        except (OSError, ValueError, IndexError):
            return None
        used = time.process_time()
        return (time.perf_counter(), busy / tick, used) if any(line[0] in ours for line in lines) else None


def is_busy(taken: float | None) -> bool:
    """Return whether other programs took so much of the CPUs' time that figures mean little."""
    return taken is not None and taken > _BUSY


def scatter(seconds: Sequence[float]) -> float:
    """Distance between the quartiles of the times, as a share of their median."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return (high - low) / median


def doubt(taken: float | None, *times: Sequence[float]) -> str | None:
    """A warning if the machine was too busy for a comparison of the times to mean anything, else None."""
    if is_busy(taken):
        return (
            f"This machine is busy: other programs took {taken:.0%} of its CPU time meanwhile, so the comparison means "
            "little; try again when it is idle."
        )
    if (worst := max(map(scatter, times))) > _SCATTERED:
        return (
            f"The times scatter: the middle half of them lies {worst:.0%} of the median apart, so the comparison means "
            "little; try again when the machine is idle."
        )
    return None
