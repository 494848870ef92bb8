"""Routing: from the router's logits to the chosen experts and their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cpumoe import ops
from cpumoe.layers.routing_methods import RoutingMethod

CustomRouting = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def routing_method(
    scoring: str, topk: int, renormalize: bool, num_expert_group: int | None = None, has_bias: bool = False
) -> RoutingMethod:
    """Return the method with which :func:`select_experts` computes what a model's configuration says.

    Call it with the same ``scoring``, ``renormalize``, bias and groups. Scores with a bias are ``deepseek_v3``, with
    groups or without. Without a bias, softmax is ``renormalize`` or ``default``; sigmoid is ``llama4`` for one expert
    per token; scores that are divided by the sum of the chosen are ``renormalize_naive``, and others ``deepseek_v3``
    with ``renormalize=False``. A scoring that is not known is ``unspecified``.

    Args:
        scoring: ``softmax``, ``sigmoid`` or ``sqrt_softplus``: how logits become scores.
        topk: experts per token.
        renormalize: whether the weights of the chosen experts are divided by their sum.
        num_expert_group: an option of every method, so that it does not decide between them.
        has_bias: whether there is a correction bias.
    """
    if scoring not in ("softmax", "sigmoid", "sqrt_softplus"):
        return RoutingMethod.UNSPECIFIED
    if has_bias:
        return RoutingMethod.DEEPSEEK_V3
    if scoring == "softmax":
        return RoutingMethod.RENORMALIZE if renormalize else RoutingMethod.DEFAULT
    if renormalize:
        return RoutingMethod.RENORMALIZE_NAIVE
    return RoutingMethod.LLAMA4 if scoring == "sigmoid" and topk == 1 else RoutingMethod.DEEPSEEK_V3


def check_scaling_factor(factor: float) -> None:
    """Raise ValueError for a ``routed_scaling_factor`` that is no finite number."""
    try:
        is_finite = math.isfinite(factor)
    except TypeError:
        is_finite = False
    if not is_finite:
        raise ValueError(f"routed_scaling_factor={factor!r}; a finite number is accepted, 1.0 for no scaling")


def parse_method(method: RoutingMethod | str) -> RoutingMethod:
    """A method of its name."""
    try:
        return RoutingMethod(method)
    except ValueError:
        names = ", ".join(m.value for m in RoutingMethod)
        raise ValueError(f"routing method {method!r} is not known; accepted are {names}") from None


# What each method accepts and does: (scorings, first one the default; score only the chosen; divide by the sum).
# A None leaves the division to the caller's `renormalize`.
_METHODS: dict[RoutingMethod, tuple[tuple[str, ...], bool, bool | None]] = {
    RoutingMethod.DEFAULT: (("softmax",), False, False),
    RoutingMethod.RENORMALIZE: (("softmax", "sigmoid"), True, False),
    RoutingMethod.RENORMALIZE_NAIVE: (("softmax", "sigmoid", "sqrt_softplus"), False, True),
    RoutingMethod.DEEPSEEK_V3: (("sigmoid", "softmax", "sqrt_softplus"), False, None),
    RoutingMethod.LLAMA4: (("sigmoid",), True, False),
    RoutingMethod.TOPK: (("none",), False, False),
}


def select_experts(
    router_logits: Tensor,
    topk: int,
    method: RoutingMethod | str = RoutingMethod.RENORMALIZE,
    *,
    scoring: str | None = None,
    renormalize: bool | None = None,
    correction_bias: Tensor | None = None,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    routed_scaling_factor: float = 1.0,
    custom: CustomRouting | None = None,
    load: Sequence[float] | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses ``topk`` experts for each token.

    Args:
        router_logits: [tokens, experts], any float dtype.
        topk: experts per token.
        method: a RoutingMethod or its name.
        scoring: ``softmax``, ``sigmoid``, ``sqrt_softplus`` or ``none`` where the method leaves a choice.
        renormalize: for ``deepseek_v3``: divide the weights by their sum (the default). The other methods are what
            they are; a value that contradicts them is refused.
        correction_bias: [experts], added to the scores for the choice but not to the weights.
        num_expert_group, topk_group: only the best ``topk_group`` of the groups take part. A group is worth its best
            expert or, with a bias, the sum of its two best.
        routed_scaling_factor: multiplies the weights.
        custom: for ``custom``: a callable (router_logits, topk) -> (weights, ids).
        load: for ``simulated``: relative load of each expert; None is uniform.
        generator: for ``simulated``: source of randomness.

    Returns:
        weights [tokens, topk] float32 and ids [tokens, topk] int32, best expert first. Of experts with equal scores
        the one with the larger logit comes first, then the lower id: the order is that of the logits also where scores
        underflow (sigmoid is 0 from -104 on) or saturate. Weights that are divided by their sum keep their ratios
        there.

    Raises:
        RuntimeError: a gradient would have to flow through the choice; there is none.
    """
    if router_logits.dim() != 2:
        raise ValueError(f"router_logits have {router_logits.dim()} dimensions; [tokens, experts] is accepted")
    if not router_logits.is_floating_point():
        raise ValueError(f"router_logits are {router_logits.dtype}; a floating point dtype is accepted")
    if not 1 <= topk <= router_logits.shape[1]:
        raise ValueError(f"topk={topk}; 1 to {router_logits.shape[1]} are accepted")
    if not torch.compiler.is_compiling():  # it may be symbolic there
        check_scaling_factor(routed_scaling_factor)
    given = (load is not None, generator is not None, custom is not None, correction_bias is not None)
    resolve = _resolve.__wrapped__ if torch.compiler.is_compiling() else _resolve  # compilers warn of caches
    steps = resolve(method, topk, scoring, renormalize, num_expert_group, topk_group, given)
    if custom is not None:
        weights, ids = custom(router_logits, topk)
        return _checked_custom(weights, ids, router_logits, topk, routed_scaling_factor)
    if steps is None:
        return _simulate(router_logits, topk, load, generator, routed_scaling_factor)
    ops.refuse_gradient(router_logits=router_logits, correction_bias=correction_bias)
    if router_logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        router_logits = router_logits.to(torch.float32)
    bias = None if correction_bias is None else correction_bias.to(torch.float32).contiguous()
    return ops.select_experts(
        router_logits,
        topk,
        steps.scoring,
        steps.score_chosen,
        bias,
        steps.groups,
        steps.topk_groups,
        steps.renormalize,
        routed_scaling_factor,
    )


