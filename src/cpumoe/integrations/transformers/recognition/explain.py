"""Whether a checkpoint's model can run a step in one call of the core, from its configuration alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.integrations.transformers.layout.expert_modules import Role, describe_experts, expert_modules, marks_of
from cpumoe.integrations.transformers.layout.model_classes import config_of, empty_model
from cpumoe.integrations.transformers.recognition.decoder_description import (
    choices_for,
    describe_decoder,
    refuse_other_parts,
)
from cpumoe.integrations.transformers.recognition.described_parts import NotDescribed
from cpumoe.integrations.transformers.replacements.norms import speed_up_norms
from cpumoe.integrations.transformers.replacements.routers import speed_up_routers
from cpumoe.layers.experts import Experts


def explain_step(checkpoint: Checkpoint) -> str:
    """One sentence: whether a step of this model is one call, and if not, what stands against it.

    Norms and routers get random weights, experts are stood for by small ones, and everything else stays without any.
    That a layer computes what its parts look like is compared only when the model is loaded.
    """
    model = empty_model(config_of(checkpoint.config), real_buffers=True)
    for name, module in list(expert_modules(model)):
        marks = marks_of(module)
        if marks is not None and marks.role is Role.PLAIN:
            activation = describe_experts(module).shape.activation
            weights = torch.zeros(1, activation.gate_up_rows(32), 32), torch.zeros(1, 32, 32)
            model.set_submodule(name, Experts.quantize(*weights, "w8a8", activation=activation))
    for module in model.modules():
        if _is_small(module):
            module.to_empty(device="cpu", recurse=False)
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter)
    speed_up_norms(model)
    speed_up_routers(model)
    for base in model.modules():
        layers = getattr(base, "layers", None)
        if isinstance(layers, nn.ModuleList) and any(isinstance(m, Experts) for m in layers.modules()):
            return _of_base(base)
    return "layer by layer through transformers: its experts are called in another way"


def _of_base(base: Any) -> str:
    try:
        refuse_other_parts(base)
        choices = tuple(next(choices_for(base, index)) for index in range(len(base.layers)))
        describe_decoder(base, choices, torch.arange(1))
    except NotDescribed as reason:
        return f"layer by layer through transformers: {reason}"
    return "each in one call of the core, if its layers compute what their parts look like"


def _is_small(module: Any) -> bool:
    """Whether a module may be a norm or a router, with few weights of its own."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_meta:
        return False
    return weight.dim() == 1 or (weight.dim() == 2 and isinstance(getattr(module, "top_k", None), int))
