"""Measures what ``cpumoe simulate`` calculates with: a rank's kernels, and exchanges of two ranks on this machine.

Two processes measure at the same time where there are cores for both, because ranks of one machine share its memory.
``measure_costs`` starts them; ``python -m cpumoe.bench.rank_costs`` is what they run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cpumoe import cpu
from cpumoe.bench.shapes import Shape
from cpumoe.bench.workload import random_experts, random_weight
from cpumoe.errors import RankError
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.packed_weights import packed_activations
from cpumoe.layers.parallel_layout import Exchange, ParallelLayout
from cpumoe.layers.scheme import Scheme
from cpumoe.ops.decoder import Copies, Travel
from cpumoe.ops.exchange import spread_experts
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.ranks import Ranks
from cpumoe.simulation.exchange_costs import GATHER, ExchangeSizes
from cpumoe.simulation.kernel_costs import Curve, KernelCosts

_PROCESSES = 2

#: Weights that calls take in turn, so that they come from memory as in a model.
_ROTATED_BYTES = 400 << 20

# Rows of an expert. Kernels have tiles of 16 rows; between the points, as many tiles are full as are not.
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_LINEAR_ROWS = (1, 4, 16, 64, 256)
_TOKENS = (1, 16, 64, 256)  # of a rank in an exchange
_IDLE_TOKENS = 256
_MESSAGES = 64


@dataclass(frozen=True)
class _Wanted:
    """What is measured; goes to the processes as JSON."""

    hidden: int
    intermediate: int
    experts: int
    topk: int
    scheme: str
    slices: tuple[int, ...]
    threads: int
    seconds: float


def measure_costs(
    shape: Shape, scheme: Scheme, threads: int, slices: Sequence[int] = (1, 2, 4, 8, 16), seconds: float = 0.5
) -> KernelCosts:
    """Measures ranks of so many threads.

    Args:
        shape: of a layer.
        scheme: of its experts.
        threads: of a rank.
        slices: into how many an expert may be cut; what does not divide is left out.
        seconds: for each point.

    Raises RankError if the processes fail.
    """
    fitting = tuple(n for n in slices if _fits(scheme, shape.intermediate, n))
    wanted = _Wanted(
        shape.hidden, shape.intermediate, shape.num_experts, shape.topk, str(scheme), fitting, threads, seconds
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_PROCESSES)]
        program = ["-m", "cpumoe.bench.rank_costs", json.dumps(asdict(wanted)), str(path)]
        done = subprocess.run(
            [sys.executable, *start, *program], capture_output=True, text=True, check=False, env=_environment(threads)
        )
        if not path.exists():
            raise RankError(f"measuring on {_PROCESSES} ranks failed: {done.stderr.strip()[-2000:]}")
        return KernelCosts.load(path)


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}  # torchrun would set it to 1


def _fits(scheme: Scheme, intermediate: int, slices: int) -> bool:
    inner = intermediate // slices
    return intermediate % slices == 0 and inner % 32 == 0 and scheme.fits(inner)


# ---- timing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shortest:
    """The shortest of many calls: by the clock, and by the calling thread's own time.

    Other programs can only make a call longer, but if they always run, no call is as short as it could be; a thread's
    own time stands still meanwhile. It is that of all work where a rank has one thread.
    """

    wall: float
    own: float


class RankTimer:
    """Times what all ranks do at once: they wait for each other before each call, and the slowest one counts."""

    def __init__(self, ranks: Ranks, seconds: float) -> None:
        self.ranks = ranks
        self.seconds = seconds

    def shortest(self, call: Callable[[int], object], least: int = 5) -> Shortest:
        """As many calls as fit the time, and some; ``call`` gets the number of the call."""
        start = time.perf_counter()
        call(0)
        one = max(1, int((time.perf_counter() - start) * 1e9))
        slowest = max(number for (number,) in self.ranks.gather_numbers([one])) * 1e-9
        times = torch.empty((max(least, min(2000, int(self.seconds / slowest))), 2), dtype=torch.float64)
        for number in range(len(times)):
            self.ranks.gather_numbers([0])
            wall, own = time.perf_counter(), time.thread_time()
            call(number + 1)
            times[number] = torch.tensor((time.perf_counter() - wall, time.thread_time() - own))
        every = torch.stack(self.ranks.gather_parts(times, [len(times)] * self.ranks.size))
        return Shortest(*every.amax(0).amin(0).tolist())


# ---- kernels -------------------------------------------------------------------------------------------------------


def _experts_costs(wanted: _Wanted, timer: RankTimer, costs: KernelCosts) -> KernelCosts:
    scheme = Scheme.parse(wanted.scheme)
    curves = {}
    for slices in wanted.slices:
        inner = wanted.intermediate // slices
        expert_bytes = 3 * wanted.hidden * inner * scheme.weights.bits / 8
        held = max(2 * wanted.topk, int(_ROTATED_BYTES / expert_bytes))
        held = min(held, max(wanted.experts, 2 * wanted.topk)) // wanted.topk * wanted.topk
        own = random_experts(Shape("measured", wanted.hidden, inner, held, wanted.topk), scheme)
        layer = ParallelExperts(own, own.config, Ranks.alone())
        if slices == 1:
            call, token = _idle(layer, wanted, timer)
            costs = replace(costs, expert_bytes=own.packed_bytes / held, call_seconds=call, token_seconds=token)
        points = []
        for rows in _ROWS:
            seconds = _seconds(wanted, timer.shortest(_call(layer, wanted, rows, held)))
            each = (seconds - costs.call_seconds - rows * costs.token_seconds) / wanted.topk
            points.append((float(rows), each))
        curves[inner] = _rising(points)
    return replace(costs, experts=curves)


def _seconds(wanted: _Wanted, found: Shortest) -> float:
    return found.own if wanted.threads == 1 else found.wall


def _rising(points: Sequence[tuple[float, float]]) -> Curve:
    """Less work takes no longer than more: where it seems to, something else ran meanwhile."""
    least, kept = float("inf"), []
    for amount, seconds in reversed(points):
        least = max(0.0, min(least, seconds))
        kept.append((amount, least))
    return Curve(tuple(reversed(kept)))


def _call(layer: ParallelExperts, wanted: _Wanted, rows: int, held: int) -> Callable[[int], object]:
    """Every token goes to the same K experts, so that each has so many rows; others with the next call."""
    x, weights = _tokens(wanted, rows)
    ids = [
        (torch.arange(wanted.topk, dtype=torch.int32) + first).repeat(rows, 1) for first in range(0, held, wanted.topk)
    ]
    return lambda number: layer(x, ids[number % len(ids)], weights)


def _idle(layer: ParallelExperts, wanted: _Wanted, timer: RankTimer) -> tuple[float, float]:
    """A call with one token without an expert here, and what another such token costs."""

    def call(tokens: int) -> float:
        x, weights = _tokens(wanted, tokens)
        ids = torch.full((tokens, wanted.topk), -1, dtype=torch.int32)
        return _seconds(wanted, timer.shortest(lambda _: layer(x, ids, weights)))

    one, many = call(1), call(_IDLE_TOKENS)
    return one, max(0.0, many - one) / (_IDLE_TOKENS - 1)


def _tokens(wanted: _Wanted, count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn((count, wanted.hidden), generator=torch.Generator().manual_seed(count))
    return x.to(cpu.float_dtype()[0]), torch.full((count, wanted.topk), 1 / wanted.topk)


def _linear_costs(wanted: _Wanted, timer: RankTimer) -> Curve:
    scheme = Scheme.parse(wanted.scheme)
    out = wanted.hidden
    count = max(2, int(_ROTATED_BYTES / (wanted.hidden * out * scheme.weights.bits / 8)))
    weight = random_weight(1, out, wanted.hidden, scheme, 0)
    first = QuantizedLinear.from_quantized(weight.values[0], weight.scales[0], scheme)
    linears = [first, *(QuantizedLinear(first.weight_packed.clone()) for _ in range(count - 1))]
    points = []
    for rows in _LINEAR_ROWS:
        x, _ = _tokens(wanted, rows)
        found = timer.shortest(lambda number, x=x: linears[number % count](x))  # type: ignore[misc]
        points.append((float(rows), _seconds(wanted, found) / (wanted.hidden * out)))
    return _rising(points)


# ---- exchanges -----------------------------------------------------------------------------------------------------


def _exchange_costs(wanted: _Wanted, timer: RankTimer) -> dict[str, Curve]:
    ranks, scheme = timer.ranks, Scheme.parse(wanted.scheme)
    sizes = ExchangeSizes(ranks.size, wanted.hidden, wanted.topk, scheme)
    found: dict[str, list[tuple[float, float]]] = {}

    def note(name: str, handled: float, call: Callable[[int], object]) -> None:
        points = found.setdefault(name, [])
        seconds = _seconds(wanted, timer.shortest(call))
        points.append((float(handled), seconds))

    layer = random_experts(Shape("sent", wanted.hidden, wanted.intermediate, ranks.size, wanted.topk), scheme)
    one_each, nowhere = torch.arange(ranks.size + 1, dtype=torch.int32), torch.full((ranks.size,), -1).int()
    experts = replace(
        layer.for_core(cpu.float_dtype()[0]),
        spread=True,
        copies=Copies(one_each, nowhere, one_each[:-1]),  # none is here: nothing is computed of what comes
        prepared_rows=packed_activations(scheme).startswith("int8"),
    )
    for tokens in _TOKENS:
        every = tokens * ranks.size
        values = torch.zeros((tokens, wanted.hidden))
        note(Exchange.ALL_REDUCE.value, sizes.added_up(tokens * sizes.sums), lambda _, v=values: ranks.sum_(v))  # type: ignore[misc]
        half = values.to(torch.bfloat16)
        note(
            GATHER,
            sizes.gathered(half.numel() * half.element_size()),
            lambda _, part=half: ranks.gather_parts(part, [len(part)] * ranks.size),  # type: ignore[misc]
        )
        ids = torch.arange(wanted.topk, dtype=torch.int32).remainder(ranks.size).repeat(tokens, 1)
        x, weights = _tokens(wanted, tokens)

        def sent(
            travel: Travel, x: Tensor = x, ids: Tensor = ids, weights: Tensor = weights
        ) -> Callable[[int], object]:
            travelling = replace(experts, travel=travel)
            return lambda _: spread_experts(x, ids, weights, travelling, 0, ranks.exchange, None)

        note(Exchange.ALLGATHER_REDUCESCATTER.value, sizes.to_all_ranks(tokens, every), sent(Travel.TO_ALL))
        visits = torch.tensor(float(every)).double().numpy()  # every token goes to all ranks
        note(Exchange.ALL_TO_ALL.value, float(sizes.to_owners(visits, visits)), sent(Travel.TO_EXPERTS))
    return {name: _rising(points) for name, points in found.items()}


def _message_seconds(timer: RankTimer) -> float:
    """Of this process's time for one message there and one back, where many are on their way at once."""
    other = 1 - timer.ranks.rank

    def used(count: int) -> float:
        sent = [torch.zeros(8, dtype=torch.uint8) for _ in range(count)]
        got = [torch.zeros(8, dtype=torch.uint8) for _ in range(count)]
        least = float("inf")
        for _ in range(50):
            timer.ranks.gather_numbers([0])
            start = time.process_time()  # the wait is the network's latency, and that of the other's turn on a core
            waits = [dist.irecv(each, other, tag=tag) for tag, each in enumerate(got)]
            waits += [dist.isend(each, other, tag=tag) for tag, each in enumerate(sent)]
            for wait in waits:
                if wait is not None:
                    wait.wait()
            least = min(least, time.process_time() - start)
        return least

    own = max(0.0, used(_MESSAGES) - used(1)) / (_MESSAGES - 1)
    every = timer.ranks.gather_parts(torch.tensor([own], dtype=torch.float64), [1] * timer.ranks.size)
    return float(torch.cat(every).min())


def main(arguments: Sequence[str]) -> None:
    wanted = _Wanted(**json.loads(arguments[0]))
    cpu.set_num_threads(wanted.threads)
    torch.set_num_threads(wanted.threads)
    ranks = Ranks.join(ParallelLayout(tp_size=_PROCESSES, expert_parallel=True), timeout=600.0)
    together = _PROCESSES * wanted.threads <= len(os.sched_getaffinity(0))
    both = RankTimer(ranks, wanted.seconds)
    kernels = RankTimer(ranks if together else Ranks.alone(), wanted.seconds)
    costs = KernelCosts(
        wanted.hidden,
        wanted.intermediate,
        wanted.scheme,
        wanted.threads,
        _PROCESSES if together else 1,
        0.0,
        0.0,
        0.0,
        {},
        Curve(((1.0, 0.0),)),
        _exchange_costs(wanted, both),
        _message_seconds(both),
    )
    if together or ranks.rank == 0:
        costs = replace(_experts_costs(wanted, kernels, costs), linear=_linear_costs(wanted, kernels))
    if ranks.rank == 0:
        costs.save(Path(arguments[1]))
    ranks.gather_numbers([0])  # whoever ended first would be missed
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
