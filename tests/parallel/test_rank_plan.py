"""Plans of ranks: memory is what packing takes, traffic is what formulas and counting messages say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from changed_checkpoints import CHECKPOINTS, changed_copy, float_copy
from rank_checkpoints import COUNT, ORDERED, per_expert_layout, write_layer
from rank_processes import run_ranks
from tiny_models import write_dense_model

pytest.importorskip("transformers")

import cpumoe
from cpumoe import ParallelLayout, cpu
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.inspection import Survey
from cpumoe.checkpoints.loading import find_experts
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers.parallel_layout import Exchange, ExpertsPart
from cpumoe.layers.scheme import Scheme
from cpumoe.parallel.rank_plan import ModelPlan, Traffic, chance_of_use, part_bytes, plan_ranks, token_bytes

PACKED = CHECKPOINTS / "qwen3moe-w4a8-g32-packed"  # 8 experts in 2 layers, 2 per token, H 128, I 64
HIDDEN, INNER, TOKEN, SUMS = 128, 64, 128 + 8, 128 * 4


def plan(layout: ParallelLayout, nodes: int = 1, folder: Path = PACKED, scheme: str | None = None) -> ModelPlan:
    with Checkpoint.open(folder) as checkpoint:
        return plan_ranks(Survey(checkpoint, describe, scheme and Scheme.parse(scheme)), layout, nodes)


def packed_bytes(experts: int, inner: int, scheme: str = "w4a8-g32") -> int:
    """Of one layer, by packing one."""
    gate_up, down = torch.randn(experts, 2 * inner, HIDDEN), torch.randn(experts, HIDDEN, inner)
    return cpumoe.Experts.quantize(gate_up.bfloat16(), down.bfloat16(), scheme).packed_bytes


# ---- memory --------------------------------------------------------------------------------------------------------


def test_one_rank_holds_what_inspection_says() -> None:
    with Checkpoint.open(PACKED) as checkpoint:
        survey = Survey(checkpoint, describe)
        (rank,) = plan_ranks(survey, ParallelLayout()).ranks
        facts = survey.to_json()
    (experts,) = (part for part in facts["parts"] if part["kind"] == "experts")
    assert (rank.experts_bytes, rank.bytes) == (experts["memory_bytes"], facts["memory_bytes"])
    assert rank.traffic.bytes == 0 and str(rank.held) == "experts 0..7"


@pytest.mark.parametrize(("ranks", "held"), [(2, [4, 4]), (3, [3, 3, 2]), (8, [1] * 8), (10, [1] * 8 + [0, 0])])
def test_whole_experts(ranks: int, held: list[int]) -> None:
    found = plan(ParallelLayout(dp_size=ranks, expert_parallel=True)).ranks
    assert [len(rank.parts[0].experts) for rank in found] == held
    assert [rank.experts_bytes for rank in found] == [2 * packed_bytes(n, INNER) if n else 0 for n in held]
    assert [rank.is_empty for rank in found] == [n == 0 for n in held]
    assert {rank.other_bytes for rank in found} == {plan(ParallelLayout()).ranks[0].other_bytes}


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp_size=2),
        ParallelLayout(tp_size=2, dp_size=3, expert_parallel=True),
        ParallelLayout(tp_size=2, pcp_size=2, expert_parallel=True, sequence_parallel=True),
    ],
    ids=str,
)
def test_linears_are_split_over_tensor_parallel_groups(layout: ParallelLayout) -> None:
    with Checkpoint.open(PACKED) as checkpoint:
        survey = Survey(checkpoint, describe)
        assert survey.layout is not None
        places = [place for name, place in survey.layout.linears.items() if name not in survey.linears]
        elsewhere = sum(source.packed_bytes() - source.packed_bytes(2) for source in survey.linears.values())
    floats = sum(place.rows * place.columns for place in places if place.may_be_packed and not place.is_tied)
    elsewhere += floats * cpu.float_dtype()[0].itemsize // 2
    assert elsewhere > 0
    (whole,) = plan(ParallelLayout()).ranks
    assert {rank.other_bytes for rank in plan(layout).ranks} == {whole.other_bytes - elsewhere}


def test_ranks_hold_what_was_planned() -> None:
    """Models that are loaded on ranks, in layouts with groups of all of them, of some, and of one."""
    for rank in run_ranks(4, "plan_cases:held", str(PACKED)):
        assert len(rank) == 4
        for layout, planned, held in rank:
            assert planned == held, layout


def test_slices() -> None:
    found = plan(ParallelLayout(tp_size=2))
    assert [rank.held for rank in found.ranks] == [f"experts 0..7, slice {i} of 2" for i in range(2)]
    assert [rank.experts_bytes for rank in found.ranks] == [2 * packed_bytes(8, INNER // 2)] * 2


def test_float_experts_with_a_scheme(tmp_path: Path) -> None:
    folder = float_copy(tmp_path, PACKED.name)
    layout = ParallelLayout(tp_size=2, expert_parallel=True)
    for scheme in ("w8a8", "w4a16-g32", "bf16"):
        found = plan(layout, folder=folder, scheme=scheme)
        assert found.schemes == (Scheme.parse(scheme),)
        assert found.ranks[0].experts_bytes == 2 * packed_bytes(4, INNER, scheme)
    assert plan(layout, folder=folder).schemes == (Scheme.parse("bf16"),)  # as they are


# ---- traffic -------------------------------------------------------------------------------------------------------


def test_bytes_of_a_token() -> None:
    assert token_bytes(Scheme.parse("w4a8-g32"), 2048) == token_bytes(Scheme.parse("w4a16+int8"), 2048) == 2056
    in_float = 2048 * cpu.float_dtype()[0].itemsize
    assert {token_bytes(Scheme.parse(name), 2048) for name in ("w4a16", "bf16", "w8a8-static", "nvfp4")} == {in_float}


@pytest.mark.parametrize(("experts", "per_token", "held"), [(8, 2, 3), (8, 8, 1), (6, 3, 0), (5, 2, 4), (7, 3, 2)])
def test_chance_of_use_by_counting(experts: int, per_token: int, held: int) -> None:
    choices = list(itertools.combinations(range(experts), per_token))
    used = sum(any(expert < held for expert in choice) for choice in choices)
    assert chance_of_use(experts, per_token, held) == pytest.approx(used / len(choices))


def test_all_reduce_goes_round_in_a_ring() -> None:
    around = 2 * 3 / 4 * SUMS
    assert [rank.layer_traffic for rank in plan(ParallelLayout(tp_size=2)).ranks] == [Traffic(SUMS, 0)] * 2
    layout = ParallelLayout(tp_size=4, expert_parallel=True)
    assert [rank.layer_traffic for rank in plan(layout).ranks] == [Traffic(around, 0)] * 4
    on_nodes = [rank.layer_traffic for rank in plan(layout, nodes=2).ranks]
    assert [sent.inside for sent in on_nodes] == [around, 0, around, 0]
    assert [sent.between for sent in on_nodes] == [0, around, 0, around]
    assert [rank.traffic.bytes for rank in plan(layout, nodes=4).ranks] == [2 * around] * 4


def test_gathering_all_tokens() -> None:
    found = plan(ParallelLayout(dp_size=2, tp_size=3, expert_parallel=True, sequence_parallel=True), nodes=2)
    assert found.exchange == "allgather_reducescatter" and [rank.node for rank in found.ranks] == [0, 0, 0, 1, 1, 1]
    for rank in found.ranks:
        assert rank.layer_traffic.inside == pytest.approx(2 * (TOKEN + SUMS))
        assert rank.layer_traffic.between == pytest.approx(3 * (TOKEN + SUMS))
        assert rank.traffic.bytes == pytest.approx(2 * 5 * (TOKEN + SUMS))


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (3, 1), (6, 3), (10, 5)])
def test_all_to_all_by_counting_messages(ranks: int, nodes: int) -> None:
    """One token on every rank, over all pairs of experts: who sends what to whom."""
    found = plan(ParallelLayout(dp_size=ranks, expert_parallel=True, exchange=Exchange.ALL_TO_ALL), nodes)
    rank_of = {expert: i for i, rank in enumerate(found.ranks) for expert in rank.parts[0].experts}
    sent = {(own, other): 0.0 for own in range(ranks) for other in range(ranks)}
    choices = list(itertools.combinations(range(8), 2))
    for choice in choices:
        for own in range(ranks):
            for other in {rank_of[expert] for expert in choice} - {own}:
                sent[own, other] += TOKEN / len(choices)
                sent[other, own] += SUMS / len(choices)
    for own, rank in enumerate(found.ranks):
        same = [other for other, place in enumerate(found.ranks) if place.node == rank.node]
        inside = sum(sent[own, other] for other in same)
        assert rank.layer_traffic.inside == pytest.approx(inside)
        assert rank.layer_traffic.between == pytest.approx(sum(sent[own, o] for o in range(ranks)) - inside)


# ---- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: plan(ParallelLayout(tp_size=3)),
            CheckpointError,
            "size 64 of the experts in 3 slices, which are multiples of 32; up to 2",
        ),
        (
            lambda: plan(ParallelLayout(tp_size=2, dp_size=2)),
            CheckpointError,
            "64 of the experts in 4 slices, which are multiples of 32; up to 2 slices, or expert parallelism",
        ),
        (
            lambda: plan(ParallelLayout(dp_size=6, expert_parallel=True), 4),
            ValueError,
            "6 ranks on 4 nodes; .*: 1, 2, 3",
        ),
        (lambda: plan(ParallelLayout(), 2), ValueError, "1 ranks on 2 nodes"),
    ],
)
def test_what_does_not_divide(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_groups_that_a_slice_would_cut(tmp_path: Path) -> None:
    folder = float_copy(tmp_path, PACKED.name)
    with pytest.raises(UnsupportedScheme, match="2 slices, which are multiples of 64; up to 1"):
        plan(ParallelLayout(tp_size=2), folder=folder, scheme="w4a8-g64")


@pytest.mark.parametrize("slices", [3, 5, 12])
def test_slices_in_activation_order_are_planned_as_they_are_loaded(tmp_path: Path, slices: int) -> None:
    """Slices have groups of 32, whatever the file has; which of them are filled up depends on values."""
    section, store, _ = ORDERED["GPTQ"]
    layer = write_layer(tmp_path / "layer", section, store, per_expert_layout(384))
    for index in range(slices):
        part = ExpertsPart(tuple(range(COUNT)), slices, index)
        with Checkpoint.open(layer.folder) as checkpoint:
            planned = part_bytes(find_experts(checkpoint, layer.layout, None), part)
        loaded, _ = layer.load(part)
        inner = part.cut(384, 32)[1]
        assert loaded.config.intermediate_size >= inner
        if loaded.config.intermediate_size == inner:
            assert planned == loaded.packed_bytes
        assert planned <= loaded.packed_bytes


def test_checkpoints_that_cannot_be_spread(tmp_path: Path) -> None:
    def broken(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]

    with pytest.raises(CheckpointError, match="would not load; cpumoe inspect says why"):
        plan(ParallelLayout(tp_size=2), folder=changed_copy(tmp_path / "a", PACKED.name, broken))
    with pytest.raises(CheckpointError, match="has no experts to spread"):
        plan(ParallelLayout(tp_size=2), folder=write_dense_model(tmp_path / "b", "w4a8-g32"))
