"""Brings the processes of a model together: that they are alike, and what they exchange through.

``torch.distributed`` carries what is said here; nothing of it is on the way of a token.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cpumoe import cpu, settings
from cpumoe.errors import RankError
from cpumoe.layers.parallel_layout import ParallelLayout
from cpumoe.ops.exchange import RankExchange, SharedExchange
from cpumoe.parallel.carried import carried_exchange
from cpumoe.parallel.long_work import long_work
from cpumoe.parallel.roll_call import RollCall

_log = logging.getLogger("cpumoe")

#: Of a rank's message that is in shared memory at a time; a longer one goes in pieces. It stays in a core's cache.
_SLOT_BYTES = 1 << 20

_MEMORY_NAME = "cpumoe-ranks"  # as it is shown in /proc/PID/maps


@contextmanager
def coming_together(call: RollCall | None = None) -> Iterator[None]:
    """What torch.distributed says while ranks come together is about ranks; a roll call names those that are gone."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as problem:
        who = "" if call is None else f"; {call.absent()}"
        raise RankError(f"the ranks did not come together{who} ({problem})") from problem


_BETWEEN_SETTINGS = "\x1f"  # the unit separator of ASCII, which is in none of them


def as_one_text(settings: Sequence[str]) -> str:
    """Return settings as a text for :func:`refuse_differences`."""
    return _BETWEEN_SETTINGS.join(settings)


def refuse_differences(what: str, texts: list[str]) -> None:
    """Raise RankError if the texts of all ranks, by rank, are not the same. It names the settings that differ."""
    parts = [text.split(_BETWEEN_SETTINGS) for text in texts]
    if len({len(settings) for settings in parts}) == 1:  # another version may have more of them
        differing = [number for number, values in enumerate(zip(*parts, strict=True)) if len(set(values)) > 1]
        parts = [[settings[number] for number in differing] for settings in parts]
    texts = [", ".join(settings) for settings in parts]
    usual = max(texts, key=texts.count)  # the first such one: all ranks say the same
    for rank, text in enumerate(texts):
        if text != usual:
            other = texts.index(usual)
            raise RankError(
                f"the {what} of rank {rank} is {text!r}, and that of rank {other} is {usual!r}; one for all is accepted"
            )


def _arithmetic() -> list[str]:
    """Return what the last bits of results depend on besides versions.

    Ranks compute routers, norms and logits of the same tokens each for itself: with other last bits they may choose
    other experts and other tokens. All our kernels have the same bits except for the bf16 tiles of AMX.
    """
    tiles = "without" if cpu.has_portable_floats() else "with"
    return [
        f"bf16 products {tiles} AMX tiles (CPUMOE_ISA)",
        f"PyTorch's kernels for {torch.backends.cpu.get_cpu_capability()} (ATEN_CPU_CAPABILITY)",
    ]


