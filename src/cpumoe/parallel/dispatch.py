"""How tokens get to the ranks that compute them, and how the sums come back.

All of it goes through messages between all ranks: a rank that has nothing to say to another gives it nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpumoe.errors import RankError
from cpumoe.layers.parallel_layout import ParallelLayout
from cpumoe.parallel.ranks import Ranks

_LINE = 64  # bytes; rows of a message begin at multiples of it


@dataclass(frozen=True)
class Tokens:
    """Tokens on their way.

    Attributes:
        rows: [tokens, H], or uint8 [tokens, bytes] as the first product wants them.
        ids: int32 [tokens, K], experts of the whole layer or -1.
        weights: fp32 [tokens, K].
        dtype: of the tokens as they were given.
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor
    dtype: torch.dtype

    def __getitem__(self, index: slice | Tensor) -> Tokens:
        return Tokens(self.rows[index], self.ids[index], self.weights[index], self.dtype)

    def as_message(self) -> Tensor:
        """uint8 [tokens, bytes]: everything of a token side by side."""
        parts = [_bytes_of(tensor) for tensor in (self.rows, self.ids, self.weights)]
        width = sum(part.shape[1] for part in parts)
        rest = torch.zeros((len(self.rows), -width % _LINE), dtype=torch.uint8)
        return torch.cat([*parts, rest], 1)

    def from_message(self, message: Tensor) -> Tokens:
        """The tokens of a message from a rank whose tokens are of the same kind as these."""
        parts, first = [], 0
        for tensor in (self.rows, self.ids, self.weights):
            bytes_ = tensor.shape[1] * tensor.element_size()
            parts.append(message[:, first : first + bytes_].contiguous().view(tensor.dtype))
            first += bytes_
        rows, ids, weights = parts
        return Tokens(rows, ids, weights, self.dtype)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _numbers_of_all(ranks: Ranks, mine: Tokens, numbers: list[int]) -> list[list[int]]:
    """Numbers of every rank, by rank; refuses ranks whose tokens are of another kind, which would be misread."""
    kind = [_DTYPES.index(mine.dtype), mine.rows.shape[1] * mine.rows.element_size(), mine.ids.shape[1]]
    found = ranks.gather_numbers([*kind, *numbers])
    for rank, (dtype, width, topk, *_) in enumerate(found):
        if [dtype, width, topk] != kind:
            raise RankError(
                f"the tokens of rank {rank} are {_DTYPES[dtype]}, {width} bytes and {topk} experts each, and those of "
                f"rank {ranks.rank} {mine.dtype}, {kind[1]} and {kind[2]}; one kind for all is accepted"
            )
    return [row[len(kind) :] for row in found]


def _bytes_of(tensor: Tensor) -> Tensor:
    """[tokens, n] -> uint8 [tokens, bytes]."""
    if tensor.stride(-1) != 1 or not tensor.is_contiguous():  # a dimension of one may have any stride
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    width = tensor.shape[1] * tensor.element_size()
    return tensor.view(torch.uint8) if width else torch.empty((len(tensor), 0), dtype=torch.uint8)


# ---- every rank gets all tokens ------------------------------------------------------------------------------------


def gather_tokens(ranks: Ranks, mine: Tokens) -> tuple[Tokens, list[int]]:
    """The tokens of all ranks, by rank, and how many each has."""
    counts = [count for (count,) in _numbers_of_all(ranks, mine, [len(mine.rows)])]
    return mine.from_message(torch.cat(ranks.gather_parts(mine.as_message(), counts))), counts


def scatter_sums(ranks: Ranks, sums: Tensor, counts: list[int]) -> Tensor:
    """fp32 [all tokens, H] of every rank, added in the order of the ranks -> [tokens, H] of this one."""
    own = counts[ranks.rank]
    parts = ranks.trade(sums, counts, [own] * ranks.size).view(ranks.size, own, sums.shape[1])
    out = parts[0]
    for part in parts[1:]:
        out += part
    return out


# ---- a token goes where its experts are ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """Which tokens went to which rank: their places, by rank, and how many came from each."""

    places: tuple[Tensor, ...]
    received: tuple[int, ...]


def send_tokens(ranks: Ranks, mine: Tokens, owners: Tensor) -> tuple[Tokens, Sent]:
    """Sends every token to the ranks that own an expert of it.

    Args:
        owners: [experts + 1]: the rank of each expert, and -1 for what the id -1 means.

    Returns the tokens that others have sent here, by rank, and what is needed to send their sums back.
    """
    targets = owners[mine.ids.long()]  # [tokens, K]
    places = tuple((targets == rank).any(1).nonzero().flatten() for rank in range(ranks.size))
    sent = [len(there) for there in places]
    received = [row[ranks.rank] for row in _numbers_of_all(ranks, mine, sent)]
    message = ranks.trade(mine.as_message()[torch.cat(places)], sent, received)
    return mine.from_message(message), Sent(places, tuple(received))


def return_sums(ranks: Ranks, sums: Tensor, sent: Sent, tokens: int) -> Tensor:
    """fp32 [tokens that came here, H] -> [tokens, H], added in the order of the ranks."""
    back = ranks.trade(sums, sent.received, [len(there) for there in sent.places])
    out = torch.zeros((tokens, sums.shape[1]))
    first = 0
    for there in sent.places:  # a token is there once at most
        out[there] += back[first : first + len(there)]
        first += len(there)
    return out


# ---- tokens that several ranks have --------------------------------------------------------------------------------


def own_share(layout: ParallelLayout, tokens: int) -> slice:
    """Of tokens that all ranks of a tensor parallel group have, those that this one sends; else all."""
    if layout.tp_size == 1 or layout.sequence_parallel:
        return slice(0, tokens)
    return slice(tokens * layout.tp_rank // layout.tp_size, tokens * (layout.tp_rank + 1) // layout.tp_size)


def share_in_group(ranks: Ranks, sums: Tensor, tokens: int) -> Tensor:
    """[own share, H] of each rank of a tensor parallel group -> [tokens, H] on all of them."""
    layout = ranks.layout
    if layout.tp_size == 1 or layout.sequence_parallel:
        return sums
    group = range(layout.flat_rank - layout.tp_rank, layout.flat_rank - layout.tp_rank + layout.tp_size)
    shares = {rank: own_share(layout.of_rank(rank), tokens) for rank in group}
    counts = [len(sums) if rank in shares else 0 for rank in range(ranks.size)]
    given = [shares[rank].stop - shares[rank].start if rank in shares else 0 for rank in range(ranks.size)]
    return ranks.trade(sums.repeat(layout.tp_size, 1), counts, given)
