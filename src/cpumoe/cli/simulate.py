"""``cpumoe simulate``: how fast a model would be on ranks that are not there."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cpumoe.bench.shapes import Shape
from cpumoe.cli.arguments import (
    check_output,
    check_scheme_fits,
    number_above_zero,
    number_from_zero,
    positive,
    real_number,
    refuse_given,
    scheme_name,
    whole_number,
    whole_numbers,
)
from cpumoe.cli.parser import Commands
from cpumoe.layers.parallel_layout import Exchange
from cpumoe.layers.scheme import Scheme
from cpumoe.option_values import LAYOUTS
from cpumoe.simulation.model_shapes import MODELS, ModelShape
from cpumoe.tables import aligned, size_text

if TYPE_CHECKING:
    from cpumoe.simulation.exchange_costs import Link, Network
    from cpumoe.simulation.kernel_costs import KernelCosts
    from cpumoe.simulation.routing_trace import RoutingTrace
    from cpumoe.simulation.scaling import Outcome

_RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
_DRAWN = ("uniform", "zipf", "demo")
_STEPS = 4  # drawn for planning and for judging, each


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="predict the speed of a model on many ranks from costs that are measured here",
        description="Predicts tokens per second of a model that is spread over ranks: from measured costs of the "
        "kernels and of exchanges, the experts that tokens choose, and a network. Without --costs it measures first, "
        "which takes a minute or more.",
    )
    parser.add_argument(
        "--shape",
        type=_model,
        default=MODELS["qwen3-30b-a3b"],
        metavar="NAME",
        help=f"{', '.join(MODELS)}, or H,I,E,K,LAYERS (qwen3-30b-a3b)",
    )
    parser.add_argument("--scheme", type=scheme_name, help="of the weights, where they are measured (w4a8-g128)")
    parser.add_argument(
        "--ranks", type=whole_numbers(1), default=_RANKS, metavar="N,N", help="such as 8,16,32 (8 to 1024)"
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        action="append",
        help="slices of experts, whole ones, or whole ones with copies by load; may be repeated (all)",
    )
    parser.add_argument("--tokens", type=positive, default=1024, metavar="N", help="of a step, on all ranks (1024)")
    parser.add_argument(
        "--exchange",
        choices=[Exchange.ALLGATHER_REDUCESCATTER.value, Exchange.ALL_TO_ALL.value],
        help="how tokens travel to whole experts (all_to_all)",
    )
    parser.add_argument("--spare", type=whole_number(0), metavar="N", help="slots a rank for copies in ep-balanced (1)")
    network = parser.add_argument_group("the machines")
    network.add_argument(
        "--network",
        type=_links,
        metavar="LAT_US,GB_S[,LAT_US,GB_S]",
        help="latency and rate of a node's connection, and of two ranks of a node (20,12.5 for both)",
    )
    network.add_argument("--ranks-per-node", type=positive, default=1, metavar="N", help="ranks of a machine (1)")
    network.add_argument("--message-us", type=number_from_zero, metavar="F", help="of a rank per message (measured)")
    network.add_argument("--speed", type=number_above_zero, default=1.0, metavar="F", help="a rank's, of that here (1)")
    parser.add_argument(
        "--routing",
        default="uniform",
        metavar="NAME",
        help="uniform, zipf, demo (as in the model that comes with the package), or a safetensors file of ids",
    )
    parser.add_argument("--costs", type=Path, metavar="FILE", help="costs that were measured before")
    parser.add_argument("--save-costs", type=Path, metavar="FILE", help="write measured costs to FILE")
    parser.add_argument("--seconds", type=number_above_zero, metavar="F", help="for each point that is measured (0.5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (PNG or SVG) to FILE")
    parser.set_defaults(run=run)


# ---- values --------------------------------------------------------------------------------------------------------


def _model(text: str) -> ModelShape:
    if text in MODELS:
        return MODELS[text]
    sizes = _split(text)
    if len(sizes) != 5 or min(sizes) < 1:
        known = ", ".join(MODELS)
        raise argparse.ArgumentTypeError(f"{text!r}; {known}, or five whole numbers H,I,E,K,LAYERS are accepted")
    hidden, intermediate, experts, topk, layers = sizes
    if hidden % 32 or intermediate % 32 or topk > experts:
        raise argparse.ArgumentTypeError(f"{text!r}; H and I are multiples of 32, and K is at most E")
    other = 4.0 * hidden * hidden * layers  # attention with as many keys as queries
    return ModelShape(text, hidden, intermediate, experts, topk, layers, layers, other)


def _split(text: str) -> list[int]:
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.isascii() and part.isdecimal() for part in parts) else []


def _links(text: str) -> tuple[Link, Link]:
    from cpumoe.simulation.exchange_costs import Link

    numbers = [real_number(part) for part in text.split(",")]
    if len(numbers) not in (2, 4) or not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r}; LAT_US,GB_S or LAT_US,GB_S,LAT_US,GB_S is accepted, such as 20,12.5"
        )
    if not all(numbers[1::2]):
        raise argparse.ArgumentTypeError(f"{text!r}; a rate above 0 GB/s is accepted")
    links = [Link(us * 1e-6, gb * 1e9) for us, gb in zip(numbers[::2], numbers[1::2], strict=True)]
    return links[0], links[-1]


# ---- running -------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    from cpumoe.simulation.exchange_costs import Network
    from cpumoe.simulation.scaling import scaling

    layouts = tuple(arguments.layout or LAYOUTS)
    _check(arguments, layouts)
    model: ModelShape = arguments.shape
    between, inside = arguments.network or _links("20,12.5")
    network = Network(between, inside, arguments.ranks_per_node)
    trace = _trace(model, arguments.routing, arguments.tokens)
    costs = _costs(arguments).faster(arguments.speed)
    if arguments.message_us is not None:
        costs = costs.with_message_seconds(arguments.message_us * 1e-6)
    exchange = Exchange(arguments.exchange or Exchange.ALL_TO_ALL.value)
    spare = 1 if arguments.spare is None else arguments.spare
    outcomes = scaling(model, layouts, arguments.ranks, costs, network, trace, arguments.tokens, exchange, spare)
    told = _told(arguments, model, costs, network)
    if arguments.json:
        print(json.dumps({**told, "predictions": [outcome.to_json() for outcome in outcomes]}, indent=1))
    else:
        print(report(told, outcomes))
    if arguments.plot is not None:
        from cpumoe.bench.scaling_plot import plot_scaling

        title = f"{model.name}, {costs.scheme}, {arguments.tokens} tokens a step, routing {arguments.routing}"
        plot_scaling({title: outcomes}, arguments.plot)
    return 0


def _check(arguments: argparse.Namespace, layouts: tuple[str, ...]) -> None:
    if arguments.costs is not None:
        refuse_given(arguments, "with --costs: nothing is measured", "scheme", "save_costs", "seconds", "threads")
    if not any(layout.startswith("ep") for layout in layouts):
        refuse_given(arguments, "without whole experts on ranks", "exchange")
    if "ep-balanced" not in layouts:
        refuse_given(arguments, "without --layout ep-balanced", "spare")
    check_output("--plot", arguments.plot, plot=True)
    check_output("--save-costs", arguments.save_costs)


def _costs(arguments: argparse.Namespace) -> KernelCosts:
    from cpumoe.simulation.kernel_costs import KernelCosts

    if arguments.costs is not None:
        return KernelCosts.load(arguments.costs)
    model: ModelShape = arguments.shape
    scheme = Scheme.parse(arguments.scheme or "w4a8-g128")
    check_scheme_fits(f"--scheme {scheme} for {model.name}", scheme, model.hidden, model.intermediate)
    from cpumoe.bench.rank_costs import measure_costs

    print("measuring kernels and exchanges; this takes a minute or more", file=sys.stderr, flush=True)
    shape = Shape(model.name, model.hidden, model.intermediate, model.experts, model.topk)
    costs = measure_costs(shape, scheme, arguments.threads or 1, seconds=arguments.seconds or 0.5)
    if arguments.save_costs is not None:
        costs.save(arguments.save_costs)
    return costs


def _trace(model: ModelShape, routing: str, tokens: int) -> RoutingTrace:
    from cpumoe.demo.model import measured_load
    from cpumoe.simulation.routing_trace import RoutingTrace

    if routing not in _DRAWN:
        if not Path(routing).is_file():
            raise ValueError(f"--routing {routing}; {', '.join(_DRAWN)}, or a file is accepted")
        return RoutingTrace.load(Path(routing), model.experts)
    drawn = {"layers": 2, "groups": model.groups, "topk_groups": model.topk_groups}
    count = 2 * _STEPS * tokens
    if routing == "demo":
        return RoutingTrace.drawn(measured_load(model.experts).tolist(), model.topk, count, **drawn)
    return RoutingTrace.zipf(model.experts, model.topk, count, 0.0 if routing == "uniform" else 1.0, **drawn)


# ---- printing ------------------------------------------------------------------------------------------------------


def _told(arguments: argparse.Namespace, model: ModelShape, costs: KernelCosts, network: Network) -> dict[str, object]:
    return {
        "model": model.name,
        "scheme": costs.scheme,
        "tokens": arguments.tokens,
        "routing": arguments.routing,
        "threads": costs.threads,
        "speed": arguments.speed,
        "ranks_per_node": network.ranks_per_node,
        "latency_us": network.between.latency * 1e6,
        "gigabytes_per_second": network.between.bytes_per_second * 1e-9,
        "message_us": costs.message_seconds * 1e6,
    }


def report(told: dict[str, object], outcomes: list[Outcome]) -> str:
    """The text that ``simulate`` prints."""
    speed = "" if told["speed"] == 1 else f", {told['speed']:g} times as fast as measured"
    heading = [
        ("model", f"{told['model']}, {told['scheme']}"),
        ("steps", f"{told['tokens']} tokens on all ranks, routing {told['routing']}"),
        ("ranks", f"{told['threads']} thread(s) each{speed}; {told['ranks_per_node']} on a node"),
        (
            "network",
            f"{told['latency_us']:g} us and {told['gigabytes_per_second']:g} GB/s a node; "
            f"{told['message_us']:.3g} us of a rank's time per message",
        ),
    ]
    rows: list[tuple[str, ...]] = [
        (
            "layout",
            "ranks",
            "tokens/s",
            "step ms",
            "experts",
            "exchange",
            "the rest",
            "slowest/mean",
            "a rank's weights",
        )
    ]
    refused = []
    for outcome in outcomes:
        name, found = (outcome.layout, str(outcome.ranks)), outcome.prediction
        if found is None:
            refused.append(f"{outcome.layout} on {outcome.ranks} ranks: {outcome.refusal}")
            rows.append((*name, *["-"] * 7))
            continue
        parts = (found.seconds, found.experts, found.exchange, found.rest)
        times = [f"{part * 1e3:.1f}" for part in parts]
        rate = f"{found.tokens_per_second:.0f}" if found.tokens_per_second >= 100 else f"{found.tokens_per_second:.1f}"
        rows.append((*name, rate, *times, f"{found.imbalance:.2f}", size_text(found.rank_bytes)))
    lines = [*aligned(heading), "", *aligned(rows, right=range(1, 9))]
    return "\n".join([*lines, *(["", *refused] if refused else [])])
