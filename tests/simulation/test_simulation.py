"""Predictions: what follows from the costs alone can be said exactly."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from cpumoe.layers.parallel_layout import Exchange, ParallelLayout
from cpumoe.parallel.placement import Placement
from cpumoe.simulation.exchange_costs import ExchangeCosts, Link, Network
from cpumoe.simulation.kernel_costs import Curve, KernelCosts
from cpumoe.simulation.model_shapes import MODELS, ModelShape
from cpumoe.simulation.routing_trace import RoutingTrace, save_routing
from cpumoe.simulation.scaling import scaling
from cpumoe.simulation.simulation import balanced_placements, simulate, simulate_layer

MODEL = ModelShape("small", 256, 512, 16, 2, 3, 4, 1e6)

FREE = {name: Curve(((1.0, 0.0),)) for name in ("gather", *(exchange.value for exchange in Exchange))}


def costs(**changed: object) -> KernelCosts:
    """Experts that cost 1 for their weights and 1/8 a row, in proportion to their size; the rest is free."""
    given = {
        "hidden": 256,
        "intermediate": 512,
        "scheme": "w4a8-g32",
        "threads": 1,
        "together": 2,
        "expert_bytes": 2e5,
        "call_seconds": 0.0,
        "token_seconds": 0.0,
        "experts": {inner: Curve(((1.0, 1.125 * inner / 512), (9.0, 2.125 * inner / 512))) for inner in (32, 512)},
        "linear": Curve(((1.0, 0.0),)),
        "exchange": FREE,
        "message_seconds": 0.0,
        **changed,
    }
    return KernelCosts(**given)  # type: ignore[arg-type]


def even_trace(tokens: int = 64) -> RoutingTrace:
    """Every expert is chosen equally often in every 8 tokens."""
    return RoutingTrace(16, (torch.arange(2 * tokens).remainder(16).view(tokens, 2),))


def ep(ranks: int, exchange: Exchange = Exchange.ALL_TO_ALL) -> ParallelLayout:
    return ParallelLayout(dp_size=ranks, expert_parallel=True, exchange=exchange)


# ---- curves and costs ----------------------------------------------------------------------------------------------


def test_curves_hold_between_and_beyond_their_points() -> None:
    curve = Curve(((1, 2.0), (3, 6.0), (5, 8.0)))
    assert curve.at(np.array([0, 1, 2, 3, 4, 5, 9])).tolist() == [2, 2, 4, 6, 7, 8, 12]
    assert Curve(((1, 2.0), (2, 1.0))).at(100.0) == 1.0  # more is never less than nothing more
    assert Curve(((4, 3.0),)).at(np.array([1, 100])).tolist() == [3, 3]
    for points in ((), ((2.0, 1.0), (1.0, 1.0)), ((1.0, -1.0),), ((1.0, math.nan),)):
        with pytest.raises(ValueError):
            Curve(points)


def test_slices_lie_between_measured_ones() -> None:
    found = costs()
    assert found.expert_curve(512) is found.experts[512]
    assert found.expert_curve(128).at(9.0) == pytest.approx(2.125 / 4)
    with pytest.raises(ValueError, match="intermediate size of 16 were not measured; 32, 512 were"):
        found.expert_curve(16)


def test_experts_without_rows_cost_nothing() -> None:
    found = costs(call_seconds=0.5, token_seconds=0.25)
    assert found.layer_seconds(4, np.array([0.0, 1.0, 0.0, 9.0])) == 0.5 + 4 * 0.25 + 1.125 + 2.125
    assert found.layer_seconds(4, np.zeros(3)) == 1.5


def test_json_is_the_same_costs(tmp_path: Path) -> None:
    found = costs(message_seconds=1e-5)
    found.save(tmp_path / "costs.json")
    assert KernelCosts.load(tmp_path / "costs.json") == found
    told = json.loads((tmp_path / "costs.json").read_text())
    for changed, message in (
        ({"version": 2}, "no measured costs of version 1"),
        ({"linear": 3}, "cannot be read"),
        ({"experts": {"512": [[1.0, -1.0]]}}, "below 0"),
    ):
        with pytest.raises(ValueError, match=message):
            KernelCosts.from_json({**told, **changed})
    del told["hidden"]
    with pytest.raises(ValueError, match="have no 'hidden'"):
        KernelCosts.from_json(told)
    (tmp_path / "text").write_text("no JSON")
    for name in ("text", "missing"):
        with pytest.raises(ValueError, match=name):
            KernelCosts.load(tmp_path / name)


# ---- limits --------------------------------------------------------------------------------------------------------


def test_one_rank_costs_what_was_measured() -> None:
    found = costs(call_seconds=0.5, token_seconds=0.25, linear=Curve(((1.0, 1e-6), (65.0, 2e-6))))
    told = simulate(MODEL, ParallelLayout(), found, Network(), even_trace(), 64)
    # 64 tokens with two experts each: 8 rows for each of 16.
    assert told.experts == pytest.approx(3 * (0.5 + 64 * 0.25 + 16 * (1 + 8 / 8)))
    assert told.rest == pytest.approx(1e6 * (1e-6 + 63 / 64 * 1e-6))
    assert told.exchange == 0 and told.imbalance == 1
    assert told.tokens_per_second == 64 / (told.experts + told.rest)
    assert told.rank_bytes == pytest.approx(16 * 3 * 2e5 + 1e6 / 2)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_ranks_that_talk_for_nothing_share_the_work(ranks: int) -> None:
    one = simulate(MODEL, ParallelLayout(), costs(), Network(), even_trace(), 64)
    for layout in (
        ParallelLayout(tp_size=ranks),
        ParallelLayout(tp_size=ranks, expert_parallel=True),
        ep(ranks),
        ep(ranks, Exchange.ALLGATHER_REDUCESCATTER),
    ):
        told = simulate(MODEL, layout, costs(), Network(), even_trace(), 64)
        assert told.seconds == pytest.approx(one.seconds / ranks)
        assert told.imbalance == pytest.approx(1)


def test_all_wait_for_the_slowest() -> None:
    ids = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 8]])
    told = simulate_layer(MODEL, ep(2), costs(), Network(), RoutingTrace(16, (ids,)), 4)
    first, second = (1 + 4 / 8) + (1 + 3 / 8), 1 + 1 / 8
    assert told.experts == first
    assert told.imbalance == pytest.approx(first / ((first + second) / 2))


def test_ranks_that_share_cores_take_turns() -> None:
    ids = torch.tensor([[0, 8]] * 8)
    trace = RoutingTrace(16, (ids,))
    one_each = simulate_layer(MODEL, ep(4), costs(), Network(), trace, 8)
    two_cores = simulate_layer(MODEL, ep(4), costs(), Network(at_once=2), trace, 8)
    one_core = simulate_layer(MODEL, ep(4), costs(), Network(at_once=1), trace, 8)
    assert one_each.experts == two_cores.experts == 2.0  # two of four ranks have something to do
    assert one_core.experts == 4.0
    sliced = [
        simulate_layer(MODEL, ParallelLayout(tp_size=4), costs(), Network(at_once=cores), trace, 8) for cores in (4, 2)
    ]
    assert sliced[1].experts == 2 * sliced[0].experts


# ---- the network ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp_size=8), ep(8), ep(8, Exchange.ALLGATHER_REDUCESCATTER)], ids=["tp", "a2a", "agrs"]
)
def test_a_slower_network_is_slower(layout: ParallelLayout) -> None:
    def exchange(latency: float, rate: float, per_node: int = 1, message: float = 0.0) -> float:
        network = Network(Link(latency, rate), Link(latency, rate), per_node)
        return simulate(MODEL, layout, costs(message_seconds=message), network, even_trace(), 64).exchange

    by_latency = [exchange(latency, 1e9) for latency in (0, 1e-6, 1e-5, 1e-4)]
    assert by_latency == sorted(set(by_latency))
    by_rate = [exchange(1e-6, rate) for rate in (math.inf, 1e10, 1e9, 1e8)]
    assert by_rate == sorted(set(by_rate))
    assert exchange(1e-6, 1e9, message=1e-5) > exchange(1e-6, 1e9)
    assert exchange(1e-6, 1e9, per_node=8) == 0  # memory that they share, which costs nothing here


def test_exchanges_by_their_algorithms() -> None:
    network = Network(Link(1.0, 1e3), Link(0.0, 1e6), 2)
    between = ExchangeCosts.of(network, costs(message_seconds=0.25), 4, 2)
    assert between.sizes.sums == 1024 and between.sizes.message == 320  # 256 + 8 + 2 * 8, in lines of 64
    # A ring of 4: six steps with a quarter of the bytes each, in two messages.
    assert between.all_reduce(1) == pytest.approx(6 * (1.0 + 2 * 0.25 + 1024 / 4 / 1e3))
    # One token of rank 0 goes to all ranks: to two of them in another node. Then the sums of all come back.
    visits = np.zeros((4, 4))
    visits[0] = 1
    numbers, tokens, sums = (8 * 4 / 1e3 + 8 / 1e6, 2 * 320 / 1e3 + 320 / 1e6, 2 * 1024 / 1e3 + 1024 / 1e6)
    assert between.to_owners(visits) == pytest.approx(3 * (1.0 + 3 * 0.25) + numbers + tokens + sums)
    shared = {name: Curve(((0.0, 0.0), (1.0, 1.0))) for name in FREE}  # a second a byte
    inside = ExchangeCosts.of(Network(), costs(exchange=shared), 4, 2)
    assert inside.all_reduce(1) == 1024 * 5  # written once, and read from four slots
    assert inside.to_owners(visits) == 5 * (320 + 1024)  # rank 0 sends four and gets its own


# ---- balance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("spare", [0, 1, 2])
def test_balance_is_never_slower_on_what_it_was_planned_for(ranks: int, spare: int) -> None:
    # By rows alone: a plan knows how often experts are chosen, and nothing of what their weights cost.
    by_rows = costs(experts={512: Curve(((0.0, 0.0), (1.0, 1.0)))})
    for seed in range(5):
        trace = RoutingTrace.zipf(16, 2, 256, seed=seed)
        planned = balanced_placements(MODEL, ep(ranks), trace, spare=spare)
        loads = [simulate_layer(MODEL, ep(ranks), by_rows, Network(), trace, 256, p) for p in (None, planned)]
        # Copies take turns by token, which is as even as the tokens are.
        assert loads[1].experts <= loads[0].experts * (1.0 if spare == 0 and ranks <= 16 else 1.02)


def test_copies_take_load_off_a_hot_expert() -> None:
    ids = torch.tensor([[0, 1 + t % 15] for t in range(64)])
    placed = Placement(16, tuple((expert, 0) if expert else (0, 1) for expert in range(16)))
    alone = simulate_layer(MODEL, ep(16), costs(), Network(), RoutingTrace(16, (ids,)), 64)
    copied = simulate_layer(MODEL, ep(16), costs(), Network(), RoutingTrace(16, (ids,)), 64, [placed])
    assert alone.experts == 1 + 64 / 8
    assert copied.experts < alone.experts / 2


def test_scaling_says_what_cannot_be() -> None:
    network = Network(Link(1e-6, 1e9), Link(1e-6, 1e9), 1)
    found = scaling(MODEL, ("tp", "ep", "ep-balanced"), (1, 2, 32), costs(), network, RoutingTrace.zipf(16, 2, 256), 64)
    assert [(each.layout, each.ranks) for each in found][:4] == [("tp", 1), ("tp", 2), ("tp", 32), ("ep", 1)]
    refused = [each for each in found if each.prediction is None]
    assert [(each.layout, each.ranks) for each in refused] == [("tp", 32)]
    assert refused[0].refusal is not None
    assert "512 of the experts in 32 slices, which are multiples of 32; up to 16" in refused[0].refusal
    with pytest.raises(ValueError, match="up to 16 slices"):
        scaling(MODEL, ("tp",), (32,), costs(), network, RoutingTrace.zipf(16, 2, 256), 64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"costs": costs(hidden=512)}, "measured for a hidden size of 512"),
        ({"trace": RoutingTrace.zipf(8, 2, 64)}, "trace has 2 of 8 experts a token; small has 2 of 16"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 65}, "a step of 65 tokens, where the trace has 64"),
        ({"layout": ParallelLayout(tp_size=32)}, "512 of the experts in 32 slices, which are multiples of 32"),
        ({"layout": ParallelLayout(tp_size=2, dp_size=2, expert_parallel=True)}, "one kind of them"),
        ({"placements": [Placement(16, (tuple(range(16)),) * 2)]}, "16 experts on 2 ranks"),
        ({"placements": []}, "0 placements for the 1 layers"),
        ({"layout": ParallelLayout(tp_size=2), "placements": []}, "splits every one"),
        ({"costs": costs(exchange={})}, "all_to_all was not measured"),
    ],
)
def test_refused_with_the_numbers(changed: dict[str, object], message: str) -> None:
    given = {
        "model": MODEL,
        "layout": ep(4),
        "costs": costs(),
        "network": Network(),
        "trace": even_trace(),
        "tokens": 64,
        **changed,
    }
    with pytest.raises(ValueError, match=message):
        simulate(**given)  # type: ignore[arg-type]


# ---- routing -------------------------------------------------------------------------------------------------------


def test_drawn_routing_is_the_same_again_and_has_no_expert_twice() -> None:
    first, second = (RoutingTrace.zipf(64, 8, 100, groups=8, topk_groups=3) for _ in range(2))
    other = RoutingTrace.zipf(64, 8, 100, groups=8, topk_groups=3, seed=1)
    for ids, again, different in zip(first.layers, second.layers, other.layers, strict=True):
        assert torch.equal(ids, again) and not torch.equal(ids, different)
        assert all(len(set(row)) == 8 and len({expert // 8 for expert in row}) <= 3 for row in ids.tolist())
    uniform = RoutingTrace.zipf(64, 8, 4000, exponent=0.0).loads(0)
    skewed = RoutingTrace.zipf(64, 8, 4000).loads(0)
    assert max(uniform) < 1.3 * 500 < 3 * 500 < max(skewed)
    with pytest.raises(ValueError, match="9 experts of a token, where it can choose of 8"):
        RoutingTrace.zipf(64, 9, 10, groups=8, topk_groups=1)


def test_recorded_routing(tmp_path: Path) -> None:
    path, ids = tmp_path / "ids.safetensors", even_trace().layers[0]
    save_routing({"layer.0": ids, "layer.1": ids.flip(0)}, path)
    told = RoutingTrace.load(path, 16)
    assert [torch.equal(*pair) for pair in zip(told.layers, (ids, ids.flip(0)), strict=True)] == [True, True]
    assert [(layer, len(step)) for layer, step in told.steps(30)] == [(0, 30), (0, 30), (1, 30), (1, 30)]
    with pytest.raises(ValueError, match="not within 0 to 14"):
        RoutingTrace.load(path, 15)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no safetensors file"):
        RoutingTrace.load(path, 16)


def test_known_models_have_as_many_weights_as_they_say() -> None:
    billions = {"qwen3-30b-a3b": (30.5, 3.3), "deepseek-v3": (671, 37), "kimi-k2": (1026, 32)}
    for name, (everything, used) in billions.items():
        model = MODELS[name]
        expert = 3 * model.hidden * model.intermediate * model.expert_layers
        assert (expert * model.experts + model.other_weights) * 1e-9 == pytest.approx(everything, rel=0.02)
        assert (expert * model.topk + model.other_weights) * 1e-9 == pytest.approx(used, rel=0.1)
