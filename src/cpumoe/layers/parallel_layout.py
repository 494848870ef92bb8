"""How a layer is spread over processes: sizes and ranks of the kinds of parallelism, and what follows from them.

These are values. They can be made from plain numbers, for tests and for planning, without a process group; what makes
them from ``torch.distributed`` is in ``parallel/``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from cpumoe.layers.scheme import SIZE_UNIT


class Exchange(Enum):
    """How tokens get to the ranks that have their experts, and the sums back."""

    #: Every rank has all tokens of the layer already; sums are added over all ranks.
    ALL_REDUCE = "all_reduce"
    #: Every rank gets the tokens of all ranks and gives each its sums.
    ALLGATHER_REDUCESCATTER = "allgather_reducescatter"
    #: A token goes to those ranks only that have an expert of it.
    ALL_TO_ALL = "all_to_all"

    @classmethod
    def _missing_(cls, value: object) -> Exchange:
        raise ValueError(f"exchange={value!r} is not known; accepted are {', '.join(e.value for e in cls)}")


class ExpertPlacement(Enum):
    """Which experts a rank has where experts are whole: vLLM's ``expert_placement_strategy``."""

    #: Consecutive ones.
    LINEAR = "linear"
    #: Every n-th one of n ranks: the experts of a group, of which a token chooses several, are on different ranks.
    ROUND_ROBIN = "round_robin"

    @classmethod
    def _missing_(cls, value: object) -> ExpertPlacement:
        names = ", ".join(placement.value for placement in cls)
        raise ValueError(f"expert_placement_strategy={value!r} is not known; accepted are {names}")


@dataclass(frozen=True)
class ExpertsPart:
    """What one rank holds of a layer's experts.

    Attributes:
        experts: which of the layer's experts, in the order in which they are held; one may be there more than once.
        slices, slice: the intermediate size is cut into ``slices`` parts, as equal as may be, of which this is one.
    """

    experts: tuple[int, ...]
    slices: int = 1
    slice: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.slice < self.slices:
            raise ValueError(f"slice={self.slice} of {self.slices}; 0 to {self.slices - 1} are accepted")

    @classmethod
    def whole(cls, expert_count: int) -> ExpertsPart:
        """All of a layer."""
        return cls(tuple(range(expert_count)))

    def is_whole(self, expert_count: int) -> bool:
        """Whether this is all of a layer with so many experts, in their order."""
        return self.slices == 1 and self.experts == tuple(range(expert_count))

    def cut(self, size: int, unit: int) -> tuple[int, int]:
        """Return the first of this slice's inputs out of ``size``, and how many there are.

        Slices consist of whole units of inputs: those that share a scale or lie in one block in memory. Where the units
        do not divide by the slices, the first slices have one more.
        """
        if self.slices == 1:
            return 0, size
        units = size // unit
        if size % unit != 0:
            raise ValueError(
                f"the intermediate size {size} of the experts is no multiple of {unit}, of which slices consist; "
                "expert parallelism is accepted"
            )
        if units < self.slices:
            raise ValueError(
                f"the intermediate size {size} of the experts in {self.slices} slices, which are multiples of {unit}; "
                f"up to {units} slices, or expert parallelism, are accepted"
            )
        each, more = divmod(units, self.slices)
        return (self.slice * each + min(self.slice, more)) * unit, (each + (self.slice < more)) * unit

    def __str__(self) -> str:
        first, count = self.experts[0] if self.experts else 0, len(self.experts)
        in_order = self.experts == tuple(range(first, first + count))
        names = (
            "none" if not count else f"{first}..{first + count - 1}" if in_order else ",".join(map(str, self.experts))
        )
        return f"experts {names}" + (f", slice {self.slice} of {self.slices}" if self.slices > 1 else "")


