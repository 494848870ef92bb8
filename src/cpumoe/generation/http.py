"""Limits on how much a client may send and how long that may take. Neither uvicorn nor Starlette has such limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from cpumoe.generation.api_requests import ApiError

HEAD_SECONDS = 20.0  # for the first line and the headers of a request, counted from its first byte or the connection
BODY_SECONDS = 60.0

_SKIPPED_BYTES, _SKIPPED_SECONDS = 64 << 20, 5.0  # how much of a too long body is read and dropped, and for how long


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP protocol, which in addition closes connections that do not send a request in time."""

    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, on_lost: Callable[[], None], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._on_lost = on_lost

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._waits_for_head():
            self._watch()
        else:
            self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._on_lost()
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Answer requests for another protocol as plain ones. uvicorn's warnings are about its own options."""

    def _waits_for_head(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _watch(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self._waits_for_head():
            self.transport.close()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Reads the whole body; raises ApiError if it is too long or does not come in time."""
    length = request.headers.get("content-length", "0")
    announced = int(length[:20]) if length.isdecimal() else 0
    parts: list[bytes] = []
    size = 0
    stream = request.stream()
    try:
        with anyio.fail_after(BODY_SECONDS):
            while announced <= max_bytes and size <= max_bytes:
                part = await anext(stream, None)
                if part is None:
                    return b"".join(parts)
                size += len(part)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} seconds") from None
    if announced <= _SKIPPED_BYTES:
        await _skip(stream)
    raise ApiError(413, f"the body is longer than the {max_bytes} bytes that this server accepts")


async def _skip(stream: AsyncIterator[bytes]) -> None:
    """Reads the rest of a body, if it is not too long: most clients look for an answer only after they sent all."""
    size = 0
    with anyio.move_on_after(_SKIPPED_SECONDS):
        async for part in stream:
            size += len(part)
            if size > _SKIPPED_BYTES:
                return


async def client_left(request: Request) -> None:
    """Returns when the client has closed its connection. The body of the request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
