"""Answers as HTTP responses: complete ones, streams of events, and refusals."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from cpumoe.generation.answers import Answering, ChatFormat, CompletionFormat
from cpumoe.generation.api_requests import ApiError
from cpumoe.generation.http import client_left
from cpumoe.generation.responses_format import ResponsesFormat

_log = logging.getLogger("cpumoe")


async def completion_response(
    request: Request,
    answering: Answering,
    answer_format: ChatFormat | CompletionFormat,
    *,
    stream: bool,
    include_usage: bool,
) -> Response:
    """The answer to a chat or text completion."""
    if stream:
        return _EventStream(_completion_events(answer_format, answering, include_usage), answering.end)
    return await _whole_answer(request, answering, answer_format)


async def responses_response(
    request: Request, answering: Answering, answer_format: ResponsesFormat, *, stream: bool
) -> Response:
    """The answer to a request of /v1/responses."""
    if stream:
        return _EventStream(_named_events(answer_format.events(answering)), answering.end)
    return await _whole_answer(request, answering, answer_format)


async def _whole_answer(
    request: Request, answering: Answering, answer_format: ChatFormat | CompletionFormat | ResponsesFormat
) -> Response:
    """The complete answer; raises ClientDisconnect if the client leaves before it is complete."""
    work, gone = asyncio.create_task(answering.finished()), asyncio.create_task(client_left(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        work.result()
        # On another thread, because writing thousands of tokens with their alternatives as JSON takes a while.
        return await asyncio.to_thread(lambda: JSONResponse(answer_format.whole(answering)))
    finally:
        for task in (work, gone):
            task.cancel()
        answering.end()


class _EventStream(StreamingResponse):
    """Server-sent events. ``on_end`` is called when the last one was sent or the client has left."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _completion_events(
    answer_format: ChatFormat | CompletionFormat, answering: Answering, include_usage: bool
) -> AsyncIterator[str]:
    """The events of a completion, with ``[DONE]`` as the last one."""
    for chunk in answer_format.beginning(answering.choices):
        yield _event(chunk)
    try:
        async for choice, tokens, delta in answering.deltas():
            if delta or tokens or choice.finish is not None:
                yield _event(answer_format.piece(choice, tokens, delta))
    except ApiError as problem:
        yield _event(problem.body())
        return
    if include_usage:
        yield _event(answer_format.usage(answering))
    yield "data: [DONE]\n\n"


async def _named_events(events: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[str]:
    async for event in events:
        yield f"event: {event['type']}\n{_event(event)}"


# ---- refusals --------------------------------------------------------------------------------------------------------


async def _refused(_: Request, problem: ApiError) -> Response:
    headers = {"connection": "close"} if problem.status in (408, 413) else {}  # the rest of the body is not read
    if problem.retry_seconds is not None:
        headers["retry-after"] = str(problem.retry_seconds)
    return JSONResponse(problem.body(), problem.status, headers)


async def _no_such_place(request: Request, problem: HTTPException) -> Response:
    path = f"{request.method} {request.url.path}"
    sentence = f"{path:.200} is not served" if problem.status_code in (404, 405) else problem.detail
    return JSONResponse(ApiError(problem.status_code, sentence).body(), problem.status_code, problem.headers)


async def _client_gone(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, problem: Exception) -> Response:
    _log.error("%s failed", request.url.path, exc_info=problem)
    return JSONResponse(ApiError(500, "the server could not answer this request; its log has more").body(), 500)


#: For Starlette: how each kind of exception is answered.
EXCEPTION_HANDLERS: Mapping[Any, Any] = {
    ApiError: _refused,
    HTTPException: _no_such_place,
    ClientDisconnect: _client_gone,
    Exception: _failed,
}
