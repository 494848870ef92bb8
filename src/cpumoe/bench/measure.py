"""Times a layer and measures, in the same run, what the machine could do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe.bench.shapes import Shape
from cpumoe.bench.workload import MOST_CALLS, exceed_caches, random_routing, rotating_experts
from cpumoe.layers.experts import Experts
from cpumoe.layers.packed_weights import packed_activations
from cpumoe.layers.scheme import Scheme

#: hidden_states, topk_ids, topk_weights -> out
Call = Callable[[Tensor, Tensor, Tensor], Tensor]

_ROUTINGS = 8  # different routings that the calls take in turn
_PROBES = 6  # how often the limits of the machine are measured between the calls
PROBE_BYTES = 256 << 20


@dataclass(frozen=True)
class Row:
    """One line of the result. ``from_memory``: the weights were too large to stay in a cache between calls."""

    system: str
    shape: str
    scheme: str
    tokens: int
    isa: str
    threads: int
    ms_median: float
    ms_min: float
    tops: float
    weight_gbps: float
    dram_gbps: float
    dram_fraction: float
    peak_tops: float
    compute_fraction: float
    from_memory: bool

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass
class Limits:
    """What the machine reached: the DRAM read rate, and the peak of the instruction set in use.

    That is the peak of int8 dot products, or with ``floats`` of those of the numbers that floats are multiplied as.
    """

    floats: bool = False
    bytes_per_second: list[float] = field(default_factory=list)
    operations_per_second: list[float] = field(default_factory=list)

    def probe(self, memory: Tensor) -> None:
        """Reads up to 256 MB of ``memory`` (uint8, not in a cache) on all threads, then runs products in registers."""
        self.bytes_per_second.append(_core.read_rate(memory[:PROBE_BYTES]))
        iterations = 2000
        seconds = 0.0
        while seconds < 2e-3:  # then the resolution of the clock and waking up the threads no longer matter
            iterations *= 4
            start = time.perf_counter()
            rate = _core.dot_rate(iterations, self.floats)
            seconds = time.perf_counter() - start
        self.operations_per_second.append(rate)

    @property
    def dram(self) -> float:
        return statistics.median(self.bytes_per_second)

    @property
    def peak(self) -> float:
        return statistics.median(self.operations_per_second)


def repetitions(seconds_per_call: float, budget: float) -> int:
    return max(5, min(MOST_CALLS, int(budget / max(seconds_per_call, 1e-6))))


def time_calls(
    calls: list[Call],
    inputs: list[tuple[Tensor, Tensor, Tensor]],
    budget: float,
    between: Callable[[int], None],
) -> list[float]:
    """Seconds of each call; the calls take the layers and inputs in turn. ``between(i)`` runs before some of them."""
    start = time.perf_counter()
    for i in range(2):  # the second call shows how long one takes; the first one also allocates scratch memory
        start = time.perf_counter()
        calls[i % len(calls)](*inputs[i % len(inputs)])
    count = repetitions(time.perf_counter() - start, budget)
    every = max(1, count // _PROBES)
    seconds = []
    for i in range(count):
        if i % every == 0:
            between(i)
        call, arguments = calls[i % len(calls)], inputs[(i // len(calls)) % len(inputs)]
        start = time.perf_counter()
        call(*arguments)
        seconds.append(time.perf_counter() - start)
    return seconds


def make_inputs(shape: Shape, tokens: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Hidden states and routings; the experts change from call to call."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn((tokens, shape.hidden), generator=generator).to(dtype)
    return [(x, *random_routing(shape, tokens, seed)) for seed in range(_ROUTINGS)]


def mean_active_experts(inputs: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    return statistics.fmean(len(ids.unique()) for _, ids, _ in inputs)


def make_row(
    system: str,
    shape: Shape,
    scheme: str,
    tokens: int,
    seconds: list[float],
    weight_bytes: float,
    limits: Limits,
    isa: str | None = None,
    *,
    from_memory: bool,
) -> Row:
    """``weight_bytes``: how many bytes of weights one call reads, which are those of the active experts."""
    median, peak = statistics.median(seconds), limits.peak
    operations, rate = shape.operations(tokens) / median, weight_bytes / median
    return Row(
        system,
        shape.name,
        scheme,
        tokens,
        isa or _core.isa(),
        _core.thread_count(),
        ms_median=median * 1e3,
        ms_min=min(seconds) * 1e3,
        tops=operations * 1e-12,
        weight_gbps=rate * 1e-9,
        dram_gbps=limits.dram * 1e-9,
        dram_fraction=rate / limits.dram,
        peak_tops=peak * 1e-12,
        compute_fraction=operations / peak,
        from_memory=from_memory,
    )


def memory_to_probe() -> Tensor:
    """Memory that :meth:`Limits.probe` can read, in huge pages as packed weights are."""
    memory = torch.empty(PROBE_BYTES, dtype=torch.uint8)
    _core.advise_huge_pages(memory)
    return memory.fill_(1)


def _packed(experts: Experts) -> Tensor:
    blob = experts.gate_up_packed
    assert isinstance(blob, Tensor)
    return blob


def bench_shape(shape: Shape, scheme: Scheme, tokens: list[int], dtype: torch.dtype, budget: float) -> Iterator[Row]:
    """Rows of cpumoe itself for one shape and a scheme that fits it."""
    layers = rotating_experts(shape, scheme)
    bytes_per_expert = layers[0].packed_bytes / shape.num_experts
    from_memory = exceed_caches(layers)
    large = None if from_memory else memory_to_probe()
    for count in tokens:
        inputs = make_inputs(shape, count, dtype)
        # Schemes with activations of more than 8 bits are compared with products of 16-bit floats.
        limits = Limits(floats=not packed_activations(scheme).startswith("int8"))

        def between(i: int, limits: Limits = limits) -> None:
            far_away = layers[(i + len(layers) // 2) % len(layers)]  # a layer that is in no cache now
            limits.probe(_packed(far_away) if large is None else large)

        calls: list[Call] = [layer.__call__ for layer in layers]
        seconds = time_calls(calls, inputs, budget, between)
        weight_bytes = mean_active_experts(inputs) * bytes_per_expert
        yield make_row("cpumoe", shape, str(scheme), count, seconds, weight_bytes, limits, from_memory=from_memory)
