"""The OpenAI-compatible server around one model that is already loaded.

Only ``serve`` imports this module, and only when it runs, since it needs transformers and the ``serve`` extra. The
event loop answers connections and nothing else: one thread renders prompts (:mod:`cpumoe.generation.prompts`), one
computes (:mod:`cpumoe.generation.engine`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import GenerationConfig

from cpumoe.generation.answers import Answering, ChatFormat, Choice, CompletionFormat
from cpumoe.generation.api_requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Message,
    ResponsesRequest,
    parse_body,
)
from cpumoe.generation.engine import ENDING, BatchEngine, Engine, SequentialEngine
from cpumoe.generation.http import ImpatientProtocol, client_left, read_body
from cpumoe.generation.prompts import Prompts
from cpumoe.generation.responses_format import ResponsesFormat
from cpumoe.generation.sampling import Sampling
from cpumoe.generation.text import PlainMessage, StructuredMessage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger("cpumoe")

_GRACE_SECONDS = 2.0  # for the answers being written when the server is told to end
_PATIENCE_SECONDS = 7  # for all of the end: that, and the step being computed
_SEND_SECONDS = 60.0  # for a client to read what it was sent
_MAX_ANSWERS = 256  # being computed or waiting; more are told to come back
_BODY_BYTES_PER_TOKEN = 32  # generous: a token is 4 bytes on average, and JSON may write a character as 12
_LEAST_BODY_BYTES = 1 << 20

Made = TypeVar("Made")


class Server:
    """Serves ``model`` under ``name``; ``context`` is what it was made for.

    To be left as a context, whatever happens: Python does not end while the thread that computes goes on.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, context: int | None
    ) -> None:
        self.name = name
        self.limit = context  # tokens of a prompt and its answer
        self._model = model
        self._tokenizer = tokenizer
        own = model.generation_config or GenerationConfig()
        self._defaults = Sampling.of_model(own)
        ends = own.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        stops = own.stop_strings or []
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self._vocabulary = model.config.get_text_config().vocab_size
        self._token_text = cache(lambda token: str(tokenizer.decode([token])))  # no larger than the vocabulary
        self._prompts = Prompts(model, tokenizer)
        self._renderer = ThreadPoolExecutor(1, "cpumoe-prompts")
        self._engine: Engine | None = None
        self._answers = 0

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._renderer.shutdown(wait=False, cancel_futures=True)
        if self._engine is not None:
            self._engine.stop()

    def start_batching(self, blocks: int, block_tokens: int, batch_tokens: int) -> str | None:
        """Computes requests together from now on, or says why this model does not allow it."""
        try:
            engine = BatchEngine(self._model, blocks, block_tokens, batch_tokens)
        except (ValueError, AttributeError, NotImplementedError) as problem:
            return str(problem)
        obstacle = engine.start()
        if obstacle is not None:
            engine.stop()
            return obstacle
        self._engine = engine
        tokens = blocks * block_tokens
        self.limit = tokens if self.limit is None else min(self.limit, tokens)
        return None

    def start_sequential(self) -> None:
        """Computes one request after another from now on."""
        self._engine = SequentialEngine(self._model)

    def run(self, listener: socket.socket, log_level: str, on_ready: Callable[[], None]) -> bool:
        """Serves until a signal comes; then, whether nothing is being computed any more."""
        assert self._engine is not None  # one of the two was started
        server = _Uvicorn(self._app(), log_level, on_ready, self._engine.stop)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it is done
            server.run(sockets=[listener])
        return server.idle

    def _app(self) -> Starlette:
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/responses", self._respond, methods=["POST"]),
        ]
        handlers: Mapping[Any, Any] = {
            ApiError: _refused,
            HTTPException: _no_such_place,
            ClientDisconnect: _nobody_there,
            Exception: _failed,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    # ---- endpoints -------------------------------------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        assert self._engine is not None
        problem = self._engine.problem
        return JSONResponse({"status": problem or "ok"}, 200 if problem is None else 503)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(self.name)]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._described(name))

    @staticmethod
    def _described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "cpumoe"}

    async def _chat(self, request: Request) -> Response:
        body = parse_body(ChatRequest, await self._body(request))
        self._check_model(body.model)

        def render() -> tuple[list[int], list[PlainMessage | StructuredMessage]]:
            prompt = self._prompts.of_chat(body.messages, body.tools, body.chat_template_kwargs)
            return prompt, [self._prompts.message(prompt, body.tools) for _ in range(body.n)]

        sampling = self._sampling(body, body.logprob_count)
        with self._places(body.n) as release:
            prompt, messages = await self._rendered(render)
            answering = self._answer([prompt], body.n, messages, body.length, body.stops, sampling, release)
        form = ChatFormat(body.model, self._token_text, logprobs=body.logprobs)
        if body.stream:
            return _EventStream(_pieces(form, answering, body.include_usage), answering.end)
        return await _whole(request, answering, form)

    async def _complete(self, request: Request) -> Response:
        body = parse_body(CompletionRequest, await self._body(request))
        self._check_model(body.model)

        def render() -> tuple[list[list[int]], list[str]]:
            prompts = [
                self._prompts.of_text(prompt) if isinstance(prompt, str) else self._prompts.of_tokens(prompt)
                for prompt in body.prompts
            ]
            if not body.echo:
                return prompts, [""] * len(prompts)
            texts = [given if isinstance(given, str) else str(self._tokenizer.decode(given)) for given in body.prompts]
            return prompts, texts

        sampling = self._sampling(body, body.logprobs)
        count = len(body.prompts) * body.n
        with self._places(count) as release:
            prompts, echoes = await self._rendered(render)
            messages = [PlainMessage() for _ in range(count)]
            answering = self._answer(prompts, body.n, messages, body.max_tokens, body.stops, sampling, release)
        form = CompletionFormat(
            body.model,
            self._token_text,
            logprobs=body.logprobs is not None,
            echoes=[echo for echo in echoes for _ in range(body.n)],
        )
        if body.stream:
            return _EventStream(_pieces(form, answering, body.include_usage), answering.end)
        return await _whole(request, answering, form)

    async def _respond(self, request: Request) -> Response:
        body = parse_body(ResponsesRequest, await self._body(request))
        self._check_model(body.model)
        given = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
        if isinstance(body.input, str):
            given.append(Message(role="user", content=body.input))
        else:
            given += [Message(role=message.role, content=message.text) for message in body.input]

        def render() -> tuple[list[int], PlainMessage | StructuredMessage]:
            prompt = self._prompts.of_chat(given)
            return prompt, self._prompts.message(prompt)

        sampling = self._chosen(body.temperature, body.top_p)
        with self._places(1) as release:
            prompt, message = await self._rendered(render)
            answering = self._answer([prompt], 1, [message], body.max_output_tokens, (), sampling, release)
        form = ResponsesFormat(body)
        if body.stream:
            return _EventStream(_named(form.events(answering)), answering.end)
        return await _whole(request, answering, form)

    # ---- what they share -------------------------------------------------------------------------------------------

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, max(_LEAST_BODY_BYTES, (self.limit or 0) * _BODY_BYTES_PER_TOKEN))

    async def _rendered(self, render: Callable[[], Made]) -> Made:
        """Templates and tokenizers may take their time, so they have a thread of their own."""
        assert self._engine is not None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._renderer, render)
        except (RuntimeError, asyncio.CancelledError):  # the renderer takes no more work, or takes too long to end
            if self._engine.problem is None:
                raise
            raise ApiError(503, ENDING) from None

    def _check_model(self, name: str) -> None:
        if name != self.name:
            sentence = f"there is no model {name!r:.200}; this server has {self.name!r}"
            raise ApiError(404, sentence, param="model", code="model_not_found")

    def _chosen(self, temperature: float | None, top_p: float | None, **others: float | None) -> Sampling:
        """The model's own settings with those of a request in their place."""
        asked = {"top_p": top_p, **others}
        given = {name: value for name, value in asked.items() if value is not None}
        if temperature is None and self._defaults.temperature == 0 and given:
            temperature = 1.0  # a share of the tokens is asked for, so they are to be sampled
        if temperature is not None:
            given["temperature"] = temperature
        return replace(self._defaults, **given)  # type: ignore[arg-type]  # the fields' own types were checked

    def _sampling(self, body: ChatRequest | CompletionRequest, logprobs: int | None) -> Sampling:
        biases: dict[int, float] = {}
        for name, bias in body.logit_bias.items():
            if not (name.isascii() and name.isdecimal() and len(name) <= 10) or int(name) >= self._vocabulary:
                raise ApiError(
                    400,
                    f"logit_bias has the key {name!r:.80}; tokens from 0 to {self._vocabulary - 1} are accepted",
                    param="logit_bias",
                )
            biases[int(name)] = bias
        sampling = self._chosen(body.temperature, body.top_p, top_k=body.top_k, min_p=body.min_p)
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

    def _answer(
        self,
        prompts: Sequence[list[int]],
        n: int,
        messages: Sequence[PlainMessage | StructuredMessage],
        length: int | None,
        stops: Sequence[str],
        sampling: Sampling,
        release: Callable[[], None],
    ) -> Answering:
        """Hands ``n`` jobs for each prompt to the engine; ``release`` is called when nobody waits for them any more."""
        assert self._engine is not None
        lengths = [self._room(len(prompt), length) for prompt in prompts]
        stops = (*stops, *self._stops)
        choices = [Choice(index, self._tokenizer, stops, message, self._ends) for index, message in enumerate(messages)]
        # The answers to one prompt must differ, also where the client fixed the seed.
        samplings = [sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + i) for i in range(n)]
        answering = Answering(
            self._engine,
            choices,
            [prompt for prompt in prompts for _ in range(n)],
            [room for room in lengths for _ in range(n)],
            self._ends,
            samplings * len(prompts),
            release,
        )
        answering.prompt_tokens = sum(map(len, prompts))
        return answering

    @contextlib.contextmanager
    def _places(self, count: int) -> Iterator[Callable[[], None]]:
        """Takes places for answers before anything is done for them; gives what gives them back.

        What goes wrong inside the block gives them back too.
        """
        if self._answers + count > _MAX_ANSWERS:
            raise ApiError(
                429, f"{self._answers} answers are being computed or wait; ask again later", code="rate_limit_exceeded"
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

    def _room(self, prompt: int, wanted: int | None) -> int:
        """How long an answer may be."""
        if self.limit is None:
            return wanted or 2**31 - 1
        if prompt + (wanted or 1) > self.limit:
            answer = "" if wanted is None else f" and {wanted} for the answer"
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens{answer}; there is room for {self.limit} in all",
                code="context_length_exceeded",
            )
        return self.limit - prompt if wanted is None else wanted


