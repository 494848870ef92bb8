"""Models with a native decoder: run their own code instead, or count the steps of the decoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cpumoe.integrations.transformers import adapter
from cpumoe.integrations.transformers.adapter import native_of


def base_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the base model that has a native decoder."""
    return next(module for module in model.modules() if native_of(module) is not None)


@contextmanager
def own_code(model: torch.nn.Module) -> Iterator[None]:
    """Let a model run its own code."""
    replaced = [
        (module, vars(module).pop("forward"))
        for module in model.modules()
        if getattr(vars(module).get("forward"), "func", None) in (adapter.forward, adapter.forward_to_logits)
    ]
    try:
        yield
    finally:
        for module, forward in replaced:
            module.forward = forward


@contextmanager
def counted_steps(model: torch.nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Yield a list that gets the shape [B, T] of every native step."""
    native: Any = native_of(base_of(model))
    decoder = native.decoder
    steps: list[tuple[int, ...]] = []
    original = decoder.step

    def step(tokens: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        steps.append(tuple(tokens.shape[:2]))
        found: torch.Tensor = original(tokens, *arguments, **options)
        return found

    decoder.step = step
    try:
        yield steps
    finally:
        decoder.step = original
