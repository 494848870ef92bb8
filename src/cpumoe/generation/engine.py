"""Engines: one thread that owns the model and generates for all requests, together or one after another.

An engine takes :class:`Job` objects and gives each its tokens. Nothing else may run the model while an engine has it:
transformers' models carry settings that a call changes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList

from cpumoe.generation.sampling import Sampling, Token, TokenChooser

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.continuous_batching.requests import FutureRequestState, GenerationOutput, RequestState

_log = logging.getLogger("cpumoe")

_REQUESTS_PER_BATCH = 64
_STOP_SECONDS = 3.0  # for the step that is being computed when an engine is told to end

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Failure:
    """Why a job got no further; a sentence for the client."""

    sentence: str


class Job:
    """One sequence to be generated. ``deliver`` is called, on the engine's thread, with each token and then the end."""

    _numbers = itertools.count()

    def __init__(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        ends: frozenset[int],
        sampling: Sampling,
        deliver: Callable[[Token | Finish | Failure], None],
    ) -> None:
        self.id = f"job-{next(self._numbers)}"
        self.prompt = list(prompt)
        self.max_new_tokens = max_new_tokens
        self.ends = ends
        self.over = False
        self._chooser = TokenChooser(sampling, self.prompt)
        self._deliver = deliver
        self._count = 0

    def next_token(self, scores: torch.Tensor) -> int | None:
        """Chooses by ``scores`` [vocabulary] and delivers; None if the job is over and needs no more."""
        if self.over:
            return None
        try:
            token = self._chooser.choose(scores)
        except ValueError as problem:
            self.fail(str(problem))
            return None
        except Exception:  # whatever it is, it must not end the thread that computes for all others
            _log.exception("no token could be chosen")
            self.fail("the model could not compute this request; the log has more")
            return None
        self._count += 1
        self._deliver(token)
        if token.id in self.ends:
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


class Engine(Protocol):
    """What the server needs of an engine."""

    def add(self, job: Job) -> None:
        """Takes a job on; called on the event loop."""

    def cancel(self, job: Job) -> None:
        """Forgets a job whose tokens nobody wants any more."""

    def stop(self) -> bool:
        """Fails what is unfinished; whether nothing is being computed any more."""

    @property
    def problem(self) -> str | None:
        """Why this engine answers nothing any more, if so."""


ENDING = "the server is ending; ask again when it has been started anew"


# ---- requests computed together ------------------------------------------------------------------------------------


class BatchEngine:
    """transformers' continuous batching, with each request's own way of choosing tokens.

    transformers chooses by one configuration for a whole batch. Here a processor of scores, which sees them last,
    chooses the token of each row by its job and leaves no other.
    """

    def __init__(self, model: PreTrainedModel, blocks: int, block_tokens: int, batch_tokens: int) -> None:
        self._jobs: dict[str, Job] = {}
        self._stopping = False
        config = ContinuousBatchingConfig(
            page_size=block_tokens,
            num_blocks=blocks,
            max_batch_tokens=batch_tokens,
            max_requests_per_batch=_REQUESTS_PER_BATCH,
            max_memory_percent=1.0,  # the blocks were counted by what is free
        )
        greedy = GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=-1)  # each job has its own ends
        self._batches = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
        chain = self._batches.logit_processor
        chain.logits_processor = LogitsProcessorList([_Chooser(self._jobs)])
        chain.tensors_required = 1
        chain.do_processing = True

    def start(self) -> str | None:
        """Starts the thread that computes and has it compute; what went wrong, if anything did."""
        logging.disable(logging.ERROR)  # what goes wrong here is told in one line
        try:
            self._batches.start()
            self._batches.add_request([0, 0], request_id="probe", max_new_tokens=2, eos_token_id=-1)
            result = None
            while result is None and self._batches.is_running():
                result = self._batches.get_result("probe", timeout=0.1)
        finally:
            logging.disable(logging.NOTSET)
        problem = self._batches.background_thread_status.fatal_error or (result.error if result else "it ended")
        return f"{type(problem).__name__}: {problem}" if isinstance(problem, Exception) else problem

    def add(self, job: Job) -> None:
        def ended(output: GenerationOutput) -> None:
            self._jobs.pop(job.id, None)
            if output.error is not None:
                _log.error("a request failed: %s", output.error)
                job.fail(ENDING if self._stopping else "the model could not compute this request; the log has more")

        self._jobs[job.id] = job
        self._batches.register_result_handler(job.id, ended)
        added = self._batches.add_request(
            job.prompt,
            request_id=job.id,
            max_new_tokens=job.max_new_tokens,
            eos_token_id=sorted(job.ends) or -1,
        )
        if added is None:
            self._forget(job)
            job.fail(ENDING if self._stopping else f"no more requests are computed: {self.problem}")

    def cancel(self, job: Job) -> None:
        job.over = True
        self._forget(job)
        self._batches.cancel_request(job.id)

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.id, None)
        router = self._batches.output_router
        with router._lock:
            router.result_handlers.pop(job.id, None)

    def stop(self) -> bool:
        self._stopping = True
        if self._batches.is_running():
            self._batches.stop(block=True, timeout=_STOP_SECONDS, hard_stop=True)
        for job in list(self._jobs.values()):  # their ends may not come through an event loop that is ending too
            job.fail(ENDING)
        return not self._batches.is_running()

    @property
    def problem(self) -> str | None:
        if self._stopping:
            return ENDING
        return None if self._batches.is_running() else "the thread that computes has ended; the log says why"


