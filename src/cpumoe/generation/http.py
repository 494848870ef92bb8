"""Limits on what a client may send and how long it may take, which neither uvicorn nor Starlette has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from cpumoe.generation.api_requests import ApiError

HEAD_SECONDS = 20.0  # for the line and the headers of a request, from the first byte or the connection
BODY_SECONDS = 60.0

_PASSED_OVER_BYTES, _PASSED_OVER_SECONDS = 64 << 20, 5.0  # of a body that is too long


class ImpatientProtocol(H11Protocol):
    """HTTP as uvicorn speaks it, but a connection that does not get its request out in time is closed."""

    _deadline: asyncio.TimerHandle | None = None

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
        super().connection_lost(exc)

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
    """The whole body; raises ApiError for one that is too long or does not come."""
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
    if announced <= _PASSED_OVER_BYTES:
        await _pass_over(stream)
    raise ApiError(413, f"the body is longer than the {max_bytes} bytes that this server accepts")


async def _pass_over(stream: AsyncIterator[bytes]) -> None:
    """Lets a client get the rest of its body out, if that is not much: most look for an answer only then."""
    size = 0
    with anyio.move_on_after(_PASSED_OVER_SECONDS):
        async for part in stream:
            size += len(part)
            if size > _PASSED_OVER_BYTES:
                return


async def client_left(request: Request) -> None:
    """Returns when the client of a request that was read whole has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
