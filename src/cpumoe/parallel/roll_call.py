"""Which ranks are still there when a message of ``torch.distributed`` has failed: its errors name addresses at most."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

#: Seconds in which a rank that works comes to a call: it has met the same failure.
_ANSWER_SECONDS = 3.0

#: Processes that did not come to an earlier call, of a group or of all ranks. Who has named them ends, and the store
#: may end with it: a second call would find others missing.
_gone: set[int] = set()


class RollCall:
    """Through the store that the ranks met in, which lives in the process that started them or in rank 0.

    ``first`` is what the first rank of the group is called.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None, first: int = 0) -> None:
        self._rank, self._size, self._first = rank, size, first
        self._members = [other if group is None else dist.get_global_rank(group, other) for other in range(size)]

    def absent(self) -> str:
        """A sentence about the ranks that have not met a failure: they have ended or hang."""
        missing = self._missing()
        if not missing:
            return "all ranks answer, and do not fit together"
        names = ", ".join(str(self._first + rank) for rank in missing)
        return f"rank {names} does not answer" if len(missing) == 1 else f"ranks {names} do not answer"

    def _missing(self) -> list[int]:
        others = [other for other in range(self._size) if other != self._rank]
        if known := [other for other in others if self._members[other] in _gone]:
            return known
        try:
            store = PrefixStore("cpumoe/roll_call", _get_default_store())
            store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
            store.set(str(self._members[self._rank]), "here")
            until = time.monotonic() + _ANSWER_SECONDS
            while others and time.monotonic() < until:
                others = [other for other in others if not store.check([str(self._members[other])])]
                time.sleep(0.05)
        except (RuntimeError, ValueError):  # the store has gone with the rank that it was in
            return [0]
        _gone.update(self._members[other] for other in others)
        return others
