"""Ledger of bits: tiny models whose weights and RoPE tables are bit-identical on every machine."""

from __future__ import annotations

from typing import Any

import torch
from bit_numbers import RoundedOnce, numbers
from every_architecture import tiny_model

import cpumoe
from cpumoe.integrations.transformers.adapter import native_of, native_with_head


def exact_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a family's float model; call it inside of :class:`RoundedOnce` if its tables are to be the same too."""
    model = tiny_model(family, dtype=dtype, **changes)
    fill(model)
    return model


@torch.no_grad()
def fill(model: Any) -> None:
    """Overwrite all parameters, and all buffers that checkpoints have, with numbers that their names say.

    Weights of norms lie around 1; other vectors (biases, sinks, decay rates) and matrices around 0.
    """
    names = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in names or not tensor.is_floating_point():
            continue
        is_norm = tensor.dim() == 1 and name.endswith("weight")
        scale = 2.0**-3 if tensor.dim() == 1 else 2.0**-2
        tensor.copy_(numbers(name, *tensor.shape, scale=scale, offset=1.0 if is_norm else 0.0))


def packed_model(family: str, scheme: str, linears: str | None, dtype: torch.dtype, **changes: Any) -> Any:
    """Return a family's model with quantised experts, and with quantised linears if they have a scheme."""
    with RoundedOnce():
        return cpumoe.accelerate(exact_model(family, dtype, **changes), scheme, linears=linears)


def native_base(model: Any) -> Any | None:
    """Return the base model inside of a model that the native decoder runs; None if there is none."""
    return next((module for module in model.modules() if native_of(module) is not None), None)


def has_native_head(model: Any) -> bool:
    """Return whether the native decoder computes a model's logits, not its hidden states alone."""
    return native_with_head(model) is not None
