"""From a request that was parsed to jobs in the engine: its place, its prompts, the room for answers, the sampling."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from transformers import GenerationConfig

from cpumoe.generation.answers import Answering
from cpumoe.generation.api_requests import ApiError, ChatRequest, CompletionRequest
from cpumoe.generation.choice import Choice
from cpumoe.generation.engine import Engine
from cpumoe.generation.stop_strings import StopAutomaton, own_stop_strings
from cpumoe.generation.text import PlainMessage, StructuredMessage
from cpumoe.steps.request import ENDING
from cpumoe.steps.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MAX_ANSWERS = 256  # that are being computed or waiting; clients that ask for more get 429
_RETRY_SECONDS = 5  # that such clients are told to wait

Rendered = TypeVar("Rendered")


class Admission:
    """Makes jobs of requests, and refuses requests for which there is no room.

    Args:
        model: its generation_config has the defaults for sampling, and strings that end an answer.
        renderer: the thread for chat templates and tokenizers, which may take their time.
        token_limit: the most tokens of a prompt and its answer together; None if there is no limit.
        ends: the tokens that end an answer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        engine: Engine,
        renderer: ThreadPoolExecutor,
        token_limit: int | None,
        ends: frozenset[int],
    ) -> None:
        self.token_limit = token_limit
        self._tokenizer = tokenizer
        self._engine = engine
        self._renderer = renderer
        self._defaults = Sampling.of_model(model.generation_config or GenerationConfig())
        self._ends = ends
        self._stops = own_stop_strings(model)
        self._own_stops = StopAutomaton(self._stops)  # for the requests that have none of their own
        self._vocabulary = model.config.get_text_config().vocab_size
        self._answers = 0

    @property
    def problem(self) -> str | None:
        """Why no more requests can be answered, if so."""
        return self._engine.problem

    @contextlib.contextmanager
    def places(self, count: int) -> Iterator[Callable[[], None]]:
        """Takes places for ``count`` answers before any work is done for them; yields the function that frees them.

        An exception inside the block frees them too.
        """
        if self._answers + count > _MAX_ANSWERS:
            raise ApiError(
                429,
                f"{self._answers} answers are being computed or wait; ask again later",
                code="rate_limit_exceeded",
                retry_seconds=_RETRY_SECONDS,
            )
        self._answers += count
        taken = count

        def release() -> None:
            nonlocal taken
            self._answers -= taken
            taken = 0

        try:
            yield release
        except BaseException:
            release()
            raise

    async def rendered(self, render: Callable[[], Rendered]) -> Rendered:
        """Calls ``render``, which runs templates and tokenizers, on the thread for that."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._renderer, render)
        except (RuntimeError, asyncio.CancelledError):  # the renderer takes no more work, or takes too long to end
            if self._engine.problem is None:
                raise
            raise ApiError(503, ENDING) from None

    async def stop_automaton(self, stops: Sequence[str]) -> StopAutomaton:
        """Return the automaton of a request's stop strings and those of the model, built on the renderer's thread."""
        if not stops:
            return self._own_stops
        return await self.rendered(lambda: StopAutomaton((*stops, *self._stops)))

    def chosen_sampling(self, temperature: float | None, top_p: float | None, **others: float | None) -> Sampling:
        """The model's own settings, replaced by those that the request has."""
        return self._defaults.asked(temperature, top_p=top_p, **others)

    def completion_sampling(self, body: ChatRequest | CompletionRequest, logprobs: int | None) -> Sampling:
        """The sampling of a chat or text completion, with its penalties and biases."""
        biases: dict[int, float] = {}
        for name, bias in body.logit_bias.items():
            if not (name.isascii() and name.isdecimal() and len(name) <= 10) or int(name) >= self._vocabulary:
                raise ApiError(
                    400,
                    f"logit_bias has the key {name!r:.80}; tokens from 0 to {self._vocabulary - 1} are accepted",
                    param="logit_bias",
                )
            biases[int(name)] = bias
        sampling = self.chosen_sampling(body.temperature, body.top_p, top_k=body.top_k, min_p=body.min_p)
        penalty = body.repetition_penalty
        return replace(
            sampling,
            repetition_penalty=sampling.repetition_penalty if penalty is None else penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=biases,
            seed=body.seed,
            logprobs=logprobs,
        )

    def answer(
        self,
        prompts: Sequence[list[int]],
        n: int,
        messages: Sequence[PlainMessage | StructuredMessage],
        length: int | None,
        stops: StopAutomaton,
        sampling: Sampling,
        release: Callable[[], None],
    ) -> Answering:
        """Gives ``n`` jobs for each prompt to the engine; ``release`` is called when nobody waits for them any more.

        All choices share ``stops``.
        """
        lengths = [self._room(len(prompt), length) for prompt in prompts]
        choices = [Choice(index, self._tokenizer, stops, message, self._ends) for index, message in enumerate(messages)]
        # The answers to one prompt must differ, even if the client fixed the seed.
        samplings = [sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + i) for i in range(n)]
        return Answering(
            self._engine,
            choices,
            [prompt for prompt in prompts for _ in range(n)],
            [room for room in lengths for _ in range(n)],
            self._ends,
            samplings * len(prompts),
            n=n,
            on_end=release,
        )

    def _room(self, prompt_tokens: int, wanted: int | None) -> int:
        """How many tokens an answer may have; raises ApiError if there is no room for it."""
        if self.token_limit is None:
            return wanted or 2**31 - 1
        if prompt_tokens + (wanted or 1) > self.token_limit:
            answer = "" if wanted is None else f" and {wanted} for the answer"
            raise ApiError(
                400,
                f"the prompt has {prompt_tokens} tokens{answer}; there is room for {self.token_limit} in all",
                code="context_length_exceeded",
            )
        return self.token_limit - prompt_tokens if wanted is None else wanted
