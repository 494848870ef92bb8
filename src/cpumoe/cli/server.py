"""transformers' OpenAI-compatible server around one model that is already loaded.

Only ``serve`` imports this module, and only when it runs, since it needs transformers and the ``serve`` extra.
What is added to the server of transformers: sampling settings of each request's own (its batches take those of the
first request for all), a refusal of what would not fit into the cache (which would end the thread that computes), and
an end that does not wait for the answers being written.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import BaseGenerateManager, CBGenerateManager, GenerateManager, GenerationState
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

_log = logging.getLogger(__name__)

_REQUESTS_PER_BATCH = 64
_GRACE_SECONDS = 2.0  # for the answers being written when the server is told to end
_STOP_SECONDS = 3.0  # for the step being computed after that
_COLDEST = 1e-5  # below it the scores overflow; nothing but the likeliest token has a chance there anyway


class _OneModel(ModelManager):  # type: ignore[misc]  # untyped base
    """Has one model, for good: others are not loaded, and this one is not unloaded."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._id = self.process_model_name(name)
        super().__init__(device="cpu", force_model=name)

    def _load_processor(self, model_id_and_revision: str, gguf_file: str | None = None) -> Any:
        if model_id_and_revision != self._id:
            raise HTTPException(404, f"this server has {self.force_model!r} only")
        return self._tokenizer

    def _load_model(self, model_id_and_revision: str, *_: Any, **__: Any) -> PreTrainedModel:
        return self._model

    def shutdown(self) -> None:
        """Asked for by POST /reset as well; the model stays."""

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "cpumoe"}]


def _samples(config: GenerationConfig, own: GenerationConfig) -> bool:
    """Whether a request is sampled. ``own`` is the model's configuration: a temperature that differs was asked for."""
    temperature = config.temperature
    asked = temperature is not None and temperature != own.temperature
    return bool((temperature is None or temperature >= _COLDEST) and (config.do_sample or asked))


class _Settings:
    """How the tokens of one request in a batch are chosen."""

    def __init__(self, config: GenerationConfig, own: GenerationConfig) -> None:
        for field, option in (("stop", config.stop_strings), ("logit_bias", config.sequence_bias)):
            if option:
                raise HTTPException(400, f"{field} is taken only by a server started with --sequential")
        self.samples = _samples(config, own)
        self.processors = LogitsProcessorList()
        self.reads_text = config.repetition_penalty not in (None, 1.0)
        if self.reads_text:
            self.processors.append(RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty)))
        if self.samples:
            if config.temperature not in (None, 1.0):
                self.processors.append(TemperatureLogitsWarper(float(config.temperature)))
            if config.top_k:
                self.processors.append(TopKLogitsWarper(config.top_k))
            if config.top_p is not None and config.top_p < 1.0:
                self.processors.append(TopPLogitsWarper(float(config.top_p)))

    def choose(self, state: RequestState, scores: torch.Tensor) -> int:
        """One token by ``scores`` [1, vocabulary]."""
        text = [*state.initial_tokens, *state.generated_tokens] if self.reads_text else []
        scores = self.processors(torch.tensor([text], dtype=torch.int64), scores)
        if self.samples:
            probabilities = scores.softmax(-1)
            # multinomial would raise, and with it end the thread that computes, for all requests
            if bool(probabilities.isfinite().all()):
                return int(torch.multinomial(probabilities, 1))
        return int(scores.argmax())


