"""Limits on how much a client may send and how long that may take. Neither uvicorn nor Starlette has such limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from cpumoe.generation.api_requests import ApiError

_log = logging.getLogger("cpumoe")

HEAD_SECONDS = 20.0  # for the first line and the headers of a request, counted from its first byte or the connection
BODY_SECONDS = 60.0
SEND_SECONDS = 60.0  # in which a client must take everything that was written, or at least SEND_BYTES of it
SEND_BYTES = 64 << 10

_SKIPPED_BYTES, _SKIPPED_SECONDS = 64 << 20, 5.0  # how much of a too long body is read and dropped, and for how long


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP protocol with time limits: closes connections that send no request or read no answer in time.

    A client that does not read may also keep a connection open that was closed already, since ``transport.close()``
    first sends what was written. The send timer therefore runs whenever bytes wait to be sent, and its end aborts.
    """

    _deadline: asyncio.TimerHandle | None = None
    _send_deadline: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, on_lost: Callable[[], None], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._on_lost = on_lost

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that writing is paused exactly while bytes wait to be sent
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._waits_for_head():
            self._watch()
        else:
            self._unwatch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        self._unwatch_sending()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._unwatch_sending()
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

    def _watch_sending(self) -> None:
        self._unwatch_sending()
        unsent = self.transport.get_write_buffer_size()
        self._send_deadline = self.loop.call_later(SEND_SECONDS, self._check_sending, unsent)

    def _unwatch_sending(self) -> None:
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None

    def _check_sending(self, unsent: int) -> None:
        """Abort the connection unless the client has taken enough of the ``unsent`` bytes since the last check."""
        if unsent - self.transport.get_write_buffer_size() >= SEND_BYTES:
            self._watch_sending()
            return
        _log.info("a client does not read its answer, which ends here")
        self.transport.abort()


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
