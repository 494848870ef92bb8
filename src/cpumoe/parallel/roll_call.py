"""Which ranks are still there when a message of ``torch.distributed`` has failed: its errors name addresses at most."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

#: Seconds in which a rank that works comes to a call: it has met the same failure.
_ANSWER_SECONDS = 3.0

#: Between two looks at who has come. Who has found somebody missing stays a few of these longer, so that the others
#: can read it before the store ends with that process.
_LOOK_SECONDS = 0.05
_LOOKS_BEFORE_LEAVING = 4

#: Processes that did not come to an earlier call, of a group or of all ranks. Who has named them ends, and the store
#: may end with it: a second call would find others missing.
_gone: set[int] = set()


class RollCall:
    """Through the store that the ranks met in, which lives in the process that started them or in the first of them.

    Processes are given by their ranks in the world.

    Args:
        caller: this process.
        members: those that are called, the ranks of a group.
        everyone: all ranks of the model, whose places here are what they are called.
    """

    def __init__(self, caller: int, members: Sequence[int], everyone: Sequence[int]) -> None:
        self._caller, self._members, self._everyone = caller, members, everyone

    def absent(self) -> str:
        """A sentence about the ranks that have not met a failure: they have ended or hang."""
        missing = self._missing()
        if not missing:
            return "all ranks answer, and do not fit together"
        names = ", ".join(str(self._everyone.index(process)) for process in missing)
        return f"rank {names} does not answer" if len(missing) == 1 else f"ranks {names} do not answer"

    def _missing(self) -> list[int]:
        if known := self._of_all(_gone):
            return known
        seen = {self._caller}
        missing: list[int] = []
        try:
            store = PrefixStore("cpumoe/roll_call", _get_default_store())
            store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
            store.set(f"here {self._caller}", "")
            for called in (self._members, self._everyone):  # where the group is complete, it has met one from outside
                missing = missing or self._find(store, called, seen)
        except (RuntimeError, ValueError):  # the store has gone with the process that it was in
            missing = [process for process in self._members if process not in seen] if 0 in seen else [0]
        _gone.update(missing)
        return self._of_all(missing)

    def _find(self, store: PrefixStore, called: Sequence[int], seen: set[int]) -> list[int]:
        """Who of those that are called does not come; who does is ``seen``."""
        until = time.monotonic() + _ANSWER_SECONDS
        while (awaited := [process for process in called if process not in seen]) and time.monotonic() < until:
            if store.check(["gone"]) and (told := self._of_all(json.loads(store.get("gone")))):
                return told
            seen.update(process for process in {0, *awaited} - seen if store.check([f"here {process}"]))
            time.sleep(_LOOK_SECONDS)
        if awaited:
            store.set("gone", json.dumps(awaited))
            time.sleep(_LOOK_SECONDS * _LOOKS_BEFORE_LEAVING)
        return awaited

    def _of_all(self, processes: Sequence[int] | set[int]) -> list[int]:
        return [process for process in self._everyone if process in processes]
