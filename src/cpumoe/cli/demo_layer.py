"""``cpumoe demo --layer``: one layer of a known model, quantised, run, and compared with what it stands for."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import cpumoe
from cpumoe.bench.machine_load import MachineLoad, doubt
from cpumoe.bench.workload import SHAPES, Shape
from cpumoe.cli.arguments import check_scheme_fits, positive, scheme_name
from cpumoe.evaluation.selftest import using_isa
from cpumoe.layers import reference
from cpumoe.layers.scheme import Scheme

#: What has no meaning without ``--layer``.
OPTIONS = ("scheme", "experts")


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --layer")
    group.add_argument("--scheme", type=scheme_name, help="of the layer (w4a8-g128)")
    group.add_argument("--experts", type=positive, metavar="N", help="of the layer (64; Qwen3-30B-A3B has 128)")


Inputs = tuple[Tensor, Tensor, Tensor]  # hidden states, ids, weights


def _seconds(
    call: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Inputs], budget: float = 1.0
) -> list[float]:
    """Of each call. Inputs are taken in turn: their experts differ, so that weights come from memory, not a cache."""
    call(*inputs[0])
    times: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times) < 3:
        arguments = inputs[len(times) % len(inputs)]
        start = time.perf_counter()
        call(*arguments)
        times.append(time.perf_counter() - start)
    return times


def _relative_error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth.double()).norm() / truth.double().norm())


def run(arguments: argparse.Namespace) -> int:
    model = SHAPES["qwen3-30b-a3b"]
    scheme = Scheme.parse(arguments.scheme or "w4a8-g128")
    check_scheme_fits(f"--scheme {scheme}", scheme, model.hidden, model.intermediate)
    shape = Shape(model.name, model.hidden, model.intermediate, arguments.experts or 64, model.topk)
    if shape.experts < shape.topk:
        raise ValueError(f"--experts {shape.experts}; {shape.topk} or more are accepted")
    print(
        f"One layer of {model.name}: hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.experts} "
        f"experts, {shape.topk} per token; {cpumoe.isa()} kernels, {cpumoe.get_num_threads()} threads.\n"
    )
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn((shape.experts, 2 * shape.intermediate, shape.hidden), generator=generator) * 0.02
    down = torch.randn((shape.experts, shape.hidden, shape.intermediate), generator=generator) * 0.02
    gate_up, down = gate_up.bfloat16(), down.bfloat16()
    start = time.perf_counter()
    layer = cpumoe.Experts.quantize(gate_up, down, scheme)
    seconds = time.perf_counter() - start
    float_bytes = 2 * (gate_up.numel() + down.numel())
    bits = 8 * layer.packed_bytes / (gate_up.numel() + down.numel())
    print(
        f"Quantised to {layer.config.scheme} in {seconds:.1f} s: {float_bytes * 1e-6:.0f} MB in bf16 -> "
        f"{layer.packed_bytes * 1e-6:.0f} MB packed ({bits:.2f} bits per weight).\n"
    )
    activation = layer.config.activation
    float_weights = gate_up.float(), down.float()

    def routed(tokens: int) -> Inputs:
        x = torch.randn((tokens, shape.hidden), generator=generator)
        logits = torch.randn((tokens, shape.experts), generator=generator)
        weights, ids = cpumoe.select_experts(logits, shape.topk, "renormalize")
        return x, ids, weights

    def torch_layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The layer in bf16 PyTorch, expert by expert."""

        def expert(index: int, inputs: Tensor) -> Tensor:
            h = reference.apply_activation(torch.nn.functional.linear(inputs, gate_up[index]), activation)
            return torch.nn.functional.linear(h, down[index])

        return reference.sum_of_experts(x, ids, weights, expert).to(x.dtype)

    doubts: list[str | None] = []
    print("tokens   cpumoe ms   PyTorch bf16 ms   faster by")
    for tokens in (1, 16, 256):
        inputs = [(x.bfloat16(), ids, weights) for x, ids, weights in (routed(tokens) for _ in range(8))]
        load_of_others = MachineLoad()
        times = _seconds(layer, inputs), _seconds(torch_layer, inputs)
        own, torch_ms = (statistics.median(each) * 1e3 for each in times)
        doubts.append(doubt(load_of_others.taken_by_others(), *times))
        print(f"{tokens:6}   {own:9.3f}   {torch_ms:15.3f}   {torch_ms / own:8.1f}x")
    if said := next(filter(None, doubts), None):
        print(said)

    x, ids, weights = routed(64)
    result = layer(x, ids, weights)
    truth = reference.experts(x, ids, weights, *float_weights, None, None, activation, quantize=False)
    same = cpumoe.Experts.quantize(gate_up, down, scheme, backend="reference")(x, ids, weights)
    print(
        f"\nAgainst the float layer: relative error {_relative_error(result, truth):.3f} (random weights; this is what "
        f"{layer.config.scheme.weights.bits} bits cost)."
    )
    print(f"Against the reference arithmetic of {layer.config.scheme}: {_relative_error(result, same):.1e}.")
    names = []
    for entry in cpumoe.instruction_sets():
        if entry.supported and entry.name != "scalar":
            with using_isa(entry.name):
                equal = torch.equal(layer(x, ids, weights), result)
            names.append(f"{entry.name} {'same bits' if equal else 'DIFFERENT BITS'}")
    print(f"On every instruction set of this CPU: {', '.join(names)}.")
    return 0 if all("DIFFERENT" not in name for name in names) else 1
