"""A generation request: prompt, limits, sampling, and where its tokens go."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cpumoe.steps.sampling import Sampling, Token, TokenChooser

_log = logging.getLogger("cpumoe")

STOP_SECONDS = 3.0  # an engine that is stopped waits this long for the current step

ENDING = "the server is ending; ask again when it has been started anew"
ENDED = "the thread that computes has ended; the log says why"
NOT_COMPUTED = "the model could not compute this request; the log has more"

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Failure:
    """Why a request failed; the sentence is for the client."""

    sentence: str


class Job:
    """A generation request: one sequence. The engine's thread calls ``deliver`` with each token and then the end.

    ``cached_tokens`` counts the tokens of the prompt that were in the prefix cache. ``is_last``, called on the engine's
    thread too, says whether a token ends the request, such as the last one of a stop string.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        ends: frozenset[int],
        sampling: Sampling,
        deliver: Callable[[Token | Finish | Failure], None],
        is_last: Callable[[Token], bool] | None = None,
    ) -> None:
        self.id = f"job-{next(self._numbers)}"
        self.prompt = list(prompt)
        self.max_new_tokens = max_new_tokens
        self.ends = ends
        self.over = False
        self.cached_tokens = 0
        self._chooser = TokenChooser(sampling, self.prompt)
        self._deliver = deliver
        self._is_last = is_last
        self._count = 0

    @property
    def started(self) -> bool:
        """Whether a token has been generated."""
        return self._count > 0

    def next_token(self, scores: torch.Tensor) -> int | None:
        """Choose a token by the logits ``scores`` [vocabulary] and deliver it. Return None if the request is over."""
        if self.over:
            return None
        try:
            token = self._chooser.choose(scores)
        except ValueError as problem:
            self.fail(str(problem))
            return None
        except Exception:  # an error in one job must not end the thread that computes for all others
            _log.exception("no token could be chosen")
            self.fail(NOT_COMPUTED)
            return None
        self._count += 1
        self._deliver(token)
        if token.id in self.ends or (self._is_last is not None and self._is_last(token)):
            self._finish("stop")
        elif self._count >= self.max_new_tokens:
            self._finish("length")
        return token.id

    def fail(self, sentence: str) -> None:
        if not self.over:
            self._finish(Failure(sentence))

    def _finish(self, end: Finish | Failure) -> None:
        self.over = True
        self._deliver(end)
