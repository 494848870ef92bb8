"""Parts of a layer: linears, norms, and the rule that every tensor of a layer must be used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.recognition import norms
from cpumoe.integrations.transformers.recognition.values import (
    LinearWeight,
    Source,
    Stored,
    UnsupportedDecoder,
    shape_of,
)
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.ops import decoder
from cpumoe.parallel.linear import SplitLinear


class Parts:
    """The parts of one module of a base model. Every tensor in it must be asked for.

    Args:
        paths: of all modules of the base model, by ``id``.
    """

    def __init__(self, module: nn.Module, paths: dict[int, str]) -> None:
        self._name = type(module).__name__
        self._paths = paths
        self._left = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}

    def path(self, module: nn.Module) -> str:
        return self._paths[id(module)]

    def take(self, module: nn.Module) -> None:
        """Count all tensors of a module as used."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._left.pop(id(tensor), None)

    def matrix(self, module: Any, name: str) -> decoder.Matrix[Source]:
        """Return the weight and bias of a linear. Raise UnsupportedDecoder for a module of another kind."""
        check_linear(module, name)
        self.take(module)
        return decoder.Matrix(LinearWeight(self.path(module), (module.out_features, module.in_features)))

    def norm(self, module: Any, name: str) -> decoder.Norm[Source]:
        """Return a root-mean-square norm. Raise UnsupportedDecoder for a module of another kind."""
        form = norms.find_form(module)
        if form is None:
            raise UnsupportedDecoder(f"{name} ({type(module).__name__}) is no root-mean-square norm that we know")
        self.take(module)
        weight = Stored(self.path(module), "weight", shape_of(module.weight), as_fp32=True)
        return decoder.Norm(weight, form.epsilon, form.round_first, form.plus_one)

    def tensor(self, module: nn.Module, name: str, *, as_fp32: bool = False, flat_from: int | None = None) -> Stored:
        """Return a parameter or buffer of a module."""
        found = getattr(module, name)
        self._left.pop(id(found), None)
        return Stored(self.path(module), name, shape_of(found), as_fp32, flat_from)

    def optional(self, module: nn.Module, name: str, *, as_fp32: bool = False) -> Stored | None:
        """Return a parameter or buffer of a module; None if it has none of that name."""
        return self.tensor(module, name, as_fp32=as_fp32) if isinstance(getattr(module, name, None), Tensor) else None

    def refuse_rest(self) -> None:
        names = [name for name in self._left.values() if not name.endswith(("inv_freq", "inv_freq_long"))]
        if names:
            raise UnsupportedDecoder(f"{self._name} has {names[0]}, which has no place in a described layer")


def refuse_widening_norms(base: nn.Module, dtype: torch.dtype) -> None:
    """Raise UnsupportedDecoder if a norm's weight is of another dtype than the rows, and would widen them."""
    for name, module in base.named_modules():
        form = norms.find_form(module)
        if form is not None and not form.fits(dtype, module.weight.dtype):
            raise UnsupportedDecoder(f"{name} is in {module.weight.dtype} and turns rows in {dtype} into it")


def check_linear(module: Any, name: str) -> None:
    """Raise UnsupportedDecoder for a module that is no linear, float or packed."""
    inner = module.own if isinstance(module, SplitLinear) else module
    if not isinstance(inner, QuantizedLinear) and type(inner) is not nn.Linear:
        raise UnsupportedDecoder(f"{name} is a {type(inner).__name__}")


def matrix_of(module: Any) -> decoder.Matrix[Tensor]:
    """Return the weight and bias of a linear that :func:`check_linear` accepts."""
    if isinstance(module, SplitLinear):
        return replace(matrix_of(module.own), ranks=module.ranks.size)
    if isinstance(module, QuantizedLinear):
        return decoder.Matrix(module.weight_packed)
    bias = None if module.bias is None else module.bias.detach().float()
    return decoder.Matrix(module.weight.detach().contiguous(), bias)