class _Chooser(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]  # untyped base
    """Chooses the token of each row of a batch; what follows in transformers then finds no other."""

    supported_kwargs: ClassVar[dict[str, type]] = {}
    ignored_kwargs = ()

    def __init__(self, jobs: dict[str, Job]) -> None:
        self._jobs = jobs
        self._states: list[RequestState] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> torch.Tensor:
        self._states = [request.state for request in requests_with_new_token]
        return torch.zeros(len(self._states), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(scores, -torch.inf)
        for row, state in enumerate(self._states):
            job = self._jobs.get(state.request_id)
            token = None if job is None else job.next_token(scores[row])
            chosen[row, token or 0] = 0  # 0 for a job that is over and about to leave the batch
        return chosen


# ---- one request after another -------------------------------------------------------------------------------------


class SequentialEngine:
    """``model.generate`` for one job after another: for models whose attention transformers does not batch."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._unfinished: set[Job] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="cpumoe-generate", daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        if self._stopping:
            job.fail(ENDING)
        else:
            self._unfinished.add(job)
            self._waiting.put(job)

    def cancel(self, job: Job) -> None:
        job.over = True
        self._unfinished.discard(job)

    def stop(self) -> bool:
        self._stopping = True
        self._waiting.put(None)
        self._thread.join(_STOP_SECONDS)
        for job in list(self._unfinished):  # the step that is being computed may take longer than anyone waits
            job.fail(ENDING)
        return not self._thread.is_alive()

    @property
    def problem(self) -> str | None:
        return ENDING if self._stopping else None

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            if self._stopping:
                job.fail(ENDING)
            elif not job.over:
                self._generate(job)
            self._unfinished.discard(job)

    def _generate(self, job: Job) -> None:
        def choose(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            token = job.next_token(scores[0])
            chosen = torch.full_like(scores, -torch.inf)
            chosen[0, token or 0] = 0
            return chosen

        def is_over(tokens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            if self._stopping:
                job.fail(ENDING)
            return torch.full((tokens.shape[0],), job.over)

        tokens = torch.tensor([job.prompt])
        try:
            self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=_PLAIN,
                max_new_tokens=job.max_new_tokens,
                stop_strings=None,  # the model's own are looked for in the text
                logits_processor=LogitsProcessorList([choose]),
                stopping_criteria=[is_over],
            )
        except Exception:  # a job that fails, for whatever reason, must not end the thread of all others
            _log.exception("a request failed")
            job.fail("the model could not compute this request; the log has more")


# Whatever the model's own configuration says was taken into account when the job was made.
_PLAIN = GenerationConfig(do_sample=False, num_beams=1, repetition_penalty=1.0)


def deliver_to(loop: asyncio.AbstractEventLoop, put: Callable[[Token | Finish | Failure], None]) -> Callable[..., None]:
    """A ``deliver`` for jobs that hands over from the engine's thread to an event loop."""

    def deliver(item: Token | Finish | Failure) -> None:
        try:
            loop.call_soon_threadsafe(put, item)
        except RuntimeError:  # the loop is closed: the server has ended, and nobody waits
            _log.debug("a token came after the end")

    return deliver
