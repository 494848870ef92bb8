"""``cpumoe bench``: the speed of a whole model or of a layer, compared with the limits of the machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from cpumoe.bench.shapes import SHAPES
from cpumoe.cli.arguments import (
    instruction_set,
    number_above_zero,
    positive,
    refuse_given,
    scheme_or_float,
    size_in_features,
    whole_numbers,
)
from cpumoe.cli.model_arguments import add_loading_options
from cpumoe.cli.parser import Commands

#: Options that have no meaning with a MODEL.
_OF_LAYERS = ("shape", "hidden", "intermediate", "experts", "topk", "tokens", "routing", "isa", "dtype", "seconds")
#: Options that have no meaning without one.
_OF_MODELS = ("prompt", "generate", "depth", "batch", "repetitions")
_LOADING = ("linears", "activations", "kv_cache", "cache", "download")


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a model's prefill and decode rates, or a layer against the limits of the machine",
        description="With MODEL: tokens per second of prefill and decode of a whole model with random tokens, as "
        "llama-bench measures them, and the share of the DRAM read rate that decode reaches. Without MODEL: layers "
        "with random weights, and in the same run the DRAM read rate and the peak of the instruction set in use; "
        "weights rotate through more than 1 GB, so that decode reads DRAM.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        type=Path,
        metavar="MODEL",
        help="checkpoint folder, or id on the Hugging Face hub (owner/name); left out: layers with random weights",
    )
    _add_model_options(parser)
    add_options(parser)
    parser.set_defaults(run=run)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a whole model: MODEL, and")
    counts: dict[str, tuple[int, str]] = {
        "prompt": (0, "prefill tests: tokens of the prompt; 0: none (512)"),
        "generate": (0, "decode tests: tokens that each sequence generates; 0: none (128)"),
        "depth": (0, "tokens in the KV cache before a test begins (0)"),
        "batch": (1, "sequences that are computed together (1)"),
    }
    for name, (least, text) in counts.items():
        group.add_argument(f"--{name}", type=whole_numbers(least), metavar="N,N", help=text)
    group.add_argument("--repetitions", type=positive, metavar="N", help="how often each test is run (5)")
    add_loading_options(group)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark of layers, and those that models have too."""
    parser.add_argument(
        "--scheme",
        type=scheme_or_float,
        action="append",
        help="of a layer (w4a8-g128, or the largest groups that fit; may be repeated), or of the experts of a float "
        "MODEL",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    group = parser.add_argument_group("a layer")
    group.add_argument("--shape", action="append", choices=sorted(SHAPES), help="known model; may be repeated")
    sizes = {"hidden": size_in_features, "intermediate": size_in_features, "experts": positive, "topk": positive}
    for name, kind in sizes.items():
        group.add_argument(f"--{name}", type=kind, metavar="N", help="a shape of your own (give all four)")
    group.add_argument("--tokens", type=whole_numbers(1), metavar="N,N", help="of a call (1,8,64,512,2048)")
    group.add_argument(
        "--routing",
        choices=["uniform", "demo"],
        help="how tokens choose experts: all alike, or as in the model that comes with the package (uniform)",
    )
    group.add_argument(
        "--isa", type=instruction_set, action="append", help="instruction set; may be repeated (the one in use)"
    )
    group.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="of the hidden states (bf16)")
    group.add_argument("--seconds", type=number_above_zero, metavar="F", help="time for each row (2)")
    group.add_argument("--plot", type=Path, metavar="FILE", help="write a roofline (PNG) to FILE")


def run(arguments: argparse.Namespace) -> int:
    if arguments.model is not None:
        refuse_given(arguments, "with MODEL, which has layers of its own", *_OF_LAYERS, "plot")
        from cpumoe.cli import bench_model

        return bench_model.run(arguments)
    refuse_given(arguments, "without MODEL", *_OF_MODELS, *_LOADING)
    from cpumoe.cli import bench_layers

    return bench_layers.run(arguments)
