"""Routers, recognised whatever their class: the form is taken that gives what a router gives.

Families differ in how scores are computed from logits, in the scores that experts are chosen by and in how weights are
normalised. All of that is found by comparing the forms that we have with what the router gives for random input.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.integrations.transformers.recognition.probe import random_copy, remembered
from cpumoe.ops import SCORING, wants_gradient

_FEW_TOKENS = 8  # up to here our router is faster, which reads the whole weight for each token; PyTorch reads it once
_TOKENS = 24  # of random input: some of them differ wherever two forms do
_TOKEN_SEED = 1

_SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale", "output_multiplier")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Names of what is added to scores for the choice alone.
CORRECTIONS = ("e_score_correction_bias", "expert_bias")
_TOLERANCE = 1e-4  # relative, of fp32 sums in another order


@dataclass(frozen=True)
class RouterForm:
    """How a router computes weights from logits, as arguments of ``ops.select_experts``.

    ``keeps_dtypes``: weights and ids get the dtypes that the router itself gives, for blocks that need them.
    """

    scoring: str
    score_chosen: bool
    renormalize: bool
    in_fp32: bool
    groups: tuple[int, int]
    scale: float
    keeps_dtypes: bool = False


def linear_of(router: Any) -> Any:
    """Return the module with the weight [experts, H] and bias of a router: itself, or the one linear in it."""
    children = list(router.children())
    is_around = getattr(router, "weight", None) is None and len(children) == 1 and type(children[0]) is nn.Linear
    return children[0] if is_around else router


def is_router(module: Any) -> bool:
    """Return whether a module looks like a router: a weight [experts, H] and ``top_k``."""
    weight, top_k = getattr(linear_of(module), "weight", None), getattr(module, "top_k", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.dtype not in _DTYPES:
        return False
    return isinstance(top_k, int) and 1 <= top_k <= weight.shape[0]


def correction_of(router: Any, block: Any = None) -> Tensor | None:
    """Return what is added to scores for the choice alone; the router has it, or the block that hands it over."""
    found = correction_place(router, block)
    return None if found is None else getattr(*found)


def correction_place(router: Any, block: Any = None) -> tuple[Any, str] | None:
    """Return the module that has the correction of a router's scores, and its name there."""
    for holder, name in product((router, getattr(router, "moe_statics", None), block), CORRECTIONS):
        if isinstance(getattr(holder, name, None), Tensor):
            return holder, name
    return None


def _more_arguments(router: Any, block: Any) -> tuple[Tensor, ...]:
    """Return the arguments of a router after the tokens, if these are its correction bias or none."""
    names = list(inspect.signature(type(router).forward).parameters)[2:]
    correction = correction_of(router, block)
    return (correction,) if len(names) == 1 and names[0] in CORRECTIONS and correction is not None else ()


def find_form(router: Any, block: Any = None) -> RouterForm | None:
    """Return the form that gives what a router gives; None if none does.

    Calls copies of the router, once for each class with the same settings in the same class of blocks.
    """
    correction = correction_of(router, block)
    told = None if correction is None else (correction.shape, correction.dtype)
    more = type(block), linear_of(router).weight.dtype, told
    return remembered(router, more, lambda: _form_of(router, block))


def _form_of(router: Any, block: Any) -> RouterForm | None:
    """Try the forms on a copy in fp32, where no two experts have the same score.

    A copy in the router's own dtype tells in which dtype its logits are.
    """
    own_copy, exact_copy = random_copy(router), random_copy(router, torch.float32)
    random = torch.Generator().manual_seed(2)
    for module in (*own_copy.modules(), *exact_copy.modules()):
        for name in CORRECTIONS:  # untrained ones are zeros, with which no form can be told from another
            if (buffer := module._buffers.get(name)) is not None:
                module._buffers[name] = torch.randn(buffer.shape, generator=random).mul(0.5).to(buffer.dtype)
    weight = linear_of(own_copy).weight
    more = tuple(torch.randn(t.shape, generator=random) * 0.5 for t in _more_arguments(router, block))
    own_more = tuple(t.to(given.dtype) for t, given in zip(more, _more_arguments(router, block), strict=True))
    x = random_tokens(weight)
    for tokens in (x, x.unsqueeze(0)):  # some are called with [tokens, H], some with [B, T, H]
        try:
            own, expected = own_copy(tokens, *own_more), exact_copy(tokens.float(), *more)
        except Exception:  # it is called in another way
            continue
        if not _is_routing(own, router) or not _is_routing(expected, router):
            continue
        if own[0].dtype not in (weight.dtype, torch.float32):
            continue
        forms = _forms(router, in_fp32=own[0].dtype == torch.float32)
        return next((form for form in forms if _gives(exact_copy, form, (tokens.float(), *more), expected)), None)
    return None


