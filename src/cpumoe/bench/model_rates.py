"""Prefill and decode rates of a whole model, with random tokens as llama-bench has them.

A decode step should take as long as the machine needs to read what it must read: all weights except for experts that
were not chosen, and the KV cache. Its share of the DRAM read rate, which is measured next to it, says how near it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe import _core
from cpumoe.bench.measure import Limits, memory_to_probe
from cpumoe.bench.workload import ROTATED_BYTES
from cpumoe.evaluation.expert_load import count_expert_load, expert_count, experts_modules
from cpumoe.generation.memory import model_bytes

_COUNTED_STEPS = 2  # of decode, whose experts are counted
_GB = 1e-9


@dataclass(frozen=True)
class Workload:
    """A prompt of ``tokens`` tokens, or ``tokens`` decode steps, for each of ``batch`` sequences.

    ``depth``: tokens that the KV cache holds before.
    """

    kind: str  # "prefill" or "decode"
    tokens: int
    depth: int = 0
    batch: int = 1

    @property
    def positions(self) -> int:
        """Tokens that a sequence gets in all: after decode tests, there are further steps whose experts are counted."""
        return self.depth + self.tokens + (_COUNTED_STEPS if self.kind == "decode" else 0)

    @property
    def name(self) -> str:
        """llama-bench's name: pp512, tg128 @ d4096."""
        depth = f" @ d{self.depth}" if self.depth else ""
        return f"{'pp' if self.kind == 'prefill' else 'tg'}{self.tokens}{depth}"


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a decode step must read: of the experts that its tokens choose, of all other weights, of the cache."""

    experts: float
    other_weights: float
    cache: float

    @property
    def total(self) -> float:
        return self.experts + self.other_weights + self.cache


@dataclass(frozen=True)
class ModelRow:
    """What was measured: a rate in tokens per second for each repetition, over all sequences.

    Attributes:
        dram: bytes per second that all threads read from DRAM next to it, at best.
        step_bytes: of a decode step; None for prefill, and where experts cannot be watched.
        from_memory: whether the model is too large to stay in a cache between two steps.
    """

    test: Workload
    rates: tuple[float, ...]
    threads: int
    isa: str
    dram: float
    step_bytes: StepBytes | None
    from_memory: bool

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Standard deviation; 0 for one repetition."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0

    @property
    def dram_share(self) -> float | None:
        """Bytes that decode must read a second, as a share of the DRAM read rate."""
        if self.step_bytes is None:
            return None
        return self.rate / self.test.batch * self.step_bytes.total / self.dram

    def to_json(self) -> dict[str, Any]:
        parts = self.step_bytes
        return {
            "test": self.test.name,
            "kind": self.test.kind,
            "tokens": self.test.tokens,
            "depth": self.test.depth,
            "batch": self.test.batch,
            "threads": self.threads,
            "isa": self.isa,
            "tokens_per_second": self.rate,
            "tokens_per_second_mean": statistics.fmean(self.rates),
            "tokens_per_second_stdev": self.spread,
            "tokens_per_second_samples": list(self.rates),
            "dram_gbps": self.dram * _GB,
            "step_bytes": None
            if parts is None
            else {"experts": parts.experts, "other_weights": parts.other_weights, "kv_cache": parts.cache},
            "dram_fraction": self.dram_share,
            "from_memory": self.from_memory,
        }


def list_tests(
    prompts: Sequence[int], generated: Sequence[int], depths: Sequence[int], batches: Sequence[int]
) -> list[Workload]:
    """Return all combinations, prefill first. A number of 0 in ``prompts`` or ``generated`` makes no test."""
    return [
        Workload(kind, tokens, depth, batch)
        for kind, counts in (("prefill", prompts), ("decode", generated))
        for tokens in counts
        if tokens
        for depth in depths
        for batch in batches
    ]


def measure_model(
    model: Any, tests: Sequence[Workload], repetitions: int, note: Callable[[str], None] = lambda _: None
) -> Iterator[ModelRow]:
    """Yield a row for each test. ``note`` is called with a line about each test that begins."""
    if repetitions < 1:
        raise ValueError(f"repetitions={repetitions}; 1 or more is accepted")
    bench = _ModelBench(model)
    for test in tests:
        note(f"{test.name}, {test.batch} sequence{'' if test.batch == 1 else 's'}")
        yield bench.measure(test, repetitions)


class _ModelBench:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._tokens = _plain_tokens(model)
        self._generator = torch.Generator().manual_seed(1)
        self._memory = memory_to_probe()
        self._from_memory = model_bytes(model) >= ROTATED_BYTES

    def measure(self, test: Workload, repetitions: int) -> ModelRow:
        limits = Limits()
        self._run(Workload(test.kind, min(test.tokens, 32), min(test.depth, 32), test.batch))  # allocates and wakes up
        rates = []
        for _ in range(repetitions):
            limits.probe(self._memory)
            seconds, cache, held = self._run(test)
            rates.append(test.tokens * test.batch / seconds)
        limits.probe(self._memory)
        step_bytes = self._step_bytes(cache, test, held) if test.kind == "decode" else None
        dram = max(limits.bytes_per_second)  # a slow moment of the probe must not flatter the model
        return ModelRow(
            test, tuple(rates), _core.thread_count(), _core.isa(), dram, step_bytes, from_memory=self._from_memory
        )

    def _run(self, test: Workload) -> tuple[float, Any, int]:
        """Fill the cache and run the test. Return its seconds, the cache, and its bytes in the middle of the test."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        if test.depth:
            self._step(cache, self._ids(test.batch, test.depth))
        calls, each = (1, test.tokens) if test.kind == "prefill" else (test.tokens, 1)
        inputs = [self._ids(test.batch, each) for _ in range(calls)]
        start, held = time.perf_counter(), 0
        for index, ids in enumerate(inputs):
            logits = self._step(cache, ids)
            if index == (calls - 1) // 2:
                held = cache_bytes(cache)
        seconds = time.perf_counter() - start
        if not logits.isfinite().all():  # such a model would choose experts in another way
            raise RuntimeError("the model gives logits that are not finite, so its speed means nothing")
        return seconds, cache, held

    def _step(self, cache: Any, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self._model(ids, past_key_values=cache, logits_to_keep=1).logits
            return logits

    def _ids(self, batch: int, tokens: int) -> Tensor:
        drawn = torch.randint(0, len(self._tokens), (batch, tokens), generator=self._generator)
        return self._tokens[drawn]

    def _step_bytes(self, cache: Any, test: Workload, held: int) -> StepBytes | None:
        """Return what a step in the middle of a test read, where the cache had ``held`` bytes."""
        layers = experts_modules(self._model)
        if not layers:
            return None
        sizes = {name: _bytes(module) / (expert_count(module) or 1) for name, module in layers.items()}
        experts = 0.0
        for _ in range(_COUNTED_STEPS):
            with count_expert_load(self._model) as load:
                self._step(cache, self._ids(test.batch, 1))
            experts += sum(sizes[name] * int(counts.count_nonzero()) for name, counts in load.counts.items())
        other = model_bytes(self._model) - sum(map(_bytes, layers.values())) - _looked_up_bytes(self._model)
        return StepBytes(experts / _COUNTED_STEPS, other, held)


def _plain_tokens(model: Any) -> Tensor:
    """Return the tokens of text: those that a configuration names stand for something else (pictures, ends)."""
    config = model.config
    named = {
        value
        for part in (config, config.get_text_config())
        for name, values in part.to_dict().items()
        if name.endswith("token_id")
        for value in (values if isinstance(values, list) else [values])
    }
    return torch.tensor([token for token in range(config.get_text_config().vocab_size) if token not in named])


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _looked_up_bytes(model: Any) -> int:
    """Return the bytes of embeddings, of which a token reads one row, unless the head is the same tensor."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    tables = {
        module.weight.data_ptr(): module.weight.nbytes for module in model.modules() if isinstance(module, nn.Embedding)
    }
    return sum(size for place, size in tables.items() if not isinstance(head, Tensor) or head.data_ptr() != place)


def cache_bytes(cache: Any) -> int:
    """Return the bytes of keys, values and states that a cache holds for a step to read."""
    total = 0
    for layer in cache.layers:
        held = getattr(layer, "held_bytes", None)
        if held is None:
            states = [
                state for name in ("conv_states", "recurrent_states") for state in getattr(layer, name, {}).values()
            ]
            tensors = [getattr(layer, "keys", None), getattr(layer, "values", None), *states]
            held = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
        total += held
    return total
