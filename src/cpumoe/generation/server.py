"""The OpenAI-compatible server around one model that is already loaded.

Only ``cpumoe serve`` imports this module, and only when it runs, since it needs transformers and the ``serve`` extra.
The event loop does nothing but answer connections (:mod:`cpumoe.generation.endpoints`). One thread renders prompts
(:mod:`cpumoe.generation.prompts`), and another one computes (:mod:`cpumoe.steps.engine`, or
:mod:`cpumoe.generation.engine` for models whose steps go through transformers).
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
from cpumoe.generation.engine import BatchEngine, CannotBatch, Engine, SequentialEngine
from cpumoe.generation.http import ImpatientProtocol
from cpumoe.generation.prompts import Prompts
from cpumoe.integrations.transformers.paged_decoder import PagedDecoder
from cpumoe.steps.engine import StepEngine
from cpumoe.steps.rank_runner import Balancing, runner_for
from cpumoe.steps.schedule import MOST_SEQUENCES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cpumoe.integrations.transformers.native_decoder import NativeDecoder
    from cpumoe.parallel.ranks import Ranks

_GRACE_SECONDS = 2.0  # that answers may still take when the server is told to end
_PATIENCE_SECONDS = 7  # for the whole shutdown: the above, and the step that is being computed


class Server:
    """Serves ``model`` under ``name``; ``context`` is the number of tokens that the model was made for.

    Use it in a ``with`` block, so that its threads end whatever happens: Python waits for the one that computes.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, context: int | None
    ) -> None:
        self.name = name
        self.token_limit = context  # of a prompt and its answer together
        self._model = model
        self._tokenizer = tokenizer
        self._marks = AnswerMarks(model, tokenizer)
        self._prompts = Prompts(model, tokenizer, self._marks)
        self._renderer = ThreadPoolExecutor(1, "cpumoe-prompts")
        self._engine: Engine | None = None
        self._admission: Admission | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._renderer.shutdown(wait=False, cancel_futures=True)
        if self._engine is not None:
            self._engine.stop()

    def start_steps(
        self,
        native: NativeDecoder,
        blocks: int,
        block_tokens: int,
        batch_tokens: int,
        sequences: int = MOST_SEQUENCES,
        ranks: Ranks | None = None,
        balancing: Balancing | None = None,
    ) -> str | None:
        """Computes requests together from now on, each step in one call of the core, on all ``ranks`` if there are any.

        Returns what went wrong, if so.
        """
        paged = PagedDecoder(self._model, native)
        runner = runner_for(paged, blocks, block_tokens, sequences, ranks, balancing)
        engine = StepEngine(runner, blocks, block_tokens, batch_tokens, sequences)
        obstacle = engine.start()
        if obstacle is not None:
            engine.stop()
            return obstacle
        self._use(engine, blocks * block_tokens)
        return None

    def start_batching(self, blocks: int, block_tokens: int, batch_tokens: int) -> str | None:
        """Computes requests together from now on, with transformers' continuous batching.

        Returns the reason if that is not possible with this model.
        """
        try:
            engine = BatchEngine(self._model, blocks, block_tokens, batch_tokens)
        except CannotBatch as problem:
            return str(problem)
        obstacle = engine.start()
        if obstacle is not None:
            engine.stop()
            return obstacle
        self._use(engine, blocks * block_tokens)
        return None

    def start_sequential(self) -> None:
        """Computes one request after another from now on."""
        self._use(SequentialEngine(self._model))

    def _use(self, engine: Engine, cached_tokens: int | None = None) -> None:
        """Gives requests to ``engine`` from now on; ``cached_tokens`` is what its cache has room for."""
        if cached_tokens is not None:
            self.token_limit = cached_tokens if self.token_limit is None else min(self.token_limit, cached_tokens)
        self._engine = engine
        self._admission = Admission(
            self._model, self._tokenizer, engine, self._renderer, self.token_limit, self._marks.ends
        )

    def run(self, listener: socket.socket, max_connections: int, log_level: str, on_ready: Callable[[], None]) -> bool:
        """Serves until a signal comes. Returns whether all computing has ended."""
        server = self._uvicorn(max_connections, log_level, on_ready)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it is done
            server.run(sockets=[listener])
        if (lost := self._lost()) is not None:
            raise lost
        return server.idle

    def _lost(self) -> Exception | None:
        """Why there will be no more answers, where ranks that were needed for them are gone."""
        return self._engine.lost if isinstance(self._engine, StepEngine) else None

    def _uvicorn(self, max_connections: int, log_level: str, on_ready: Callable[[], None]) -> _Uvicorn:
        assert self._engine is not None and self._admission is not None  # an engine was started
        app = Endpoints(self.name, self._tokenizer, self._prompts, self._admission).app()
        return _Uvicorn(app, max_connections, log_level, on_ready, self._engine.stop, lambda: self._lost() is not None)


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
        stop: Callable[[], bool],
        is_lost: Callable[[], bool],
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
        self._stop = stop
        self._is_lost = is_lost
        self.idle = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; the server ends when this is true."""
        return await super().on_tick(counter) or self._is_lost()

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
        self.idle = await asyncio.to_thread(self._stop)
        await ending
