"""What it costs that ranks exchange tokens and sums, by what the code does.

Ranks on one machine share memory: every rank writes what it gives once and reads what it gets, one rank after another,
so that its time goes by the bytes that it handles. Curves of that were measured with two ranks. Ranks on several
machines go through ``torch.distributed`` with all messages, also inside of a machine: gloo adds up in a ring, and a
trade is a message to every other rank, which are all on their way at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cpumoe.layers.parallel_layout import Exchange
from cpumoe.layers.scheme import Scheme
from cpumoe.parallel.rank_plan import token_bytes
from cpumoe.simulation.kernel_costs import Floats, KernelCosts

#: Exchanges of which there are measured curves, beside those of :class:`Exchange`.
GATHER = "gather"

_LINE = 64  # bytes; a token's message is a multiple of it
_ID_AND_WEIGHT = 8
_FP32, _BF16 = 4, 2
_RANGE = 8  # two fp32 numbers for each row between the products of slices


@dataclass(frozen=True)
class Link:
    """One direction of a connection: seconds until a message's first byte is there, and bytes a second then."""

    latency: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency={self.latency}; a number of seconds from 0 is accepted")
        if not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second={self.bytes_per_second}; a number above 0 is accepted")


#: Nothing costs anything.
INSTANT = Link(0.0, math.inf)


