"""Routers of a model in two operators each.

transformers writes a router as a dozen of PyTorch operators, which for one token take longer than the products of small
experts.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.recognition.routers import (
    RouterForm,
    find_form,
    is_router,
    linear_of,
    random_tokens,
    route,
)
from cpumoe.integrations.transformers.replacements.replaced_forward import ReplacedForward
from cpumoe.integrations.transformers.watched_modules import kind_of
from cpumoe.layers.experts import Experts

_log = logging.getLogger("cpumoe")

_BLOCK_TOLERANCE = 0.02  # of a token's result in 16 bits


def speed_up_routers(model: nn.Module) -> None:
    """Gives the routers in front of packed experts their one-step form, where one does what they do."""
    forms: dict[Hashable, RouterForm | None] = {}
    for name, block in model.named_modules():
        if not any(isinstance(child, Experts) for child in block.children()):
            continue
        for child_name, router in block.named_children():
            if not is_router(router) or "forward" in vars(router) or not linear_of(router).weight.is_cpu:
                continue
            key = (type(block), type(router), kind_of(router, -1), linear_of(router).weight.dtype)
            if key not in forms:
                forms[key] = _form_for_block(block, router)
                if forms[key] is None:
                    _log.info("%s.%s (%s) keeps its own code", name, child_name, type(router).__name__)
            if (form := forms[key]) is not None:
                router.forward = ReplacedForward(route, router, form)


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
    x = random_tokens(linear_of(router).weight).unsqueeze(0)
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
