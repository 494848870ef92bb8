"""What ranks do in the tests of layers; see test_ranked_layers.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from random_layers import SCHEMES, RandomLayer, fitting, random_layer, relative_error, routing
from rank_processes import Cases
from torch import Tensor

import cpumoe
from cpumoe import ParallelLayout
from cpumoe.errors import RankError
from cpumoe.layers.experts import Experts
from cpumoe.layers.parallel_layout import Exchange, ExpertPlacement, ExpertsPart
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.placement import Placement
from cpumoe.parallel.ranks import Ranks

TOLERANCE = 1e-6
_A2A = Exchange.ALL_TO_ALL
_ROUND_ROBIN = ExpertPlacement.ROUND_ROBIN


def layouts(size: int) -> dict[str, ParallelLayout]:
    """Every kind of layout of so many ranks."""
    found = {
        "tp": ParallelLayout(tp_size=size),
        "ep": ParallelLayout(tp_size=size, expert_parallel=True),
        "dp": ParallelLayout(dp_size=size),
        "pcp": ParallelLayout(pcp_size=size),
        "dp ep": ParallelLayout(dp_size=size, expert_parallel=True),
        "dp ep by expert": ParallelLayout(dp_size=size, expert_parallel=True, exchange=_A2A),
        "pcp ep by expert": ParallelLayout(pcp_size=size, expert_parallel=True, exchange=_A2A),
        "sp": ParallelLayout(tp_size=size, sequence_parallel=True),
        "sp ep by expert": ParallelLayout(tp_size=size, expert_parallel=True, sequence_parallel=True, exchange=_A2A),
        "ep by expert": ParallelLayout(tp_size=size, expert_parallel=True, exchange=_A2A),
        "ep round robin": ParallelLayout(tp_size=size, expert_parallel=True, expert_placement_strategy=_ROUND_ROBIN),
        "tp gathered": ParallelLayout(tp_size=size, exchange=Exchange.ALLGATHER_REDUCESCATTER),
    }
    if size == 4:
        found |= {
            "tp dp": ParallelLayout(tp_size=2, dp_size=2),
            "tp dp ep": ParallelLayout(tp_size=2, dp_size=2, expert_parallel=True),
            "tp dp ep by expert": ParallelLayout(tp_size=2, dp_size=2, expert_parallel=True, exchange=_A2A),
            "dp pcp ep": ParallelLayout(dp_size=2, pcp_size=2, expert_parallel=True),
            "tp pcp sp": ParallelLayout(tp_size=2, pcp_size=2, sequence_parallel=True),
        }
    return found


@dataclass
class Batch:
    """The tokens of all ranks, and which of them a rank has."""

    rows: Tensor
    ids: Tensor
    weights: Tensor
    own: slice

    def mine(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows[self.own], self.ids[self.own], self.weights[self.own]


def _batch(
    layout: ParallelLayout, counts: list[int], experts: int, hidden: int, topk: int, dtype: torch.dtype
) -> Batch:
    """``counts``: tokens of each rank that has its own; ranks that have the same ones take the first of theirs."""
    if layout.has_all_tokens:
        counts, index = counts[:1], 0
    elif layout.sequence_parallel:
        counts, index = counts[: layout.flat_size], layout.flat_rank
    else:
        index = layout.flat_rank // layout.tp_size
        counts = counts[: layout.flat_size // layout.tp_size]
    total = sum(counts)
    rows = torch.randn(total, hidden).to(dtype)
    ids, weights = routing(total, experts, topk)
    first = sum(counts[:index])
    return Batch(rows, ids, weights, slice(first, first + counts[index]))


def _joined(layouts: dict[str, ParallelLayout]) -> dict[str, Ranks]:
    return {name: Ranks.join(layout) for name, layout in layouts.items()}


def _spread(whole: Experts, ranks: Ranks, **options: bool | None) -> ParallelExperts:
    part = ranks.layout.part_of(whole.config.experts, whole.config.intermediate_size)
    return ParallelExperts(whole.part(part) if part.experts else None, whole.config, ranks, **options)


def _check(
    whole: Experts, ranks: Ranks, batch: Batch, *, tolerance: float = TOLERANCE, on_input: bool = False
) -> tuple[Tensor, Tensor]:
    """Against one process, with tokens sent as they are and quantised; gives this rank's sums and the expected ones."""
    expected = whole(*_as_given(batch), apply_router_weight_on_input=on_input, fp32_out=True)[batch.own]
    part = ranks.layout.part_of(whole.config.experts, whole.config.intermediate_size)
    own = whole.part(part) if part.experts else None
    sent = ranks.layout.chosen_exchange is not Exchange.ALL_REDUCE
    found = [
        ParallelExperts(own, whole.config, ranks, quantized_dispatch=prepared)(
            *batch.mine(), apply_router_weight_on_input=on_input, fp32_out=True
        )
        for prepared in ((None, False, True) if sent else (None,))
    ]
    assert found[0].shape == expected.shape
    assert found[0].dtype == torch.float32
    for other in found:
        assert torch.equal(_bits(found[0]), _bits(other)), "quantised dispatch changes bits"
    if expected.numel():
        error = relative_error(found[0], expected)
        assert error <= tolerance, f"the relative error is {error}"
    layout = ranks.layout
    if layout.tp_size > 1 and not layout.sequence_parallel:
        everything = ranks.gather(found[0])
        first = layout.flat_rank - layout.tp_rank
        for rank in range(first, first + layout.tp_size):
            assert torch.equal(_bits(everything[rank]), _bits(found[0])), f"rank {rank} has other bits"
    return found[0], expected


