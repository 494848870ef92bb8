"""The engine: one thread that computes all requests together, with continuous batching and chunked prefill."""

from __future__ import annotations

import logging
import queue
import time

import torch
from torch import Tensor

from cpumoe.steps.group_schedules import GroupSchedules
from cpumoe.steps.job_thread import JobThread
from cpumoe.steps.request import NOT_COMPUTED, Failure, Finish, Job
from cpumoe.steps.runner import Rows, Runner
from cpumoe.steps.sampling import Sampling, Token
from cpumoe.steps.schedule import MOST_SEQUENCES, Piece, Schedule

_log = logging.getLogger("cpumoe")

# While sequences are decoding, a step has no more prompt rows than are computed in about this time: their next tokens
# wait for its end. Below _LEAST_PROMPT_ROWS prefill would be slow.
_PROMPT_SECONDS = 0.5
_LEAST_PROMPT_ROWS = 128


class StepEngine(JobThread):
    """Computes all requests together; see :class:`Schedule` for what a step has.

    Every group of ranks that has tokens of its own has a schedule, and each step a part for each group. The results of
    a step do not depend on what else is computed in it, so an answer is the same whatever other requests there are.

    Args:
        pages: of the runner's KV cache, each for ``page_tokens`` tokens.
        step_rows: the most tokens that one step of a group computes; a longer prompt is read in chunks.
        sequences: the most requests that a group computes at the same time; further ones wait.
    """

    token_limit: int

    def __init__(
        self, runner: Runner, pages: int, page_tokens: int, step_rows: int, sequences: int = MOST_SEQUENCES
    ) -> None:
        super().__init__("cpumoe-steps")
        self.token_limit = pages * page_tokens
        self._runner = runner
        self._schedules = GroupSchedules(
            [
                Schedule(pages, page_tokens, step_rows, sequences, shares_pages=runner.shares_prefixes)
                for _ in range(runner.groups)
            ]
        )
        self._least_prompt_rows = self._prompt_rows = min(_LEAST_PROMPT_ROWS, step_rows)

    def start(self) -> str | None:
        """Start the thread and compute one small request. Return what went wrong, or None."""
        items: queue.SimpleQueue[Token | Finish | Failure] = queue.SimpleQueue()
        self._thread.start()
        self.add(Job([0, 0], 2, frozenset(), Sampling(), items.put))
        while isinstance(item := items.get(), Token):
            pass
        return item.sentence if isinstance(item, Failure) else None

    def add(self, job: Job) -> None:
        if any(not 0 <= token < self._runner.vocabulary for token in job.prompt):
            # The core would reject the whole step.
            _log.error("a request failed: its prompt has tokens that are not 0 to %d", self._runner.vocabulary - 1)
            job.fail(NOT_COMPUTED)
            return
        if len(job.prompt) + job.max_new_tokens > self.token_limit:
            job.fail(
                f"the prompt has {len(job.prompt)} tokens and {job.max_new_tokens} for the answer; there is room for "
                f"{self.token_limit} in all"
            )
            return
        super().add(job)

    def _compute_all(self) -> None:
        while self._take_jobs():
            pieces = self._schedules.next_step(self._prompt_rows)
            if any(pieces):
                self._compute(pieces)
        self._runner.end()

    def _take_jobs(self) -> bool:
        """Drop finished requests and take new ones; wait if there is nothing to compute. Return False at the end."""
        # First, because a group's ended sequences would count as its work when a new job chooses a group.
        self._unfinished.difference_update(self._schedules.drop_ended())
        while not self._stopping:
            idle = self._schedules.is_idle
            try:
                job = self._added.get(block=idle, timeout=self._runner.rest_seconds)
            except queue.Empty:
                if idle:
                    self._runner.rest()
                    continue
                break
            if job is not None:
                self._schedules.add(job)
        return not self._stopping

    def _compute(self, pieces: list[list[Piece]]) -> None:
        """Compute a step, and choose the next token of every sequence whose pending tokens were all in it.

        ``pieces``: the chunks of each group.
        """
        groups = self._schedules.groups
        rows = [_rows_of(*part) for part in zip(groups, pieces, strict=True)]
        started = time.perf_counter()
        logits = self._runner.compute(rows)
        most = max(len(part.tokens) for part in rows)  # all groups wait for the one with the most rows
        if most >= self._least_prompt_rows and None not in logits:
            rate = most / (time.perf_counter() - started)
            self._prompt_rows = max(self._least_prompt_rows, int(rate * _PROMPT_SECONDS))
        for group, of_group, scores in zip(groups, pieces, logits, strict=True):
            self._take(group, of_group, scores)

    @staticmethod
    def _take(group: Schedule, pieces: list[Piece], logits: Tensor | None) -> None:
        """Choose tokens by the logits of a group, [complete sequences, vocabulary]; None if the step failed."""
        if logits is None:
            for piece in pieces:
                piece.sequence.computed = 0  # its recurrent states may be of any token
                piece.sequence.job.fail(NOT_COMPUTED)
            return
        complete = [piece.sequence for piece in pieces if piece.is_last]
        group.advance(pieces)
        for sequence, scores in zip(complete, logits.to(torch.float32), strict=True):
            token = sequence.job.next_token(scores)
            if token is not None:
                sequence.tokens.append(token)


def _rows_of(group: Schedule, pieces: list[Piece]) -> Rows:
    """Return the rows of a group for these chunks."""
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
