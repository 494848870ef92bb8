"""The engine for models whose steps are one call of the core: rows of all requests in every step."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpumoe.errors import RankError
from cpumoe.generation.engine import ENDED, ENDING, NOT_COMPUTED, STOP_SECONDS, Failure, Finish, Job
from cpumoe.generation.group_schedules import GroupSchedules
from cpumoe.generation.memory import MOST_SEQUENCES
from cpumoe.generation.rank_steps import Balancing, LeadingSteps, Rows, Steps
from cpumoe.generation.sampling import Sampling, Token
from cpumoe.generation.schedule import Piece, Schedule
from cpumoe.integrations.transformers.native_decoder import NativeDecoder
from cpumoe.parallel.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("cpumoe")

# While answers are being written, a step takes no more rows of prompts than it can compute in about this time, since
# no answer goes on before it ends. With few rows, prompts are read slowly.
_PROMPT_SECONDS = 0.5
_LEAST_PROMPT_ROWS = 128


class StepEngine:
    """Computes all requests together with :meth:`NativeDecoder.step_rows`; see :class:`Schedule` for what a step has.

    Of several ranks, every group that has tokens of its own has a schedule, and each step a part for each group. A
    step's results do not depend on what else is computed in it, so that an answer is the same whoever else asks.

    Args:
        native: what computes the steps of ``model``, to logits.
        pages: of keys and values, each for ``page_tokens`` tokens, on every rank.
        step_rows: the most tokens that one step of a group computes; a longer prompt is read in pieces.
        sequences: the most requests that a group computes at the same time; further ones wait.
        ranks: that compute the steps together, of which this is the first; None: they are computed here alone.
        balancing: when experts are moved between the ranks; None: never.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        native: NativeDecoder,
        pages: int,
        page_tokens: int,
        step_rows: int,
        sequences: int = MOST_SEQUENCES,
        ranks: Ranks | None = None,
        balancing: Balancing | None = None,
    ) -> None:
        sizes = (pages, page_tokens, sequences)
        self._steps = LeadingSteps(model, native, *sizes, ranks, balancing) if ranks else Steps(model, native, *sizes)
        self._vocabulary = native.decoder.model.embedding.shape[0]
        # States are those behind all tokens of a sequence: what another one has computed of the same tokens is no help.
        shares_pages = native.state_bytes == 0
        self._schedules = GroupSchedules(
            [
                Schedule(pages, page_tokens, step_rows, sequences, shares_pages=shares_pages)
                for _ in range(ranks.size // ranks.group.size if ranks else 1)
            ]
        )
        self._least_prompt_rows = self._prompt_rows = min(_LEAST_PROMPT_ROWS, step_rows)
        self._added: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._unfinished: set[Job] = set()
        self._stopping = False
        self._ended = False
        self.lost: RankError | None = None  # why other ranks are gone, without which nothing can be computed
        self._lock = threading.Lock()  # no job may be added behind the back of a thread that ends
        self._thread = threading.Thread(target=self._run, name="cpumoe-steps", daemon=True)

    def start(self) -> str | None:
        """Starts the thread that computes and tries it out. Returns what went wrong, or None."""
        items: queue.SimpleQueue[Token | Finish | Failure] = queue.SimpleQueue()
        self._thread.start()
        self.add(Job([0, 0], 2, frozenset(), Sampling(), items.put))
        while isinstance(item := items.get(), Token):
            pass
        return item.sentence if isinstance(item, Failure) else None

    def add(self, job: Job) -> None:
        if any(not 0 <= token < self._vocabulary for token in job.prompt):
            # The core would refuse the whole step.
            _log.error("a request failed: its prompt has tokens that are not 0 to %d", self._vocabulary - 1)
            job.fail(NOT_COMPUTED)
            return
        tokens = len(job.prompt) + job.max_new_tokens
        if tokens > self._schedules.tokens:
            job.fail(
                f"the prompt has {len(job.prompt)} tokens and {job.max_new_tokens} for the answer; there is room for "
                f"{self._schedules.tokens} in all"
            )
            return
        with self._lock:
            problem = self.problem
            if problem is None:
                self._unfinished.add(job)
                self._added.put(job)
        if problem is not None:
            job.fail(ENDING if self._stopping else f"no more requests are computed: {problem}")

    def cancel(self, job: Job) -> None:
        job.over = True  # the thread drops it before its next step

    def stop(self) -> bool:
        with self._lock:
            self._stopping = True
        self._added.put(None)
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        for job in list(self._unfinished):  # the step that is being computed may take longer than we wait
            job.fail(ENDING)
        return not self._thread.is_alive()

    @property
    def problem(self) -> str | None:
        if self._stopping:
            return ENDING
        return ENDED if self._ended else None

    def _run(self) -> None:
        try:
            while self._take_jobs():
                pieces = self._schedules.next_step(self._prompt_rows)
                if any(pieces):
                    self._compute(pieces)
            self._steps.end()
        except RankError as problem:
            _log.error("no more requests are computed: %s", problem)
            self.lost = problem
        except Exception:
            _log.exception("no more requests are computed")
        with self._lock:
            self._ended = True
        for job in list(self._unfinished):
            job.fail(ENDING if self._stopping else NOT_COMPUTED)

    def _take_jobs(self) -> bool:
        """Drops what has ended and takes what was added; waits if there is nothing to compute. False at the end."""
        # First, because a group's ended sequences would count as its work when a new job chooses a group.
        self._unfinished.difference_update(self._schedules.drop_ended())
        while not self._stopping:
            idle = self._schedules.is_idle
            try:
                job = self._added.get(block=idle, timeout=self._steps.rest_seconds)
            except queue.Empty:
                if idle:
                    self._steps.rest()
                    continue
                break
            if job is not None:
                self._schedules.add(job)
        return not self._stopping

    def _compute(self, pieces: list[list[Piece]]) -> None:
        """Computes a step, and chooses the next token of every sequence that is complete with it.

        ``pieces``: those of each group.
        """
        groups = self._schedules.groups
        rows = [_rows_of(*part) for part in zip(groups, pieces, strict=True)]
        started = time.perf_counter()
        logits = self._steps.compute(rows)
        most = max(len(part.tokens) for part in rows)  # all groups wait for the one that has them
        if most >= self._least_prompt_rows and None not in logits:
            rate = most / (time.perf_counter() - started)
            self._prompt_rows = max(self._least_prompt_rows, int(rate * _PROMPT_SECONDS))
        for group, of_group, scores in zip(groups, pieces, logits, strict=True):
            self._take(group, of_group, scores)

    @staticmethod
    def _take(group: Schedule, pieces: list[Piece], logits: Tensor | None) -> None:
        """Takes what a step has given a group: [complete sequences, vocabulary], or None if it failed."""
        if logits is None:
            for piece in pieces:
                piece.sequence.job.fail(NOT_COMPUTED)
            return
        complete = [piece.sequence for piece in pieces if piece.is_last]
        group.advance(pieces)
        for sequence, scores in zip(complete, logits.to(torch.float32), strict=True):
            token = sequence.job.next_token(scores)
            if token is not None:
                sequence.tokens.append(token)


def _rows_of(group: Schedule, pieces: list[Piece]) -> Rows:
    """What a group computes in a step that consists of these pieces."""
    tokens: list[int] = []
    lines: list[int] = []
    places: list[int] = []
    wanted: list[int] = []
    for piece in pieces:
        assert piece.sequence.line is not None  # it has pages
        first, last = piece.sequence.computed, piece.sequence.computed + piece.count
        tokens += piece.sequence.tokens[first:last]
        lines += [piece.sequence.line] * piece.count
        places += range(first, last)
        if piece.is_last:
            wanted.append(len(tokens) - 1)

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    return Rows(column(tokens), column(lines), column(places), group.table, column(wanted))