@dataclass(frozen=True)
class ParallelLayout:
    """Over how many ranks a model is spread, and which of them this is.

    Attributes:
        tp_size, tp_rank: tensor parallel: attention heads and columns are split; ranks have the same tokens.
        dp_size, dp_rank: data parallel: every rank has sequences of its own.
        pcp_size, pcp_rank: prefill-context parallel: every rank has its part of the tokens of a sequence.
        expert_parallel: ranks own whole experts; otherwise every expert's intermediate size is split.
        sequence_parallel: what the layer is called with are the tokens of this rank alone, in tensor parallel groups
            too, where all ranks would have the same otherwise.
        expert_placement_strategy: which experts a rank has with expert parallelism, an ExpertPlacement or its name:
            ``linear`` gives it consecutive ones, ``round_robin`` every n-th of n ranks.
        exchange: how tokens travel, an Exchange or its name; None takes what needs the fewest bytes for these sizes.
    """

    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    pcp_size: int = 1
    pcp_rank: int = 0
    expert_parallel: bool = False
    sequence_parallel: bool = False
    exchange: Exchange | None = None
    expert_placement_strategy: ExpertPlacement = ExpertPlacement.LINEAR

    def __post_init__(self) -> None:
        object.__setattr__(self, "expert_placement_strategy", ExpertPlacement(self.expert_placement_strategy))
        if self.exchange is not None:
            object.__setattr__(self, "exchange", Exchange(self.exchange))
        for kind in ("tp", "dp", "pcp"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if size < 1:
                raise ValueError(f"{kind}_size={size}; 1 or more is accepted")
            if not 0 <= rank < size:
                raise ValueError(f"{kind}_rank={rank} of {kind}_size={size}; 0 to {size - 1} are accepted")
        if self.sequence_parallel and self.tp_size == 1:
            raise ValueError("sequence_parallel with tp_size=1; there is no group whose tokens could be split")
        if self.expert_placement_strategy is not ExpertPlacement.LINEAR and not self.expert_parallel:
            raise ValueError(
                f"expert_placement_strategy={self.expert_placement_strategy.value} without expert parallelism: every "
                "rank has a slice of every expert; expert_parallel=True, or linear, is accepted"
            )
        if self.exchange is Exchange.ALL_REDUCE and not self.has_all_tokens:
            raise ValueError(
                "exchange=all_reduce, and ranks have different tokens "
                f"(dp_size={self.dp_size}, pcp_size={self.pcp_size}, sequence_parallel={self.sequence_parallel}); "
                "allgather_reducescatter and all_to_all are accepted"
            )
        if self.exchange is Exchange.ALL_TO_ALL and not self.uses_ep:
            raise ValueError(
                "exchange=all_to_all without expert parallelism: every rank has a slice of every expert, so that all "
                "tokens go everywhere; allgather_reducescatter is accepted"
            )

    # ---- the flattening rule -----------------------------------------------------------------------------------------

    @property
    def flat_size(self) -> int:
        """Ranks in all."""
        return self.dp_size * self.pcp_size * self.tp_size

    @property
    def flat_rank(self) -> int:
        """This one among all."""
        return (self.dp_rank * self.pcp_size + self.pcp_rank) * self.tp_size + self.tp_rank

    def of_rank(self, flat_rank: int) -> ParallelLayout:
        """The same layout as another rank has it."""
        if not 0 <= flat_rank < self.flat_size:
            raise ValueError(f"flat_rank={flat_rank}; 0 to {self.flat_size - 1} are accepted")
        outer, tp_rank = divmod(flat_rank, self.tp_size)
        dp_rank, pcp_rank = divmod(outer, self.pcp_size)
        return replace(self, dp_rank=dp_rank, pcp_rank=pcp_rank, tp_rank=tp_rank)

    def ranks(self) -> Iterator[ParallelLayout]:
        """The layout as each rank has it, by flat rank."""
        return map(self.of_rank, range(self.flat_size))

    def in_model(self) -> ParallelLayout:
        """The layout that the layers of a whole model have.

        A model calls them with all tokens of a tensor parallel group. What sequence parallelism is there for, that a
        rank sends its share of them and no more, they see to themselves: the tokens travel as this layout has it.
        """
        if not self.sequence_parallel:
            return self
        return replace(self, sequence_parallel=False, exchange=self.chosen_exchange)

    # ---- what follows for the experts --------------------------------------------------------------------------------

    @property
    def uses_ep(self) -> bool:
        """Whether experts are spread whole. One rank has all of them anyway."""
        return self.expert_parallel and self.flat_size > 1

    @property
    def ep_size(self) -> int:
        return self.flat_size if self.uses_ep else 1

    @property
    def ep_rank(self) -> int:
        return self.flat_rank if self.uses_ep else 0

    @property
    def experts_tp_size(self) -> int:
        """Into how many parts every expert is split: data and context parallelism widen it."""
        return 1 if self.uses_ep else self.flat_size

    @property
    def experts_tp_rank(self) -> int:
        return 0 if self.uses_ep else self.flat_rank

    def part_of(self, expert_count: int, intermediate_size: int) -> ExpertsPart:
        """What this rank holds of a layer's experts.

        With expert parallelism consecutive ones or every n-th, as ``expert_placement_strategy`` has it, and the first
        ranks one more where they do not divide; there may be ranks without any. Otherwise a slice of each
        (:meth:`ExpertsPart.cut`).
        """
        if self.uses_ep and self.expert_placement_strategy is ExpertPlacement.ROUND_ROBIN:
            return ExpertsPart(tuple(range(self.ep_rank, expert_count, self.ep_size)))
        if self.uses_ep:
            each, more = divmod(expert_count, self.ep_size)
            first = self.ep_rank * each + min(self.ep_rank, more)
            return ExpertsPart(tuple(range(first, first + each + (self.ep_rank < more))))
        part = ExpertsPart(tuple(range(expert_count)), self.experts_tp_size, self.experts_tp_rank)
        part.cut(intermediate_size, SIZE_UNIT)  # refuses more slices than there can be in any scheme
        return part

    # ---- what follows for the tokens ---------------------------------------------------------------------------------

    @property
    def has_all_tokens(self) -> bool:
        """Whether every rank has all tokens that the layer is called with."""
        return self.dp_size == 1 and self.pcp_size == 1 and not self.sequence_parallel

    @property
    def chosen_exchange(self) -> Exchange | None:
        """How tokens travel; None for one rank."""
        if self.flat_size == 1:
            return None
        if self.exchange is not None:
            return self.exchange
        return Exchange.ALL_REDUCE if self.has_all_tokens else Exchange.ALLGATHER_REDUCESCATTER

    def __str__(self) -> str:
        sizes = [
            f"{kind} {size}" for kind, size in (("tp", self.tp_size), ("dp", self.dp_size), ("pcp", self.pcp_size))
        ]
        kept = [text for text in sizes if not text.endswith(" 1")] or ["one rank"]
        more = [name for name, on in (("ep", self.uses_ep), ("sp", self.sequence_parallel)) if on]
        if self.uses_ep and self.expert_placement_strategy is not ExpertPlacement.LINEAR:
            more.append(self.expert_placement_strategy.value)
        return " ".join([*kept, *more])
