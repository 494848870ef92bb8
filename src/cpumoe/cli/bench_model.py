"""``cpumoe bench MODEL``: prefill and decode rates of a whole model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from cpumoe import _core, cpu
from cpumoe.bench.machine_load import MachineLoad, is_busy
from cpumoe.bench.model_rates import ModelRow, Workload, list_tests, measure_model
from cpumoe.cli.arguments import check_output, find_models
from cpumoe.cli.model_arguments import check_schemes, load_chosen_model
from cpumoe.generation.memory import model_bytes
from cpumoe.generation.model_folder import check_config, context_length, prepare_transformers
from cpumoe.tables import aligned, size_text

_PROMPTS, _GENERATED, _DEPTHS, _BATCHES, _REPETITIONS = [512], [128], [0], [1], 5  # llama-bench's


def run(arguments: argparse.Namespace) -> int:
    tests = _tests(arguments)
    if len(arguments.scheme or ()) > 1:
        raise ValueError("--scheme is given more than once; a MODEL is loaded with one")
    arguments.scheme = None if arguments.scheme is None else arguments.scheme[0]
    check_output("--json", arguments.json)
    name = str(arguments.model)
    find_models(arguments, "model")
    check_config(arguments.model)
    check_schemes(arguments)
    prepare_transformers()
    _check_context(tests, context_length(arguments.model))
    model = load_chosen_model(arguments)
    size = model_bytes(model)
    load = MachineLoad()
    rows = list(measure_model(model, tests, arguments.repetitions or _REPETITIONS, _note))
    print(f"{name}: {size_text(size)} in memory, {cpu.isa()} kernels, {_core.thread_count()} threads\n")
    print(report(rows))
    taken = load.taken_by_others()
    if is_busy(taken):
        print(f"\nother programs took {taken:.0%} of the CPUs' time meanwhile; measure again when they have ended")
    if arguments.json is not None:
        facts = {"model": name, "model_bytes": size, "tests": [row.to_json() for row in rows]}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def _tests(arguments: argparse.Namespace) -> list[Workload]:
    tests = list_tests(
        arguments.prompt or _PROMPTS,
        arguments.generate or _GENERATED,
        arguments.depth or _DEPTHS,
        arguments.batch or _BATCHES,
    )
    if not tests:
        raise ValueError("--prompt 0 and --generate 0 leave nothing to measure")
    return tests


def _check_context(tests: Sequence[Workload], context: int | None) -> None:
    longest = max(tests, key=lambda test: test.positions)
    if context is not None and longest.positions > context:
        option = "prompt" if longest.kind == "prefill" else "generate"
        raise ValueError(
            f"--depth {longest.depth} and --{option} {longest.tokens} take {longest.positions} positions (with "
            f"the steps whose experts are counted); the model's context is {context}"
        )


def _note(line: str) -> None:
    print(f"measuring {line}", file=sys.stderr, flush=True)


def report(rows: Sequence[ModelRow]) -> str:
    """The table that ``bench MODEL`` prints, and what the share of DRAM means."""
    cells: list[tuple[str, ...]] = [("test", "batch", "tokens/s", "+-", "ms/step", "read/step", "DRAM", "of DRAM")]
    for row in rows:
        decode = row.test.kind == "decode"
        step = f"{1e3 * row.test.batch / row.rate:.2f}" if decode else "-"
        share = "-" if row.dram_share is None else f"{row.dram_share:.0%}"
        cells.append(
            (
                row.test.name,
                str(row.test.batch),
                f"{row.rate:.1f}",
                f"{row.spread:.1f}",
                step,
                "-" if row.step_bytes is None else size_text(row.step_bytes.total),
                f"{row.dram * 1e-9:.1f} GB/s",
                share,
            )
        )
    lines = aligned(cells, right=range(1, 8))
    decoded = [row for row in rows if row.test.kind == "decode"]
    if any(row.dram_share is not None for row in decoded):
        lines += ["", "of DRAM: what a decode step must read (weights of chosen experts, all others, KV cache) at the"]
        lines += ["DRAM read rate that was measured in between, over the time that it took"]
    if any(row.step_bytes is None for row in decoded):
        lines += ["", "what a decode step must read is not known: this model's experts cannot be watched"]
    if not all(row.from_memory for row in decoded):
        lines += ["the model is so small that it may stay in a cache: the share of DRAM says nothing about memory"]
    return "\n".join(lines)
