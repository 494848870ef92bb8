"""Root-mean-square norms of a model in one operator each."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cpumoe import ops
from cpumoe.integrations.transformers.recognition.norms import NormForm, find_form
from cpumoe.integrations.transformers.replacements.replaced_forward import ReplacedForward
from cpumoe.ops import wants_gradient


def speed_up_norms(model: nn.Module) -> None:
    """Gives the norms of a model one operator each, where it computes what they compute."""
    for module in model.modules():
        if "forward" in vars(module):  # somebody else has replaced it
            continue
        if (form := find_form(module)) is not None and module.weight.is_cpu:
            module.forward = ReplacedForward(rms_norm, module, form)


def rms_norm(module: Any, form: NormForm, hidden_states: Tensor) -> Tensor:
    """The forward of a root-mean-square norm in one operator."""
    weight = module.weight
    is_ours = form.fits(hidden_states.dtype, weight.dtype) and hidden_states.shape[-1] == len(weight)
    if not is_ours or wants_gradient(hidden_states, weight):  # a weight of one value may be spread over rows
        normed: Tensor = type(module).forward(module, hidden_states)
        return normed
    return ops.rms_norm(hidden_states, weight, form.epsilon, form.round_first, form.plus_one)
