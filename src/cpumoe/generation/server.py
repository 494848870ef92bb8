"""The OpenAI-compatible server around one model that is already loaded.

Only ``cpumoe serve`` imports this module, and only when it runs, since it needs transformers and the ``serve`` extra.
The event loop does nothing but answer connections (:mod:`cpumoe.generation.endpoints`). One thread renders prompts
(:mod:`cpumoe.generation.prompts`), and another one computes (:mod:`cpumoe.generation.engine`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from cpumoe.generation.admission import Admission
from cpumoe.generation.answer_marks import AnswerMarks
from cpumoe.generation.connections import Acceptor, RepeatedLines
from cpumoe.generation.endpoints import Endpoints
from cpumoe.generation.engine import Engine
from cpumoe.generation.http import ImpatientProtocol
from cpumoe.generation.prompts import Prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_GRACE_SECONDS = 2.0  # that answers may still take when the server is told to end
_PATIENCE_SECONDS = 7  # for the whole shutdown: the above, and the step that is being computed


class Server:
    """Serves ``model`` under ``name``; ``context`` is the number of tokens that the model was made for.

    Use it in a ``with`` block, so that its thread ends whatever happens. ``engine`` computes the requests.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        context: int | None,
        engine: Engine,
    ) -> None:
        # The most tokens of a prompt and its answer together.
        self.token_limit = min(filter(None, (context, engine.token_limit)), default=None)
        self._engine = engine
        self._renderer = ThreadPoolExecutor(1, "cpumoe-prompts")
        marks = AnswerMarks(model, tokenizer)
        self._admission = Admission(model, tokenizer, engine, self._renderer, self.token_limit, marks.ends)
        self._endpoints = Endpoints(name, tokenizer, Prompts(model, tokenizer, marks), self._admission)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._renderer.shutdown(wait=False, cancel_futures=True)

    def run(self, listener: socket.socket, max_connections: int, log_level: str, on_ready: Callable[[], None]) -> bool:
        """Serves until a signal comes. Returns whether all computing has ended."""
        server = self._uvicorn(max_connections, log_level, on_ready)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it is done
            server.run(sockets=[listener])
        if self._engine.lost is not None:
            raise self._engine.lost
        return server.idle

    def _uvicorn(self, max_connections: int, log_level: str, on_ready: Callable[[], None]) -> _Uvicorn:
        return _Uvicorn(self._endpoints.app(), max_connections, log_level, on_ready, self._engine)


class _Uvicorn(uvicorn.Server):
    """uvicorn with our own acceptor of connections.

    At shutdown, it gives unfinished answers a moment to end and then stops the engine, which fails the others.
    """

    def __init__(
        self,
        app: Starlette,
        max_connections: int,
        log_level: str,
        on_ready: Callable[[], None],
        engine: Engine,
    ) -> None:
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
        logging.getLogger("uvicorn.error").addFilter(RepeatedLines())
        self._max_connections = max_connections
        self._acceptor: Acceptor | None = None
        self._on_ready = on_ready
        self._engine = engine
        self.idle = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; the server ends when this is true."""
        return await super().on_tick(counter) or self._engine.lost is not None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None and len(sockets) == 1
        await super().startup([])  # uvicorn itself listens nowhere
        self._acceptor = Acceptor(sockets[0], self._max_connections, self._protocol)
        self._on_ready()

    def _protocol(self, on_lost: Callable[[], None]) -> ImpatientProtocol:
        return ImpatientProtocol(self.config, self.server_state, self.lifespan.state, on_lost=on_lost)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        ending = asyncio.create_task(super().shutdown(sockets))
        await asyncio.wait({ending}, timeout=_GRACE_SECONDS)
        self.idle = await asyncio.to_thread(self._engine.stop)
        await ending
