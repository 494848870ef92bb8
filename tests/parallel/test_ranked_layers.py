"""Layers that are spread over real processes, against one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_layers import random_layer, routing
from rank_processes import refuse_failures, run_ranks, shared_files
from sampling import first_of

from cpumoe import ParallelLayout
from cpumoe.errors import RankError
from cpumoe.ops.decoder import Copies, Travel
from cpumoe.ops.exchange import spread_experts
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.ranks import Ranks


def _copies(begins: Sequence[int] = range(5), places: Sequence[int] = range(4)) -> Copies:
    """Return one copy of each of four experts, or a mistake."""
    return Copies(*(torch.tensor(values, dtype=torch.int32) for values in (begins, places, [0] * 4)))


@pytest.mark.parametrize("ranks", first_of([2, 4], 1))
def test_every_scheme(ranks: int) -> None:
    refuse_failures(run_ranks(ranks, "layer_cases:every_scheme", ranks, seconds=300))


@pytest.mark.parametrize("ranks", first_of([2, 4], 1))
def test_every_layout(ranks: int) -> None:
    refuse_failures(run_ranks(ranks, "layer_cases:every_layout", ranks, seconds=300))
    assert not shared_files()


@pytest.mark.full
def test_every_layout_through_torch_distributed() -> None:
    environment = {"CPUMOE_SHARED_MEMORY": "0"}
    refuse_failures(run_ranks(4, "layer_cases:through_gloo", 4, environment=environment, seconds=300))


def test_tokens_that_do_not_fit_together() -> None:
    refuse_failures(run_ranks(2, "layer_cases:misuse"))


# ---- one rank ------------------------------------------------------------------------------------------------------


def test_one_rank_is_no_parallelism() -> None:
    assert not Ranks.join()
    assert not Ranks.join(ParallelLayout(expert_parallel=True))
    with pytest.raises(ValueError, match="the layout tp 2 has 2 ranks, and this is one process; torchrun"):
        Ranks.join(ParallelLayout(tp_size=2))
    for timeout in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout="):
            Ranks.join(timeout=timeout)
    whole = random_layer("w4a8-g32", bias=True).experts("native")
    x, (ids, weights) = torch.randn(5, 128), routing(5, 4, 2)
    alone = ParallelExperts(whole, whole.config, Ranks.alone())
    assert torch.equal(alone(x, ids, weights), whole(x, ids, weights))
    with pytest.raises(ValueError, match="topk_ids hold 4; 0 to 3"):
        alone(x, ids + 4 - ids, weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spread": True}, "experts are spread over ranks, and exchange is None"),
        ({"travel": Travel.TO_ALL}, "travel is given for experts that are not spread"),
        ({"gate_up": None}, "gate_up and down must both be given, or none"),
        ({"gate_up": None, "down": None}, "gate_up is None; only ranks that share copies"),
        ({"loads": torch.zeros(3, dtype=torch.int64)}, "loads has 3 values; 4 are accepted"),
        ({"copies": _copies(places=[0, 1, 2, 4])}, "copies.places holds 4; -1 to 3 are accepted"),
        ({"copies": _copies(begins=[0, 1, 1, 3, 4])}, "copies.begins has none of expert 1"),
        ({"copies": _copies(begins=[0, 1, 2, 3, 5])}, "copies.places has 4 values; 5 are accepted"),
    ],
)
def test_experts_that_do_not_fit_together(changes: dict[str, Any], message: str) -> None:
    experts = replace(random_layer("w4a8-g32").experts("native").for_core(torch.float32), **changes)
    x, (ids, weights) = torch.randn(5, 128), routing(5, 4, 2)
    with pytest.raises(ValueError, match=message):
        spread_experts(x, ids, weights, experts, 0, None, None)


def test_unknown_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUMOE_SHARED_MEMORY", "yes")
    with pytest.raises(ValueError, match="CPUMOE_SHARED_MEMORY='yes'; 0 .* and 1 are accepted"):
        Ranks.join()


def test_together_lets_errors_through() -> None:
    with pytest.raises(KeyError), Ranks.alone().together():
        raise KeyError("x")
    Ranks.alone().check()
    assert issubclass(RankError, RuntimeError)


def test_opcheck() -> None:
    experts = random_layer("w4a8-g32").experts("native")
    gate_up, down = experts.gate_up_packed, experts.down_packed
    x, (ids, weights) = torch.randn(5, 128), routing(5, 4, 2)
    last = (0, True, 1.702, 7.0, False, True)
    torch.library.opcheck(torch.ops.cpumoe.fused_experts.default, (x, ids, weights, gate_up, down, *last, 0))
    with pytest.raises(ValueError, match="slices=99; no exchange of that number"):
        torch.ops.cpumoe.fused_experts(x, ids, weights, gate_up, down, *last, 99)
