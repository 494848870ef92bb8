"""``cpumoe bench`` without a MODEL: the speed of a layer, compared with the limits of the machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from cpumoe import _core
from cpumoe.bench.measure import Row, bench_shape
from cpumoe.bench.report import plot, table, write_json
from cpumoe.bench.shapes import SHAPES, Shape
from cpumoe.bench.workload import fitting_scheme
from cpumoe.cli.arguments import check_output, check_scheme_fits
from cpumoe.demo.model import measured_load
from cpumoe.layers.scheme import DEFAULT_SCHEME, FLOAT, Scheme

#: Called with a shape, the numbers of tokens, the dtype of the hidden states, the seconds for each row, and a function
#: that gets a sentence about everything that goes wrong.
BenchOthers = Callable[[Shape, list[int], torch.dtype, float, Callable[[str], None]], Iterator[Row]]

_TOKENS, _SECONDS = [1, 8, 64, 512, 2048], 2.0  # by default

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _shapes(arguments: argparse.Namespace) -> list[Shape]:
    sizes = [arguments.hidden, arguments.intermediate, arguments.experts, arguments.topk]
    shapes = [SHAPES[name] for name in arguments.shape or []]
    if any(size is not None for size in sizes):
        if None in sizes:
            raise ValueError("a shape of your own needs --hidden, --intermediate, --experts and --topk")
        hidden, intermediate, num_experts, topk = sizes
        if topk > num_experts:
            raise ValueError(f"--topk {topk}; 1 to {num_experts} are accepted")
        shapes.append(Shape(f"{hidden}x{intermediate}x{num_experts}x{topk}", *sizes))
    shapes = shapes or [SHAPES["qwen3-30b-a3b"]]
    if arguments.routing == "demo":
        shapes = [replace(shape, load=tuple(measured_load(shape.num_experts).tolist())) for shape in shapes]
    return shapes


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(arguments: argparse.Namespace, bench_others: BenchOthers | None = None) -> int:
    """Measures and prints; ``bench_others`` measures other systems for more rows (``benchmarks/peers.py``)."""
    shapes = _shapes(arguments)
    tokens, seconds = arguments.tokens or _TOKENS, arguments.seconds or _SECONDS
    if FLOAT in (arguments.scheme or ()):
        raise ValueError(f"--scheme {FLOAT} has no effect without MODEL; --scheme bf16 measures a layer in bf16")
    schemes = [Scheme.parse(name) for name in arguments.scheme or []]
    for shape in shapes:
        for scheme in schemes:
            check_scheme_fits(f"--scheme {scheme} for {shape.name}", scheme, shape.hidden, shape.intermediate)
    dtype = _DTYPES[arguments.dtype or "bf16"]
    check_output("--json", arguments.json)
    check_output("--plot", arguments.plot, plot=True)
    rows: list[Row] = []
    for isa in arguments.isa or [""]:
        _core.use_isa(isa)
        for shape in shapes:
            for scheme in schemes or [fitting_scheme(Scheme.parse(DEFAULT_SCHEME), shape)]:
                for row in bench_shape(shape, scheme, tokens, dtype, seconds):
                    rows.append(row)
                    _note(f"{row.shape} {row.scheme} {row.isa} T={row.tokens}: {row.ms_median:.3f} ms")
    _core.use_isa("")
    if bench_others is not None:
        for shape in shapes:
            for row in bench_others(shape, tokens, dtype, seconds, _note):
                rows.append(row)
                _note(f"{row.system} {row.shape} T={row.tokens}: {row.ms_median:.3f} ms")
    print(table(rows))
    own = [row for row in rows if row.system == "cpumoe"]
    print(
        f"\nlimits seen among the calls: DRAM read {min(r.dram_gbps for r in own):.1f} to "
        f"{max(r.dram_gbps for r in own):.1f} GB/s; peak "
        + ", ".join(
            f"{isa} {max(r.peak_tops for r in own if r.isa == isa):.2f} TOPS"
            for isa in dict.fromkeys(r.isa for r in own)
        )
    )
    if cached := sorted({row.shape for row in rows if not row.from_memory}):
        print(
            f"the weights of {', '.join(cached)} are so small that they may stay in a cache: GB/s and the share of "
            "DRAM say nothing about memory there"
        )
    if arguments.json is not None:
        write_json(rows, arguments.json)
    if arguments.plot is not None:
        plot(rows, arguments.plot)
    return 0
