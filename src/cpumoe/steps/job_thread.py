"""The thread of an engine, and the requests that it has not finished."""

from __future__ import annotations

import logging
import queue
import threading

from cpumoe.errors import RankError
from cpumoe.steps.request import ENDED, ENDING, NOT_COMPUTED, STOP_SECONDS, Job

_log = logging.getLogger("cpumoe")


class JobThread:
    """Base of engines with a thread of their own, which takes requests from a queue.

    Attributes:
        token_limit: the most tokens of a prompt and its answer together; None: no limit.
        lost: why other ranks are gone, without which nothing can be computed.
    """

    token_limit: int | None = None

    def __init__(self, name: str) -> None:
        self.lost: RankError | None = None
        self._added: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._unfinished: set[Job] = set()
        self._stopping = self._ended = False
        self._lock = threading.Lock()  # a request may not be added after the thread has ended
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def add(self, job: Job) -> None:
        """Begin a request."""
        with self._lock:
            problem = self.problem
            if problem is None:
                self._unfinished.add(job)
                self._added.put(job)
        if problem is not None:
            job.fail(ENDING if self._stopping else f"no more requests are computed: {problem}")

    def cancel(self, job: Job) -> None:
        """Drop a request whose tokens nobody wants any more."""
        job.over = True  # the thread looks at it before its next step

    def stop(self) -> bool:
        """Fail all unfinished requests. Return whether all computing has ended."""
        with self._lock:
            self._stopping = True
        self._added.put(None)
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        self._fail_all(ENDING)  # the step that is being computed may take longer than we wait
        return not self._thread.is_alive()

    @property
    def problem(self) -> str | None:
        """Why no more requests can be computed, or None."""
        if self._stopping:
            return ENDING
        return ENDED if self._ended else None

    def _compute_all(self) -> None:
        """Compute requests until the engine is stopping; runs on the thread."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            self._compute_all()
        except RankError as problem:
            _log.error("no more requests are computed: %s", problem)
            self.lost = problem
        except Exception:
            _log.exception("no more requests are computed")
        with self._lock:
            self._ended = True
        self._fail_all(ENDING if self._stopping else NOT_COMPUTED)

    def _fail_all(self, sentence: str) -> None:
        for job in list(self._unfinished):
            job.fail(sentence)
