"""The processes that a model is spread over, as one of them sees them.

``torch.distributed`` brings them together (``torchrun`` starts them) and carries what they give each other, unless all
of them are on one machine and share memory: what is exchanged for every layer of every token then goes through that,
in about a microsecond where sockets take more than a hundred.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from cpumoe import settings
from cpumoe.errors import RankError
from cpumoe.layers.parallel_layout import ExpertPlacement, ParallelLayout
from cpumoe.ops.exchange import RankExchange, number_exchange
from cpumoe.option_values import DEFAULT_TIMEOUT
from cpumoe.parallel.joining import Meeting, as_one_text, coming_together, refuse_differences

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


#: Of that, what a tensor parallel group waits for one of its ranks: less, so that those outside, who wait for all of
#: the group, hear who it is instead of giving up who waits for it.
_GROUP_PATIENCE = 0.8

#: The variable that names the network interface of gloo, and the interface for ranks of one host.
GLOO_INTERFACE, LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"

_CPU = torch.device("cpu")  # whatever the default is: models are made on another one before they are loaded


class Ranks:
    """A layout, and what its ranks exchange. Made by :meth:`join`, or :meth:`alone`.

    Attributes:
        layout: as this rank has it.
        exchange: of all ranks; None if there is one.
        number: of the exchange, for operators; 0 if there is none.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        exchange: RankExchange | None,
        inner: RankExchange | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        """``inner``: the exchange of the tensor parallel group, where it is more than one rank and not all of them.

        ``meeting``: where the ranks came together.
        """
        self.layout = layout
        self.exchange = exchange
        self.number = 0 if exchange is None else number_exchange(exchange)
        self._inner = None if inner is None else _Group(self, inner)
        self._meeting = meeting

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
        settings.SHARED_MEMORY.is_on()
        if group is None and not dist.is_initialized():
            if not dist.is_torchelastic_launched() and "RANK" not in os.environ:
                if layout is None or layout.flat_size == 1:
                    return cls.alone()
                raise ValueError(
                    f"the layout {layout} has {layout.flat_size} ranks, and this is one process; "
                    f"torchrun --nproc-per-node {layout.flat_size} starts as many"
                )
            _keep_to_this_host()
            with coming_together():
                dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
            atexit.register(_leave)
        everyone = Meeting(group, timeout)
        size = everyone.size
        layout = ParallelLayout(tp_size=size) if layout is None else layout
        if size > 1:  # before any of them refuses it: the others would wait for that one
            everyone.agree_on_layout(layout)
        if layout.flat_size != size:
            raise ValueError(f"the layout {layout} has {layout.flat_size} ranks, and the process group has {size}")
        layout = layout.of_rank(everyone.rank)
        if size == 1:
            return cls(layout, None)
        exchange = everyone.exchange()
        if not 1 < layout.tp_size < size:
            return cls(layout, exchange, None, everyone)
        inside = everyone.inner(layout.flat_rank - layout.tp_rank, layout.tp_size, timeout * _GROUP_PATIENCE)
        return cls(layout, exchange, inside.exchange(), everyone)

    def in_model(self) -> Ranks:
        """These ranks as the layers of a whole model have them (:meth:`ParallelLayout.in_model`)."""
        layout = self.layout.in_model()
        if layout == self.layout:
            return self
        return Ranks(layout, self.exchange, None if self._inner is None else self._inner.exchange, self._meeting)

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

    @property
    def group(self) -> Ranks:
        """The tensor parallel group of this rank, whose ranks have the same tokens.

        Heads and outputs of linears are split over it. It is all ranks, or this one alone, or some with an exchange of
        their own.
        """
        if self._inner is not None:
            return self._inner
        return self if self.layout.tp_size == self.size else Ranks.alone()

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
        self._carry(self.exchange.gather, _bytes_of(mine), [count * row for count in counts], _bytes_of(whole))
        return list(whole.split(list(counts)))

    def gather_numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """As many integers of every rank, by rank."""
        if self.exchange is None:
            return [list(mine)]
        own = torch.tensor(mine, dtype=torch.int64, device=_CPU)
        whole = torch.empty((self.size, len(mine)), dtype=torch.int64, device=_CPU)
        self._carry(self.exchange.gather, _bytes_of(own), [own.numel() * 8] * self.size, _bytes_of(whole))
        return whole.tolist()

    def trade(self, mine: Tensor, counts: Sequence[int], given: Sequence[int]) -> Tensor:
        """``counts[r]`` rows of ``mine`` go to rank r, which gives ``given[r]``; those come one behind the other."""
        assert self.exchange is not None
        row = _row_bytes(mine)
        whole = torch.empty((sum(given), *mine.shape[1:]), dtype=mine.dtype, device=_CPU)
        sizes = [[n * row for n in numbers] for numbers in (counts, given)]
        self._carry(self.exchange.trade, _bytes_of(mine), sizes[0], _bytes_of(whole), sizes[1])
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
            self._carry(self.exchange.sum, values.view(-1))
        return values

    def agree(self, what: str, *settings: str) -> None:
        """Raise RankError on every rank if these texts are not the same on all of them; it names those that differ."""
        if self.exchange is None:
            return
        text = bytearray(f"{as_one_text(settings)}\n".encode())  # with an end, so that there is a message
        own = torch.frombuffer(text, dtype=torch.uint8)
        texts = [text.numpy().tobytes().decode().removesuffix("\n") for text in self.gather(own)]
        refuse_differences(what, texts)

    def _carry(self, message: Callable[..., None], *arguments: Any) -> None:
        """Exchanges a message; a group says who fails in another way."""
        message(*arguments)

    # ---- ranks that do not go on -------------------------------------------------------------------------------------

    def fail(self, problem: BaseException) -> None:
        """Tells the others that this rank will not go on, so that they need not wait for it.

        Where messages go through ``torch.distributed`` they learn it when the process ends.
        """
        for exchange in (self.exchange, None if self._inner is None else self._inner.exchange):
            if exchange is not None:
                exchange.fail(f"{type(problem).__name__}: {problem}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do together: if it raises here, the others get a RankError instead of waiting.

        What they exchange ends with it. Errors that all ranks have alike, and may go on after, do not belong inside.
        """
        try:
            yield
        except RankError as problem:
            known = self._known(problem)
            self.fail(known)
            if known is problem:
                raise
            raise known from problem
        except BaseException as problem:
            self.fail(problem)
            raise

    def _known(self, problem: RankError) -> RankError:
        """What all ranks know of a failure that may have met this one in its group."""
        if self._inner is not None:
            try:
                self.check()
            except RankError as known:
                return known
        return problem

    def check(self) -> None:
        """Raises RankError if it is known that another rank has ended or failed; for work that exchanges nothing."""
        if self.exchange is not None:
            self.exchange.check()

    def long_work(self) -> AbstractContextManager[None]:
        """Around work in which ranks exchange nothing, and some take much longer than others: all leave it together.

        Who is done waits for the others as long as they live, and not just for the timeout of messages.
        """
        return nullcontext() if self._meeting is None else self._meeting.long_work(self.check)


class _Group(Ranks):
    """Some of all ranks, which have the same tokens. A failure among them is one of all ranks, and named so.

    Args:
        everyone: all ranks.
        exchange: of the group.
    """

    def __init__(self, everyone: Ranks, exchange: RankExchange) -> None:
        of_all = everyone.layout
        super().__init__(ParallelLayout(tp_size=of_all.tp_size, tp_rank=of_all.tp_rank), exchange)
        self._everyone = everyone

    def _carry(self, message: Callable[..., None], *arguments: Any) -> None:
        try:
            message(*arguments)
        except RankError as problem:
            self._everyone.fail(problem)
            raise

    def fail(self, problem: BaseException) -> None:
        self._everyone.fail(problem)

    def check(self) -> None:
        self._everyone.check()


def _keep_to_this_host() -> None:
    """Have gloo listen on the loopback interface if all ranks are on this host, unless an interface was chosen.

    Its connections are not authenticated, so that nothing outside should reach them. Without the variable, gloo takes
    the address that the host's name resolves to.
    """
    if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault(GLOO_INTERFACE, LOOPBACK)  # it stays: groups that are made later read it too


def _leave() -> None:
    """Ends the group that was made here: a process that ends with threads of gloo in it may be aborted."""
    if dist.is_initialized():
        dist.destroy_process_group()


_MESH_ORDER = ("dp", "pcp", "tp")


def layout_of_mesh(
    mesh: DeviceMesh,
    *,
    expert_parallel: bool = False,
    expert_placement_strategy: ExpertPlacement | str = ExpertPlacement.LINEAR,
) -> ParallelLayout:
    """The layout of a device mesh with dimensions ``dp``, ``pcp`` and ``tp``, in this order; some may be left out."""
    names = tuple(mesh.mesh_dim_names or ())
    if not names or names != tuple(name for name in _MESH_ORDER if name in names):
        raise ValueError(f"the mesh has dimensions {names}; some of {_MESH_ORDER} in this order are accepted")
    if mesh.mesh.flatten().tolist() != list(range(mesh.size())):
        raise ValueError(f"the mesh is {mesh.mesh.tolist()}; the ranks in ascending order are accepted")
    dp, pcp, tp = (mesh.shape[names.index(name)] if name in names else 1 for name in _MESH_ORDER)
    layout = ParallelLayout(
        tp_size=tp,
        dp_size=dp,
        pcp_size=pcp,
        expert_parallel=expert_parallel,
        expert_placement_strategy=ExpertPlacement(expert_placement_strategy),
    )
    return layout.of_rank(mesh.get_rank())


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()
