"""``cpumoe check``: loads and runs every quantised layer of a checkpoint and compares it with plain arithmetic."""

from __future__ import annotations

import argparse
import json
import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from cpumoe import cpu
from cpumoe.cli.arguments import add_download, add_model, find_models, instruction_set, scheme_name, whole_numbers
from cpumoe.cli.parser import Commands
from cpumoe.errors import printable
from cpumoe.layers.scheme import Scheme
from cpumoe.option_values import EXPERTS_TOLERANCE, LINEAR_TOLERANCE

if TYPE_CHECKING:
    from cpumoe.checkpoints.verification import Result

_MAX_LISTED = 8  # problems of a module that are printed; JSON has all of them


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "check",
        help="every layer of a checkpoint against the reference arithmetic",
        description="Loads the experts and quantised linears of a checkpoint layer by layer, compares the packed "
        "weights with the file to the bit and their outputs with the arithmetic in plain PyTorch. Exit code 0: all "
        "agree; 1: some do not, the first is named; 2: there is nothing that could be checked.",
    )
    add_model(parser)
    parser.add_argument(
        "--scheme", type=scheme_name, help="for a float checkpoint: what to quantise its experts to, such as w4a8-g128"
    )
    add_download(parser)
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens per layer (enough for every expert)")
    parser.add_argument("--layers", type=whole_numbers(0), metavar="LIST", help="only these, such as 0,5 (all)")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="F",
        help=f"relative difference of a token that is accepted ({EXPERTS_TOLERANCE:g} for experts, which quantise "
        f"twice, {LINEAR_TOLERANCE:g} for linears)",
    )
    parser.add_argument("--isa", type=instruction_set, help="instruction set (the one in use)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from cpumoe.checkpoints.checkpoint import Checkpoint
    from cpumoe.checkpoints.verification import checks_of, run_checks, summary
    from cpumoe.evaluation.selftest import using_isa
    from cpumoe.integrations.transformers.facade import describe

    if arguments.tokens is not None and arguments.tokens < 3:
        raise ValueError(f"--tokens {arguments.tokens}; 3 or more are accepted (one is zero, one has an outlier)")
    if arguments.tolerance is not None and not 0 < arguments.tolerance < math.inf:
        raise ValueError(f"--tolerance {arguments.tolerance}; a positive number is accepted")
    find_models(arguments, "model")
    scheme = None if arguments.scheme is None else Scheme.parse(arguments.scheme)
    using = nullcontext() if arguments.isa is None else using_isa(arguments.isa)
    with Checkpoint.open(arguments.model) as checkpoint, using:
        layers = checks_of(checkpoint, describe, scheme, arguments.tokens, arguments.tolerance, arguments.layers)
        found = []
        for layer, results in run_checks(layers):
            found.append({"layer": layer, "agrees": not any(r.problems for r in results), "modules": results})
            if not arguments.json:
                print(_layer_text(layer, results), flush=True)
        facts = {"folder": str(checkpoint.folder), "isa": cpu.isa(), **summary(found)}
    if arguments.json:
        print(json.dumps(facts, indent=1))
    else:
        print(_summary_text(facts))
    return 0 if facts["agrees"] else 1


def _layer_text(layer: str, results: list[Result]) -> str:
    agrees = not any(result.problems for result in results)
    parts = []
    for kind in ("experts", "linear"):
        of_kind = [result for result in results if result.kind == kind]
        if of_kind:
            differences = [result.difference for result in of_kind if result.difference is not None]
            worst = f" {max(differences):.1e}" if differences else " not run"
            parts.append(f"{kind if len(of_kind) == 1 else f'{len(of_kind)} {kind}s'}{worst}")
    seconds = sum(result.seconds for result in results)
    lines = [f"{layer:20} {'ok     ' if agrees else 'DIFFERS'}  {', '.join(parts)}  {seconds:.2f} s"]
    for result in results:
        for title, texts in (("", result.problems), ("warning: ", result.warnings)):
            lines += [f"    {title}{text}" for text in texts[:_MAX_LISTED]]
            if len(texts) > _MAX_LISTED:
                lines.append(f"    {title}{result.name}: {len(texts) - _MAX_LISTED} more; --json lists all")
    return "\n".join(map(printable, lines))  # names come from the files and may hold any characters


def _summary_text(facts: dict[str, Any]) -> str:
    good, count = sum(layer["agrees"] for layer in facts["layers"]), len(facts["layers"])
    details = f"{facts['modules']} modules, {facts['isa']} kernels, {facts['seconds']:.1f} s"
    text = f"{good} of {count} layers agree with the reference ({details})"
    if facts["warnings"]:
        text += f"; {facts['warnings']} warnings"
    return text if facts["agrees"] else f"{text}\nthe first that differs: {printable(facts['first_difference'])}"
