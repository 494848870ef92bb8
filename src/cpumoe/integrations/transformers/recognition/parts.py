"""Parts of a layer: linears, norms, and the rule that every tensor of a layer must be used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.replacements import norms
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.ops import decoder
from cpumoe.parallel.linear import SplitLinear


class NotDescribed(Exception):
    """Why a model is not run in one call; a sentence for its user."""


class Parts:
    """The tensors of a module, of which each must be asked for."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._left = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}

    def take(self, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            self._left.pop(id(tensor), None)

    def take_all_of(self, *modules: nn.Module | None) -> None:
        for module in modules:
            if module is not None:
                self.take(*module.parameters(), *module.buffers())

    def refuse_rest(self) -> None:
        names = [name for name in self._left.values() if not name.endswith(("inv_freq", "inv_freq_long"))]
        if names:
            raise NotDescribed(f"{self._name} has {names[0]}, which has no place in a described layer")


def refuse_widening_norms(base: nn.Module, dtype: torch.dtype) -> None:
    """Raise NotDescribed if a norm's weight is of another dtype than the rows, and would widen them."""
    for name, module in base.named_modules():
        form = norms.form_of(module)
        if form is not None and not form.fits(dtype, module.weight.dtype):
            raise NotDescribed(f"{name} is in {module.weight.dtype} and turns rows in {dtype} into it")


def describe_norm(module: Any, name: str) -> decoder.Norm:
    """A root-mean-square norm. Raises NotDescribed for a module of another kind."""
    form = norms.form_of(module)
    if form is None:
        raise NotDescribed(f"{name} ({type(module).__name__}) is no root-mean-square norm that we know")
    return decoder.Norm(module.weight.detach().float(), form.epsilon, form.round_first, form.plus_one)


def describe_matrix(module: Any, name: str) -> decoder.Matrix:
    """The weight of a linear. Raises NotDescribed for a module of another kind."""
    if isinstance(module, SplitLinear):
        return replace(describe_matrix(module.own, name), ranks=module.ranks.size)
    if isinstance(module, QuantizedLinear):
        return decoder.Matrix(module.weight_packed)
    if type(module) is not nn.Linear:
        raise NotDescribed(f"{name} is a {type(module).__name__}")
    bias = None if module.bias is None else module.bias.detach().float()
    return decoder.Matrix(module.weight.detach().contiguous(), bias)


def first_of(module: Any, names: tuple[str, ...]) -> nn.Module | None:
    """Return the first child module with one of these names; None without any."""
    return next((m for name in names if isinstance(m := getattr(module, name, None), nn.Module)), None)


def plain(parameter: Tensor) -> Tensor:
    """Return the values of a parameter, contiguous."""
    return parameter.detach().contiguous()
