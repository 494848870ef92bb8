"""Every routing method against an independent statement of it in plain Python."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import SUPPORTED_ISAS
from hypothesis import given, settings
from hypothesis import strategies as st

from cpumoe import RoutingMethod, routing_method, select_experts
from cpumoe.evaluation.selftest import using_isa


def scored(logits: list[float], scoring: str) -> list[float]:
    if scoring == "softmax":
        high = max(logits)
        powers = [math.exp(v - high) for v in logits]
        return [p / sum(powers) for p in powers]
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in logits]
    if scoring == "sqrt_softplus":
        return [math.sqrt(math.log1p(math.exp(-abs(v))) + max(v, 0.0)) for v in logits]
    return list(logits)


def best(values: dict[int, float], count: int) -> list[int]:
    return sorted(values, key=lambda i: (-values[i], i))[:count]


def statement(
    logits: list[float],
    topk: int,
    method: str,
    scoring: str,
    renormalize: bool,
    bias: list[float] | None,
    groups: int,
    topk_group: int,
    factor: float,
) -> dict[int, float]:
    """Chosen expert -> weight, for one token, in double precision."""
    after = method in ("renormalize", "llama4")
    scores = list(logits) if after else scored(logits, scoring)
    choice = [s + (b if bias else 0.0) for s, b in zip(scores, bias or scores, strict=True)]
    open_experts = set(range(len(logits)))
    if groups > 1:
        size = len(logits) // groups
        worth = {}
        for g in range(groups):
            members = sorted(choice[g * size : (g + 1) * size], reverse=True)
            worth[g] = sum(members[:2]) if bias else members[0]
        kept = best(worth, topk_group)
        open_experts = {e for e in open_experts if e // size in kept}
    chosen = best({e: choice[e] for e in open_experts}, topk)
    weights = scored([logits[e] for e in chosen], scoring) if after else [scores[e] for e in chosen]
    if method == "renormalize_naive" or (method == "deepseek_v3" and renormalize):
        weights = [w / sum(weights) for w in weights]
    return {e: w * factor for e, w in zip(chosen, weights, strict=True)}


METHODS = [
    ("default", "softmax"),
    ("renormalize", "softmax"),
    ("renormalize", "sigmoid"),
    ("renormalize_naive", "softmax"),
    ("renormalize_naive", "sigmoid"),
    ("renormalize_naive", "sqrt_softplus"),
    ("deepseek_v3", "sigmoid"),
    ("deepseek_v3", "sqrt_softplus"),
    ("llama4", "sigmoid"),
    ("topk", "none"),
]


@settings(max_examples=300, deadline=None)
@given(
    which=st.sampled_from(METHODS),
    groups=st.sampled_from([0, 1, 2, 4]),
    tokens=st.integers(1, 70),
    topk=st.integers(1, 4),
    with_bias=st.booleans(),
    renormalize=st.booleans(),
    factor=st.sampled_from([1.0, 2.5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    seed=st.integers(0, 10_000),
)
def test_methods(
    which: tuple[str, str],
    groups: int,
    tokens: int,
    topk: int,
    with_bias: bool,
    renormalize: bool,
    factor: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    method, scoring = which
    experts, topk_group = 16, 2 if groups > 1 else 0
    topk = 1 if method == "llama4" else topk
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn((tokens, experts), generator=generator) * 3).to(dtype)
    usable = method not in ("renormalize", "llama4", "topk")
    bias = torch.randn(experts, generator=generator) if with_bias and usable else None
    weights, ids = select_experts(
        logits,
        topk,
        method,
        scoring=scoring,
        renormalize=renormalize if method == "deepseek_v3" else None,
        correction_bias=bias,
        num_expert_group=groups or None,
        topk_group=topk_group or None,
        routed_scaling_factor=factor,
    )
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    for t in range(tokens):
        expected = statement(
            logits[t].double().tolist(),
            topk,
            method,
            scoring,
            renormalize,
            None if bias is None else bias.double().tolist(),
            groups,
            topk_group,
            factor,
        )
        got = dict(zip(ids[t].tolist(), weights[t].tolist(), strict=True))
        assert got.keys() == expected.keys(), (t, got, expected)
        for expert, weight in expected.items():
            assert math.isclose(got[expert], weight, rel_tol=1e-5, abs_tol=1e-6)


def test_ties_go_to_the_lower_id() -> None:
    _, ids = select_experts(torch.zeros(3, 8), 3)
    assert ids.tolist() == [[0, 1, 2]] * 3
    _, ids = select_experts(torch.tensor([[1.0, 5.0, 5.0, 2.0]]), 3)
    assert ids.tolist() == [[1, 2, 3]]


def test_bits_do_not_depend_on_the_instruction_set() -> None:
    logits = torch.randn(33, 100, generator=torch.Generator().manual_seed(1)) * 5
    with using_isa("scalar"):
        expected = select_experts(logits, 8, "renormalize_naive", scoring="softmax")
    for isa in SUPPORTED_ISAS:
        with using_isa(isa):
            got = select_experts(logits, 8, "renormalize_naive", scoring="softmax")
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_extreme_logits() -> None:
    logits = torch.tensor([[1e30, 0.0, -1e30, 5.0], [-1e4, -1e4, -2e4, -1e4], [88.0, -88.0, 300.0, -300.0]])
    for method, scoring in METHODS:
        weights, ids = select_experts(logits, 1 if method == "llama4" else 2, method, scoring=scoring)
        assert ((ids >= 0) & (ids < 4)).all()
        assert weights.isfinite().all(), (method, scoring, weights)
    nan = select_experts(torch.tensor([[1.0, torch.nan, 2.0], [1.0, 3.0, 2.0]]), 2)
    assert nan[0][0].isnan().any() and ((nan[1] >= 0) & (nan[1] < 3)).all()
    assert nan[0][1].isfinite().all() and nan[1][1].tolist() == [1, 2]


def test_method_names() -> None:
    assert routing_method("sigmoid", 8, True, 8, True) is RoutingMethod.DEEPSEEK_V3
    assert routing_method("sigmoid", 1, False) is RoutingMethod.LLAMA4
    assert routing_method("softmax", 8, True) is RoutingMethod.RENORMALIZE
    assert routing_method("softmax", 8, False) is RoutingMethod.DEFAULT
    assert routing_method("softmax", 6, False, 8) is RoutingMethod.DEFAULT
    assert routing_method("sigmoid", 8, True) is RoutingMethod.RENORMALIZE_NAIVE
    assert routing_method("sigmoid", 8, True, None, True) is RoutingMethod.DEEPSEEK_V3
    assert routing_method("tanh", 8, True) is RoutingMethod.UNSPECIFIED


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_the_named_method_computes_what_the_configuration_says(scoring: str) -> None:
    logits, bias = torch.randn(5, 8), torch.randn(8)
    for topk, renormalize, groups, has_bias in itertools.product((1, 3), (False, True), (None, 4), (False, True)):
        method = routing_method(scoring, topk, renormalize, groups, has_bias)
        weights, ids = select_experts(
            logits,
            topk,
            method,
            scoring=scoring,
            renormalize=renormalize,
            correction_bias=bias if has_bias else None,
            num_expert_group=groups,
            topk_group=None if groups is None else 2,
        )
        for row, row_weights, row_ids in zip(logits.tolist(), weights.tolist(), ids.tolist(), strict=True):
            # Scores, choice and division in this order, whatever the method's own order is.
            expected = statement(
                *(row, topk, "deepseek_v3", scoring, renormalize),
                *(bias.tolist() if has_bias else None, groups or 0, 2, 1.0),
            )
            assert dict(zip(row_ids, row_weights, strict=True)) == pytest.approx(expected, rel=1e-5)


def test_custom_routing() -> None:
    def last(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.arange(logits.shape[1] - topk, logits.shape[1]).expand(logits.shape[0], topk)
        return torch.full(ids.shape, 0.5, dtype=torch.float64), ids

    weights, ids = select_experts(torch.randn(4, 6), 2, "custom", custom=last, routed_scaling_factor=2.0)
    assert ids.tolist() == [[4, 5]] * 4 and weights.tolist() == [[1.0, 1.0]] * 4
    with pytest.raises(ValueError, match=r"custom routing returned weights \[4, 3\]"):
        select_experts(torch.randn(4, 6), 2, "custom", custom=lambda logits, topk: last(logits, 3))
    for ids, message in [
        (torch.full((4, 2), 1.7), "returned torch.float32 ids"),
        (torch.full((4, 2), 2**32 + 1), "ids outside -1 to 5"),
    ]:
        with pytest.raises(ValueError, match=message):
            select_experts(torch.randn(4, 6), 2, "custom", custom=lambda *_, ids=ids: (torch.ones(4, 2), ids))


def test_simulated_routing() -> None:
    generator = torch.Generator().manual_seed(3)
    load = [8.0, 4.0, 2.0, 1.0, 1.0, 0.0]
    weights, ids = select_experts(torch.empty(2000, 6), 2, "simulated", load=load, generator=generator)
    counts = torch.bincount(ids.flatten(), minlength=6)
    assert counts[5] == 0 and counts[0] > counts[1] > counts[2] > counts[3]
    assert (ids[:, 0] != ids[:, 1]).all() and (weights == 0.5).all()
    assert select_experts(torch.empty(0, 6), 2, "simulated")[1].shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topk": 0}, "topk=0; 1 to 8 are accepted"),
        ({"topk": 9}, "topk=9; 1 to 8 are accepted"),
        ({"method": "nonsense"}, "routing method 'nonsense' is not known; accepted are default"),
        ({"method": "unspecified"}, "name a method"),
        ({"scoring": "tanh"}, "scoring='tanh' with method 'renormalize'; accepted: softmax, sigmoid"),
        ({"method": "llama4"}, "topk=2 with method 'llama4'"),
        ({"correction_bias": torch.zeros(8)}, "chooses by raw logits"),
        ({"method": "deepseek_v3", "correction_bias": torch.zeros(7)}, r"correction_bias is \[7\]; \[8\] is accepted"),
        ({"num_expert_group": 3, "topk_group": 1}, "does not divide 8 experts"),
        ({"num_expert_group": 4}, "num_expert_group=4 with topk_group=None; give both"),
        ({"topk_group": 2}, "num_expert_group=None with topk_group=2; give both"),
        ({"renormalize": False}, "renormalize=False contradicts method 'renormalize'"),
        ({"method": "default", "renormalize": True}, "renormalize=True contradicts method 'default'"),
        ({"generator": torch.Generator()}, "generator is for method 'simulated'"),
        ({"method": "simulated", "scoring": "softmax"}, "scoring has no meaning with method 'simulated'"),
        ({"topk": -1}, "topk=-1; 1 to 8"),
        ({"router_logits": torch.ones(3, 8).int()}, "router_logits are torch.int32"),
        ({"num_expert_group": 4, "topk_group": 5}, "topk_group=5; 1 to 4"),
        ({"num_expert_group": 8, "topk_group": 1}, "hold only 1"),
        ({"method": "custom"}, "custom=None with method 'custom'"),
        ({"load": [1.0] * 8}, "load is for method 'simulated'"),
        ({"method": "simulated", "load": [1.0] * 7}, "8 numbers"),
        ({"method": "simulated", "load": [1.0] + [0.0] * 7}, "leaves 1 experts"),
        ({"router_logits": torch.randn(8)}, "1 dimensions"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor=None; a finite number is accepted, 1.0 for no"),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor='2'; a finite number"),
        ({"routed_scaling_factor": math.nan}, "routed_scaling_factor=nan; a finite number"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    call: dict[str, object] = {"router_logits": torch.randn(3, 8), "topk": 2, **arguments}
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        select_experts(**call)


def test_a_refused_call_does_not_break_the_next() -> None:
    logits = torch.randn(3, 8)
    with pytest.raises((TypeError, RuntimeError)):
        select_experts(logits, 2, "deepseek_v3", num_expert_group=2.0, topk_group=1.0)
    select_experts(logits, 2, "deepseek_v3", num_expert_group=2, topk_group=1)
