"""Root-mean-square norms of a model in one operator each, known by their parts and by what they compute."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.integrations.transformers.replacements.replaced_forward import ReplacedForward, replaced_forward
from cpumoe.ops import wants_gradient

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


def speed_up_norms(model: nn.Module) -> None:
    """Gives the norms of a model one operator each, where it computes what they compute."""
    known: dict[Hashable, NormForm | None] = {}
    for module in model.modules():
        epsilon = _epsilon(module)
        if epsilon is None or "forward" in vars(module):  # the second: somebody else has replaced it
            continue
        key = (type(module), epsilon, module.weight.dtype, module.weight.shape)
        if key not in known:
            known[key] = find_form(module)
        if (form := known[key]) is not None:
            module.forward = ReplacedForward(rms_norm, module, form)


def rms_norm(module: Any, form: NormForm, hidden_states: Tensor) -> Tensor:
    """The forward of a root-mean-square norm in one operator."""
    weight = module.weight
    is_ours = form.fits(hidden_states.dtype, weight.dtype) and hidden_states.shape[-1] == len(weight)
    if not is_ours or wants_gradient(hidden_states, weight):  # a weight of one value may be spread over rows
        normed: Tensor = type(module).forward(module, hidden_states)
        return normed
    return ops.rms_norm(hidden_states, weight, form.epsilon, form.round_first, form.plus_one)


def form_of(module: Any) -> NormForm | None:
    """Return the form of a norm whose forward was replaced by one operator; a changed norm's is found anew."""
    replaced = replaced_forward(module, rms_norm)
    if replaced is None:
        return None
    found: NormForm | None = replaced.facts if replaced.is_current() else find_form(module)
    return found


def find_form(module: Any) -> NormForm | None:
    """How a norm computes, if it is a root-mean-square norm by its parts and by what it gives for random input."""
    epsilon = _epsilon(module)
    if epsilon is None:
        return None
    if module.weight.dtype == torch.float32:  # models in fp16 and bf16 may keep the weights of norms in fp32
        flags = _find_flags(module, epsilon, torch.bfloat16)
        if flags is not None:
            exact = _find_flags(module, epsilon, torch.float32)  # where the rounding of bf16 hides no difference
            return NormForm(epsilon, *flags, keeps_dtype=True) if exact is not None and exact[1] == flags[1] else None
    flags = _find_flags(module, epsilon, module.weight.dtype)
    return None if flags is None else NormForm(epsilon, *flags)


def _find_flags(module: Any, epsilon: float, dtype: torch.dtype) -> tuple[bool, bool] | None:
    """Return the flags with which ``ops.rms_norm`` computes what a module computes for rows of a dtype, if any do."""
    weight = module.weight
    with torch.no_grad():
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
    """What a norm adds to the mean square; None for a module that has other parts than such a norm."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not weight.is_cpu or weight.dtype not in _TOLERANCES:
        return None
    if isinstance(module, nn.LayerNorm | nn.modules.batchnorm._NormBase | nn.GroupNorm):
        return None
    if len(list(module.parameters())) != 1 or len(inspect.signature(type(module).forward).parameters) != 2:
        return None  # the second: some take a gate as well
    return next((value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
