"""Measures llama.cpp in a process and a virtual environment of its own. Needs the package llama-cpp-python.

    python llama_cpp_worker.py FILE THREADS TOKENS_AT_ONCE

Every line of stdin is a request, as JSON, and gets one line on stdout. The model stays loaded, so that measurements can
alternate with those of another system. Only llama.cpp's C functions are used: no tokenizer, no sampling.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

_CONTEXT_STEP = 256  # llama.cpp pads contexts to multiples of this


class Worker:
    """One model, and the context of the workload that is being measured."""

    def __init__(self, path: str, threads: int, at_once: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads, self._at_once = threads, at_once
        self._random = np.random.default_rng(1)
        self._context: Any = None
        self._room = (0, 0)  # tokens of a sequence and sequences that the context has room for
        self._batch, self._depth = 1, 0

    def _make_context(self, length: int, batch: int) -> None:
        """An empty context for ``batch`` sequences of ``length`` tokens; one that fits is emptied and used again."""
        length = -(-length // _CONTEXT_STEP) * _CONTEXT_STEP
        if self._room != (length, batch):
            if self._context is not None:
                llama_cpp.llama_free(self._context)
            parameters = llama_cpp.llama_context_default_params()
            parameters.n_ctx = length * batch
            parameters.n_batch = max(self._at_once, length * batch)
            parameters.n_ubatch = self._at_once
            parameters.n_seq_max = batch
            parameters.n_threads = parameters.n_threads_batch = self._threads
            parameters.no_perf = True
            self._context = llama_cpp.llama_init_from_model(self._model, parameters)
            if not self._context:
                raise RuntimeError(f"llama.cpp makes no context for {batch} sequences of {length} tokens")
            self._room = (length, batch)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._batch, self._depth = batch, 0

    def _compute(self, tokens: int) -> float:
        """Seconds for so many further tokens of each sequence, with logits of the last one of each."""
        batch = llama_cpp.llama_batch_init(tokens * self._batch, 0, 1)
        ids = self._random.integers(0, self._vocabulary, tokens * self._batch).tolist()
        for index, token in enumerate(ids):
            sequence, position = divmod(index, tokens)
            batch.token[index] = token
            batch.pos[index] = self._depth + position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = position == tokens - 1
        batch.n_tokens = len(ids)
        start = time.perf_counter()
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_synchronize(self._context)
        seconds = time.perf_counter() - start
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returns {status} for {len(ids)} tokens behind {self._depth}")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        if not np.isfinite(np.ctypeslib.as_array(logits, (self._vocabulary,))).all():
            raise RuntimeError("llama.cpp gives logits that are not finite")  # it would choose experts in another way
        self._depth += tokens
        return seconds

    def about(self) -> dict[str, Any]:
        features = llama_cpp.llama_print_system_info().decode()
        return {"version": llama_cpp.__version__, "features": features}

    def prefill(self, tokens: int) -> float:
        self._make_context(tokens, 1)
        return self._compute(tokens)

    def fill(self, depth: int, batch: int, room: int) -> None:
        self._make_context(depth + room, batch)
        self._compute(depth)

    def decode(self, steps: int) -> list[float]:
        return [self._compute(1) for _ in range(steps)]


def main() -> None:
    # Compiled libraries may print to stdout, which is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    calls: dict[str, Callable[..., Any]] = {
        "about": worker.about,
        "prefill": worker.prefill,
        "fill": worker.fill,
        "decode": worker.decode,
    }
    for line in sys.stdin:
        request = json.loads(line)
        result = calls[request.pop("call")](**request)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