def _as_given(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.rows, batch.ids, batch.weights


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _sizes(scheme: str) -> tuple[int, int]:
    """A hidden and an intermediate size that four ranks can split."""
    group = next((int(part[1:]) for part in scheme.split("+")[0].split("-") if part[:1] == "g" and part != "g"), 32)
    return fitting(scheme, group * -(-128 // group)), fitting(scheme, 4 * group) * (4 if "block" in scheme else 1)


def _layer(scheme: str, **options: object) -> RandomLayer:
    hidden, inner = _sizes(scheme)
    return random_layer(scheme, **{"experts": 5, "hidden": hidden, "inner": inner} | options)  # type: ignore[arg-type]


# ---- what is run ---------------------------------------------------------------------------------------------------

#: Layouts in which every scheme is tried: slices and whole experts, with tokens of all and with tokens of its own.
_FOR_SCHEMES = {2: ("tp", "ep", "dp", "dp ep by expert"), 4: ("tp", "dp ep by expert")}
_COUNTS = [5, 0, 7, 3]


def every_scheme(size: int) -> dict[str, str | None]:
    cases = Cases()
    chosen = layouts(size)
    ranks = _joined({name: chosen[name] for name in _FOR_SCHEMES[size]})
    for scheme, name in itertools.product(SCHEMES, ranks):
        cases.run(f"{scheme}, {name}", _one_scheme, scheme, ranks[name])
    return cases.outcomes


def _one_scheme(scheme: str, ranks: Ranks) -> None:
    torch.manual_seed(11)
    whole = _layer(scheme, bias=True).experts("native")
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(scheme, torch.bfloat16)
    batch = _batch(ranks.layout, _COUNTS, 5, whole.config.hidden_size, 2, dtype)
    _check(whole, ranks, batch)


def every_layout(size: int) -> dict[str, str | None]:
    cases = Cases()
    for name, ranks in _joined(layouts(size)).items():
        for what, check in _SITUATIONS.items():
            cases.run(f"{name}: {what}", _seeded, check, ranks)
    return cases.outcomes


def through_gloo(size: int) -> dict[str, str | None]:
    """Fewer, since nothing depends on what carries messages but the messages."""
    cases = Cases()
    for name, ranks in _joined(layouts(size)).items():
        assert type(ranks.exchange).__name__ == "CarriedExchange"
        for what in ("w4a8 in bf16", "one expert", "no tokens at all", "fp8-tensor-dynamic"):
            cases.run(f"{name}: {what}", _seeded, _SITUATIONS[what], ranks)
    return cases.outcomes


def _seeded(check: Callable[[Ranks], None], ranks: Ranks) -> None:
    torch.manual_seed(12)
    check(ranks)


def _dtypes(scheme: str, dtype: torch.dtype, **options: object) -> Callable[[Ranks], None]:
    def check(ranks: Ranks) -> None:
        whole = _layer(scheme, **options).experts("native")
        batch = _batch(ranks.layout, _COUNTS, 5, whole.config.hidden_size, 3, dtype)
        found, _ = _check(whole, ranks, batch)
        assert torch.equal(_spread(whole, ranks)(*batch.mine()), found.to(dtype)), "rounded once"

    return check


def _one_expert(ranks: Ranks) -> None:
    """A token of one expert: nothing is added, so whole experts give the bits of one process."""
    whole = _layer("w4a8-g32", bias=True).experts("native")
    batch = _batch(ranks.layout, _COUNTS, 5, whole.config.hidden_size, 1, torch.bfloat16)
    found, expected = _check(whole, ranks, batch)
    if ranks.layout.uses_ep:
        assert torch.equal(_bits(found + 0.0), _bits(expected + 0.0))


def _on_input(ranks: Ranks) -> None:
    whole = _layer("w8a8", bias=True).experts("native")
    batch = _batch(ranks.layout, _COUNTS, 5, whole.config.hidden_size, 1, torch.bfloat16)
    _check(whole, ranks, batch, on_input=True)


def _no_expert(ranks: Ranks) -> None:
    """Some experts of a token are none, or all of them."""
    whole = _layer("w4a8-g32").experts("native")
    batch = _batch(ranks.layout, _COUNTS, 5, whole.config.hidden_size, 3, torch.float32)
    batch.ids[torch.rand(batch.ids.shape) < 0.4] = -1
    batch.ids[:2] = -1
    _check(whole, ranks, batch)


def _nobody(ranks: Ranks) -> None:
    whole = _layer("w4a8-g32").experts("native")
    _check(whole, ranks, _batch(ranks.layout, [0] * 4, 5, whole.config.hidden_size, 2, torch.bfloat16))


def _one_rank_has_tokens(ranks: Ranks) -> None:
    whole = _layer("w4a8-g32").experts("native")
    for place in range(2):
        counts = [9 if index == place else 0 for index in range(4)]
        _check(whole, ranks, _batch(ranks.layout, counts, 5, whole.config.hidden_size, 2, torch.bfloat16))


def _one_token(ranks: Ranks) -> None:
    """Fewer than ranks that would send a share of them."""
    whole = _layer("w4a8-g32").experts("native")
    _check(whole, ranks, _batch(ranks.layout, [1] * 4, 5, whole.config.hidden_size, 2, torch.bfloat16))


def _all_on_one_rank(ranks: Ranks) -> None:
    """Experts 0 and 1 are on rank 0, or on 0 and 1; of ten all chosen ones are on the first rank."""
    whole = _layer("w4a8-g32", experts=10).experts("native")
    for first in (0, 8):
        batch = _batch(ranks.layout, _COUNTS, 2, whole.config.hidden_size, 2, torch.bfloat16)
        batch.ids += first
        _check(whole, ranks, batch)


def _fewer_experts_than_ranks(ranks: Ranks) -> None:
    for experts in (1, 2):
        whole = _layer("w4a8-g32", experts=experts, bias=True).experts("native")
        batch = _batch(ranks.layout, _COUNTS, experts, whole.config.hidden_size, experts, torch.bfloat16)
        _check(whole, ranks, batch)


def _many_tokens(ranks: Ranks) -> None:
    """Of which messages take several slots of shared memory."""
    whole = _layer("w4a8-g32", hidden=512).experts("native")
    _check(whole, ranks, _batch(ranks.layout, [700, 30, 0, 900], 5, 512, 4, torch.float32))


def _nan(ranks: Ranks) -> None:
    """NaN in a token makes its sums NaN, and no others."""
    for scheme in ("w4a8-g32", "fp8", "bf16"):
        whole = _layer(scheme).experts("native")
        batch = _batch(ranks.layout, [5, 4, 7, 3], 5, whole.config.hidden_size, 2, torch.float32)
        plain = _spread(whole, ranks)(*batch.mine(), fp32_out=True)
        batch.rows[2, 3] = torch.nan
        found = _spread(whole, ranks)(*batch.mine(), fp32_out=True)
        for index in range(len(found)):
            if index + batch.own.start == 2:
                assert found[index].isnan().all()
            else:
                assert torch.equal(found[index], plain[index])


def _whole_layer(ranks: Ranks) -> None:
    """MoELayer with a router and shared experts, called with what a model calls it with."""
    whole = _layer("w4a8-g32").experts("native")
    hidden = whole.config.hidden_size
    router, shared = torch.nn.Linear(hidden, 5), torch.nn.Linear(hidden, hidden)
    batch = _batch(ranks.layout, [6, 4, 0, 2], 5, hidden, 2, torch.float32)
    with torch.no_grad():
        expected = cpumoe.MoELayer(router, whole, 2, shared_experts=shared)(batch.rows)[batch.own]
        layer = cpumoe.MoELayer(router, _spread(whole, ranks), 2, shared_experts=shared)
        found = layer(batch.rows[batch.own].unsqueeze(0))[0]
    assert found.shape == expected.shape
    assert not found.numel() or relative_error(found, expected) <= TOLERANCE


_SITUATIONS: dict[str, Callable[[Ranks], None]] = {
    "w4a8 in bf16": _dtypes("w4a8-g32", torch.bfloat16, bias=True),
    "w8a8 in fp16": _dtypes("w8a8", torch.float16),
    "nvfp4a16 in fp32": _dtypes("nvfp4a16", torch.float32, bias=True),
    "fp8-tensor-dynamic": _dtypes("fp8-tensor-dynamic", torch.bfloat16),
    **{f"{name} between": _dtypes("w4a8-g32", torch.bfloat16, activation=name, bias=True)
       for name in ("swiglu_oai", "swiglu_step", "gelu", "gelu_tanh")},
    **{f"{name} alone": _dtypes("w8a8", torch.float32, activation=name, gated=False, bias=True)
       for name in ("relu2", "silu")},
    "one expert": _one_expert,
    "weights on the input": _on_input,
    "no expert": _no_expert,
    "no tokens at all": _nobody,
    "tokens on one rank": _one_rank_has_tokens,
    "one token": _one_token,
    "all experts on one rank": _all_on_one_rank,
    "fewer experts than ranks": _fewer_experts_than_ranks,
    "many tokens": _many_tokens,
    "NaN": _nan,
    "a whole layer": _whole_layer,
}  # fmt: skip


# ---- ranks that do not fit together --------------------------------------------------------------------------------


def misuse() -> dict[str, str | None]:
    """Each of these ends the exchange: it takes ranks of its own."""
    cases = Cases()
    for name, check in (
        ("an id that is no expert", _bad_id),
        ("another number of experts for a token", _other_topk),
        ("another dtype", _other_dtype),
        ("another number of tokens", _other_count),
        ("another placement", _other_placement),
    ):
        cases.run(name, check)
    return cases.outcomes


def _refused(ranks: Ranks, call: Callable[[], object], text: str, *, here: str | None = None) -> None:
    """Rank 1 does it wrong; ``here`` is what it gets itself, if not the same."""
    try:
        call()
    except (RankError, ValueError) as problem:
        expected = here if here is not None and ranks.rank == 1 else text
        assert expected in str(problem), f"{problem!r} instead of {expected!r}"
        return
    raise AssertionError("nothing was refused")


def _other_placement() -> None:
    """The experts of rank 0 lie in another order, as rank 1 has it."""
    ranks = Ranks.join(ParallelLayout(tp_size=2, expert_parallel=True))
    whole = _layer("w4a8-g32").experts("native")
    experts = tuple(range(whole.config.experts))  # an odd number of them
    half = len(experts) // 2
    first = experts[:half][::-1] if ranks.rank == 1 else experts[:half]
    placement = Placement(len(experts), (first, experts[half:]), uneven=True)
    own = whole.part(ExpertsPart(placement.experts_of(ranks.rank)))
    layer = ParallelExperts(own, whole.config, ranks, placement=placement)
    x, ids = torch.randn(4, layer.config.hidden_size), torch.arange(2).repeat(4, 1)
    text = (
        f"the layer of experts of rank 1 is 'placement={(first[::-1] if ranks.rank == 0 else first, experts[half:])}'"
    )
    _refused(ranks, lambda: layer(x, ids, torch.ones(4, 2)), text)


def _bad_id() -> None:
    ranks = Ranks.join(ParallelLayout(dp_size=2, expert_parallel=True))
    layer = _spread(_layer("w4a8-g32").experts("native"), ranks)
    ids = torch.tensor([[0, 77 if ranks.rank == 1 else 1]])
    x = torch.randn(1, layer.config.hidden_size)
    _refused(ranks, lambda: layer(x, ids, torch.ones(1, 2)), "rank 1 has failed: ValueError: topk_ids hold 77",
             here="topk_ids hold 77")  # fmt: skip


def _other_topk() -> None:
    ranks = Ranks.join(ParallelLayout(dp_size=2, expert_parallel=True))
    layer = _spread(_layer("w4a8-g32").experts("native"), ranks)
    topk = 3 if ranks.rank == 1 else 2
    x, ids = torch.randn(4, layer.config.hidden_size), torch.arange(topk).repeat(4, 1)
    _refused(ranks, lambda: layer(x, ids, torch.ones(4, topk)), "rank 1")


def _other_dtype() -> None:
    ranks = Ranks.join(ParallelLayout(dp_size=2, expert_parallel=True, exchange=_A2A))
    layer = _spread(_layer("w4a8-g32").experts("native"), ranks)
    x = torch.randn(4, layer.config.hidden_size).to(torch.float16 if ranks.rank == 1 else torch.bfloat16)
    ids = torch.arange(2).repeat(4, 1)
    _refused(ranks, lambda: layer(x, ids, torch.ones(4, 2)), "rank 1")


def _other_count() -> None:
    ranks = Ranks.join(ParallelLayout(tp_size=2))
    layer = _spread(_layer("w4a8-g32").experts("native"), ranks)
    tokens = 3 if ranks.rank == 1 else 4
    x, ids = torch.randn(tokens, layer.config.hidden_size), torch.arange(2).repeat(tokens, 1)
    _refused(ranks, lambda: layer(x, ids, torch.ones(tokens, 2)), "rank 1", here="rank 0")
