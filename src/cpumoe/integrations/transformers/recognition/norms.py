"""Root-mean-square norms, recognised by their parts and by what they compute."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.integrations.transformers.recognition.probe import random_copy, remembered

#: How far a norm may be from ours to be the same: the last bit, and what another order of sums does to fp32.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


class NormForm(NamedTuple):
    """How a root-mean-square norm computes.

    ``epsilon`` is added to the mean square. ``round_first``: the normalised row is rounded to its dtype before it is
    multiplied by the weight; ``plus_one``: it is multiplied by 1 + weight. ``keeps_dtype``: a weight in fp32 leaves
    rows of 16 bits in their dtype.
    """

    epsilon: float
    round_first: bool
    plus_one: bool
    keeps_dtype: bool = False

    def fits(self, rows: torch.dtype, weight: torch.dtype) -> bool:
        """Return whether ``ops.rms_norm`` computes the norm for these dtypes."""
        return rows == weight or (self.keeps_dtype and weight == torch.float32)


_FLAGS = ((True, False), (False, False), (False, True), (True, True))  # in the order in which one of several is taken

_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")


def find_form(module: Any) -> NormForm | None:
    """Return how a norm computes; None if it is no root-mean-square norm by its parts or by its results.

    Calls a copy of the module, once for each class with the same settings.
    """
    if (epsilon := _epsilon(module)) is None:
        return None
    return remembered(module, module.weight.dtype, lambda: _form_of(random_copy(module), epsilon))


def _form_of(module: Any, epsilon: float) -> NormForm | None:
    dtype: torch.dtype = module.weight.dtype
    if dtype == torch.float32:  # models in fp16 and bf16 may keep the weights of norms in fp32
        flags = _find_flags(module, epsilon, torch.bfloat16)
        if flags is not None:
            exact = _find_flags(module, epsilon, torch.float32)  # where the rounding of bf16 hides no difference
            return NormForm(epsilon, *flags, keeps_dtype=True) if exact is not None and exact[1] == flags[1] else None
    flags = _find_flags(module, epsilon, dtype)
    return None if flags is None else NormForm(epsilon, *flags)


def _find_flags(module: Any, epsilon: float, dtype: torch.dtype) -> tuple[bool, bool] | None:
    """Return the flags with which ``ops.rms_norm`` computes what a module computes for rows of a dtype, if any do."""
    weight = module.weight
    x = torch.randn((4, len(weight)), generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        expected = module(x)
    except Exception:  # a module that has a weight and an epsilon and is called in another way
        return None
    if not isinstance(expected, Tensor) or expected.shape != x.shape or expected.dtype != dtype:
        return None
    try:
        results = {flags: ops.rms_norm(x, weight, epsilon, *flags) for flags in _FLAGS}
    except Exception:  # our operator rejects its epsilon or its size
        return None
    best = max(results, key=lambda flags: int((results[flags] == expected).sum()))
    limit = _TOLERANCES[dtype]
    return best if torch.allclose(results[best], expected, rtol=limit, atol=limit * 0.01) else None


def _epsilon(module: Any) -> float | None:
    """Return the epsilon of a root-mean-square norm; None for a module with other parts than such a norm."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or weight.dtype not in _TOLERANCES:
        return None
    if isinstance(module, nn.LayerNorm | nn.modules.batchnorm._NormBase | nn.GroupNorm):
        return None
    if (
        len([*module.parameters(), *module.buffers()]) != 1
        or len(inspect.signature(type(module).forward).parameters) != 2
    ):
        return None  # the second: some take a gate as well
    return next((value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
