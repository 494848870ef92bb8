"""``cpumoe plan``: what every rank would hold of a model, and what it would send."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from cpumoe.cli.arguments import add_download, add_model, find_models, positive, scheme_name
from cpumoe.cli.parser import Commands
from cpumoe.cli.rank_arguments import add_layout_arguments, layout_of
from cpumoe.errors import printable
from cpumoe.layers.scheme import Scheme
from cpumoe.tables import aligned, size_text

if TYPE_CHECKING:
    from cpumoe.parallel.rank_plan import ModelPlan


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="what every rank would hold of a model that is spread over processes, and what it would send",
        description="Shows for every rank its experts, its memory and the bytes that it is expected to send for a "
        "token, from the headers of a checkpoint alone. Refuses what does not divide.",
    )
    add_model(parser)
    sizes = add_layout_arguments(parser)
    sizes.add_argument("--nodes", type=positive, default=1, metavar="N", help="machines, with ranks in order (1)")
    parser.add_argument(
        "--scheme", type=scheme_name, help="for a float checkpoint: with its experts quantised, such as w4a8-g128"
    )
    add_download(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from cpumoe.checkpoints.checkpoint import Checkpoint
    from cpumoe.checkpoints.inspection import Survey
    from cpumoe.integrations.transformers.facade import describe
    from cpumoe.parallel.rank_plan import plan_ranks

    layout = layout_of(arguments)
    find_models(arguments, "model")
    scheme = None if arguments.scheme is None else Scheme.parse(arguments.scheme)
    with Checkpoint.open(arguments.model) as checkpoint:
        plan = plan_ranks(Survey(checkpoint, describe, scheme), layout, arguments.nodes)
    folder = str(arguments.model)
    print(json.dumps({"folder": folder, **plan.to_json()}, indent=1) if arguments.json else report(folder, plan))
    return 0


def report(folder: str, plan: ModelPlan) -> str:
    """The text that ``plan`` prints."""

    def numbers(of_layers: tuple[object, ...]) -> str:
        return " or ".join(map(str, of_layers))

    ranks = f"{_count(len(plan.ranks), 'rank')} on {_count(plan.nodes, 'node')}"
    exchange = "" if plan.exchange is None else f", exchange {plan.exchange}"
    heading = [
        ("checkpoint", folder),
        ("layout", f"{plan.layout}: {ranks}{exchange}" if len(plan.ranks) > 1 else "one rank"),
        (
            "experts",
            f"{numbers(plan.expert_counts)} per layer in {_count(plan.layer_count, 'layer')}, "
            f"{numbers(plan.per_token)} per token, {numbers(plan.schemes)}",
        ),
    ]
    if plan.exchange is not None:
        heading.append(("sent", "by a rank for the experts of a token in a layer, if all are equally likely"))
    return "\n".join(map(printable, [*aligned(heading), "", *_table(plan), "", _summary(plan)]))


def _table(plan: ModelPlan) -> list[str]:
    sent = ("sent inside the node", "to other nodes", "in all layers") if plan.exchange else ()
    rows: list[tuple[str, ...]] = [("rank", "node", "holds", "experts", "the rest", "in all", *sent)]
    for number, rank in enumerate(plan.ranks):
        layer = rank.layer_traffic
        sizes: list[float] = [rank.experts_bytes, rank.other_bytes, rank.bytes]
        if plan.exchange:
            sizes += [layer.inside, layer.between, rank.traffic.bytes]
        rows.append((str(number), str(rank.node), rank.held, *map(size_text, sizes)))
    return aligned(rows, right=(0, 1, *range(3, 9)))


def _summary(plan: ModelPlan) -> str:
    largest, together = max(rank.bytes for rank in plan.ranks), sum(rank.bytes for rank in plan.ranks)
    text = f"the largest rank has {size_text(largest)} of {size_text(together)} in all"
    if plan.exchange is None:
        return text
    busiest = max(plan.ranks, key=lambda rank: rank.traffic.bytes)
    layer, all_layers = (size_text(sent.bytes) for sent in (busiest.layer_traffic, busiest.traffic))
    text += f"; a rank sends up to {layer} per token and layer, {all_layers} per token"
    empty = [number for number, rank in enumerate(plan.ranks) if rank.is_empty]  # the last ones
    return text + (f"; no experts for ranks from {empty[0]} on" if empty else "")


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"