class _Sampler(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]  # untyped base
    """Chooses the token of each row of a batch; what follows in transformers then finds no other."""

    supported_kwargs: ClassVar[dict[str, type]] = {}
    ignored_kwargs = ()

    def __init__(self, settings: weakref.WeakValueDictionary[str, _Settings]) -> None:
        self._settings = settings
        self._states: list[RequestState] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> torch.Tensor:
        self._states = [request.state for request in requests_with_new_token]
        return torch.zeros(len(self._states), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(scores, -torch.inf)
        for row, state in enumerate(self._states):
            settings = self._settings.get(state.request_id)
            # Without settings its client has left.
            chosen[row, settings.choose(state, scores[row : row + 1]) if settings else 0] = 0
        return chosen


def _fit(prompt_tokens: int, config: GenerationConfig, limit: int | None) -> None:
    """Makes the answer end where the room does; raises where there is none."""
    if prompt_tokens < 1:
        raise HTTPException(400, "the prompt is empty")
    wanted = config.max_new_tokens
    if wanted is not None and (not isinstance(wanted, int) or wanted < 1):
        raise HTTPException(400, f"max_tokens is {wanted!r}; a whole number from 1 is accepted")
    if limit is None:
        return
    if prompt_tokens >= limit:
        raise HTTPException(400, f"the prompt has {prompt_tokens} tokens; there is room for {limit} with the answer")
    room = limit - prompt_tokens
    config.max_new_tokens = room if wanted is None else min(wanted, room)


class _Batched(CBGenerateManager):  # type: ignore[misc]  # untyped base
    """Requests computed together, each by its own settings."""

    def __init__(self, model: PreTrainedModel, own: GenerationConfig, config: ContinuousBatchingConfig) -> None:
        super().__init__(config)
        self.limit: int | None = None
        self._own = own
        # Held by the configuration of the request, and so for as long as the request is.
        self._settings: weakref.WeakValueDictionary[str, _Settings] = weakref.WeakValueDictionary()
        greedy = GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=own.eos_token_id)
        self._cb = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
        chain = self._cb.logit_processor
        chain.logits_processor = LogitsProcessorList([_Sampler(self._settings)])
        chain.tensors_required = 1
        chain.do_processing = True

    def probe(self) -> str | None:
        """Starts the thread that computes and has it compute; what went wrong, if anything did."""
        logging.disable(logging.ERROR)  # what goes wrong here is told in one line
        try:
            self._cb.start()
            self._cb.add_request([0, 0], request_id="probe", max_new_tokens=2, eos_token_id=-1)
            result = None
            while result is None and self._cb.is_running():
                result = self._cb.get_result("probe", timeout=0.1)
        finally:
            logging.disable(logging.NOTSET)
        problem = self._cb.background_thread_status.fatal_error or (result.error if result else "it ended")
        return f"{type(problem).__name__}: {problem}" if isinstance(problem, Exception) else problem

    def init_cb(self, model: PreTrainedModel, gen_config: GenerationConfig) -> None:
        """Called with each request; batching began with the server."""

    def _admit(self, inputs: dict[str, Any], config: GenerationConfig, request_id: str) -> str:
        """The name of the request in the batch: a client may have used its own one twice."""
        _fit(len(inputs["input_ids"]), config, self.limit)
        settings = _Settings(config, self._own)
        request_id = f"{request_id}-{uuid.uuid4()}"
        self._settings[request_id] = settings
        config._cpumoe_settings = settings
        return request_id

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        request_id = self._admit(inputs, gen_config, request_id)
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        request_id = self._admit(inputs, gen_config, request_id)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)

    def stop(self) -> None:
        if not self.is_idle:
            self._cb.stop(block=True, timeout=_STOP_SECONDS, hard_stop=True)

    @property
    def is_idle(self) -> bool:
        return not self._cb.is_running()