@dataclass(frozen=True)
class _Steps:
    """A method with its options, in the words of the operator."""

    scoring: int
    score_chosen: bool
    groups: int
    topk_groups: int
    renormalize: bool


@lru_cache(maxsize=None, typed=True)  # checking the options of a call costs several times what routing one token does
def _resolve(
    method: RoutingMethod | str,
    topk: int,
    scoring: str | None,
    renormalize: bool | None,
    num_expert_group: int | None,
    topk_group: int | None,
    given: tuple[bool, bool, bool, bool],
) -> _Steps | None:
    """Checks options against each other; None for the methods that do not go to the operator.

    ``given``: whether there are load, generator, custom and correction_bias.
    """
    method = parse_method(method)
    has_load, has_generator, has_custom, has_bias = given
    if method is RoutingMethod.UNSPECIFIED:
        raise ValueError("routing method 'unspecified' cannot be computed; name a method")
    if has_custom != (method is RoutingMethod.CUSTOM):
        raise ValueError(f"custom={'a callable' if has_custom else None} with method {method.value!r}")
    for name, is_given in (("load", has_load), ("generator", has_generator)):
        if is_given and method is not RoutingMethod.SIMULATED:
            raise ValueError(f"{name} is for method 'simulated', not {method.value!r}")
    if method not in _METHODS:
        options = {
            "scoring": scoring is not None,
            "renormalize": renormalize is not None,
            "correction_bias": has_bias,
            "num_expert_group": num_expert_group is not None,
            "topk_group": topk_group is not None,
        }
        for name, is_given in options.items():
            if is_given:
                raise ValueError(f"{name} has no meaning with method {method.value!r}")
        return None
    scorings, score_chosen, divide = _METHODS[method]
    scoring = scorings[0] if scoring is None else scoring
    if scoring not in scorings:
        raise ValueError(f"scoring={scoring!r} with method {method.value!r}; accepted: {', '.join(scorings)}")
    if method is RoutingMethod.LLAMA4 and topk != 1:
        raise ValueError(f"topk={topk} with method 'llama4'; 1 is accepted")
    if has_bias and (score_chosen or method is RoutingMethod.TOPK):
        raise ValueError(
            f"correction_bias with method {method.value!r}, which chooses by raw logits; use 'renormalize_naive', "
            "'default' or 'deepseek_v3'"
        )
    sums_to_one = True if divide or method is RoutingMethod.RENORMALIZE else divide
    if renormalize is not None and sums_to_one is not None and renormalize != sums_to_one:
        raise ValueError(f"renormalize={renormalize} contradicts method {method.value!r}")
    groups = num_expert_group or 0
    if (groups > 1) != (topk_group is not None) and groups != 1:
        raise ValueError(f"num_expert_group={num_expert_group} with topk_group={topk_group}; give both or neither")
    return _Steps(
        ops.SCORING[scoring],
        score_chosen,
        groups,
        topk_group or 0,
        renormalize is not False if divide is None else divide,
    )


def _checked_custom(
    weights: Tensor, ids: Tensor, router_logits: Tensor, topk: int, factor: float
) -> tuple[Tensor, Tensor]:
    expected = (router_logits.shape[0], topk)
    for name, tensor in (("weights", weights), ("ids", ids)):
        if tuple(tensor.shape) != expected:
            raise ValueError(f"custom routing returned {name} {list(tensor.shape)}; {list(expected)} is accepted")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"custom routing returned {ids.dtype} ids; int32 or int64 is accepted")
    if bool(((ids < -1) | (ids >= router_logits.shape[1])).any()):
        raise ValueError(f"custom routing returned ids outside -1 to {router_logits.shape[1] - 1}")
    return weights.to(torch.float32) * factor, ids.to(torch.int32)


def _simulate(
    router_logits: Tensor,
    topk: int,
    load: Sequence[float] | Tensor | None,
    generator: torch.Generator | None,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Draws ``topk`` different experts per token with probabilities proportional to their load; equal weights."""
    tokens, experts = router_logits.shape
    shares = torch.ones(experts) if load is None else torch.as_tensor(load, dtype=torch.float32)
    if tuple(shares.shape) != (experts,) or not bool((shares >= 0).all()):
        raise ValueError(f"load must hold {experts} numbers, none negative")
    if int((shares > 0).sum()) < topk:
        raise ValueError(f"load leaves {int((shares > 0).sum())} experts, but topk={topk}")
    weights = torch.full((tokens, topk), factor / topk)
    if tokens == 0:
        return weights, torch.empty((0, topk), dtype=torch.int32)
    ids = torch.multinomial(shares.expand(tokens, experts), topk, replacement=False, generator=generator)
    return weights, ids.to(torch.int32)
