"""Predictions of ``cpumoe simulate`` beside real ranks, and plots for ranks that are not here.

``python benchmarks/simulation.py`` runs layers of Qwen3-30B-A3B on 2 and on 4 ranks of one thread and predicts the same
from costs that were measured on two ranks. On a machine with fewer cores than ranks these take turns, which the
prediction is told (``at_once``). ``--plot FOLDER`` predicts DeepSeek-V3 and Kimi-K2 on 8 to 1024 ranks instead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from simulation_ranks import SHAPE, Case

from cpumoe.bench.machine_load import MachineLoad
from cpumoe.bench.rank_costs import Shortest, measure_costs
from cpumoe.bench.scaling_plot import plot_scaling
from cpumoe.bench.shapes import Shape
from cpumoe.cli.arguments import number_above_zero
from cpumoe.demo.model import measured_load
from cpumoe.layers.parallel_layout import Exchange
from cpumoe.layers.scheme import Scheme
from cpumoe.option_values import LAYOUTS
from cpumoe.simulation.exchange_costs import Link, Network
from cpumoe.simulation.kernel_costs import KernelCosts
from cpumoe.simulation.model_shapes import MODELS
from cpumoe.simulation.routing_trace import RoutingTrace
from cpumoe.simulation.scaling import Outcome, scaling
from cpumoe.simulation.simulation import simulate_layer
from cpumoe.tables import aligned

_NEAR = 0.2  # a prediction that is no further off is a good one


def cases(ranks: int) -> list[Case]:
    kinds = [(False, Exchange.ALL_REDUCE), *((True, exchange) for exchange in Exchange)]
    return [Case(ranks, tokens, ep, exchange.value) for tokens in (64, 512) for ep, exchange in kinds]


def run_ranks(wanted: Sequence[Case], seconds: float) -> list[Shortest]:
    """Each case on real ranks."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(wanted[0].ranks)]
    program = [str(Path(__file__).parent / "simulation_ranks.py"), json.dumps([*map(asdict, wanted)]), str(seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *start, *program], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return [Shortest(*times) for times in json.loads(done.stdout.splitlines()[-1])]


def predict(case: Case, costs: KernelCosts, cores: int | None) -> float:
    network = Network(at_once=cores)
    model = MODELS["qwen3-30b-a3b"]
    return simulate_layer(model, case.layout, costs, network, case.trace, case.tokens).seconds


def kept_costs(shape: Shape, scheme: str, folder: Path | None, seconds: float) -> KernelCosts:
    """Read from the folder, or measured and left there."""
    path = None if folder is None else folder / f"{shape.name}-{scheme}.json"
    if path is not None and path.exists():
        return KernelCosts.load(path)
    costs = measure_costs(shape, Scheme.parse(scheme), 1, seconds=seconds)
    if path is not None:
        costs.save(path)
    return costs


def validate(folder: Path | None, seconds: float, run_seconds: float) -> None:
    wanted = [case for ranks in (2, 4) for case in cases(ranks)]
    costs = {scheme: kept_costs(SHAPE, scheme, folder, seconds) for scheme in sorted({case.scheme for case in wanted})}
    load = MachineLoad()
    measured = [found for ranks in (2, 4) for found in run_ranks(cases(ranks), run_seconds)]
    cores = len(os.sched_getaffinity(0))
    heads = ("own ms", "predicted", "ratio", "", "wall ms", "predicted", "ratio", "")
    rows: list[tuple[str, ...]] = [("ranks", "tokens", "layout", "scheme", *heads)]
    for case, found in zip(wanted, measured, strict=True):
        told: list[str] = []
        for took, at_once in ((found.own, None), (found.wall, cores)):
            seconds = predict(case, costs[case.scheme], at_once)
            near = "" if abs(seconds / took - 1) <= _NEAR else "off"
            told += [f"{took * 1e3:.2f}", f"{seconds * 1e3:.2f}", f"{seconds / took:.2f}", near]
        rows.append((str(case.ranks), str(case.tokens), case.name, case.scheme, *told))
    print("\n".join(aligned(rows, right=(0, 1, 4, 5, 6, 8, 9, 10))))
    print(
        f"own: of the slowest rank's thread, as if each had a core; wall: on the {cores} cores that are here, where "
        f"ranks take turns. All that ran took {load.taken_by_others() or 0:.0%} of the cores meanwhile."
    )


# ---- plots ---------------------------------------------------------------------------------------------------------

_RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = 4096
# Routing, and seconds of a rank's time for a message: None is gloo's as measured.
_PANELS = {"gloo": ("demo", None), "1 us a message": ("demo", 1e-6), "1 us a message, Zipf": ("zipf", 1e-6)}
# A rank is a socket that is 16 times as fast as one thread here, two of them are a node with 100 Gbit/s.
_SPEED = 16.0
_NETWORK = Network(Link(20e-6, 12.5e9), Link(10e-6, 12.5e9), 2)


def draw(folder: Path, costs_folder: Path | None, seconds: float) -> None:
    """Plots, and the tables of docs/simulation.md."""
    for name in ("deepseek-v3", "kimi-k2"):
        model = MODELS[name]
        shape = Shape("deepseek-v3", model.hidden, model.intermediate, model.experts, model.topk)  # both have its sizes
        costs = kept_costs(shape, "w4a8-g128", costs_folder, seconds).faster(_SPEED)
        loads = {
            "demo": measured_load(model.experts).tolist(),
            "zipf": [1 / place for place in range(1, model.experts + 1)],
        }
        panels = {}
        for panel, (routing, message) in _PANELS.items():
            trace = RoutingTrace.drawn(loads[routing], model.topk, 8 * _TOKENS, 2, model.groups, model.topk_groups)
            used = costs if message is None else costs.with_message_seconds(message)
            title = f"{name}, {_TOKENS} tokens a step, {panel}"
            panels[title] = scaling(model, LAYOUTS, _RANKS, used, _NETWORK, trace, _TOKENS)
            message_us = used.message_seconds * 1e6
            print(f"\n{title} ({message_us:.0f} us a message): tokens/s (ms of experts + exchange + rest)\n")
            print("\n".join(_table(panels[title])))
        plot_scaling(panels, folder / f"simulation-{name}.png")


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    found = {(each.layout, each.ranks): each.prediction for each in outcomes}
    rows = [("| ranks", *(f"| {name}" for name in LAYOUTS), "| slowest/mean EP, balanced |"), ("|---",) * 5]
    for ranks in _RANKS:
        cells = []
        for name in LAYOUTS:
            told = found[name, ranks]
            times = (
                "" if told is None else " + ".join(f"{x * 1e3:.0f}" for x in (told.experts, told.exchange, told.rest))
            )
            cells.append("| -" if told is None else f"| {told.tokens_per_second:.0f} ({times})")
        slowest = [f"{told.imbalance:.2f}" for name in LAYOUTS[1:] if (told := found[name, ranks]) is not None]
        rows.append((f"| {ranks}", *cells, f"| {', '.join(slowest)} |"))
    return ["".join(("|---",) * 5) + "|" if row[0] == "|---" else " ".join(row) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--costs", type=Path, metavar="FOLDER", help="where measured costs are kept")
    parser.add_argument(
        "--seconds", type=number_above_zero, default=1.0, metavar="F", help="for each point of the costs (1)"
    )
    parser.add_argument(
        "--run", type=number_above_zero, default=60.0, metavar="F", help="seconds of the real ranks, each (60)"
    )
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw predictions for many ranks instead")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        draw(arguments.plot, arguments.costs, arguments.seconds)
        return
    validate(arguments.costs, arguments.seconds, arguments.run)


if __name__ == "__main__":
    main()
