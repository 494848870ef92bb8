"""Steps of a server's batches: in this process, or on several ranks of which the first leads.

All ranks compute every step, each with its own experts, columns and heads, and with pages of its own for the keys and
values of these. What a step consists of, the first one knows, where requests arrive; the others follow it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpumoe.errors import RankError
from cpumoe.integrations.transformers.described_parts import NotDescribed
from cpumoe.integrations.transformers.native_decoder import NativeDecoder
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.ranks import Ranks
from cpumoe.parallel.rebalance import rebalance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("cpumoe")

# The leader says this often that it is still there.
_SIGN_SECONDS = 1.0


class Steps:
    """Computes steps in this process.

    Args:
        native: what computes the steps of ``model``, to logits.
        pages: of keys and values, each for ``page_tokens`` tokens.
        sequences: the most that are computed at the same time.
    """

    #: How long nothing may be computed before :meth:`rest` has to be called; None: as long as one likes.
    rest_seconds: float | None = None

    def __init__(
        self, model: PreTrainedModel, native: NativeDecoder, pages: int, page_tokens: int, sequences: int
    ) -> None:
        self._model = model
        self._native = native
        self._page_tokens = page_tokens
        self._caches = native.new_pages(pages, page_tokens, sequences)

    def compute(self, tokens: Tensor, lines: Tensor, places: Tensor, table: Tensor, wanted: Tensor) -> Tensor:
        """Logits [W, vocabulary]; see :meth:`NativeDecoder.step_rows`."""
        return self._native.step_rows(
            self._model, tokens, lines, places, table, self._page_tokens, self._caches, wanted
        )

    def rest(self) -> None:
        """Nothing is to be computed at the moment."""

    def end(self) -> None:
        """No more steps will be computed."""


@dataclass(frozen=True)
class Balancing:
    """When experts are moved between ranks, by how often they are chosen: every so many steps.

    ``spare_slots``: copies of experts that each rank has room for. ``nodes``: machines that the ranks are spread over.
    """

    steps: int
    spare_slots: int = 0
    nodes: int = 1


_LAYERS_AT_ONCE = 4  # whose experts are moved between two steps: answers wait meanwhile


class _Say(IntEnum):
    """What the leader says: that it is there, how the pages are, a step, which layers' experts to move, or the end."""

    HERE = 0
    PAGES = 1
    STEP = 2
    MOVE = 3
    END = 4


_NUMBERS = 5  # that the leader says with it


class LeadingSteps(Steps):
    """Steps that the other ranks compute too."""

    rest_seconds = _SIGN_SECONDS

    def __init__(
        self,
        model: PreTrainedModel,
        native: NativeDecoder,
        pages: int,
        page_tokens: int,
        sequences: int,
        ranks: Ranks,
        balancing: Balancing | None = None,
    ) -> None:
        self._ranks = ranks
        self._balancing = balancing
        self._layers = 0 if balancing is None else len(_spread_layers(model))
        self._steps_left, self._next_layer = 0 if balancing is None else balancing.steps, 0
        self._say(_Say.PAGES, pages, page_tokens, sequences)
        super().__init__(model, native, pages, page_tokens, sequences)

    def compute(self, tokens: Tensor, lines: Tensor, places: Tensor, table: Tensor, wanted: Tensor) -> Tensor:
        self._move_experts()
        used = lines.unique()  # of the table, only what this step needs
        self._say(_Say.STEP, len(tokens), len(wanted), len(used), table.shape[1])
        parts = (tokens, lines, places, wanted, used, table[used].flatten())
        self._ranks.broadcast(torch.cat([part.to(torch.int64) for part in parts]))
        return super().compute(tokens, lines, places, table, wanted)

    def _move_experts(self) -> None:
        """Between steps, those of a few layers at a time, once so many steps have been computed."""
        if (balancing := self._balancing) is None:
            return
        if self._next_layer == 0 and self._steps_left > 0:
            self._steps_left -= 1
            return
        first, last = self._next_layer, min(self._next_layer + _LAYERS_AT_ONCE, self._layers)
        self._say(_Say.MOVE, first, last, balancing.spare_slots, balancing.nodes)
        _move_experts(self._model, self._native, first, last, balancing.spare_slots, balancing.nodes)
        self._next_layer = last % self._layers
        self._steps_left = balancing.steps

    def rest(self) -> None:
        self._say(_Say.HERE)

    def end(self) -> None:
        self._say(_Say.END)

    def _say(self, what: _Say, *numbers: int) -> None:
        self._ranks.gather_numbers([what, *numbers, *[0] * (_NUMBERS - 1 - len(numbers))])


def _spread_layers(model: PreTrainedModel) -> list[ParallelExperts]:
    return [module for module in model.modules() if isinstance(module, ParallelExperts)]


def _move_experts(
    model: PreTrainedModel, native: NativeDecoder, first: int, last: int, spare_slots: int, nodes: int
) -> None:
    moves = rebalance(_spread_layers(model)[first:last], spare_slots=spare_slots, nodes=nodes)
    if any(move.after < move.before for move in moves):
        native.describe_anew(model)
        for layer, move in enumerate(moves, first):
            _log.info("experts of layer %d: slowest rank %.2f -> %.2f of the mean", layer, move.before, move.after)


def follow_steps(model: PreTrainedModel, native: NativeDecoder, ranks: Ranks) -> None:
    """Computes the steps of the first rank until it ends. Raises RankError if it, or another one, is gone."""
    steps: Steps | None = None
    table = torch.empty((0, 0), dtype=torch.int32)
    while True:
        what, *numbers = ranks.gather_numbers([_Say.HERE] + [0] * (_NUMBERS - 1))[0]
        if what == _Say.END:
            return
        if what == _Say.PAGES:
            pages, page_tokens, sequences, _ = numbers
            steps = Steps(model, native, pages, page_tokens, sequences)
            table = torch.zeros((sequences, 0), dtype=torch.int32)
        if what == _Say.MOVE:
            _move_experts(model, native, *numbers)
        if what != _Say.STEP:
            continue
        assert steps is not None  # pages come first
        count, wanted_count, used_count, width = numbers
        sizes = [count, count, count, wanted_count, used_count, used_count * width]
        tokens, lines, places, wanted, used, rows = ranks.broadcast(torch.empty(sum(sizes), dtype=torch.int64)).split(
            sizes
        )
        if width > table.shape[1]:
            table = torch.nn.functional.pad(table, (0, width - table.shape[1]))
        table[used, :width] = rows.view(used_count, width).to(torch.int32)
        try:
            steps.compute(tokens.clone(), lines.clone(), places.clone(), table, wanted.clone())
        except (RankError, NotDescribed):
            raise
        except Exception:  # the leader has it too, and goes on with the next step
            _log.exception("a step failed")
