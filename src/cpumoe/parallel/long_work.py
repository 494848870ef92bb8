"""Work that takes some ranks much longer than others, such as reading their parts of a checkpoint.

Whoever is done waits for the others for as long as these show signs of life: a rank that reads for minutes exchanges
nothing meanwhile, and is not lost. The signs go through the store that the ranks met in.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from cpumoe.errors import RankError

_SIGN_SECONDS = 0.5
_LOOK_SECONDS = 0.02

_begun: Counter[tuple[int, ...]] = Counter()  # by members: what one group has done before is not taken for its next


@contextmanager
def long_work(
    members: Sequence[int], rank: int, timeout: float, first: int, check: Callable[[], None]
) -> Iterator[None]:
    """Ends when all members have come to its end.

    Args:
        members: their numbers in the world, of which ``rank`` is the place of this one.
        timeout: seconds without a sign of life after which a rank is an error.
        first: what the first member is called in messages.
        check: raises if it is known otherwise that a member has gone.
    """
    _begun[tuple(members)] += 1
    name = "-".join(map(str, members))
    store = PrefixStore(f"cpumoe/long_work/{name}/{_begun[tuple(members)]}", _get_default_store())
    over = threading.Event()
    signs = threading.Thread(target=_give_signs, args=(store, rank, over), name="cpumoe-signs", daemon=True)
    signs.start()
    try:
        yield
        try:
            store.set(f"done {rank}", "")
            _await_others(store, [other for other in range(len(members)) if other != rank], timeout, first, check)
        except RankError:
            raise
        except RuntimeError as problem:  # of the store
            raise RankError(f"the ranks did not come together ({problem})") from problem
    finally:
        over.set()
        signs.join()


def _give_signs(store: PrefixStore, rank: int, over: threading.Event) -> None:
    count = 0
    with suppress(RuntimeError):  # the store is gone, as the others will find
        while not over.is_set():
            count += 1
            store.set(f"sign {rank}", str(count))
            over.wait(_SIGN_SECONDS)


def _await_others(store: PrefixStore, others: list[int], timeout: float, first: int, check: Callable[[], None]) -> None:
    """Looks until all others are done."""
    now = time.monotonic()
    signs = dict.fromkeys(others, (b"", now))  # the last one of each, and when it was new
    while others:
        check()
        others = [other for other in others if not store.check([f"done {other}"])]
        now = time.monotonic()
        for other in others:
            sign = store.get(f"sign {other}") if store.check([f"sign {other}"]) else b""
            if sign != signs[other][0]:
                signs[other] = sign, now
            elif now - signs[other][1] > timeout:
                raise RankError(f"rank {first + other} has shown no sign of life for {timeout:g} s")
        time.sleep(_LOOK_SECONDS)
