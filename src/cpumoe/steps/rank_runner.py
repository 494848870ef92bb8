"""Distributed runner: the first rank, where requests arrive, leads; the others follow.

All ranks compute every step, each with its own experts, columns and heads, and with a KV cache for these heads. Ranks
of a tensor parallel group compute the same rows. Each data parallel group has rows of its own; a group without rows
computes its experts for the others. The leader broadcasts the rows of each step, and followers return their logits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from cpumoe.parallel.ranks import Ranks
from cpumoe.parallel.rebalance import rebalance
from cpumoe.steps.runner import CoreRunner, PagedModel, Rows

_log = logging.getLogger("cpumoe")

# Interval of the leader's heartbeats.
_SIGN_SECONDS = 1.0


@dataclass(frozen=True)
class Balancing:
    """Expert load balancing: every ``steps`` steps experts are moved between ranks by how often they are chosen.

    ``spare_slots``: redundant experts that each rank has room for. ``nodes``: machines that the ranks are spread over.
    """

    steps: int
    spare_slots: int = 0
    nodes: int = 1


_LAYERS_AT_ONCE = 4  # layers whose experts are moved between two steps: requests wait meanwhile


class _Say(IntEnum):
    """Commands of the leader: heartbeat, sizes of the KV cache, a step, layers whose experts to move, the end."""

    HERE = 0
    PAGES = 1
    STEP = 2
    MOVE = 3
    END = 4


_NUMBERS = 5  # of a command, with its arguments


class LeadingRunner(CoreRunner):
    """Runner of the leading rank."""

    rest_seconds = _SIGN_SECONDS

    def __init__(
        self,
        model: PagedModel,
        pages: int,
        page_tokens: int,
        sequences: int,
        ranks: Ranks,
        balancing: Balancing | None = None,
    ) -> None:
        self._ranks = ranks
        self._balancing = balancing
        self.groups = ranks.size // ranks.group.size
        self._layers = 0 if balancing is None else len(model.spread_experts)
        self._steps_left, self._next_layer = 0 if balancing is None else balancing.steps, 0
        self._say(_Say.PAGES, pages, page_tokens, sequences)
        super().__init__(model, pages, page_tokens, sequences)

    def compute(self, groups: Sequence[Rows]) -> list[Tensor | None]:
        with self._ranks.together():  # an exception ends all steps, on all ranks
            self._move_experts()
            message = _message(groups, self._page_tokens)
            self._say(_Say.STEP, len(message))
            self._ranks.broadcast(message)
            return _compute_together(self, self._ranks, groups)

    def _move_experts(self) -> None:
        """Rebalance experts every ``balancing.steps`` steps, a few layers between two steps."""
        if (balancing := self._balancing) is None:
            return
        if self._next_layer == 0 and self._steps_left > 0:
            self._steps_left -= 1
            return
        first, last = self._next_layer, min(self._next_layer + _LAYERS_AT_ONCE, self._layers)
        self._say(_Say.MOVE, first, last, balancing.spare_slots, balancing.nodes)
        _move_experts(self._model, first, last, balancing.spare_slots, balancing.nodes)
        self._next_layer = last % self._layers
        self._steps_left = balancing.steps

    def rest(self) -> None:
        self._say(_Say.HERE)

    def end(self) -> None:
        self._say(_Say.END)

    def _say(self, what: _Say, *numbers: int) -> None:
        self._ranks.gather_numbers([what, *numbers, *[0] * (_NUMBERS - 1 - len(numbers))])


def runner_for(
    model: PagedModel,
    pages: int,
    page_tokens: int,
    sequences: int,
    ranks: Ranks | None = None,
    balancing: Balancing | None = None,
) -> CoreRunner:
    """Return what computes steps: here alone, or on ``ranks``, of which this is the first.

    ``balancing``: when experts are moved between the ranks; None: never.
    """
    if not ranks:
        return CoreRunner(model, pages, page_tokens, sequences)
    return LeadingRunner(model, pages, page_tokens, sequences, ranks, balancing)


# ---- what all ranks do in a step -----------------------------------------------------------------------------------


def _message(groups: Sequence[Rows], page_tokens: int) -> Tensor:
    """Return the rows of all groups as int64, with only the slots and pages of the page tables that the step needs."""
    sizes: list[int] = []
    parts: list[Tensor] = []
    for rows in groups:
        used = rows.lines.unique()
        width = int(rows.places.max()) // page_tokens + 1 if len(rows.places) else 0
        sizes += [len(rows.tokens), len(rows.wanted), len(used), width]
        parts += [rows.tokens, rows.lines, rows.places, rows.wanted, used, rows.table[used, :width].flatten()]
    return torch.cat([torch.tensor(sizes), *[part.to(torch.int64) for part in parts]])


def _read_message(message: Tensor, tables: Sequence[Tensor]) -> list[Rows]:
    """Return the rows of each group, and update its page table (int32 [slots, pages])."""
    groups = []
    rest = message[4 * len(tables) :]
    for (count, wanted_count, used_count, width), table in zip(
        message[: 4 * len(tables)].view(-1, 4).tolist(), tables, strict=True
    ):
        sizes = [count, count, count, wanted_count, used_count, used_count * width]
        *parts, rest = rest.split([*sizes, len(rest) - sum(sizes)])
        tokens, lines, places, wanted, used, pages = parts
        table[used, :width] = pages.view(used_count, width).to(torch.int32)
        # Clones, because the core needs aligned tensors.
        groups.append(Rows(tokens.clone(), lines.clone(), places.clone(), table, wanted.clone()))
    return groups


def _compute_together(runner: CoreRunner, ranks: Ranks, groups: Sequence[Rows]) -> list[Tensor | None]:
    """Return the logits of all groups on the leader; on other ranks those of their own group, and None for the rest.

    A step that is rejected on all ranks fails, and the next one is computed. One that fails on some ranks only leaves
    them at another collective than the rest, which is an error that names them and ends all steps.
    """
    size = ranks.group.size
    mine = runner.try_rows(groups[ranks.rank // size])
    logits: list[Tensor | None] = [None] * len(groups)
    if mine is None:
        return logits
    logits[ranks.rank // size] = mine
    if len(groups) == 1:
        return logits
    # The first rank of each other group sends its logits to the leader.
    nothing = [0] * ranks.size
    counts = list(nothing)
    counts[size::size] = [len(rows.wanted) for rows in groups[1:]]
    gives = counts[ranks.rank]
    came = ranks.trade(mine[:gives], [gives, *nothing[1:]], nothing if ranks.rank else counts)
    if ranks.rank == 0:
        logits[1:] = came.split(counts)[size::size]
    return logits


def _move_experts(model: PagedModel, first: int, last: int, spare_slots: int, nodes: int) -> None:
    moves = rebalance(model.spread_experts[first:last], spare_slots=spare_slots, nodes=nodes)
    if any(move.after < move.before for move in moves):
        model.refresh()
        for layer, move in enumerate(moves, first):
            _log.info("experts of layer %d: slowest rank %.2f -> %.2f of the mean", layer, move.before, move.after)


def follow_steps(model: PagedModel, ranks: Ranks) -> None:
    """Follow the leader until it ends. Raise RankError if it, or another rank, is gone."""
    runner: CoreRunner | None = None
    tables: list[Tensor] = []
    while True:
        what, *numbers = ranks.gather_numbers([_Say.HERE] + [0] * (_NUMBERS - 1))[0]
        if what == _Say.END:
            return
        if what == _Say.PAGES:
            pages, page_tokens, sequences, _ = numbers
            runner = CoreRunner(model, pages, page_tokens, sequences)
            groups = ranks.size // ranks.group.size
            tables = [torch.zeros((sequences, pages), dtype=torch.int32) for _ in range(groups)]
        if what == _Say.MOVE:
            _move_experts(model, *numbers)
        if what == _Say.STEP:
            assert runner is not None  # pages come first
            message = ranks.broadcast(torch.empty(numbers[0], dtype=torch.int64))
            _compute_together(runner, ranks, _read_message(message, tables))
