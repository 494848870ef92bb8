"""The processes that a model is spread over, as one of them sees them.

``torch.distributed`` brings them together (``torchrun`` starts them) and carries what they give each other, unless all
of them are on one machine and share memory: what is exchanged for every layer of every token then goes through that,
in about a microsecond where sockets take more than a hundred.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from cpumoe.errors import RankError
from cpumoe.layers.parallel_layout import ParallelLayout
from cpumoe.ops.exchange import RankExchange, SharedExchange, number_exchange
from cpumoe.parallel.carried import carried_exchange
from cpumoe.parallel.roll_call import RollCall

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("cpumoe")

#: Seconds after which a rank that gives nothing is given up.
DEFAULT_TIMEOUT = 60.0

#: Of a rank's message that is in shared memory at a time; a longer one goes in pieces. It stays in a core's cache.
_SLOT_BYTES = 1 << 20

_CPU = torch.device("cpu")  # whatever the default is: models are made on another one before they are loaded

_SHARED_FOLDER = Path("/dev/shm")
_SWITCH = "CPUMOE_SHARED_MEMORY"


class Ranks:
    """A layout, and what its ranks exchange. Made by :meth:`join`, or :meth:`alone`.

    Attributes:
        layout: as this rank has it.
        exchange: of all ranks; None if there is one.
        number: of the exchange, for operators; 0 if there is none.
    """

    def __init__(self, layout: ParallelLayout, exchange: RankExchange | None) -> None:
        self.layout = layout
        self.exchange = exchange
        self.number = 0 if exchange is None else number_exchange(exchange)

    @classmethod
    def alone(cls) -> Ranks:
        """No parallelism."""
        return cls(ParallelLayout(), None)

    @classmethod
    def join(
        cls,
        layout: ParallelLayout | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Ranks:
        """Joins the ranks of a process group; every one of them has to call it.

        Args:
            layout: with the sizes; which rank this is, the group says. None: tensor parallel over all of them.
            group: None takes the default group, which is made (gloo) from what ``torchrun`` has put into the
                environment if there is none yet.
            timeout: seconds after which a rank that gives nothing is an error on all others.
        """
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout={timeout}; a number of seconds above 0 is accepted")
        _wants_shared_memory()
        if group is None and not dist.is_initialized():
            if not dist.is_torchelastic_launched() and "RANK" not in os.environ:
                if layout is None or layout.flat_size == 1:
                    return cls.alone()
                raise ValueError(
                    f"the layout {layout} has {layout.flat_size} ranks, and this is one process; "
                    f"torchrun --nproc-per-node {layout.flat_size} starts as many"
                )
            with _coming_together():
                dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
            atexit.register(_leave)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        layout = ParallelLayout(tp_size=size) if layout is None else layout
        if size > 1:  # before any of them refuses it: the others would wait for that one
            with _coming_together(RollCall(rank, size, group)):
                _agree_on_layout(layout, timeout, size, group)
        if layout.flat_size != size:
            raise ValueError(f"the layout {layout} has {layout.flat_size} ranks, and the process group has {size}")
        layout = layout.of_rank(rank)
        if size == 1:
            return cls(layout, None)
        with _coming_together(RollCall(rank, size, group)):
            shared = _shared_exchange(rank, size, timeout, group)
        return cls(layout, carried_exchange(rank, size, group) if shared is None else shared)

    def __deepcopy__(self, _: object) -> Ranks:
        """Copies of a module are of the same ranks."""
        return self

    def __bool__(self) -> bool:
        """Whether there is more than one."""
        return self.exchange is not None

    @property
    def rank(self) -> int:
        return self.layout.flat_rank

    @property
    def size(self) -> int:
        return self.layout.flat_size

    # ---- messages ----------------------------------------------------------------------------------------------------

    def gather(self, mine: Tensor) -> list[Tensor]:
        """A tensor [n, ...] of every rank, of which n may differ, by rank."""
        if self.exchange is None:
            return [mine]
        counts = self.gather_numbers([mine.shape[0]])
        return self.gather_parts(mine, [count for (count,) in counts])

    def gather_parts(self, mine: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The same where it is known how long each is."""
        if self.exchange is None:
            return [mine]
        row = _row_bytes(mine)
        whole = torch.empty((sum(counts), *mine.shape[1:]), dtype=mine.dtype, device=_CPU)
        self.exchange.gather(_bytes_of(mine), [count * row for count in counts], _bytes_of(whole))
        return list(whole.split(list(counts)))

    def gather_numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """As many integers of every rank, by rank."""
        if self.exchange is None:
            return [list(mine)]
        own = torch.tensor(mine, dtype=torch.int64, device=_CPU)
        whole = torch.empty((self.size, len(mine)), dtype=torch.int64, device=_CPU)
        self.exchange.gather(_bytes_of(own), [own.numel() * 8] * self.size, _bytes_of(whole))
        return whole.tolist()

    def trade(self, mine: Tensor, counts: Sequence[int], given: Sequence[int]) -> Tensor:
        """``counts[r]`` rows of ``mine`` go to rank r, which gives ``given[r]``; those come one behind the other."""
        assert self.exchange is not None
        row = _row_bytes(mine)
        whole = torch.empty((sum(given), *mine.shape[1:]), dtype=mine.dtype, device=_CPU)
        self.exchange.trade(_bytes_of(mine), [n * row for n in counts], _bytes_of(whole), [n * row for n in given])
        return whole

    def broadcast(self, values: Tensor) -> Tensor:
        """The tensor of the first rank on all of them; others give one of the same shape and dtype."""
        if self.exchange is None:
            return values
        counts = [len(values), *[0] * (self.size - 1)]
        return self.gather_parts(values if self.rank == 0 else values[:0], counts)[0]

    def sum_(self, values: Tensor) -> Tensor:
        """Adds fp32 values over all ranks, in place; the same bits on each of them."""
        if self.exchange is not None:
            self.exchange.sum(values.view(-1))
        return values

    def agree(self, what: str, value: str) -> None:
        """Raises RankError on every rank if this text is not the same on all of them."""
        if self.exchange is None:
            return
        own = torch.frombuffer(bytearray(value.encode() or b" "), dtype=torch.uint8)
        texts = [bytes(text.numpy().tobytes()).decode().strip() for text in self.gather(own)]
        _refuse_differences(what, texts)

    # ---- ranks that do not go on -------------------------------------------------------------------------------------

    def fail(self, problem: BaseException) -> None:
        """Tells the others that this rank will not go on, so that they need not wait for it.

        Where messages go through ``torch.distributed`` they learn it when the process ends.
        """
        if self.exchange is not None:
            self.exchange.fail(f"{type(problem).__name__}: {problem}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do together: if it raises here, the others get a RankError instead of waiting.

        What they exchange ends with it. Errors that all ranks have alike, and may go on after, do not belong inside.
        """
        try:
            yield
        except BaseException as problem:
            self.fail(problem)
            raise

    def check(self) -> None:
        """Raises RankError if it is known that another rank has ended or failed; for work that exchanges nothing."""
        if self.exchange is not None:
            self.exchange.check()


def _leave() -> None:
    """Ends the group that was made here: a process that ends with threads of gloo in it may be aborted."""
    if dist.is_initialized():
        dist.destroy_process_group()


_MESH_ORDER = ("dp", "pcp", "tp")


def layout_of_mesh(mesh: DeviceMesh, *, expert_parallel: bool = False) -> ParallelLayout:
    """The layout of a device mesh with dimensions ``dp``, ``pcp`` and ``tp``, in this order; some may be left out."""
    names = tuple(mesh.mesh_dim_names or ())
    if not names or names != tuple(name for name in _MESH_ORDER if name in names):
        raise ValueError(f"the mesh has dimensions {names}; some of {_MESH_ORDER} in this order are accepted")
    if mesh.mesh.flatten().tolist() != list(range(mesh.size())):
        raise ValueError(f"the mesh is {mesh.mesh.tolist()}; the ranks in ascending order are accepted")
    dp, pcp, tp = (mesh.shape[names.index(name)] if name in names else 1 for name in _MESH_ORDER)
    layout = ParallelLayout(tp_size=tp, dp_size=dp, pcp_size=pcp, expert_parallel=expert_parallel)
    return layout.of_rank(mesh.get_rank())


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


@contextmanager
def _coming_together(call: RollCall | None = None) -> Iterator[None]:
    """What torch.distributed says while ranks come together is about ranks; a roll call names those that are gone."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as problem:
        who = "" if call is None else f"; {call.absent()}"
        raise RankError(f"the ranks did not come together{who} ({problem})") from problem


def _agree_on_layout(layout: ParallelLayout, timeout: float, size: int, group: dist.ProcessGroup | None) -> None:
    from cpumoe import __version__

    said = f"cpumoe {__version__}, torch {torch.__version__}, layout {layout.of_rank(0)!r}, timeout {timeout}"
    texts: list[str] = [""] * size
    dist.all_gather_object(texts, said, group=group)
    _refuse_differences("version and layout", texts)


def _refuse_differences(what: str, texts: list[str]) -> None:
    usual = max(texts, key=texts.count)  # the first such one: all ranks say the same
    for rank, text in enumerate(texts):
        if text != usual:
            other = texts.index(usual)
            raise RankError(
                f"the {what} of rank {rank} is {text!r}, and that of rank {other} is {usual!r}; one for all is accepted"
            )


def _wants_shared_memory() -> bool:
    wanted = os.environ.get(_SWITCH, "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"{_SWITCH}={wanted!r}; 0 (messages go through torch.distributed) and 1 are accepted")
    return wanted == "1"


def _shared_exchange(rank: int, size: int, timeout: float, group: dist.ProcessGroup | None) -> SharedExchange | None:
    """Through shared memory if all ranks see the same file; None, on all of them, if one does not."""
    path, problem = None, None if _wants_shared_memory() else "it is switched off"
    if rank == 0 and problem is None:
        path = _SHARED_FOLDER / f"cpumoe-{secrets.token_hex(8)}"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, SharedExchange.file_bytes(size, _SLOT_BYTES))
            finally:
                os.close(descriptor)
        except OSError as error:
            problem = f"{path}: {error.strerror}"
    exchange = None
    try:
        told: list[object] = [None if path is None else str(path)]
        dist.broadcast_object_list(told, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
        if told[0] is not None and problem is None:
            try:
                descriptor = os.open(str(told[0]), os.O_RDWR | os.O_CLOEXEC)
                try:
                    exchange = SharedExchange(descriptor, rank, size, _SLOT_BYTES, timeout)
                finally:
                    os.close(descriptor)
            except (OSError, ValueError, RankError) as error:
                problem = str(error)
        elif problem is None:
            problem = "rank 0 has no shared memory"
        problems: list[str | None] = [None] * size
        dist.all_gather_object(problems, problem, group=group)
    finally:
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # whoever has it mapped keeps it, and no end of a process leaves it behind
    found = [(index, text) for index, text in enumerate(problems) if text is not None]
    if found:
        _log.info(
            "ranks exchange through torch.distributed (%s): rank %d shares no memory with the others: %s",
            dist.get_backend(group),
            *found[0],
        )
        return None
    return exchange
