"""What ranks do in the tests of exchanges; see test_exchange.py."""

from __future__ import annotations

import os
import random
import time

import torch
import torch.distributed as dist
from rank_processes import Cases
from torch import Tensor

from cpumoe.ops.exchange import RankExchange, SharedExchange
from cpumoe.parallel.carried import carried_exchange
from cpumoe.parallel.roll_call import RollCall

SLOT_BYTES = 4096
SIZES = (0, 1, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 5 * SLOT_BYTES + 3)
_SEED = 20


def through_shared_memory(path: str, turns: int) -> dict[str, str | None]:
    """Over a file of zeros that is there already."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    descriptor = os.open(path, os.O_RDWR)
    exchange = SharedExchange(descriptor, rank, size, SLOT_BYTES, 60.0)
    os.close(descriptor)
    _wait_for_all(exchange, path)
    return _run(exchange, turns)


def through_gloo(turns: int) -> dict[str, str | None]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), range(dist.get_world_size())
    exchange = carried_exchange(rank, len(world), None, RollCall(rank, world, world))
    found = _run(exchange, turns)
    dist.barrier()
    dist.destroy_process_group()
    return found


def _wait_for_all(exchange: SharedExchange, path: str) -> None:
    """A rank that has not come yet looks like one that has ended."""
    open(f"{path}.{exchange.rank}", "w").close()  # noqa: PTH123
    while not all(os.path.exists(f"{path}.{other}") for other in range(exchange.ranks)):  # noqa: PTH110
        time.sleep(0.01)


def _run(exchange: RankExchange, turns: int) -> dict[str, str | None]:
    cases = Cases()
    for size in SIZES:
        cases.run(f"gather {size}", _gather, exchange, [size] * exchange.ranks, size)
        for short in range(exchange.ranks):
            sizes = [3 if rank == short else size for rank in range(exchange.ranks)]
            cases.run(f"gather {size}, 3 of rank {short}", _gather, exchange, sizes, size)
        cases.run(f"trade {size}", _trade, exchange, [[size] * exchange.ranks] * exchange.ranks, size)
        cases.run(f"sum {size}", _sum, exchange, size, size)
        cases.run(f"largest {size}", _largest, exchange, size, size)
    cases.run("sum 20000", _sum, exchange, 20000, 1)
    cases.run("largest 20000", _largest, exchange, 20000, 1)
    shared = random.Random(_SEED)
    for index in range(25):
        sizes = [[_random_size(shared) for _ in range(exchange.ranks)] for _ in range(exchange.ranks)]
        cases.run(f"random trade {index}", _trade, exchange, sizes, index)
    cases.run("many turns", _many_turns, exchange, turns)
    return cases.outcomes


def _random_size(shared: random.Random) -> int:
    return shared.choice((0, 0, 1, 63, 64, shared.randrange(200), shared.randrange(5000)))


def _given(rank: int, to: int, size: int, turn: int) -> Tensor:
    """What a rank gives to another in a turn: different for all of these."""
    return ((torch.arange(size) * 13 + torch.arange(size) // 251 + rank * 101 + to * 31 + turn * 7) % 256).byte()


def _gather(exchange: RankExchange, sizes: list[int], turn: int) -> None:
    whole = torch.full((sum(sizes),), 255, dtype=torch.uint8)
    exchange.gather(_given(exchange.rank, 0, sizes[exchange.rank], turn), sizes, whole)
    expected = torch.cat([_given(rank, 0, size, turn) for rank, size in enumerate(sizes)])
    assert torch.equal(whole, expected)


def _trade(exchange: RankExchange, sizes: list[list[int]], turn: int) -> None:
    """``sizes[a][b]`` go from a to b."""
    mine = torch.cat([_given(exchange.rank, to, size, turn) for to, size in enumerate(sizes[exchange.rank])])
    given = [sizes[other][exchange.rank] for other in range(exchange.ranks)]
    whole = torch.full((sum(given),), 255, dtype=torch.uint8)
    exchange.trade(mine, sizes[exchange.rank], whole, given)
    expected = torch.cat([_given(other, exchange.rank, size, turn) for other, size in enumerate(given)])
    assert torch.equal(whole, expected)


def _values(rank: int, count: int, turn: int) -> Tensor:
    """Of such different sizes that the order of additions can be seen."""
    numbers = torch.Generator().manual_seed(rank * 1000 + turn)
    values = torch.randn(count, generator=numbers)
    return values * torch.exp2(torch.randint(0, 24, (count,), generator=numbers).float())


def _sum(exchange: RankExchange, count: int, turn: int) -> None:
    values = _values(exchange.rank, count, turn)
    expected = _values(0, count, turn)
    for rank in range(1, exchange.ranks):
        expected += _values(rank, count, turn)
    exchange.sum(values)
    assert torch.equal(values, expected)


def _largest(exchange: RankExchange, count: int, turn: int) -> None:
    everything = torch.stack([_values(rank, count, turn) for rank in range(exchange.ranks)])
    places = torch.arange(count)
    if exchange.ranks > 1:  # some rank has NaN at every third place
        everything[(places[::3] // 3) % exchange.ranks, places[::3]] = torch.nan
    everything[:, 1::50] = torch.nan  # all of them do
    values = everything[exchange.rank].clone()
    exchange.largest(values)
    expected = everything.nan_to_num(-torch.inf).amax(0)
    expected[1::50] = torch.nan
    assert torch.equal(values.nan_to_num(7.0), expected.nan_to_num(7.0))


def _many_turns(exchange: RankExchange, turns: int) -> None:
    """All kinds in a random order that all ranks know, with delays that none of the others knows."""
    shared, own = random.Random(_SEED), random.Random(exchange.rank)
    for turn in range(turns):
        kind = shared.randrange(4)
        if own.random() < 0.02:
            time.sleep(own.random() * 0.003)
        if kind == 0:
            _gather(exchange, [_random_size(shared) for _ in range(exchange.ranks)], turn)
        elif kind == 1:
            sizes = [[_random_size(shared) // 4 for _ in range(exchange.ranks)] for _ in range(exchange.ranks)]
            _trade(exchange, sizes, turn)
        elif kind == 2:
            _sum(exchange, _random_size(shared), turn)
        else:
            _largest(exchange, _random_size(shared), turn)
