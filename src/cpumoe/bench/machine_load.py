"""Whether the machine was quiet while something was measured: what other programs computed, and how times scattered."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

_STAT = Path("/proc/stat")
# Others that take a seventh of the CPUs' time cost one of two threads more than a quarter of its own, and the other
# thread waits for it. Times whose quartiles are half a median apart would let a comparison come out either way.
_BUSY = 0.15  # of the CPUs' time
_SCATTERED = 0.5  # of the median


class MachineLoad:
    """What goes on besides this process on the CPUs that it may use, from when it is made on."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._start = self._now()

    def taken_by_others(self) -> float | None:
        """Share of the CPUs' time that was not idle and not ours: other programs, or (stolen) other machines.

        None where the kernel does not tell, or too little time has passed for its clock.
        """
        if self._start is None or (now := self._now()) is None:
            return None
        seconds, busy, own = (after - before for after, before in zip(now, self._start, strict=True))
        available = seconds * len(os.sched_getaffinity(0))
        return max(0.0, busy - own) / available if seconds >= 0.1 else None

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds: the time, what our CPUs were not idle for, and what we used of that."""
        tick = os.sysconf("SC_CLK_TCK")
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines()]
            # user, nice, system, idle, iowait, irq, softirq, steal: all but the two kinds of idling
            busy = sum(sum(map(int, line[1:4])) + sum(map(int, line[6:9])) for line in lines if line[0] in ours)
        except (OSError, ValueError, IndexError):
            return None
        used = time.process_time()
        return (time.perf_counter(), busy / tick, used) if any(line[0] in ours for line in lines) else None


def scatter(seconds: Sequence[float]) -> float:
    """Distance of the quartiles of some times, as a share of their median."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return (high - low) / median


def doubt(taken: float | None, *times: Sequence[float]) -> str | None:
    """A sentence, if the times were measured on a machine too busy for a comparison to mean anything."""
    if taken is not None and taken > _BUSY:
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
