"""Predictions of ``cpumoe simulate`` beside real ranks, and plots for ranks that are not here.

``python benchmarks/simulation.py`` runs layers of Qwen3-30B-A3B on 2 and on 4 ranks of one thread and predicts the same
from costs that were measured on two ranks. On a machine with fewer cores than ranks these take turns, which the prediction
is told (``at_once``). ``--plot FOLDER`` predicts DeepSeek-V3 and Kimi-K2 on 8 to 1024 ranks instead.
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

from cpumoe.bench.rank_costs import measure_costs
from cpumoe.cli.arguments import seconds
from cpumoe.layers.parallel_layout import Exchange
from cpumoe.layers.scheme import Scheme
from cpumoe.parallel.exchange_costs import Network
from cpumoe.parallel.kernel_costs import KernelCosts
from cpumoe.parallel.simulation import MODELS, LayerPrediction, simulate_layer
from cpumoe.tables import aligned

_NEAR = 0.2  # a prediction that is no further off is a good one


def cases(ranks: int) -> list[Case]:
    kinds = [(False, Exchange.ALL_REDUCE), *((True, exchange) for exchange in Exchange)]
    return [Case(ranks, tokens, ep, exchange.value) for tokens in (64, 512) for ep, exchange in kinds]


def run_ranks(wanted: Sequence[Case], seconds: float) -> list[float]:
    """Seconds of each case on real ranks."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(wanted[0].ranks)]
    program = [str(Path(__file__).parent / "simulation_ranks.py"), json.dumps([*map(asdict, wanted)]), str(seconds)]
    command = [sys.executable, *start, *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    measured: list[float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def predict(case: Case, costs: KernelCosts) -> LayerPrediction:
    cores = Network(at_once=len(os.sched_getaffinity(0)))
    return simulate_layer(MODELS["qwen3-30b-a3b"], case.layout, costs, cores, case.trace, case.tokens)


def kept_costs(scheme: str, folder: Path | None, seconds: float) -> KernelCosts:
    """Of a layer of Qwen3-30B-A3B; read from the folder, or measured and left there."""
    path = None if folder is None else folder / f"{SHAPE.name}-{scheme}.json"
    if path is not None and path.exists():
        return KernelCosts.load(path)
    costs = measure_costs(SHAPE, Scheme.parse(scheme), 1, seconds=seconds)
    if path is not None:
        costs.save(path)
    return costs


def validate(folder: Path | None, seconds: float, rounds: int) -> None:
    wanted = [case for ranks in (2, 4) for case in cases(ranks)]
    costs = {scheme: kept_costs(scheme, folder, seconds) for scheme in sorted({case.scheme for case in wanted})}
    best = [float("inf")] * len(wanted)
    for _ in range(rounds):
        measured = [took for ranks in (2, 4) for took in run_ranks(cases(ranks), seconds)]
        best = [min(pair) for pair in zip(best, measured, strict=True)]
    rows = [("ranks", "tokens", "layout", "scheme", "real ms", "predicted", "experts", "exchange", "ratio", "")]
    for case, took in zip(wanted, best, strict=True):
        told = predict(case, costs[case.scheme])
        parts = [f"{part * 1e3:.2f}" for part in (took, told.seconds, told.experts, told.exchange)]
        near = "" if abs(told.seconds / took - 1) <= _NEAR else "off"
        head = (str(case.ranks), str(case.tokens), case.name, case.scheme)
        rows.append((*head, *parts, f"{told.seconds / took:.2f}", near))
    print("\n".join(aligned(rows, right=(0, 1, *range(4, 9)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--costs", type=Path, metavar="FOLDER", help="where measured costs are kept")
    parser.add_argument("--seconds", type=seconds, default=2.0, metavar="F", help="for each point (2)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of real ranks, of which the best (3)")
    arguments = parser.parse_args()
    validate(arguments.costs, arguments.seconds, arguments.rounds)


if __name__ == "__main__":
    main()
