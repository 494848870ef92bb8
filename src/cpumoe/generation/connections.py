"""The server's listening socket: takes the port, and accepts connections up to a limit.

asyncio's own server accepts whatever comes. When the process has no file descriptors left, it logs a traceback for
every connection that it cannot accept, many thousands in a second. Here connections above the limit wait in the
kernel's queue until others close.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger("cpumoe.connections")

MAX_CONNECTIONS = 1024  # by default; idle ones are closed after seconds, and 256 answers are computed at most
_RESERVED_FILES = 64  # descriptors that are left for everything else: libraries, logs, files that are opened later
_BACKLOG = 2048  # connections that the kernel keeps waiting
_BATCH = 64  # connections accepted at once, so that those that are open are served in between
_RETRY_SECONDS = 1.0
_SECONDS_BETWEEN_LINES = 60.0  # of the log, with the same text
_CURES = {
    errno.EADDRINUSE: "end the program that listens there, or choose another --port (0 takes a free one)",
    errno.EACCES: "ports below 1024 may need privileges; choose another --port",
    errno.EADDRNOTAVAIL: "no network interface of this machine has that address; choose another --host",
}


class RepeatedLines(logging.Filter):
    """Passes warnings of one text once a minute: every connection may be a reason for one."""

    _MOST = 1000  # texts that are remembered

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}  # text -> when

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        text, now = record.getMessage(), time.monotonic()
        if now - self._passed.get(text, -_SECONDS_BETWEEN_LINES) < _SECONDS_BETWEEN_LINES:
            return False
        if len(self._passed) >= self._MOST:
            self.forget()
        self._passed[text] = now
        return True

    def forget(self) -> None:
        self._passed.clear()


_repeated = RepeatedLines()
_log.addFilter(_repeated)


def listen(host: str, port: int) -> socket.socket:
    """Take the port. Do this before loading a model: a server that comes second finds out at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as problem:
        raise ValueError(f"--host {host}: {problem.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)  # two sockets that do not listen may have the same port
    except OSError as problem:
        listener.close()
        cure = _CURES.get(problem.errno or 0)
        raise ValueError(f"--host {host} --port {port}: {problem.strerror}" + (f"; {cure}" if cure else "")) from None
    return listener


def connection_limit(wanted: int | None = None) -> int:
    """Return how many connections may be open at once: ``wanted``, else as many as the open files limit has room for.

    Raises ValueError if ``wanted`` or the limit of open files does not do.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = len(list(Path("/proc/self/fd").iterdir())) + _RESERVED_FILES
    room = MAX_CONNECTIONS if wanted is None else wanted
    if files != resource.RLIM_INFINITY:
        room = min(room, files - used)
    if room < (wanted or 1):
        raise ValueError(
            f"{wanted or 1} connections, and {used} files for everything else, are more than the limit of {files} open "
            f"files: ulimit -n {used + (wanted or MAX_CONNECTIONS)} before this command raises it"
            + (f", or --max-connections {room}" if room >= 1 else "")
        )
    return room


class Acceptor:
    """Accepts the connections of a listening socket as long as fewer than ``limit`` are open.

    ``make_protocol`` gets a function that the protocol has to call when its connection is lost.
    """

    def __init__(
        self, listener: socket.socket, limit: int, make_protocol: Callable[[Callable[[], None]], asyncio.Protocol]
    ) -> None:
        self._listener = listener
        self._limit = limit
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._open: set[socket.socket] = set()
        self._connecting: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly
        self._paused = True
        self._closed = False
        _repeated.forget()  # a new server says it again
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more connections. Those that are open stay."""
        self._closed = True
        self._pause()
        self._listener.close()

    def _resume(self) -> None:
        if self._paused and not self._closed and len(self._open) < self._limit:
            self._paused = False
            self._loop.add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                connection = self._listener.accept()[0]
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # the client has left already
                continue
            except OSError as problem:  # no descriptors or no memory: at once the same would happen again
                _log.warning("no connection can be accepted: %s; those that are open are served", problem.strerror)
                self._pause()
                self._loop.call_later(_RETRY_SECONDS, self._resume)
                return
            self._open.add(connection)
            task = self._loop.create_task(self._serve(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            if len(self._open) >= self._limit:
                self._pause()
                _log.warning(
                    "%d connections are open: more of them wait until some close (--max-connections, and ulimit -n, "
                    "set this limit)",
                    self._limit,
                )
                return

    async def _serve(self, connection: socket.socket) -> None:
        def lost() -> None:  # called once or twice
            if connection in self._open:
                self._open.discard(connection)
                self._loop.call_soon(self._resume)  # the transport closes the socket after it has told its protocol

        try:
            await self._loop.connect_accepted_socket(lambda: self._make_protocol(lost), connection)
        except BaseException as problem:
            connection.close()
            lost()
            if not isinstance(problem, OSError):
                raise
            _log.info("a connection failed: %s", problem)  # the client has left, or nothing is free to serve it
