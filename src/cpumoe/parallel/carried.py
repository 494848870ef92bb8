"""What ranks give each other, carried by ``torch.distributed``: for ranks on several machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cpumoe.errors import RankError
from cpumoe.ops.exchange import CarriedExchange

#: Seconds in which a rank that works answers when it is asked whether it is there.
_ANSWER_SECONDS = 5.0


def carried_exchange(rank: int, size: int, group: dist.ProcessGroup | None) -> CarriedExchange:
    """The exchange of a process group's ranks."""
    carrier = _Carrier(rank, size, group)
    named = carrier.naming_who_fails
    return CarriedExchange(
        rank, size, named(carrier.gather), named(carrier.trade), named(carrier.sum), named(carrier.largest)
    )


class _Carrier:
    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self._rank, self._size, self._group = rank, size, group

    def gather(self, mine: memoryview, sizes: Sequence[int], everything: memoryview) -> None:
        if not any(sizes):
            return
        # Collectives take parts of equal sizes; trades do not.
        copies = _tensor(mine).repeat(self._size)
        self._trade(copies, [sizes[self._rank]] * self._size, _tensor(everything), sizes)

    def trade(self, mine: memoryview, sizes: Sequence[int], everything: memoryview, given: Sequence[int]) -> None:
        self._trade(_tensor(mine), sizes, _tensor(everything), given)

    def _trade(self, mine: Tensor, sizes: Sequence[int], everything: Tensor, given: Sequence[int]) -> None:
        dist.all_to_all_single(everything, mine, list(given), list(sizes), group=self._group)

    def sum(self, values: memoryview) -> None:
        self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: memoryview) -> None:
        self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: memoryview, operation: Any) -> None:
        if len(values):
            dist.all_reduce(_tensor(values).view(torch.float32), operation, group=self._group)

    def naming_who_fails(self, carry: Callable[..., None]) -> Callable[..., None]:
        """Errors of torch.distributed name addresses, if anything; these name the rank."""

        @wraps(carry)
        def named(*arguments: Any) -> None:
            try:
                carry(*arguments)
            except RuntimeError as problem:
                missing = self._missing()
                who = f"rank {missing[0]} does not answer" if missing else "the ranks do not fit together"
                raise RankError(f"{who} ({problem})") from problem

        return named

    def _missing(self) -> list[int]:
        """Ranks that do not answer: they have ended or hang."""
        asked = []
        for other in range(self._size):
            if other == self._rank:
                continue
            there = other if self._group is None else dist.get_global_rank(self._group, other)
            try:
                asked.append((other, dist.irecv(torch.empty(1), there, group=self._group, tag=_ASKING)))
                dist.isend(torch.zeros(1), there, group=self._group, tag=_ASKING)
            except RuntimeError:
                asked.append((other, None))
        missing = []
        for other, answer in asked:
            try:
                if answer is None:
                    raise RuntimeError("no connection")
                answer.wait(timedelta(seconds=_ANSWER_SECONDS))
            except RuntimeError:
                missing.append(other)
        return missing


_ASKING = 7919  # a tag that nothing else has


def _tensor(view: memoryview) -> Tensor:
    if len(view) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8)
