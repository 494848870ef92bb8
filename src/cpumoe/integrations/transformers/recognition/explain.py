"""Whether a checkpoint's model can run a step in one call of the core, from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.integrations.transformers.layout.expert_modules import Role, describe_experts, expert_modules, marks_of
from cpumoe.integrations.transformers.layout.model_classes import config_of, empty_model
from cpumoe.integrations.transformers.recognition.build import describe_decoder, refuse_other_parts
from cpumoe.integrations.transformers.recognition.mixers.kinds import choices_for
from cpumoe.integrations.transformers.recognition.parts import NotDescribed
from cpumoe.integrations.transformers.recognition.shown import as_lines, as_values
from cpumoe.integrations.transformers.replacements.norms import speed_up_norms
from cpumoe.integrations.transformers.replacements.routers import CORRECTIONS, linear_of, speed_up_routers
from cpumoe.layers.experts import Experts
from cpumoe.ops import decoder


@dataclass(frozen=True)
class Explanation:
    """Whether a model has a native decoder, in a sentence, and the decoder as values and as lines of text.

    How pairs of RoPE are arranged and where norms of heads stand is found when the model is loaded: here they are as in
    most models.
    """

    sentence: str
    values: dict[str, Any] | None = None
    lines: tuple[str, ...] = ()


def explain_step(checkpoint: Checkpoint) -> Explanation:
    """Explain the native decoder of a model, or what stands against it.

    Norms and routers get random weights, experts are stood for by small ones, and everything else stays without any.
    That a layer computes what its parts look like is compared only when the model is loaded.
    """
    found = recognised_decoder(empty_model(config_of(checkpoint.config), real_buffers=True))
    if isinstance(found, str):
        return Explanation(f"layer by layer through transformers: {found}")
    sentence = "each in one call of the core, if its layers compute what their parts look like"
    return Explanation(sentence, as_values(found), tuple(as_lines(found)))


def reason_against(model: nn.Module) -> str | None:
    """Return why a model cannot have a native decoder, None if nothing is known that stands against it.

    ``model`` is that of :func:`recognised_decoder`.
    """
    found = recognised_decoder(model)
    return found if isinstance(found, str) else None


def recognised_decoder(model: nn.Module) -> decoder.DecoderModel | str:
    """Return a model's decoder as its parts look like, without weights; or why it cannot have one.

    Args:
        model: one with real buffers and no weights, which it gets here as far as they are looked at.
    """
    for name, module in list(expert_modules(model)):
        marks = marks_of(module)
        if marks is not None and marks.role is Role.PLAIN:
            activation = describe_experts(module).shape.activation
            weights = torch.zeros(1, activation.gate_up_rows(32), 32), torch.zeros(1, 32, 32)
            model.set_submodule(name, Experts.quantize(*weights, "w8a8", activation=activation))
    for module in model.modules():
        for small in _small_parts(module):
            small.to_empty(device="cpu", recurse=False)
            for parameter in small.parameters(recurse=False):
                nn.init.normal_(parameter)
    speed_up_norms(model)
    speed_up_routers(model)
    for base in model.modules():
        layers = getattr(base, "layers", None)
        if isinstance(layers, nn.ModuleList) and any(isinstance(m, Experts) for m in layers.modules()):
            return _decoder_of(base)
    return "its experts are called in another way"


def _decoder_of(base: Any) -> decoder.DecoderModel | str:
    try:
        refuse_other_parts(base)
        choices = tuple(next(choices_for(base, index)) for index in range(len(base.layers)))
        return describe_decoder(base, choices, torch.arange(1))
    except NotDescribed as reason:
        return str(reason)


def _small_parts(module: Any) -> Iterator[nn.Module]:
    """Yield a module that may be a norm or a router, with few weights of its own, and the linear in a router.

    A module that holds the correction of a router's scores is another one.
    """
    weight, is_router = getattr(module, "weight", None), isinstance(getattr(module, "top_k", None), int)
    is_small = isinstance(weight, Tensor) and weight.is_meta and weight.dim() in ((1, 2) if is_router else (1,))
    if is_small or any(isinstance(module._parameters.get(name), Tensor) for name in CORRECTIONS):
        yield module
    if is_router and (linear := linear_of(module)) is not module:
        yield linear
