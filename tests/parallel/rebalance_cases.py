"""What ranks do in ``test_rebalance.py``; see ``rank_processes.py``."""

from __future__ import annotations

import os
import signal

import torch
from rank_processes import Cases

from cpumoe import Experts, ParallelLayout
from cpumoe.errors import RankError
from cpumoe.layers.parallel_layout import Exchange
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.placement import Placement
from cpumoe.parallel.ranks import Ranks
from cpumoe.parallel.rebalance import rebalance

EXPERTS, HIDDEN, INNER, TOPK = 10, 128, 192, 3


def _whole(scheme: str) -> Experts:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn((EXPERTS, 2 * INNER, HIDDEN), generator=generator)
    down = torch.randn((EXPERTS, HIDDEN, INNER), generator=generator)
    bias = torch.randn((EXPERTS, HIDDEN), generator=generator)
    return Experts.quantize(gate_up, down, scheme, down_bias=bias)


def _skewed(tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    share = torch.tensor([1 / (expert + 1) ** 1.3 for expert in range(EXPERTS)])
    return (
        torch.randn((tokens, HIDDEN), generator=generator),
        torch.multinomial(share.expand(tokens, -1), TOPK, generator=generator),
        torch.rand((tokens, TOPK), generator=generator),
    )


def _spread(whole: Experts, ranks: Ranks) -> ParallelExperts:
    return ParallelExperts(whole.part(ranks.layout.part_of(EXPERTS, INNER)), whole.config, ranks)


def _moves(layout: ParallelLayout, scheme: str) -> None:
    """Experts move with their loads, and results stay what they are."""
    ranks = Ranks.join(layout)
    whole = _whole(scheme)
    spread = _spread(whole, ranks)
    before = spread.placement
    generator = torch.Generator().manual_seed(3 + (0 if layout.has_all_tokens else ranks.rank))
    for spare_slots in (2, 0, 1):
        for _ in range(2):
            x, ids, weights = _skewed(57, generator)
            expected, found = whole(x, ids, weights, fp32_out=True), spread(x, ids, weights, fp32_out=True)
            assert float((found - expected).norm() / expected.norm()) <= 1e-6
        (move,) = rebalance([spread], spare_slots=spare_slots)
        assert move.after <= move.before
        assert spread.held.experts == spread.placement.experts_of(ranks.rank)
        if spare_slots == 2:
            assert spread.placement != before  # so skewed a load leaves no placement as it was
            assert max(spread.placement.replicas(expert) for expert in range(EXPERTS)) > 1
    one = torch.randn((1, HIDDEN), generator=torch.Generator().manual_seed(1))
    for _ in range(4):  # copies take turns
        found = spread(one, torch.tensor([[0, 1, 2]]), torch.ones((1, TOPK)), fp32_out=True)
        expected = whole(one, torch.tensor([[0, 1, 2]]), torch.ones((1, TOPK)), fp32_out=True)
        assert float((found - expected).norm() / expected.norm()) <= 1e-6


def _even_loads_stay(ranks: Ranks) -> None:
    spread = _spread(_whole("w4a8-g32"), ranks)
    before, packed = spread.placement, spread.gate_up_packed
    spread.loads += 100
    (move,) = rebalance([spread])
    assert spread.placement == before and spread.gate_up_packed is packed
    assert move.came == 0 and move.before == move.after
    assert spread.loads.tolist() == [50] * EXPERTS  # old choices fade


def _refusals(size: int) -> None:
    sliced = Ranks.join(ParallelLayout(tp_size=size))
    spread = _spread(_whole("w8a8"), sliced)
    try:
        rebalance([spread])
        raise AssertionError("slices were moved")
    except ValueError as problem:
        assert "has a slice of every expert" in str(problem)
    ranks = Ranks.join(ParallelLayout(tp_size=size, expert_parallel=True))
    whole = _whole("w8a8")
    try:
        own = whole.part(ranks.layout.part_of(EXPERTS, INNER))
        ParallelExperts(own, whole.config, ranks, placement=Placement(EXPERTS, (tuple(range(EXPERTS)),)))
        raise AssertionError("a placement of other ranks was taken")
    except ValueError as problem:
        assert "on 1 ranks" in str(problem)


def run(size: int) -> dict[str, str | None]:
    cases = Cases()
    layouts = {
        "all_reduce": ParallelLayout(tp_size=size, expert_parallel=True),
        "allgather_reducescatter": ParallelLayout(dp_size=size, expert_parallel=True),
        "all_to_all": ParallelLayout(dp_size=size, expert_parallel=True, exchange=Exchange.ALL_TO_ALL),
    }
    for name, layout in layouts.items():
        for scheme in ("w4a8-g32", "fp8", "bf16"):
            cases.run(f"{name}, {scheme}", _moves, layout, scheme)
    if EXPERTS % size == 0:
        cases.run("even loads", _even_loads_stay, Ranks.join(layouts["all_reduce"]))
    cases.run("refusals", _refusals, size)
    return cases.outcomes


def lose_a_rank() -> str:
    """The last rank ends while experts move; the others keep the placement that they had."""
    ranks = Ranks.join(ParallelLayout(tp_size=3, expert_parallel=True), timeout=10)
    spread = _spread(_whole("w4a8-g32"), ranks)
    generator = torch.Generator().manual_seed(3)
    spread(*_skewed(57, generator))
    if ranks.rank == 2:
        ranks.trade = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    before, packed = spread.placement, spread.gate_up_packed
    try:
        rebalance([spread])
    except RankError as problem:
        assert spread.placement == before and spread.gate_up_packed is packed
        return str(problem)
    raise AssertionError("a rank was gone, and nobody noticed")
