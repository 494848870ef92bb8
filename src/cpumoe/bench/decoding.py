"""Measures how long decoding a token takes, and which kinds of work take how much of that."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PROFILED = 8  # tokens that run under the profiler. It slows them down, so only shares are taken from it


@dataclass(frozen=True)
class DecodeTimes:
    """Seconds of each decoded token, and the share of each kind of work; ``Python`` is the time outside operators."""

    all_seconds: tuple[float, ...]
    shares: dict[str, float]

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.all_seconds)


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Silences stderr inside the block: the profiler's C++ library announces its start and end there."""
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


def decode_times(model: Any, prompt: Tensor, tokens: int) -> DecodeTimes:
    """Continues ``prompt`` [1, T] greedily by ``tokens`` tokens and measures them.

    Where steps are one call of the core, it tells itself what its time goes into.
    """
    from torch.profiler import ProfilerActivity, profile
    from transformers import DynamicCache

    from cpumoe.integrations.transformers.adapter import native_with_head

    native = native_with_head(model)
    cache = DynamicCache(config=model.config)

    def step(ids: Tensor) -> Tensor:
        best: Tensor = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        return best

    with torch.inference_mode():
        token = step(prompt)
        for _ in range(3):
            token = step(token)
        times = []
        if native is not None:
            native.decoder.take_seconds()
        for _ in range(tokens):
            start = time.perf_counter()
            token = step(token)
            times.append(time.perf_counter() - start)
        if native is not None:
            parts = {kind: seconds / sum(times) for kind, seconds in native.decoder.take_seconds().items()}
            return DecodeTimes(tuple(times), _sorted(parts | {"Python": max(0.0, 1 - sum(parts.values()))}))
        with _silent_stderr(), profile(activities=[ProfilerActivity.CPU]) as profiler:
            start = time.perf_counter()
            for _ in range(_PROFILED):
                token = step(token)
            profiled = time.perf_counter() - start
    kinds: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        kinds[_kind(event.key)] += event.self_cpu_time_total * 1e-6 / profiled
    kinds["Python"] = max(0.0, 1 - sum(kinds.values()))
    return DecodeTimes(tuple(times), _sorted(kinds))


def _sorted(shares: dict[str, float]) -> dict[str, float]:
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _kind(operator: str) -> str:
    own = {
        "cpumoe::fused_experts": "experts",
        "cpumoe::linear": "packed linears",
        "cpumoe::decode_attention": "attention",
        "cpumoe::gated_delta_rule": "attention",
        "cpumoe::short_convolution": "attention",
        "cpumoe::token_linear": "float products",
        "cpumoe::router_logits": "routing",
        "cpumoe::select_experts": "routing",
        "cpumoe::rms_norm": "norms",
    }
    if operator in own:
        return own[operator]
    if "attention" in operator:
        return "attention"
    if any(word in operator for word in ("mm", "linear", "mkldnn", "matmul")):
        return "float products"
    return "other operators"
