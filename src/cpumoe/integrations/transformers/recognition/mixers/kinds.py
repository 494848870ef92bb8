"""The kind of mixer of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from torch import nn

from cpumoe.integrations.transformers.recognition.mixers.attention import QUERY_NORMS, LayerContext
from cpumoe.integrations.transformers.recognition.mixers.delta_net import DeltaForm, delta_form, recognize_delta_net
from cpumoe.integrations.transformers.recognition.mixers.gqa import recognize_gqa
from cpumoe.integrations.transformers.recognition.mixers.mla import recognize_mla
from cpumoe.integrations.transformers.recognition.mixers.short_conv import (
    ConvolutionForm,
    convolution_form,
    recognize_short_conv,
)
from cpumoe.integrations.transformers.recognition.rotary import rotary_of
from cpumoe.integrations.transformers.recognition.values import LayerVariant, Source, UnsupportedDecoder, first_of
from cpumoe.ops import decoder

_MIXERS = ("self_attn", "linear_attn", "conv")


def state_form(module: Any) -> DeltaForm | ConvolutionForm | None:
    """Return what a module is, if it looks like a layer with a recurrent state."""
    return delta_form(module) or convolution_form(module)


def mixer_of(layer: Any) -> nn.Module:
    """Return what mixes tokens in a layer: attention or another mixer. Raise UnsupportedDecoder without any."""
    if (mixer := first_of(layer, _MIXERS)) is None:
        raise UnsupportedDecoder(f"{type(layer).__name__} has no {_MIXERS[0]}")
    return mixer


def variants_for(base: Any, index: int) -> Iterator[LayerVariant]:
    """Yield all variants that a layer may be, the most common first."""
    mixer = mixer_of(base.layers[index])
    if state_form(mixer) is not None:
        yield LayerVariant(rotates=False)
        return
    has_norms = any(hasattr(mixer, name) for name in QUERY_NORMS)
    has_rotary = rotary_of(base) is not None
    for rotates, after in product((True, False) if has_rotary else (False,), (False, True) if has_norms else (False,)):
        yield LayerVariant(False, after, rotates)
        if rotates:
            yield LayerVariant(False, after, rotates, separated=True)
            yield LayerVariant(True, after, rotates)


def recognize_mixer(mixer: Any, context: LayerContext) -> decoder.Mixer[Source]:
    """Return what mixes the tokens of a layer. Raise UnsupportedDecoder if no kind fits."""
    form = state_form(mixer)
    if isinstance(form, DeltaForm):
        return recognize_delta_net(mixer, form, context.parts)
    if isinstance(form, ConvolutionForm):
        return recognize_short_conv(mixer, context.parts)
    if not getattr(mixer, "is_causal", True):
        raise UnsupportedDecoder(f"its attention ({type(mixer).__name__}) is not causal")
    recognize = recognize_mla if hasattr(mixer, "kv_lora_rank") else recognize_gqa
    return recognize(mixer, context)
