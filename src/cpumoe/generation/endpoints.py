"""The endpoints of the server: each parses the body of a request, has it computed, and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cpumoe.generation.admission import Admission
from cpumoe.generation.answers import ChatFormat, CompletionFormat
from cpumoe.generation.api_requests import ApiError, Body, ChatRequest, CompletionRequest, ResponsesRequest, parse_body
from cpumoe.generation.http import read_body
from cpumoe.generation.http_answers import EXCEPTION_HANDLERS, completion_response, responses_response
from cpumoe.generation.prompts import Prompts
from cpumoe.generation.responses_format import ResponsesFormat
from cpumoe.generation.text import PlainMessage, StructuredMessage
from cpumoe.generation.token_text import TokenTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BODY_BYTES_PER_TOKEN = 32  # generous: a token has 4 bytes on average, and JSON may write a character as 12
_LEAST_BODY_BYTES = 1 << 20


class Endpoints:
    """The OpenAI API for one model, which requests call ``name``."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, admission: Admission) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._admission = admission
        self._token_texts = TokenTexts(tokenizer)

    def app(self) -> Starlette:
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/responses", self._respond, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)

    async def _health(self, _: Request) -> Response:
        problem = self._admission.problem
        return JSONResponse({"status": problem or "ok"}, 200 if problem is None else 503)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_entry(self._name)]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(_model_entry(name))

    async def _chat(self, request: Request) -> Response:
        body = await self._body(ChatRequest, request)

        def render() -> tuple[list[int], list[PlainMessage | StructuredMessage]]:
            prompt = self._prompts.of_chat(body.messages, body.tools, body.chat_template_kwargs)
            return prompt, [self._prompts.message(prompt, body.tools) for _ in range(body.n)]

        sampling = self._admission.completion_sampling(body, body.logprob_count)
        with self._admission.places(body.n) as release:
            prompt, messages = await self._admission.rendered(render)
            stops = await self._admission.stop_automaton(body.stops)
            answering = self._admission.answer([prompt], body.n, messages, body.length, stops, sampling, release)
        answer_format = ChatFormat(body.model, self._token_texts, logprobs=body.logprobs)
        return await completion_response(
            request, answering, answer_format, stream=body.stream, include_usage=body.include_usage
        )

    async def _complete(self, request: Request) -> Response:
        body = await self._body(CompletionRequest, request)

        def render() -> tuple[list[list[int]], list[str]]:
            names = ["prompt"] if body.has_one_prompt else [f"prompt.{i}" for i in range(len(body.prompts))]
            prompts = [self._prompts.of_text(*part) for part in zip(body.prompts, names, strict=True)]
            if not body.echo:
                return prompts, [""] * len(prompts)
            texts = [given if isinstance(given, str) else str(self._tokenizer.decode(given)) for given in body.prompts]
            return prompts, texts

        sampling = self._admission.completion_sampling(body, body.logprobs)
        count = len(body.prompts) * body.n
        with self._admission.places(count) as release:
            prompts, echoes = await self._admission.rendered(render)
            stops = await self._admission.stop_automaton(body.stops)
            messages = [PlainMessage() for _ in range(count)]
            answering = self._admission.answer(prompts, body.n, messages, body.max_tokens, stops, sampling, release)
        answer_format = CompletionFormat(
            body.model,
            self._token_texts,
            logprobs=body.logprobs is not None,
            echoes=[echo for echo in echoes for _ in range(body.n)],
        )
        return await completion_response(
            request, answering, answer_format, stream=body.stream, include_usage=body.include_usage
        )

    async def _respond(self, request: Request) -> Response:
        body = await self._body(ResponsesRequest, request)

        def render() -> tuple[list[int], PlainMessage | StructuredMessage]:
            prompt = self._prompts.of_chat(body.messages)
            return prompt, self._prompts.message(prompt)

        sampling = self._admission.chosen_sampling(body.temperature, body.top_p)
        with self._admission.places(1) as release:
            prompt, message = await self._admission.rendered(render)
            stops = await self._admission.stop_automaton(())
            answering = self._admission.answer([prompt], 1, [message], body.max_output_tokens, stops, sampling, release)
        return await responses_response(request, answering, ResponsesFormat(body), stream=body.stream)

    async def _body(self, kind: type[Body], request: Request) -> Body:
        limit = self._admission.token_limit or 0
        body = parse_body(kind, await read_body(request, max(_LEAST_BODY_BYTES, limit * _BODY_BYTES_PER_TOKEN)))
        self._check_model(body.model)
        return body

    def _check_model(self, name: str) -> None:
        if name != self._name:
            sentence = f"there is no model {name!r:.200}; this server has {self._name!r}"
            raise ApiError(404, sentence, param="model", code="model_not_found")


def _model_entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "cpumoe"}