@dataclass(frozen=True)
class Meeting:
    """The processes of a group, which come together; each of them calls the same in the same order.

    Attributes:
        group: of ``torch.distributed``; None is the default one.
        timeout: seconds after which a rank that gives nothing is an error.
        outer: that of all ranks, of which these are some.
    """

    group: dist.ProcessGroup | None
    timeout: float
    outer: Meeting | None = None

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def members(self) -> list[int]:
        """Their ranks in the world."""
        return [rank if self.group is None else dist.get_global_rank(self.group, rank) for rank in range(self.size)]

    @property
    def first(self) -> int:
        """What the first of the group is called: groups inside of a layout have the numbers of all ranks."""
        return 0 if self.outer is None else self.outer.members.index(self.members[0])

    def long_work(self, check: Callable[[], None]) -> AbstractContextManager[None]:
        """Ends when all have come to its end; see :func:`cpumoe.parallel.long_work.long_work`."""
        return long_work(self.members, self.rank, self.timeout, self.first, check)

    def agree_on_layout(self, layout: ParallelLayout) -> None:
        """Raise RankError on every rank if one runs another version or arithmetic, or has another layout or timeout."""
        from cpumoe import __version__

        said = [
            f"cpumoe {__version__}",
            f"torch {torch.__version__}",
            f"layout {layout.of_rank(0)!r}",
            f"timeout {self.timeout}",
            *_arithmetic(),
        ]
        texts: list[str] = [""] * self.size
        with coming_together(self._call()):
            dist.all_gather_object(texts, as_one_text(said), group=self.group)
        refuse_differences("version and layout", texts)

    def exchange(self) -> RankExchange:
        """What these ranks exchange through: memory that all of them share, else messages of ``torch.distributed``."""
        with coming_together(self._call()):
            shared = self.shared_exchange()
        return carried_exchange(self.rank, self.size, self.group, self._call()) if shared is None else shared

    def inner(self, first: int, size: int, timeout: float) -> Meeting:
        """That of ``size`` consecutive ranks of this one, of which this process is one.

        Each process takes part in its own alone, so that others of the world need not know of it.
        """
        members = self.members
        with coming_together(self._call()):
            group = dist.new_group(
                members[first : first + size], timeout=timedelta(seconds=timeout), use_local_synchronization=True
            )
        return Meeting(group, timeout, self)

    def _call(self) -> RollCall:
        members = self.members
        return RollCall(members[self.rank], members, members if self.outer is None else self.outer.members)

    def shared_exchange(self) -> SharedExchange | None:
        """Return the exchange through memory that all ranks share; None, on all of them, if one cannot open it.

        The memory is a memfd of the first rank, which the others open below /proc. It has no name in a file system, so
        that nothing is left of it when processes are killed.
        """
        rank, size, group = self.rank, self.size, self.group
        shared, told, problem = None, None, None if settings.SHARED_MEMORY.is_on() else "it is switched off"
        if rank == 0 and problem is None:
            name = f"{_MEMORY_NAME}-{secrets.token_hex(8)}"
            try:
                shared = os.memfd_create(name, os.MFD_CLOEXEC)
                os.posix_fallocate(shared, 0, SharedExchange.file_bytes(size, _SLOT_BYTES))
                told = (f"/proc/{os.getpid()}/fd/{shared}", name)
            except OSError as error:
                problem = f"shared memory: {error.strerror}"
        exchange = None
        try:
            said: list[tuple[str, str] | None] = [told]
            dist.broadcast_object_list(said, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
            if said[0] is not None and problem is None:
                try:
                    descriptor = _open_memory(*said[0])
                    try:
                        exchange = SharedExchange(descriptor, rank, size, _SLOT_BYTES, self.timeout, self.first)
                    finally:
                        os.close(descriptor)
                except (OSError, ValueError, RankError) as error:
                    problem = str(error)
            elif problem is None:
                problem = "rank 0 has no shared memory"
            problems: list[str | None] = [None] * size
            dist.all_gather_object(problems, problem, group=group)
        finally:
            if shared is not None:
                os.close(shared)
        found = [(index, text) for index, text in enumerate(problems) if text is not None]
        if found:
            _log.info(
                "ranks exchange through torch.distributed (%s): rank %d shares no memory with the others: %s",
                dist.get_backend(group),
                self.first + found[0][0],
                found[0][1],
            )
            return None
        return exchange


def _open_memory(path: str, name: str) -> int:
    """Open a memfd of another process by its path below /proc. Raises OSError, also if that is another file.

    On another machine or in another container, the process may be any other one.
    """
    expected = Path(f"/memfd:{name} (deleted)")
    if Path(path).readlink() != expected:
        raise OSError(f"{path} is not the shared memory of rank 0")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if Path(f"/proc/self/fd/{descriptor}").readlink() != expected:  # replaced in between
        os.close(descriptor)
        raise OSError(f"{path} is not the shared memory of rank 0")
    return descriptor
