"""transformers' continuous batching, for models without a native decoder whose attention it can batch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList

from cpumoe.errors import RankError
from cpumoe.generation.engine import CannotBatch
from cpumoe.generation.memory import BATCHED_SEQUENCES
from cpumoe.steps.request import ENDED, ENDING, NOT_COMPUTED, STOP_SECONDS, Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.continuous_batching.requests import FutureRequestState, GenerationOutput, RequestState

_log = logging.getLogger("cpumoe")


class BatchEngine:
    """transformers' continuous batching, with separate settings for choosing tokens in each request.

    transformers itself uses one configuration for the whole batch. So the last step that processes the scores is ours:
    it chooses the token of each row as the job of that row wants it, and leaves only that token possible.
    """

    lost: RankError | None = None

    def __init__(self, model: PreTrainedModel, blocks: int, block_tokens: int, batch_tokens: int) -> None:
        self.token_limit: int | None = blocks * block_tokens
        self._jobs: dict[str, Job] = {}
        self._stopping = False
        config = ContinuousBatchingConfig(
            page_size=block_tokens,
            num_blocks=blocks,
            max_batch_tokens=batch_tokens,
            max_requests_per_batch=BATCHED_SEQUENCES,
            max_memory_percent=1.0,  # the number of blocks already depends on the free memory
        )
        self._model, self._attention = model, model.config._attn_implementation
        greedy = GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=-1)  # each job has its own ends
        try:
            self._batches = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
        except (ValueError, AttributeError, NotImplementedError) as problem:  # raised by transformers' own code
            self._put_attention_back()
            raise CannotBatch(str(problem)) from problem
        chain = self._batches.logit_processor
        chain.logits_processor = LogitsProcessorList([_Chooser(self._jobs)])
        chain.tensors_required = 1
        chain.do_processing = True

    def start(self) -> None:
        """Starts the thread that computes and tries it out. Raises CannotBatch for what goes wrong."""
        logging.disable(logging.ERROR)  # the caller reports an error in one line
        try:
            self._batches.start()
            self._batches.add_request([0, 0], request_id="probe", max_new_tokens=2, eos_token_id=-1)
            result = None
            while result is None and self._batches.is_running():
                result = self._batches.get_result("probe", timeout=0.1)
        finally:
            logging.disable(logging.NOTSET)
        problem = self._batches.background_thread_status.fatal_error or (result.error if result else "it ended")
        if problem is not None:
            self.stop()
            self._put_attention_back()
            raise CannotBatch(f"{type(problem).__name__}: {problem}" if isinstance(problem, Exception) else problem)
        self._count_cached_tokens()

    def _put_attention_back(self) -> None:
        """Undo transformers' change of the attention to a paged one, with which no other engine can run the model."""
        if self._model.config._attn_implementation != self._attention:
            self._model.set_attn_implementation(self._attention)

    def _count_cached_tokens(self) -> None:
        """Count the prefix cache hits of each request, which transformers does not report."""
        cache = self._batches.batch_processor.cache
        search = cache.search_prefix_match

        def search_and_count(request_id: str, prompt: list[int]) -> int:
            found = int(search(request_id, prompt))
            job = self._jobs.get(request_id)
            if job is not None and not job.started:  # a job that was preempted finds its own blocks again
                job.cached_tokens = found
            return found

        cache.search_prefix_match = search_and_count

    def add(self, job: Job) -> None:
        def ended(output: GenerationOutput) -> None:
            self._jobs.pop(job.id, None)
            if output.error is not None:
                _log.error("a request failed: %s", output.error)
                job.fail(ENDING if self._stopping else NOT_COMPUTED)

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
            self._batches.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)
        for job in list(self._jobs.values()):  # the event loop is ending too and may not hear of their ends
            job.fail(ENDING)
        return not self._batches.is_running()

    @property
    def problem(self) -> str | None:
        if self._stopping:
            return ENDING
        return None if self._batches.is_running() else ENDED


class _Chooser(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]  # untyped base
    """Chooses the token of each row of a batch, and makes all others impossible for the steps that follow."""

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
            chosen[row, token or 0] = 0  # token 0 if the job is over and about to leave the batch
        return chosen