def _gives(router: Any, form: RouterForm, arguments: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Return whether a form gives what is expected; a form that our operators reject does not."""
    try:
        return _agree(route(router, form, *arguments), expected)
    except Exception:  # such as a number of groups that our operator does not take
        return False


def _is_routing(found: Any, router: Any) -> bool:
    """Whether a router gives logits [tokens, experts], weights and ids [tokens, K]."""
    if not isinstance(found, tuple) or len(found) != 3 or not all(isinstance(t, Tensor) for t in found):
        return False
    shapes = [(_TOKENS, linear_of(router).weight.shape[0]), *[(_TOKENS, router.top_k)] * 2]
    return [t.shape for t in found] == shapes and not found[2].is_floating_point()


def _forms(router: Any, in_fp32: bool) -> Iterator[RouterForm]:
    groups, chosen = getattr(router, "num_group", 0), getattr(router, "topk_group", 0)
    limited = [(groups, chosen)] if isinstance(groups, int) and isinstance(chosen, int) and groups > 1 else []
    experts = linear_of(router).weight.shape[0]
    if limited and (experts % groups or router.top_k > experts // groups * chosen):
        # Groups that do not divide the experts are not used by the router. With too few experts in the chosen groups it
        # goes on with experts of other groups, whose scores transformers has set to 0.
        limited = []
    scales = [float(v) for name in _SCALES if isinstance(v := getattr(router, name, None), int | float)]
    choices = product(("softmax", "sigmoid", "sqrt_softplus"), (False, True), (True, False))
    for scoring, score_chosen, renormalize in choices:
        for some_groups, scale in product((*limited, (0, 0)), dict.fromkeys((*scales, 1.0))):
            yield RouterForm(scoring, score_chosen, renormalize, in_fp32, some_groups, scale)


def _agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Return whether two results agree except for rounding and the order of a token's experts."""
    if not torch.allclose(found[0], expected[0].float(), rtol=_TOLERANCE, atol=_TOLERANCE):
        return False
    sorted_ids = [ids.long().sort(-1) for ids in (found[2], expected[2])]
    if not torch.equal(sorted_ids[0].values, sorted_ids[1].values):
        return False
    weights = [w.float().gather(-1, o.indices) for w, o in zip((found[1], expected[1]), sorted_ids, strict=True)]
    return torch.allclose(weights[0], weights[1], rtol=_TOLERANCE, atol=_TOLERANCE * 0.1)


def random_tokens(weight: Tensor) -> Tensor:
    """Hidden states for which the logits of random weights are of the size that they have in models.

    Their seed is not that of the weights (0): a token equal to the weights of an expert would have a far larger logit.
    """
    x: Tensor = torch.randn((_TOKENS, weight.shape[1]), generator=torch.Generator().manual_seed(_TOKEN_SEED))
    scale = 4.0 / math.sqrt(weight.shape[1])
    return (x * scale).to(weight.dtype)


def route(module: Any, form: RouterForm, hidden_states: Tensor, *more: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., H] -> logits [tokens, experts], weights and ids [tokens, K], computed from the router's own tensors.

    ``more``: the correction of the scores, where the caller has it.
    """
    linear = linear_of(module)
    weight, bias = linear.weight, getattr(linear, "bias", None)
    if wants_gradient(hidden_states, weight, bias):  # our operators have no gradient, the replaced code has
        routed: tuple[Tensor, Tensor, Tensor] = type(module).forward(module, hidden_states, *more)
        return routed
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    if x.shape[0] <= _FEW_TOKENS and x.dtype == weight.dtype:
        bias32 = None if bias is None else bias.to(torch.float32)
        logits = ops.router_logits(x, weight, bias32, form.in_fp32)
    elif form.in_fp32:
        bias32 = None if bias is None else bias.to(torch.float32)
        logits = nn.functional.linear(x.to(torch.float32), weight.to(torch.float32), bias32)
    else:
        logits = nn.functional.linear(x, weight, bias)
    correction = more[0] if more else correction_of(module)
    weights, ids = ops.select_experts(
        logits,
        module.top_k,
        SCORING[form.scoring],
        form.score_chosen,
        None if correction is None else correction.to(torch.float32).flatten(),
        *form.groups,
        form.renormalize,
        form.scale,
    )
    if form.keeps_dtypes:
        return logits, weights.to(logits.dtype), ids.long()
    return logits, weights, ids