# ---- answers ---------------------------------------------------------------------------------------------------------


async def _whole(
    request: Request, answering: Answering, form: ChatFormat | CompletionFormat | ResponsesFormat
) -> Response:
    """The complete answer, unless the client leaves before it is there."""
    work, gone = asyncio.create_task(answering.finished()), asyncio.create_task(client_left(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        work.result()
        # Thousands of tokens with their alternatives take a while to write down.
        return await asyncio.to_thread(lambda: JSONResponse(form.whole(answering)))
    finally:
        for task in (work, gone):
            task.cancel()
        answering.end()


class _EventStream(StreamingResponse):
    """Server-sent events. ``on_end`` is called when the last was sent or the client has left."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_in_time(message: Any) -> None:
            with anyio.fail_after(_SEND_SECONDS):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            _log.info("a client does not read its answer, which ends here")
        finally:
            self._on_end()


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _pieces(form: ChatFormat | CompletionFormat, answering: Answering, include_usage: bool) -> AsyncIterator[str]:
    """The events of a completion, up to the mark that there are no more."""
    for chunk in form.beginning(answering.choices):
        yield _event(chunk)
    try:
        async for choice, tokens, delta in answering.deltas():
            if delta or tokens or choice.finish is not None:
                yield _event(form.piece(choice, tokens, delta))
    except ApiError as problem:
        yield _event(problem.body())
        return
    if include_usage:
        yield _event(form.usage(answering))
    yield "data: [DONE]\n\n"


async def _named(events: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[str]:
    async for event in events:
        yield f"event: {event['type']}\n{_event(event)}"


# ---- refusals --------------------------------------------------------------------------------------------------------


async def _refused(_: Request, problem: ApiError) -> Response:
    headers = {"connection": "close"} if problem.status in (408, 413) else None  # the rest of the body is not read
    return JSONResponse(problem.body(), problem.status, headers)


async def _no_such_place(request: Request, problem: HTTPException) -> Response:
    path = f"{request.method} {request.url.path}"
    sentence = f"{path:.200} is not served" if problem.status_code in (404, 405) else problem.detail
    return JSONResponse(ApiError(problem.status_code, sentence).body(), problem.status_code, problem.headers)


async def _nobody_there(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, problem: Exception) -> Response:
    _log.error("%s failed", request.url.path, exc_info=problem)
    return JSONResponse(ApiError(500, "the server could not answer this request; its log has more").body(), 500)


class _Uvicorn(uvicorn.Server):
    """Gives the answers being written a moment to end, then ends the computing: what is left is told so."""

    def __init__(self, app: Starlette, log_level: str, on_ready: Callable[[], None], stop: Callable[[], bool]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=ImpatientProtocol,
                ws="none",
                lifespan="off",
                log_level=log_level,
                server_header=False,
                timeout_graceful_shutdown=_PATIENCE_SECONDS,
            )
        )
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