class _Sequential(GenerateManager):  # type: ignore[misc]  # untyped base
    """Requests computed one after another by ``generate``."""

    def __init__(self, own: GenerationConfig, limit: int | None) -> None:
        super().__init__()
        self._own = own
        self._limit = limit
        self._stopping = threading.Event()

    def _admit(self, inputs: Any, config: GenerationConfig) -> dict[str, Any]:
        _fit(inputs["input_ids"].shape[-1], config, self._limit)
        config.do_sample = _samples(config, self._own)
        if config.top_k is None:
            config.top_k = 0  # all; generate would take the best 50

        def stops(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            if self._stopping.is_set():
                raise RuntimeError("the server is ending")
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        return {**inputs, "stopping_criteria": [stops]}

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        inputs = self._admit(inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        inputs = self._admit(inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)

    def stop(self) -> None:
        self._stopping.set()

    @property
    def is_idle(self) -> bool:
        try:
            self.submit(lambda: None).result(timeout=_STOP_SECONDS)
        except concurrent.futures.TimeoutError:
            return False
        return True


class _Generation(GenerationState):  # type: ignore[misc]  # untyped base
    """Hands every request to one of the two managers."""

    def __init__(self, own: GenerationConfig, limit: int | None) -> None:
        super().__init__()
        self.sequential = _Sequential(own, limit)
        self.stopping = False

    @property
    def batched(self) -> _Batched | None:
        return self._cb_manager if isinstance(self._cb_manager, _Batched) else None

    def set_batched(self, manager: _Batched | None) -> None:
        self._cb_manager, self._continuous_batching = manager, manager is not None

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        return self.batched or self.sequential if use_cb else self.sequential

    def stop(self) -> bool:
        """Whether nothing is being computed any more."""
        self.stopping = True
        managers = [manager for manager in (self.batched, self.sequential) if manager is not None]
        for manager in managers:
            manager.stop()
        return all(manager.is_idle for manager in managers)


class _Chat(ChatCompletionHandler):  # type: ignore[misc]  # untyped base
    """Chat completions with what clients of OpenAI send and expect today."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> StreamingResponse | JSONResponse:
        if (length := body.pop("max_completion_tokens", None)) is not None:  # the new name of max_tokens
            body.setdefault("max_tokens", length)
        response: StreamingResponse | JSONResponse = await super().handle_request(body, request_id)
        if isinstance(response, StreamingResponse):
            response.body_iterator = _with_end(response.body_iterator)
        return response


async def _with_end(events: Any) -> AsyncIterator[Any]:
    try:
        async for event in events:
            yield event
        yield "data: [DONE]\n\n"
    finally:
        await events.aclose()  # tells it that the client has left, if that is why we are here


class Server:
    """Serves ``model`` under ``name``; ``context`` is what it was made for.

    To be left as a context, whatever happens: Python does not end while the thread that computes goes on.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, context: int | None
    ) -> None:
        self.name = name
        self.limit = context
        self._model = model
        self._own = model.generation_config or GenerationConfig()
        self._models = _OneModel(model, tokenizer, name)
        self._generation = _Generation(self._own, context)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._generation.stop()

    def start_batching(self, blocks: int, block_tokens: int, batch_tokens: int) -> str | None:
        """Computes requests together from now on, or says why this model does not allow it."""
        config = ContinuousBatchingConfig(
            page_size=block_tokens,
            num_blocks=blocks,
            max_batch_tokens=batch_tokens,
            max_requests_per_batch=_REQUESTS_PER_BATCH,
            max_memory_percent=1.0,  # the blocks were counted by what is free
        )
        try:
            manager = _Batched(self._model, self._own, config)
        except (ValueError, AttributeError, NotImplementedError) as problem:
            return str(problem)
        self._generation.set_batched(manager)
        obstacle = manager.probe()
        if obstacle is not None:
            manager.stop()
            self._generation.set_batched(None)
            return obstacle
        tokens = blocks * block_tokens
        self.limit = manager.limit = tokens if self.limit is None else min(self.limit, tokens)
        return None

    def run(self, listener: socket.socket, log_level: str, on_ready: Callable[[], None]) -> bool:
        """Serves until a signal comes; then, whether nothing is being computed any more."""
        server = _Uvicorn(self._app(), log_level, on_ready, self._generation.stop)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it is done
            server.run(sockets=[listener])
        return server.idle

    def _app(self) -> FastAPI:
        models, generation = self._models, self._generation
        app: FastAPI = build_server(
            models,
            _Chat(models, generation),
            completion_handler=CompletionHandler(models, generation),
            response_handler=ResponseHandler(models, generation),
            transcription_handler=TranscriptionHandler(models, generation),
            systemone_handler=SystemOneHandler(models, generation),
            generation_state=generation,
        )
        for kind in (KeyError, TypeError, ValueError):
            app.add_exception_handler(kind, _bad_request)
        app.add_exception_handler(RuntimeError, self._failed)
        return app

    async def _failed(self, request: Request, problem: Exception) -> JSONResponse:
        if self._generation.stopping:
            return JSONResponse({"detail": "the server is ending"}, status_code=503)
        _log.error("%s: %s", request.url.path, problem, exc_info=problem)
        return JSONResponse({"detail": str(problem)}, status_code=500)


async def _bad_request(request: Request, problem: Exception) -> JSONResponse:
    """The handlers read requests without checking them, so this is what a bad one ends in."""
    _log.info("%s: %r", request.url.path, problem)
    return JSONResponse({"detail": f"bad request: {type(problem).__name__}: {problem}"}, status_code=400)


class _Uvicorn(uvicorn.Server):
    """Gives the answers being written a moment to end, then ends the computing: what is left is told so."""

    def __init__(self, app: FastAPI, log_level: str, on_ready: Callable[[], None], stop: Callable[[], bool]) -> None:
        patience = _GRACE_SECONDS + _STOP_SECONDS + 1
        super().__init__(uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=int(patience)))
        self._on_ready = on_ready
        self._stop = stop
        self.idle = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(super().shutdown(sockets))
        await asyncio.wait({ending}, timeout=_GRACE_SECONDS)
        self.idle = await asyncio.to_thread(self._stop)
        await ending
