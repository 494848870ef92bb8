"""What ranks give each other, carried by ``torch.distributed``: for ranks on several machines."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cpumoe.errors import RankError
from cpumoe.ops.exchange import CarriedExchange
from cpumoe.parallel.roll_call import RollCall

#: Up to so many values every rank adds all; of more each adds a part, and all get what the others have added.
_FEW_VALUES = 16384

_CPU = torch.device("cpu")  # whatever the default is

#: Those of this process. If a message of one fails, ranks may wait in another one for what will not come.
_carriers: weakref.WeakSet[_Carrier] = weakref.WeakSet()


def carried_exchange(rank: int, size: int, group: dist.ProcessGroup | None, call: RollCall) -> CarriedExchange:
    """The exchange of a process group's ranks; where one fails, a call says which."""
    carrier = _Carrier(rank, size, group, call)
    named = carrier.naming_who_fails
    return CarriedExchange(
        rank, size, named(carrier.gather), named(carrier.trade), named(carrier.sum), named(carrier.largest)
    )


class _Carrier:
    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None, call: RollCall) -> None:
        self._rank, self._size, self._group = rank, size, group
        self._call = call
        _carriers.add(self)

    def gather(self, mine: memoryview, sizes: Sequence[int], everything: memoryview) -> None:
        if any(sizes):
            self._gather(_tensor(mine), sizes, _tensor(everything))

    def _gather(self, mine: Tensor, sizes: Sequence[int], everything: Tensor) -> None:
        # Collectives take parts of equal sizes; trades do not.
        self._trade(mine.repeat(self._size), [sizes[self._rank]] * self._size, everything, sizes)

    def trade(self, mine: memoryview, sizes: Sequence[int], everything: memoryview, given: Sequence[int]) -> None:
        self._trade(_tensor(mine), sizes, _tensor(everything), given)

    def _trade(self, mine: Tensor, sizes: Sequence[int], everything: Tensor, given: Sequence[int]) -> None:
        dist.all_to_all_single(everything, mine, list(given), list(sizes), group=self._group)

    def sum(self, values: memoryview) -> None:
        self._fold(values, torch.Tensor.add_)

    def largest(self, values: memoryview) -> None:
        self._fold(values, _keep_larger_)

    def _fold(self, values: memoryview, take: Callable[[Tensor, Tensor], object]) -> None:
        """In the order of the ranks, which all_reduce does not keep: the bits are those of shared memory."""
        mine = _tensor(values).view(torch.float32)
        if len(mine) == 0:
            return
        few = len(mine) <= _FEW_VALUES
        sizes = [len(part) for part in mine.tensor_split(self._size)]
        own = len(mine) if few else sizes[self._rank]
        theirs = torch.empty(self._size * own, device=_CPU)
        if few:
            self._gather(mine, [own] * self._size, theirs)
        else:
            self._trade(mine, sizes, theirs, [own] * self._size)
        first, *others = theirs.view(self._size, own)
        for other in others:
            take(first, other)
        if few:
            mine.copy_(first)
        else:
            self._gather(first, sizes, mine)

    def hang_up(self) -> None:
        """Closes the connections to the other ranks."""
        group = dist.group.WORLD if self._group is None else self._group
        if group is not None:
            group.abort()

    def naming_who_fails(self, carry: Callable[..., None]) -> Callable[..., None]:
        """Errors of torch.distributed name addresses, if anything; these name the rank."""

        @wraps(carry)
        def named(*arguments: Any) -> None:
            try:
                carry(*arguments)
            except RuntimeError as problem:
                for carrier in _carriers:
                    carrier.hang_up()  # those who wait here come to the call
                raise RankError(f"{self._call.absent()} ({problem})") from problem

        return named


def _keep_larger_(values: Tensor, others: Tensor) -> None:
    """NaN counts for nothing, and of equal values the first is kept."""
    values.copy_(torch.where((others > values) | values.isnan(), others, values))


def _tensor(view: memoryview) -> Tensor:
    if len(view) == 0:
        return torch.empty(0, dtype=torch.uint8, device=_CPU)
    return torch.frombuffer(view, dtype=torch.uint8)
