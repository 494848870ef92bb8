"""``cpumoe bench``: the speed of a layer, compared with the limits of the machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cpumoe import _core
from cpumoe.bench.measure import Row, bench_shape
from cpumoe.bench.report import plot, table, write_json
from cpumoe.bench.workload import SHAPES, Shape, fitting_scheme
from cpumoe.cli.arguments import (
    check_scheme_fits,
    instruction_set,
    positive,
    scheme_name,
    seconds,
    size_in_features,
)
from cpumoe.demo.model import measured_load
from cpumoe.layers.scheme import Scheme

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DEFAULT_SCHEME = Scheme.parse("w4a8-g128")
#: Called with a shape, the numbers of tokens, the dtype of the hidden states, the seconds for each row, and a function
#: that gets a sentence about everything that goes wrong.
BenchOthers = Callable[[Shape, list[int], torch.dtype, float, Callable[[str], None]], Iterator[Row]]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a layer against DRAM and the peak of dot products",
        description="Measures layers with random weights, and in the same run the DRAM read rate and the peak of "
        "the instruction set in use. Weights rotate through more than 1 GB, so that decode reads DRAM.",
    )
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="known model; may be repeated")
    sizes = {"hidden": size_in_features, "intermediate": size_in_features, "experts": positive, "topk": positive}
    for name, kind in sizes.items():
        parser.add_argument(f"--{name}", type=kind, metavar="N", help="a shape of your own (give all four)")
    parser.add_argument(
        "--scheme",
        type=scheme_name,
        action="append",
        help="scheme; may be repeated (w4a8-g128, or the largest groups that fit the shape)",
    )
    parser.add_argument("--tokens", type=_token_list, default=[1, 8, 64, 512, 2048], help="such as 1,8,64,512,2048")
    parser.add_argument(
        "--routing",
        choices=["uniform", "demo"],
        default="uniform",
        help="how tokens choose experts: all alike, or as in the model that comes with the package",
    )
    parser.add_argument(
        "--isa", type=instruction_set, action="append", help="instruction set; may be repeated (the one in use)"
    )
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16", help="of the hidden states")
    parser.add_argument("--seconds", type=seconds, metavar="F", default=2.0, help="time for each row (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a roofline (PNG) to FILE")


def _token_list(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; positive numbers separated by commas are accepted")
    return counts


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
    schemes = [Scheme.parse(name) for name in arguments.scheme or []]
    for shape in shapes:
        for scheme in schemes:
            check_scheme_fits(f"--scheme {scheme} for {shape.name}", scheme, shape.hidden, shape.intermediate)
    dtype = _DTYPES[arguments.dtype]
    if arguments.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise RuntimeError("--plot needs matplotlib: pip install 'cpumoe[bench]'") from None
    for path in (arguments.json, arguments.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.absolute().parent}")
    rows: list[Row] = []
    for isa in arguments.isa or [""]:
        _core.use_isa(isa)
        for shape in shapes:
            for scheme in schemes or [fitting_scheme(_DEFAULT_SCHEME, shape)]:
                for row in bench_shape(shape, scheme, arguments.tokens, dtype, arguments.seconds):
                    rows.append(row)
                    _note(f"{row.shape} {row.scheme} {row.isa} T={row.tokens}: {row.ms_median:.3f} ms")
    _core.use_isa("")
    if bench_others is not None:
        for shape in shapes:
            for row in bench_others(shape, arguments.tokens, dtype, arguments.seconds, _note):
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
