"""``cpumoe inspect``: what a checkpoint is, what of it would be loaded, and what would stop the load."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.inspection import Survey
from cpumoe.cli.arguments import add_download, add_model, find_models, scheme_name
from cpumoe.errors import printable
from cpumoe.integrations.transformers.model_config import completed_config
from cpumoe.layers.scheme import Scheme

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_MAX_LISTED = 20  # of one kind of problem in the text; JSON has all
_TITLES = {"missing": "missing", "wrong": "of another kind", "unexpected": "unexpected", "other": "refused"}
_WORDS = 2  # the first columns of the table, which are not numbers


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="what a checkpoint is, what would be loaded, and what would stop it",
        description="Shows architecture, schemes and sizes of a checkpoint, and everything that would stop it from "
        "being loaded, from its headers alone. Exit code 0: it would load; 1: it would not; 2: this is no checkpoint.",
    )
    add_model(parser)
    parser.add_argument(
        "--scheme", type=scheme_name, help="for a float checkpoint: sizes with its experts quantised, such as w4a8-g128"
    )
    add_download(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    find_models(arguments, "model")
    scheme = None if arguments.scheme is None else Scheme.parse(arguments.scheme)
    with Checkpoint.open(arguments.model) as checkpoint:
        facts = Survey(checkpoint, scheme, completed_config).to_json()
    print(json.dumps(facts, indent=1) if arguments.json else report(facts))
    return 0 if facts["loads"] else 1


def size_text(size: int | None) -> str:
    """Bytes for people, with a unit."""
    if size is None:
        return "?"
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if size >= 10**power:
            return f"{size / 10**power:.1f} {unit}"
    return f"{size} B"


def report(facts: dict[str, Any]) -> str:
    """The text of ``inspect`` from what it prints as JSON."""
    experts, files = facts["experts"], f"{facts['files']} file{'' if facts['files'] == 1 else 's'}"
    lines = [
        f"checkpoint  {facts['folder']}, {files}",
        f"model       {facts['model_type']}, {facts['layers']} layers, hidden size {facts['hidden_size']}",
    ]
    if experts is not None:
        lines.append(
            f"experts     {experts['count']} per layer in {experts['layers']} layers, {experts['per_token']} per "
            f"token, intermediate size {experts['intermediate_size']}, {experts['activation']}"
        )
    lines += ["", *_table(facts), ""]
    if experts is not None and experts["memory_bits_per_weight"] is not None:
        on_disk, in_memory = experts["disk_bits_per_weight"], experts["memory_bits_per_weight"]
        lines.append(f"experts: {on_disk:.2f} bits per weight on disk, {in_memory:.2f} in memory")
    lines.append(f"float parts are loaded as {facts['float_dtype']}: {facts['float_dtype_reason']}")
    if facts["schemes"]:
        lines.append("this is a float checkpoint; --scheme quantises its experts while they are loaded:")
        for offer in facts["schemes"]:
            size = size_text(offer["memory_bytes"])
            lines.append(f"  {offer['scheme']:10} {size:>10}  {offer['bits_per_weight']:.2f} bits per weight")
    lines.append("it would load" if facts["loads"] else "it would not load:")
    for key, title in _TITLES.items():
        if found := facts["problems"][key]:
            lines += [f"  {title} ({len(found)})", *(f"    {text}" for text in found[:_MAX_LISTED])]
            if len(found) > _MAX_LISTED:
                lines.append(f"    and {len(found) - _MAX_LISTED} more; --json lists all")
    return "\n".join(map(printable, lines))  # names are those of the files, whatever they hold


def _table(facts: dict[str, Any]) -> list[str]:
    def row(first: str, held: str, modules: str, part: dict[str, Any]) -> tuple[str, ...]:
        parameters = "?" if part["parameters"] is None else f"{part['parameters']:,}"
        return first, held, modules, parameters, size_text(part["disk_bytes"]), size_text(part["memory_bytes"])

    rows: list[tuple[str, ...]] = [("kind", "held as", "modules", "parameters", "on disk", "in memory")]
    rows += [row(part["kind"], part["held"], str(part["modules"]), part) for part in facts["parts"]]
    rows.append(row("total", "", "", facts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(t.ljust(w) if i < _WORDS else t.rjust(w) for i, (t, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
