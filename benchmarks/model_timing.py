"""Times whole models: several systems in turn, with the limits of the machine measured before and after."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from cpumoe.bench.machine_load import MachineLoad
from cpumoe.bench.measure import Call, Limits, make_inputs, memory_to_probe, time_calls
from cpumoe.bench.shapes import Shape
from cpumoe.bench.workload import rotating_experts
from cpumoe.evaluation.expert_load import count_expert_load
from cpumoe.layers.scheme import Scheme

_SETTLE = 0.1  # seconds until the waiting threads of a system have stopped spinning
_LOOK = 0.25  # seconds that are watched to see whether other programs run
_IDLE = 0.05  # of the CPUs' time that they may take
_IDLE_LOOKS = 3  # in a row
_LAYER_SECONDS = 0.3  # for one measurement of a layer alone


@dataclass(frozen=True)
class Workload:
    """A prompt of ``length`` tokens, or one step of ``batch`` sequences that are ``length`` tokens long."""

    kind: str  # "prefill" or "decode"
    length: int
    batch: int = 1

    @property
    def tokens(self) -> int:
        """That one measured call computes."""
        return self.length if self.kind == "prefill" else self.batch

    def __str__(self) -> str:
        if self.kind == "prefill":
            return f"prefill of {self.length} tokens"
        if self.batch == 1:
            return f"decode behind {self.length} tokens"
        return f"decode of {self.batch} sequences behind {self.length} tokens"


class System(Protocol):
    """A system with its model loaded. Tokens are random, and none is chosen from the logits."""

    name: str

    def prefill(self, tokens: int) -> float:
        """Seconds for a prompt, with the logits of its last token."""

    def fill(self, depth: int, batch: int, room: int) -> None:
        """Reads ``batch`` prompts of ``depth`` tokens, which up to ``room`` steps will follow."""

    def decode(self, steps: int) -> list[float]:
        """Seconds of each step, one token for each of the sequences."""


class OwnModel:
    """cpumoe, through a call of the model."""

    name = "cpumoe"

    def __init__(self, model: Any) -> None:
        self._model = model
        self._generator = torch.Generator().manual_seed(1)
        self._batch = 1
        self._cache: Any = None

    def _ids(self, batch: int, tokens: int) -> Tensor:
        return torch.randint(0, self._model.config.vocab_size, (batch, tokens), generator=self._generator)

    def _call(self, ids: Tensor) -> float:
        with torch.inference_mode():
            start = time.perf_counter()
            logits = self._model(ids, past_key_values=self._cache, logits_to_keep=1).logits
            seconds = time.perf_counter() - start
            if not logits.isfinite().all():  # such a model would choose experts in another way
                raise RuntimeError(f"{self.name} gives logits that are not finite")
            return seconds

    def _new_cache(self) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)

    def prefill(self, tokens: int) -> float:
        self._new_cache()
        return self._call(self._ids(1, tokens))

    def fill(self, depth: int, batch: int, room: int) -> None:
        self._new_cache()
        self._batch = batch
        self._call(self._ids(batch, depth))

    def decode(self, steps: int) -> list[float]:
        return [self._call(self._ids(self._batch, 1)) for _ in range(steps)]

    def experts_per_layer(self, steps: int) -> float | None:
        """How many different experts a step takes, the mean over steps and layers; None if it cannot be seen."""
        seen: list[int] = []
        for _ in range(steps):
            with count_expert_load(self._model) as load:
                self.decode(1)
            seen += [int(counts.count_nonzero()) for counts in load.counts.values()]
        return statistics.fmean(seen) if any(seen) else None


class LayerAlone:
    """The experts of one layer without the model around them, with uniform routing, as ``cpumoe bench`` times them."""

    def __init__(self, shape: Shape, scheme: Scheme) -> None:
        self._shape = shape
        self._calls: list[Call] = [layer.__call__ for layer in rotating_experts(shape, scheme)]

    def seconds(self, tokens: int) -> float:
        inputs = make_inputs(self._shape, tokens, torch.bfloat16)
        return statistics.median(time_calls(self._calls, inputs, _LAYER_SECONDS, lambda _: None))


@dataclass
class Measured:
    """All that was measured for a workload; ``experts`` is the mean number of experts that a layer took in a step."""

    workload: Workload
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of each system
    before: Limits = field(default_factory=Limits)
    after: Limits = field(default_factory=Limits)
    floats: Limits = field(default_factory=lambda: Limits(floats=True))
    layer_alone: list[float] = field(default_factory=list)
    experts: float | None = None
    mean_depth: float = 0.0
    taken_by_others: list[float] = field(default_factory=list)  # of the CPUs' time, in each turn of cpumoe

    @property
    def dram(self) -> float:
        """Bytes per second: the most that was seen, so that the model is not praised for a slow moment of a probe."""
        return max(self.before.bytes_per_second + self.after.bytes_per_second)

    @property
    def int8_peak(self) -> float:
        return max(self.before.operations_per_second + self.after.operations_per_second)

    @property
    def float_peak(self) -> float:
        return max(self.floats.operations_per_second)


class Stopwatch:
    """Measures workloads, the systems in turn. ``rounds``: how often each has its turn."""

    def __init__(
        self,
        own: OwnModel,
        peers: Sequence[System],
        rounds: int,
        steps: int,
        layer: LayerAlone | None,
        patience: float = 0.0,
    ) -> None:
        """``patience``: seconds, in all, that turns may wait for other programs to leave the CPUs alone."""
        self._own, self._peers = own, peers
        self._systems: list[System] = [own, *peers]
        self._rounds = rounds
        self._steps_per_round = max(1, steps // rounds)
        self._layer = layer
        self._patience = patience
        self._memory = memory_to_probe()

    def measure(self, workload: Workload) -> Measured:
        out = Measured(workload, {system.name: [] for system in self._systems})
        if workload.kind == "decode":
            # One more step in each round is not counted: it wakes the threads up.
            steps = self._rounds * (self._steps_per_round + 1)
            out.mean_depth = workload.length + steps / 2
            for system in self._systems:
                system.fill(workload.length, workload.batch, steps)
        else:
            for system in self._systems:
                system.prefill(min(32, workload.length))
        for _ in range(self._rounds):
            self._own_turn(workload, out)
            for peer in self._peers:
                self._settle()
                out.seconds[peer.name] += self._turn(peer, workload)
        if workload.kind == "decode":
            out.experts = self._own.experts_per_layer(2)
        return out

    def _settle(self) -> None:
        """Lets the threads of the turn before stop, and waits until the machine is idle while there is patience."""
        time.sleep(_SETTLE)
        idle = 0
        while self._patience > 0 and idle < _IDLE_LOOKS:
            load, start = MachineLoad(), time.perf_counter()
            time.sleep(_LOOK)
            taken = load.taken_by_others()
            idle = idle + 1 if taken is None or taken < _IDLE else 0
            self._patience -= time.perf_counter() - start

    def _own_turn(self, workload: Workload, out: Measured) -> None:
        self._settle()
        load = MachineLoad()
        out.before.probe(self._memory)
        out.floats.probe(self._memory)
        out.seconds[self._own.name] += self._turn(self._own, workload)
        out.after.probe(self._memory)
        if self._layer is not None and workload.kind == "decode" and workload.batch > 1:
            out.layer_alone.append(self._layer.seconds(workload.batch))
        if (taken := load.taken_by_others()) is not None:
            out.taken_by_others.append(taken)

    def _turn(self, system: System, workload: Workload) -> list[float]:
        if workload.kind == "prefill":
            return [system.prefill(workload.length)]
        return system.decode(1 + self._steps_per_round)[1:]
