"""Measures a model with the shape of Qwen3-30B-A3B but fewer layers: loading, memory, prefill, decode and its parts.

    python benchmarks/model.py                                # 4 layers, w4a8-g128, head in w8a8
    python benchmarks/model.py --layers 16 --cache            # also a second start from the cache
    python benchmarks/model.py --layers 16 --peers            # llama.cpp in turn with it, from its own environment
    python benchmarks/model.py --quick --no-load-figures

The checkpoint has random weights and is written to a temporary folder, or to ``--folder``, where it is kept. Loading is
measured in a separate process, so that the peak of memory is that of loading alone. What is decoded and prefilled is
put beside the DRAM read rate and the peak of int8 dot products of the same minutes; the most that was seen counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from model_checkpoint import write_checkpoint
from model_limits import cpumoe_bytes, llama_cpp_bytes
from model_report import ModelFacts, byte_lines, doubts, markdown_table, workload_figures
from model_shape import ModelShape
from model_timing import LayerAlone, OwnModel, Stopwatch, Workload
from peer_llama_cpp import ENVIRONMENT, LlamaCpp, environment_python

import cpumoe
from cpumoe.bench.decoding import decode_times
from cpumoe.bench.shapes import Shape
from cpumoe.checkpoints.formats.compressed_storages import storage_for
from cpumoe.cli.arguments import (
    add_kv_cache,
    add_threads,
    number_above_zero,
    positive,
    scheme_name,
    scheme_or_float,
    use_threads,
)
from cpumoe.layers.scheme import FLOAT, Scheme

# Options that are not given, and what --quick makes of them.
_DEFAULTS = {"layers": 4, "prompts": [512, 2048, 4096], "depths": [8, 512, 4096], "batches": [1, 8, 32], "tokens": 32}
_QUICK = {"layers": 2, "prompts": [128], "depths": [8, 128], "batches": [1, 8], "tokens": 8}
_ARITHMETIC = ("experts", "packed linears", "attention", "float products", "products", "head")
_PROFILED = 8  # tokens that are decoded to see which kinds of work take how much


def memory_bytes(key: str) -> int:
    """Memory of this process: its peak for the key VmHWM, the present amount for VmRSS."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def load(folder: Path, linears: str, cache: Path | None, kv_cache: str | None = None) -> tuple[Any, dict[str, float]]:
    """Loads the model and measures the time and the memory that it takes."""
    from cpumoe.integrations.transformers.loading.model_loading import load_model

    before = memory_bytes("VmRSS")
    start = time.perf_counter()
    model = load_model(folder, linears=None if linears == FLOAT else linears, cache=cache, kv_cache=kv_cache)
    duration = time.perf_counter() - start
    packed = sum(b.numel() for b in model.buffers() if b.dtype == torch.uint8)
    model_bytes = packed + sum(p.numel() * p.element_size() for p in model.parameters())
    per_layer = packed // model.config.num_hidden_layers
    peak = memory_bytes("VmHWM") - before
    return model, {
        "seconds": duration,
        "packed_gb": packed * 1e-9,
        "packed_gb_per_second": packed * 1e-9 / duration,
        "model_gb": model_bytes * 1e-9,
        "peak_gb": peak * 1e-9,
        "peak_over_packed_and_layer": peak / (packed + per_layer),
    }


def load_figures(folder: Path, linears: str, cache: Path | None) -> dict[str, float]:
    """The figures of one load, measured in a separate process."""
    command = [sys.executable, __file__, "--folder", str(folder), "--load-only", "--linears", linears]
    command += ["--threads", str(cpumoe.get_num_threads())]
    command += [] if cache is None else ["--cache-folder", str(cache)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, float] = json.loads(out.splitlines()[-1])
    return figures


def decode_shares(model: Any, depth: int) -> dict[str, Any]:
    """The shares of a decoded token's time, from a profiler, which inflates what is not arithmetic."""
    ids = torch.randint(0, model.config.vocab_size, (1, depth), generator=torch.Generator().manual_seed(1))
    decode = decode_times(model, ids, _PROFILED)
    outside = sum(share for kind, share in decode.shares.items() if kind not in _ARITHMETIC)
    return {"depth": depth, "shares": decode.shares, "outside_arithmetic": outside}


