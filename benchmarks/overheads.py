"""Measures costs besides the arithmetic: of a call, of routing, of sharing threads with PyTorch, and of packing.

.venv/bin/python benchmarks/overheads.py
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

import cpumoe
from cpumoe import ops
from cpumoe.bench.shapes import SHAPES
from cpumoe.bench.workload import random_routing, random_weight, rotating_experts
from cpumoe.layers.nibbles import pack_nibbles


def median_us(call: Callable[[], object], seconds: float = 1.0) -> float:
    for _ in range(20):
        call()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def tiny_call() -> None:
    layer = cpumoe.Experts.quantize(torch.randn(4, 64, 32), torch.randn(4, 32, 32), "w4a8-g32")
    weights, ids = cpumoe.select_experts(torch.randn(1, 4), 2)
    x = torch.randn(1, 32)
    print(f"one call of a tiny layer, T=1: {median_us(lambda: layer(x, ids, weights)):.1f} us")


def routing() -> None:
    logits, bias = torch.randn(1, 128), torch.randn(128)
    softmax = median_us(lambda: cpumoe.select_experts(logits, 8))
    grouped = median_us(
        lambda: cpumoe.select_experts(logits, 8, "deepseek_v3", correction_bias=bias, num_expert_group=8, topk_group=4)
    )
    print(f"routing among 128 experts, T=1: softmax + top-8 {softmax:.1f} us, deepseek_v3 {grouped:.1f} us")


def tiny_linear() -> None:
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(64, 64), "w8a8")
    x = torch.randn(1, 64)
    print(f"one call of a tiny linear, T=1: {median_us(lambda: linear(x)):.1f} us")


def alternating(tokens: int) -> None:
    """Times a torch matmul and the fused layer in turn, and each alone. The weights of both come from memory."""
    shape = SHAPES["qwen3-30b-a3b"]
    layers = rotating_experts(shape, cpumoe.Scheme.parse("w4a8-g128"))
    routings = [random_routing(shape, tokens, seed) for seed in range(8)]
    matrices = [torch.randn(shape.hidden, shape.hidden) for _ in range(12)]
    x = torch.randn(tokens, shape.hidden)
    turn = itertools.count()

    def product() -> torch.Tensor:
        return x @ matrices[next(turn) % len(matrices)]

    def fused() -> torch.Tensor:
        i = next(turn)
        return layers[i % len(layers)](x, *routings[i // len(layers) % len(routings)])

    def both() -> None:
        product()
        fused()

    ratios = []
    for _ in range(7):
        alone = median_us(product, 0.3) + median_us(fused, 0.3)
        ratios.append(median_us(both, 0.6) / alone)
    print(f"torch matmul and fused layer in turn, T={tokens}: {statistics.median(ratios):.2f} of the sum of the two")


def packing() -> None:
    scheme = cpumoe.Scheme.parse("w4a8-g128")
    weight = random_weight(64, 1536, 2048, scheme, 0)
    values, scales = weight.values, weight.scales
    for source, name in ((values, "int8 values"), (pack_nibbles(values), "nibbles")):
        rates = []
        for _ in range(5):
            start = time.perf_counter()
            blob = torch.ops.cpumoe.pack(source, scales, None, 2048, 128, "int4", ops.ROWS_GATE_THEN_UP)
            rates.append(blob.numel() / (time.perf_counter() - start) * 1e-9)
        print(f"packing from {name}: {statistics.median(rates):.2f} GB/s of output (first {rates[0]:.2f})")


def main() -> None:
    print(f"{cpumoe.isa()}, {cpumoe.get_num_threads()} threads")
    tiny_call()
    tiny_linear()
    routing()
    for tokens in (1, 16, 256):
        alternating(tokens)
    packing()


if __name__ == "__main__":
    main()
