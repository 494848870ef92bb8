"""``cpumoe inspect``: what a checkpoint is, how it would be loaded, and what would keep it from being loaded."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cpumoe.cli.arguments import add_download, add_model, find_models, scheme_name
from cpumoe.cli.parser import Commands
from cpumoe.errors import printable
from cpumoe.layers.scheme import Scheme
from cpumoe.tables import aligned, size_text

_MAX_LISTED = 20  # problems of one kind that are printed; JSON has all of them
_TITLES = {"missing": "missing", "wrong": "of another kind", "unexpected": "unexpected", "other": "refused"}


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="what a checkpoint is, what would be loaded, and what would stop it",
        description="Shows architecture, schemes and sizes of a checkpoint, and everything that would stop it from "
        "being loaded. It reads headers and no weights, unless --deep is given. Exit code 0: it would load; 1: it "
        "would not; 2: this is no checkpoint.",
    )
    add_model(parser)
    parser.add_argument(
        "--scheme", type=scheme_name, help="for a float checkpoint: sizes with its experts quantised, such as w4a8-g128"
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="also read and pack all quantised weights, as a load does, and name those with values that stop it",
    )
    add_download(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from cpumoe.checkpoints.checkpoint import Checkpoint
    from cpumoe.checkpoints.inspection import Survey
    from cpumoe.integrations.transformers.facade import describe

    find_models(arguments, "model")
    scheme = None if arguments.scheme is None else Scheme.parse(arguments.scheme)
    with Checkpoint.open(arguments.model) as checkpoint:
        facts = Survey(checkpoint, describe, scheme, deep=arguments.deep).to_json()
    print(json.dumps(facts, indent=1) if arguments.json else report(facts))
    return 0 if facts["loads"] else 1


def report(facts: dict[str, Any]) -> str:
    """The text that ``inspect`` prints, made from its JSON."""
    of_experts, files = facts["experts"], f"{facts['files']} file{'' if facts['files'] == 1 else 's'}"
    heading = [
        ("checkpoint", f"{facts['folder']}, {files}"),
        ("model", f"{facts['model_type']}, {facts['layers']} layers, hidden size {facts['hidden_size']}"),
    ]
    if of_experts is not None:
        experts_text = (
            f"{of_experts['count']} per layer in {of_experts['layers']} layers, {of_experts['per_token']} per token, "
            f"intermediate size {of_experts['intermediate_size']}, {of_experts['activation']}"
        )
        heading.append(("experts", experts_text))
    lines = [*aligned(heading), "", *_table(facts), ""]
    if of_experts is not None and of_experts["memory_bits_per_weight"] is not None:
        on_disk, in_memory = of_experts["disk_bits_per_weight"], of_experts["memory_bits_per_weight"]
        lines.append(f"experts: {on_disk:.2f} bits per weight on disk, {in_memory:.2f} in memory")
    lines.append(f"float parts are loaded as {facts['float_dtype']}: {facts['float_dtype_reason']}")
    if facts["kv_cache"] is not None:
        lines.append(facts["kv_cache"])
    if facts["schemes"]:
        lines.append("this is a float checkpoint; --scheme quantises its experts while they are loaded:")
        rows = [
            (offer["scheme"], size_text(offer["memory_bytes"]), f"{offer['bits_per_weight']:.2f} bits per weight")
            for offer in facts["schemes"]
        ]
        lines += aligned(rows, right=(1,), indent=2)
    if facts["loads"] and not facts["values_read"]:
        lines.append("it would load, by its headers: values of weights and scales were not read (--deep reads them)")
    else:
        lines.append("it would load" if facts["loads"] else "it would not load:")
    for key, title in _TITLES.items():
        if found := facts["problems"][key]:
            lines += [f"  {title} ({len(found)})", *(f"    {text}" for text in found[:_MAX_LISTED])]
            if len(found) > _MAX_LISTED:
                lines.append(f"    and {len(found) - _MAX_LISTED} more; --json lists all")
    return "\n".join(map(printable, lines))  # names come from the files and may hold any characters


def _table(facts: dict[str, Any]) -> list[str]:
    def row(kind: str, storage: str, modules: str, part: dict[str, Any]) -> tuple[str, ...]:
        parameters = "?" if part["parameters"] is None else f"{part['parameters']:,}"
        sizes = ("?" if part[key] is None else size_text(part[key]) for key in ("disk_bytes", "memory_bytes"))
        return kind, storage, modules, parameters, *sizes

    rows: list[tuple[str, ...]] = [("kind", "held as", "modules", "parameters", "on disk", "in memory")]
    rows += [row(part["kind"], part["held"], str(part["modules"]), part) for part in facts["parts"]]
    rows.append(row("total", "", "", facts))
    return aligned(rows, right=range(2, 6))