def workloads(prompts: list[int], depths: list[int], batches: list[int]) -> Iterator[Workload]:
    """Each once: a batch of 1 behind the smallest depth may be asked for twice."""
    wanted = [Workload("prefill", prompt) for prompt in prompts]
    wanted += [Workload("decode", depth) for depth in depths]
    wanted += [Workload("decode", min(depths), batch) for batch in batches]
    yield from dict.fromkeys(wanted)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive, help="of 48 (4)")
    parser.add_argument("--scheme", type=scheme_name, default="w4a8-g128")
    parser.add_argument("--form", default="pack-quantized", choices=["pack-quantized", "int-quantized"])
    parser.add_argument(
        "--linears", type=scheme_or_float, default="w8a8", help="scheme for what the checkpoint has in float: the head"
    )
    add_kv_cache(parser)
    parser.add_argument("--prompts", type=positive, nargs="+", help="lengths to prefill (512 2048 4096)")
    parser.add_argument("--depths", type=positive, nargs="+", help="tokens to decode one sequence behind (8 512 4096)")
    parser.add_argument(
        "--batches", type=positive, nargs="+", help="sequences to decode at once, behind the smallest depth (1 8 32)"
    )
    parser.add_argument("--tokens", type=positive, help="steps to time for each kind of decode (32)")
    parser.add_argument("--rounds", type=positive, default=3, help="turns that each system has (3)")
    parser.add_argument("--quick", action="store_true", help="2 layers, short prompts, few tokens, where not given")
    parser.add_argument(
        "--folder",
        type=Path,
        help="checkpoint folder: written if it is not there, and kept; so is the GGUF of --peers beside it",
    )
    parser.add_argument("--no-load-figures", action="store_true", help="do not measure loading by itself")
    parser.add_argument("--cache", action="store_true", help="also measure starts with the packed cache")
    parser.add_argument("--peers", action="store_true", help="measure llama.cpp in turn with cpumoe")
    parser.add_argument(
        "--peer-environment",
        type=Path,
        default=ENVIRONMENT,
        help="virtual environment with llama.cpp: made if it is not there (build/llama-cpp-environment)",
    )
    parser.add_argument("--peer-at-once", type=positive, default=512, help="llama.cpp's n_ubatch (512, its default)")
    parser.add_argument(
        "--patience",
        type=number_above_zero,
        default=0.0,
        metavar="F",
        help="seconds, in all, to wait for other programs to leave the CPUs alone (0)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--cache-folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load-only", action="store_true", help="load, print the figures as JSON, and stop")
    add_threads(parser)
    arguments = parser.parse_args()
    if arguments.cache and arguments.no_load_figures:
        parser.error("--cache has no effect with --no-load-figures")
    for name, value in (_QUICK if arguments.quick else _DEFAULTS).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def checkpoint_in(folder: Path, arguments: argparse.Namespace) -> ModelShape:
    """The shape of the checkpoint, which is written if the folder has none."""
    shape = ModelShape(arguments.layers)
    if (folder / "config.json").exists():
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        if layers != shape.layers:
            raise ValueError(f"{folder} has {layers} layers, not {shape.layers}; give --layers {layers}")
    else:
        note(f"writing a checkpoint of {shape.layers} layers")
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder, shape, storage_for(Scheme.parse(arguments.scheme), arguments.form))
    return shape


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(arguments: argparse.Namespace, scratch: Path, stack: ExitStack) -> dict[str, Any]:
    """All figures. ``stack`` ends the processes of peers."""
    folder = arguments.folder or scratch / "model"
    shape = checkpoint_in(folder, arguments)
    figures: dict[str, Any] = {
        "isa": cpumoe.isa(),
        "threads": cpumoe.get_num_threads(),
        "model": asdict(shape),
        "scheme": arguments.scheme,
        "linears": arguments.linears,
        "kv_cache": arguments.kv_cache,
    }
    if not arguments.no_load_figures:
        figures["load"] = load_figures(folder, arguments.linears, None)
    if arguments.cache:
        figures["load_writing_cache"] = load_figures(folder, arguments.linears, scratch / "cache")
        figures["load_from_cache"] = load_figures(folder, arguments.linears, scratch / "cache")
    peers = []
    if arguments.peers:
        python = environment_python(arguments.peer_environment)
        file = folder.with_name(f"{folder.name}-{shape.layers}-layers.gguf")
        threads = cpumoe.get_num_threads()
        peer = stack.enter_context(LlamaCpp(python, file, shape, threads, arguments.peer_at_once))
        figures[peer.name] = {**peer.about, "at_once": arguments.peer_at_once}
        peers.append(peer)
    model, loaded = load(folder, arguments.linears, None, arguments.kv_cache)
    scheme, head = Scheme.parse(arguments.scheme), None
    if arguments.linears != FLOAT:
        head = Scheme.parse(arguments.linears)
    ours = cpumoe_bytes(shape, scheme, head, model.dtype, arguments.kv_cache)
    stored = {"cpumoe": ours, LlamaCpp.name: llama_cpp_bytes(shape)}
    facts = ModelFacts(shape, stored, head_is_packed=head is not None)
    # What is said about bytes should be what the model has.
    counted = shape.layers * (stored["cpumoe"].linears + shape.experts * stored["cpumoe"].expert)
    counted += 0 if head is None else stored["cpumoe"].head
    figures["packed_gb"] = {"in_the_model": loaded["packed_gb"], "counted": counted * 1e-9}
    layer = None
    if max(arguments.batches) > 1:
        sizes = (shape.hidden, shape.intermediate, shape.experts, shape.topk)
        layer = LayerAlone(Shape("one layer", *sizes), scheme)
    own = OwnModel(model)
    stopwatch = Stopwatch(own, peers, arguments.rounds, arguments.tokens, layer, arguments.patience)
    rows = []
    for workload in workloads(arguments.prompts, arguments.depths, arguments.batches):
        rows.append(workload_figures(facts, stopwatch.measure(workload)))
        speeds = (f"{name} {speed['tokens_per_second']:.1f}" for name, speed in rows[-1]["systems"].items())
        note(f"{workload}: {', '.join(speeds)} tokens/s")
    figures["decode_profile"] = decode_shares(model, sorted(arguments.depths)[len(arguments.depths) // 2])
    figures["workloads"] = rows
    return figures


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads is not None:
        use_threads(arguments.threads)
    if arguments.load_only:
        print(json.dumps(load(arguments.folder, arguments.linears, arguments.cache_folder)[1]))
        return
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        figures = run(arguments, Path(scratch), stack)
    rows = figures.pop("workloads")
    print(json.dumps(figures, indent=1))
    print("\n" + byte_lines(rows))
    print("\n" + markdown_table(rows, [name for name in rows[0]["systems"] if name != "cpumoe"]))
    if doubtful := doubts(rows):
        print("\n" + doubtful)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**figures, "workloads": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
