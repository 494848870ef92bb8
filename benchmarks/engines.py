"""Measures how many tokens a second the engines of the server compute for requests that come at once.

    python benchmarks/engines.py FOLDER --linears w8a8            # whole steps in the core, then transformers' batches
    python benchmarks/engines.py FOLDER --engines step --requests 1 8 32

Each request has a prompt of its own and is answered greedily. The engines take turns, each alone with the model.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import cpumoe
from cpumoe.generation.batch_engine import BatchEngine
from cpumoe.integrations.transformers.adapter import native_with_head
from cpumoe.integrations.transformers.paged_decoder import PagedDecoder
from cpumoe.steps.engine import StepEngine
from cpumoe.steps.request import Job
from cpumoe.steps.runner import CoreRunner
from cpumoe.steps.sampling import Sampling, Token
from cpumoe.steps.schedule import MOST_SEQUENCES

PAGES, PAGE_TOKENS, STEP_ROWS, PROMPT = 256, 32, 1024, 16


def started(kind: str, model: Any) -> BatchEngine | StepEngine:
    """An engine that computes with ``model``."""
    engine: BatchEngine | StepEngine
    if kind == "batch":
        engine = BatchEngine(model, PAGES, PAGE_TOKENS, STEP_ROWS)
    else:
        native = native_with_head(model)
        if native is None:
            raise SystemExit(
                "this model's steps are not one call of the core; --engines batch measures the other engine"
            )
        runner = CoreRunner(PagedDecoder(model, native), PAGES, PAGE_TOKENS, MOST_SEQUENCES)
        engine = StepEngine(runner, PAGES, PAGE_TOKENS, STEP_ROWS)
    if (problem := engine.start()) is not None:
        raise SystemExit(f"the engine did not start: {problem}")
    return engine


async def rate(engine: BatchEngine | StepEngine, prompts: list[list[int]], new: int) -> float:
    """Tokens a second of requests that come at once. A coroutine, since transformers' engine wants an event loop."""
    ends: queue.SimpleQueue[object] = queue.SimpleQueue()

    def deliver(item: object) -> None:
        if not isinstance(item, Token):
            ends.put(item)

    start = time.perf_counter()
    for prompt in prompts:
        engine.add(Job(prompt, new, frozenset(), Sampling(), deliver))
    found = await asyncio.to_thread(lambda: [ends.get() for _ in prompts])
    seconds = time.perf_counter() - start
    if any(end != "length" for end in found):
        raise SystemExit(f"a request failed: {found}")
    return len(prompts) * new / seconds


async def measured(arguments: argparse.Namespace) -> dict[tuple[str, int], list[float]]:
    """Rates by engine and number of requests, all in one event loop: transformers' engine keeps the one it has seen."""
    model = cpumoe.load_model(arguments.folder, linears=arguments.linears, attn_implementation="sdpa")
    rates: dict[tuple[str, int], list[float]] = {}
    for turn in range(arguments.rounds):
        for kind in arguments.engines:
            engine = started(kind, model)
            for requests in arguments.requests:
                random = torch.Generator().manual_seed(1000 * turn + requests)
                ids = torch.randint(4, model.config.vocab_size, (requests, PROMPT), generator=random).tolist()
                rates.setdefault((kind, requests), []).append(await rate(engine, ids, arguments.tokens))
            engine.stop()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--linears", help="scheme for what the checkpoint has in float")
    parser.add_argument("--engines", nargs="+", choices=["step", "batch"], default=["step", "batch"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=24, help="of each answer (24)")
    parser.add_argument("--rounds", type=int, default=2, help="turns that each engine has (2)")
    arguments = parser.parse_args()
    rates = asyncio.run(measured(arguments))
    for (kind, requests), seen in rates.items():
        print(f"{kind}, {requests} requests: {statistics.median(seen):.1f} tokens/s (best {max(seen):.1f})")


if __name__ == "__main__":
    main()
