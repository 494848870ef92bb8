"""One rank of the layers that ``simulation.py`` compares its predictions with; started by ``torchrun``.

Weights are random; routing is that of the prediction. Prints on rank 0 a line of JSON: the shortest of many calls, by the
name of each case.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from cpumoe import ParallelLayout, cpu
from cpumoe.bench.rank_costs import RankTimer
from cpumoe.bench.workload import SHAPES, Shape, random_experts
from cpumoe.layers.parallel_layout import Exchange
from cpumoe.layers.scheme import Scheme
from cpumoe.parallel.dispatch import own_share
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.ranks import Ranks
from cpumoe.parallel.routing_trace import RoutingTrace

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


def run(case: Case, seconds: float, ranks: Ranks) -> float:
    """Seconds of a call of the layer, the shortest of many."""
    ranks = Ranks(case.layout.of_rank(ranks.rank), ranks.exchange)
    part = ranks.layout.part_of(SHAPE.num_experts, SHAPE.intermediate)
    held = Shape("held", SHAPE.hidden, SHAPE.intermediate // part.slices, len(part.experts), SHAPE.topk)
    own = random_experts(held, Scheme.parse(case.scheme))
    whole = replace(own.config, experts=SHAPE.num_experts, intermediate_size=SHAPE.intermediate, held_experts=None)
    layer = ParallelExperts(own, whole, ranks)
    (ids,) = case.trace.layers
    x = torch.randn((case.tokens, SHAPE.hidden), generator=torch.Generator().manual_seed(0)).to(cpu.float_dtype()[0])
    if not ranks.layout.has_all_tokens:
        mine = own_share(ParallelLayout(tp_size=case.ranks, tp_rank=ranks.rank), case.tokens)
        x, ids = x[mine], ids[mine]
    ids, weights = ids.int(), torch.full(ids.shape, 1 / SHAPE.topk)
    return RankTimer(ranks, seconds).shortest(lambda _: layer(x, ids, weights), least=20)


def main() -> None:
    cases, seconds = [Case(**case) for case in json.loads(sys.argv[1])], float(sys.argv[2])
    cpu.set_num_threads(1)
    torch.set_num_threads(1)
    ranks = Ranks.join(ParallelLayout(tp_size=cases[0].ranks), timeout=600.0)
    measured = [run(case, seconds, ranks) for case in cases]
    if ranks.rank == 0:
        print(json.dumps(measured), flush=True)
    ranks.gather_numbers([0])  # whoever ended first would be missed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
