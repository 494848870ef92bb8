"""Quantises one layer of a known model, runs it, and compares it with the float layer."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from cpumoe.bench.machine_load import MachineLoad, doubt
from cpumoe.bench.measure import time_calls
from cpumoe.bench.shapes import Shape
from cpumoe.cpu import instruction_sets, isa
from cpumoe.evaluation.selftest import using_isa
from cpumoe.layers import reference
from cpumoe.layers.activation_rounding import input_scale_arguments
from cpumoe.layers.experts import Experts
from cpumoe.layers.packed_weights import multiplies_floats
from cpumoe.layers.routing import select_experts
from cpumoe.layers.scheme import Scheme

Inputs = tuple[Tensor, Tensor, Tensor]  # hidden states, ids, weights


def _relative_error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth.double()).norm() / truth.double().norm())


@dataclass(frozen=True)
class Times:
    """Medians for one number of tokens, and a warning if other programs disturbed the measurement."""

    own_ms: float
    torch_ms: float
    doubt: str | None


@dataclass(frozen=True)
class Agreement:
    """Relative errors of a layer, and whether each instruction set gives the same bits, but for those that need not."""

    float_error: float
    reference_error: float
    same_bits: dict[str, bool]


class DemoLayer:
    """A layer with random weights, in bf16 and packed."""

    def __init__(self, shape: Shape, scheme: Scheme) -> None:
        self._shape, self._scheme = shape, scheme
        self._generator = generator = torch.Generator().manual_seed(0)
        gate_up = torch.randn((shape.num_experts, 2 * shape.intermediate, shape.hidden), generator=generator) * 0.02
        down = torch.randn((shape.num_experts, shape.hidden, shape.intermediate), generator=generator) * 0.02
        self._gate_up, self._down = gate_up.bfloat16(), down.bfloat16()
        self._input_scales = input_scale_arguments(scheme, 5.0, 8.0)  # hardly any input is larger than these
        start = time.perf_counter()
        self.experts = Experts.quantize(self._gate_up, self._down, scheme, **self._input_scales)
        self.seconds = time.perf_counter() - start
        self.weights = gate_up.numel() + down.numel()

    def _routed(self, tokens: int) -> Inputs:
        x = torch.randn((tokens, self._shape.hidden), generator=self._generator)
        logits = torch.randn((tokens, self._shape.num_experts), generator=self._generator)
        weights, ids = select_experts(logits, self._shape.topk, "renormalize")
        return x, ids, weights

    def _torch_layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The layer in bf16 PyTorch, expert by expert."""

        def expert(index: int, inputs: Tensor) -> Tensor:
            gate_up = torch.nn.functional.linear(inputs, self._gate_up[index])
            h = reference.apply_activation(gate_up, self.experts.config.activation)
            return torch.nn.functional.linear(h, self._down[index])

        return reference.sum_of_experts(x, ids, weights, expert).to(x.dtype)

    def times(self, tokens: int) -> Times:
        inputs = [(x.bfloat16(), ids, weights) for x, ids, weights in (self._routed(tokens) for _ in range(8))]
        load_of_others = MachineLoad()
        # Inputs with different experts are taken in turn, so that weights come from memory.
        times = [time_calls([call], inputs, 1.0, lambda _: None) for call in (self.experts, self._torch_layer)]
        own, torch_ms = (statistics.median(each) * 1e3 for each in times)
        return Times(own, torch_ms, doubt(load_of_others.taken_by_others(), *times))

    def agreement(self) -> Agreement:
        x, ids, weights = self._routed(64)
        result = self.experts(x, ids, weights)

        def floats(expert: int) -> tuple[reference.Dense, reference.Dense]:
            return reference.Dense(self._gate_up[expert].float()), reference.Dense(self._down[expert].float())

        truth = reference.experts(x, ids, weights, floats, self.experts.config.activation, form=None)
        same = Experts.quantize(self._gate_up, self._down, self._scheme, backend="reference", **self._input_scales)(
            x, ids, weights
        )
        results: dict[str, Tensor] = {}
        is_portable = not multiplies_floats(self._scheme)
        for entry in instruction_sets():
            if entry.supported and entry.name != "scalar" and (is_portable or entry.portable_floats):
                with using_isa(entry.name):
                    results[entry.name] = self.experts(x, ids, weights)
        expected = results.get(isa(), next(iter(results.values()), result))
        same_bits = {name: torch.equal(found, expected) for name, found in results.items()}
        return Agreement(_relative_error(result, truth), _relative_error(result, same), same_bits)
