"""Runners, which compute the steps of an engine, and the interface of the models that they call."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from cpumoe.errors import RankError
from cpumoe.parallel.experts import ParallelExperts

_log = logging.getLogger("cpumoe")


@dataclass(frozen=True)
class Rows:
    """The rows of a step of one group of ranks: tokens of any sequences, or none.

    Attributes:
        tokens: int64 [T].
        lines: int64 [T], the batch slot of each token's sequence, a row of the page table.
        places: int64 [T], the cache position of each token.
        table: int32 [slots, pages], the page table.
        wanted: int64 [W], the rows whose logits are needed, ascending.
    """

    tokens: Tensor
    lines: Tensor
    places: Tensor
    table: Tensor
    wanted: Tensor


class ModelChanged(Exception):
    """The native decoder cannot compute a model any more; the message says why."""


class PagedModel(Protocol):
    """A model that computes steps over a paged KV cache."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids that it accepts."""

    @property
    def has_states(self) -> bool:
        """Whether layers have recurrent states, so that sequences cannot share the pages of a common prefix."""

    @property
    def spread_experts(self) -> list[ParallelExperts]:
        """The layers of experts that are spread over ranks."""

    def new_pages(self, pages: int, page_tokens: int, sequences: int) -> Any:
        """Return a KV cache of so many pages, and states of so many sequences."""

    def step(self, rows: Rows, page_tokens: int, caches: Any) -> Tensor:
        """Return logits [W, vocabulary]. Raise ModelChanged if no further step can be computed."""

    def refresh(self) -> None:
        """Use the experts that have been moved here."""


class Runner(Protocol):
    """The methods of a runner that the engine uses. Every group of ranks with rows of its own has a part of a step."""

    #: The time without steps after which :meth:`rest` has to be called; None: no limit.
    rest_seconds: float | None
    groups: int
    vocabulary: int
    #: Whether sequences with a common prefix may share the pages of that prefix.
    shares_prefixes: bool

    def compute(self, groups: Sequence[Rows]) -> list[Tensor | None]:
        """Return logits [W, vocabulary] of each group; None where a step failed, and the next one may not."""

    def rest(self) -> None:
        """Nothing is to be computed at the moment."""

    def end(self) -> None:
        """No more steps will be computed."""


class CoreRunner:
    """Computes steps in this process, for one group.

    Args:
        pages: of the KV cache, each for ``page_tokens`` tokens.
        sequences: the most that are computed at the same time.
    """

    rest_seconds: float | None = None
    groups = 1

    def __init__(self, model: PagedModel, pages: int, page_tokens: int, sequences: int) -> None:
        self._model = model
        self._page_tokens = page_tokens
        self._caches = model.new_pages(pages, page_tokens, sequences)
        self.vocabulary = model.vocabulary
        # The states kept are those after all tokens of a sequence: there are none at the end of a shared prefix.
        self.shares_prefixes = not model.has_states

    def compute(self, groups: Sequence[Rows]) -> list[Tensor | None]:
        (rows,) = groups
        return [self.try_rows(rows)]

    def try_rows(self, rows: Rows) -> Tensor | None:
        """Return logits [W, vocabulary] of a group; None if that failed in a way that later steps need not."""
        try:
            return self._model.step(rows, self._page_tokens, self._caches)
        except (ModelChanged, RankError):  # no later step can be computed either
            raise
        except Exception:  # an error in one step must not end all others
            _log.exception("a step failed")
            return None

    def rest(self) -> None:
        pass

    def end(self) -> None:
        pass