@dataclass(frozen=True)
class Network:
    """Nodes, what connects them, and how many ranks lie on each, in order.

    Attributes:
        between: the connection of a node to all others, which its ranks share.
        inside: the connection of two ranks of a node, where ranks of other nodes take part.
        ranks_per_node: None puts all ranks on one node.
        at_once: how many ranks of a node have cores at the same time; None for all. Where there are more, they take
            turns.
    """

    between: Link = INSTANT
    inside: Link = INSTANT
    ranks_per_node: int | None = None
    at_once: int | None = None

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "at_once"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; 1 or more is accepted")

    def nodes(self, ranks: int) -> int:
        return 1 if self.ranks_per_node is None else -(-ranks // self.ranks_per_node)

    def node_of(self, ranks: int) -> np.ndarray:
        """[ranks]"""
        return np.arange(ranks) // (ranks if self.ranks_per_node is None else self.ranks_per_node)

    def waiting(self, ranks: int) -> float:
        """How many times as long something takes that all ranks do, for ranks that take turns on the cores."""
        on_node = min(ranks, self.ranks_per_node or ranks)
        return 1.0 if self.at_once is None else max(1.0, on_node / self.at_once)


@dataclass(frozen=True)
class ExchangeSizes:
    """Bytes that a rank handles, by what the code does with them: each byte that is written or read counts."""

    ranks: int
    hidden: int
    topk: int
    scheme: Scheme

    @property
    def message(self) -> int:
        """Of a token on its way to experts, with their ids and weights."""
        size = token_bytes(self.scheme, self.hidden) + self.topk * _ID_AND_WEIGHT
        return -(-size // _LINE) * _LINE

    @property
    def sums(self) -> int:
        """Of a token's sums."""
        return self.hidden * _FP32

    def added_up(self, size: float) -> float:
        """``size`` bytes of every rank are added: written once, and those of all ranks are read."""
        return size * (self.ranks + 1)

    def gathered(self, part: float) -> float:
        """Every rank gives ``part`` bytes to all."""
        return part * (self.ranks + 1)

    def to_all_ranks(self, own: float, every: float) -> float:
        """Tokens to all ranks and their sums back, where a rank has ``own`` of ``every`` token."""
        return every * 2 * (self.message + self.sums) + own * self.message

    def to_owners(self, sent: Floats, received: Floats) -> Floats:
        """Tokens to the ranks of their experts and their sums back; a token counts once for each such rank."""
        return (sent + received) * (self.message + self.sums)


@dataclass(frozen=True)
class ExchangeCosts:
    """Seconds of exchanges between ranks."""

    network: Network
    costs: KernelCosts
    sizes: ExchangeSizes

    @classmethod
    def of(cls, network: Network, costs: KernelCosts, ranks: int, topk: int) -> ExchangeCosts:
        return cls(network, costs, ExchangeSizes(ranks, costs.hidden, topk, Scheme.parse(costs.scheme)))

    @property
    def ranks(self) -> int:
        return self.sizes.ranks

    # ---- what layers exchange ----------------------------------------------------------------------------------------

    def all_reduce(self, tokens: int) -> float:
        """Sums that every rank gets of all others."""
        return self._add_up(tokens * self.sizes.sums)

    def share_ranges(self, tokens: int) -> float:
        """Slices of experts: the extremes of the rows between the products, of which int8 rows are made."""
        return self._add_up(tokens * self.sizes.topk * _RANGE)

    def gather_hidden(self, tokens: int) -> float:
        """A part of every token's values from each rank: as outputs of split linears are."""
        part = tokens * self.sizes.hidden * _BF16 / self.ranks
        return self._local(GATHER, self.sizes.gathered(part)) + self._trade(np.full((self.ranks, self.ranks), part))

    def to_all_ranks(self, tokens: Floats) -> float:
        """Every token goes to all ranks, and its sums come back. ``tokens``: [ranks], of each rank."""
        handled = self.sizes.to_all_ranks(float(tokens.max()), float(tokens.sum()))
        there = np.repeat(tokens[:, None], self.ranks, 1)
        return self._local(Exchange.ALLGATHER_REDUCESCATTER.value, handled) + self._there_and_back(there)

    def to_owners(self, visits: Floats) -> float:
        """Tokens go to ranks with experts of theirs, and sums come back. ``visits``: [from, to], a rank's own too."""
        handled = self.sizes.to_owners(visits.sum(1), visits.sum(0))
        return self._local(Exchange.ALL_TO_ALL.value, float(handled.max())) + self._there_and_back(visits)

    # ---- how ---------------------------------------------------------------------------------------------------------

    @property
    def _shares_memory(self) -> bool:
        return self.network.nodes(self.ranks) == 1

    def _local(self, name: str, handled: float) -> float:
        """A rank's own work: through shared memory it is all; otherwise sockets copy as often as slots do."""
        if self.ranks == 1:
            return 0.0
        if name not in self.costs.exchange:
            raise ValueError(f"the exchange {name} was not measured; {', '.join(self.costs.exchange)} were")
        return float(self.costs.exchange[name].at(handled)) * self.network.waiting(self.ranks)

    def _add_up(self, size: float) -> float:
        n = self.ranks
        if n == 1 or size == 0:
            return 0.0
        if self._shares_memory:
            return self._local(Exchange.ALL_REDUCE.value, self.sizes.added_up(size))
        # gloo's ring: each of n parts goes around twice, and all ranks wait for the slowest connection. A part is two
        # messages, of which one is added up while the other is on its way.
        link, steps = self.network.between, 2 * (n - 1)
        local = self._local(Exchange.ALL_REDUCE.value, size * 3)  # as often as one of two ranks reads and writes it
        return local + steps * (link.latency + 2 * self.costs.message_seconds + size / n / link.bytes_per_second)

    def _there_and_back(self, visits: Floats) -> float:
        """Trades of a call: how many tokens come, which is a few bytes for all; the tokens; their sums."""
        counts = np.full((self.ranks, self.ranks), 8.0)
        return self._trade(counts) + self._trade(visits * self.sizes.message) + self._trade(visits.T * self.sizes.sums)

    def _trade(self, sent: Floats) -> float:
        """gloo's trade. ``sent``: bytes [from, to]. A rank sends a message to each other, also one without a byte."""
        if self._shares_memory:
            return 0.0  # what ranks handle is all
        network, node = self.network, self.network.node_of(self.ranks)
        same = node[:, None] == node[None, :]
        own = np.eye(self.ranks, dtype=bool)
        inside = np.where(same & ~own, sent, 0.0)
        outside = np.where(same, 0.0, sent)
        busiest = max(float(np.bincount(node, outside.sum(axis)).max()) for axis in (0, 1))
        in_node = max(float(inside.sum(axis).max()) for axis in (0, 1))
        return (
            network.between.latency
            + (self.ranks - 1) * self.costs.message_seconds
            + busiest / network.between.bytes_per_second
            + in_node / network.inside.bytes_per_second
        )
