"""One rank of the layers that ``simulation.py`` compares its predictions with; started by ``torchrun``.

Weights are random; routing is that of the prediction. Rank 0 prints a line of JSON: of each case the
shortest of many calls.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from cpumoe import ParallelLayout, cpu
from cpumoe.bench.rank_costs import RankTimer, Shortest
from cpumoe.bench.shapes import SHAPES, Shape
from cpumoe.bench.workload import random_experts
from cpumoe.layers.experts import Experts
from cpumoe.layers.parallel_layout import Exchange, ExpertsPart
from cpumoe.layers.scheme import Scheme
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.ranks import Ranks
from cpumoe.simulation.routing_trace import RoutingTrace

SHAPE = SHAPES["qwen3-30b-a3b"]


@dataclass(frozen=True)
class Case:
    """A layout of so many ranks, and the tokens that all of them have together."""

    ranks: int
    tokens: int
    expert_parallel: bool
    exchange: str

    @property
    def layout(self) -> ParallelLayout:
        same_tokens = Exchange(self.exchange) is Exchange.ALL_REDUCE
        sizes = {"tp_size" if same_tokens else "dp_size": self.ranks}
        return ParallelLayout(**sizes, expert_parallel=self.expert_parallel, exchange=Exchange(self.exchange))

    @property
    def scheme(self) -> str:
        """Groups of 128 inputs do not divide a quarter of the intermediate size."""
        return "w4a8-g64" if self.ranks == 4 and not self.expert_parallel else "w4a8-g128"

    @property
    def name(self) -> str:
        return f"{'EP' if self.expert_parallel else 'TP'} {self.exchange}"

    @property
    def trace(self) -> RoutingTrace:
        return RoutingTrace.zipf(SHAPE.num_experts, SHAPE.topk, self.tokens, exponent=0.0, layers=1)


def calls(cases: list[Case], ranks: Ranks) -> list[Callable[[int], object]]:
    """A call of the layer for each case; layers with the same part of the experts share it."""
    held: dict[ExpertsPart, Experts] = {}

    def call(case: Case) -> Callable[[int], object]:
        mine = Ranks(case.layout.of_rank(ranks.rank), ranks.exchange)
        part = mine.layout.part_of(SHAPE.num_experts, SHAPE.intermediate)
        if part not in held:
            inner = SHAPE.intermediate // part.slices
            shape = Shape("held", SHAPE.hidden, inner, len(part.experts), SHAPE.topk)
            held[part] = random_experts(shape, Scheme.parse(case.scheme))
        config = held[part].config
        whole = replace(config, experts=SHAPE.num_experts, intermediate_size=SHAPE.intermediate, held_experts=None)
        layer = ParallelExperts(held[part], whole, mine)
        (ids,) = case.trace.layers
        x = torch.randn((case.tokens, SHAPE.hidden), generator=torch.Generator().manual_seed(0))
        if not mine.layout.has_all_tokens:
            share = slice(case.tokens * mine.rank // case.ranks, case.tokens * (mine.rank + 1) // case.ranks)
            x, ids = x[share], ids[share]
        x, ids, weights = x.to(cpu.float_dtype()[0]), ids.int(), torch.full(ids.shape, 1 / SHAPE.topk)
        return lambda _: layer(x, ids, weights)

    return [call(case) for case in cases]


def main() -> None:
    cases, seconds = [Case(**case) for case in json.loads(sys.argv[1])], float(sys.argv[2])
    cpu.set_num_threads(1)
    torch.set_num_threads(1)
    ranks = Ranks.join(ParallelLayout(tp_size=cases[0].ranks), timeout=600.0)
    layers = calls(cases, ranks)
    best = [Shortest(float("inf"), float("inf"))] * len(cases)
    start, goes_on = time.monotonic(), True
    while goes_on:  # all cases in turn and again, so that each meets the machine when it is idle, if it ever is
        for number, layer in enumerate(layers):
            found, before = RankTimer(ranks, 0.3).shortest(layer, least=3), best[number]
            best[number] = Shortest(min(found.wall, before.wall), min(found.own, before.own))
        goes_on = bool(ranks.gather_numbers([time.monotonic() - start < seconds])[0][0])  # rank 0 says it for all
    if ranks.rank == 0:
        print(json.dumps([(each.wall, each.own) for each in best]), flush=True)
    ranks.gather_numbers([0])  # whoever ended first would be missed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
