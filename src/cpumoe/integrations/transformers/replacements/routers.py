"""Routers of a model in two operators each, whatever their class: the form that gives what a router gives is taken.

transformers writes a router as a dozen of PyTorch operators, which for one token take longer than the products of small
experts. Families differ in how scores are made of logits, in what is chosen by and in what weights become; all of that
is found by comparing the forms that we have with what the router itself gives for random input.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.integrations.transformers.replacements.replaced_forward import ReplacedForward, replaced_forward
from cpumoe.integrations.transformers.replacements.replacement_check import twin_of
from cpumoe.layers.experts import Experts
from cpumoe.ops import SCORING, wants_gradient

_log = logging.getLogger("cpumoe")

_FEW_TOKENS = 8  # up to here our router is faster, which reads the whole weight for each token; PyTorch reads it once
_TOKENS = 24  # of random input: some of them differ wherever two forms do
_TOKEN_SEED = 1

_SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale", "output_multiplier")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Names of what is added to scores for the choice alone.
CORRECTIONS = ("e_score_correction_bias", "expert_bias")
_TOLERANCE = 1e-4  # relative, of fp32 sums in another order
_BLOCK_TOLERANCE = 0.02  # of a token's result in 16 bits


@dataclass(frozen=True)
class RouterForm:
    """How a router makes weights of logits, in the words of our operators.

    ``keeps_dtypes``: weights and ids get the dtypes that the router itself gives, for blocks that need them.
    """

    scoring: str
    score_chosen: bool
    renormalize: bool
    in_fp32: bool
    groups: tuple[int, int]
    scale: float
    keeps_dtypes: bool = False


def speed_up_routers(model: nn.Module) -> None:
    """Gives the routers in front of packed experts their one-step form, where one does what they do."""
    forms: dict[Hashable, RouterForm | None] = {}
    for name, block in model.named_modules():
        if not any(isinstance(child, Experts) for child in block.children()):
            continue
        for child_name, router in block.named_children():
            if not _is_router(router) or "forward" in vars(router):
                continue
            facts = {
                k: v for k, v in vars(router).items() if isinstance(v, int | float | str) and not k.startswith("_")
            }
            weight = linear_of(router).weight
            key = (type(block), type(router), *sorted(facts.items()), weight.dtype, weight.shape)
            if key not in forms:
                forms[key] = _form_for_block(block, router)
                if forms[key] is None:
                    _log.info("%s.%s (%s) keeps its own code", name, child_name, type(router).__name__)
            if (form := forms[key]) is not None:
                router.forward = ReplacedForward(route, router, form)


def is_replaced(module: Any) -> bool:
    """Return whether a module is a router whose forward was replaced by our operators."""
    return replaced_forward(module, route) is not None


def form_of(module: Any, block: Any) -> RouterForm | None:
    """Return the form of such a router, which ``block`` calls; a changed router's is found anew."""
    replaced = replaced_forward(module, route)
    if replaced is None:
        return None
    found: RouterForm | None = replaced.facts if replaced.is_current() else find_form(module, block)
    return found


def linear_of(router: Any) -> Any:
    """What holds the weight [experts, H] and bias of a router: itself, or the one linear in it."""
    children = list(router.children())
    is_around = getattr(router, "weight", None) is None and len(children) == 1 and type(children[0]) is nn.Linear
    return children[0] if is_around else router


def _is_router(module: Any) -> bool:
    weight, top_k = getattr(linear_of(module), "weight", None), getattr(module, "top_k", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_cpu or weight.dtype not in _DTYPES:
        return False
    return isinstance(top_k, int) and 1 <= top_k <= weight.shape[0]


def correction_of(router: Any, block: Any = None) -> Tensor | None:
    """What is added to scores for the choice alone: the router has it, or the block that hands it over."""
    for holder, name in product((router, getattr(router, "moe_statics", None), block), CORRECTIONS):
        if isinstance(found := getattr(holder, name, None), Tensor):
            return found
    return None


def _more_arguments(router: Any, block: Any) -> tuple[Tensor, ...]:
    """What a router is called with besides tokens, if that is no more than its correction."""
    names = list(inspect.signature(type(router).forward).parameters)[2:]
    correction = correction_of(router, block)
    return (correction,) if len(names) == 1 and names[0] in CORRECTIONS and correction is not None else ()


def find_form(router: Any, block: Any = None) -> RouterForm | None:
    """The form that gives what a router gives; None if none does.

    It is tried on a twin in fp32, where no two experts have the same score; the router itself tells in which dtype its
    logits are.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        twin = twin_of(router, {})
        weight = linear_of(router).weight
        x, more = _random_tokens(weight), _more_arguments(router, block)
        twin_more = tuple(torch.randn(t.shape) * 0.5 for t in more)
        for tokens in (x, x.unsqueeze(0)):  # some are called with [tokens, H], some with [B, T, H]
            try:
                own, expected = router(tokens, *more), twin(tokens.float(), *twin_more)
            except Exception:  # it is called in another way
                continue
            if not _is_routing(own, router) or not _is_routing(expected, router):
                continue
            if own[0].dtype not in (weight.dtype, torch.float32):
                continue
            forms = _forms(router, in_fp32=own[0].dtype == torch.float32)
            return next((form for form in forms if _gives(twin, form, (tokens.float(), *twin_more), expected)), None)
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
    """Whether two results are the same but for rounding and for the order of a token's experts."""
    if not torch.allclose(found[0], expected[0].float(), rtol=_TOLERANCE, atol=_TOLERANCE):
        return False
    sorted_ids = [ids.long().sort(-1) for ids in (found[2], expected[2])]
    if not torch.equal(sorted_ids[0].values, sorted_ids[1].values):
        return False
    weights = [w.float().gather(-1, o.indices) for w, o in zip((found[1], expected[1]), sorted_ids, strict=True)]
    return torch.allclose(weights[0], weights[1], rtol=_TOLERANCE, atol=_TOLERANCE * 0.1)


def _form_for_block(block: nn.Module, router: Any) -> RouterForm | None:
    """The form of a router; it keeps the router's dtypes unless the block is seen to do without."""
    form = find_form(router, block)
    if form is None:
        return None
    kept = replace(form, keeps_dtypes=True)
    parameters = inspect.signature(block.forward).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(required) != 1:
        return kept
    x = _random_tokens(linear_of(router).weight).unsqueeze(0)
    try:
        with torch.no_grad():
            expected = block(x)
            router.forward = ReplacedForward(route, router, form)
            found = block(x)
    except Exception:  # it needs what it was not given here, or the dtypes of the router
        return kept
    finally:
        vars(router).pop("forward", None)
    expected, found = (out[0] if isinstance(out, tuple) else out for out in (expected, found))
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return kept
    if found.dtype != expected.dtype or found.shape != expected.shape or found.dim() < 2:
        return kept
    # In 16 bits an expert may change places with one of the same score, so that a token's result is another.
    errors = (found - expected).float().flatten(0, -2).norm(dim=-1)
    sizes = expected.float().flatten(0, -2).norm(dim=-1)
    return form if bool(((errors / sizes) < _BLOCK_TOLERANCE).float().mean() > 0.5) else kept


def _random_tokens(weight: Tensor) -> Tensor:
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
