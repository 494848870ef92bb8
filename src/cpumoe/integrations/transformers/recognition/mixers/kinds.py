"""Which kind of mixer a layer has, and what its cache keeps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import nn

from cpumoe.integrations.transformers.preallocated_cache import CacheForm
from cpumoe.integrations.transformers.recognition.mixers.delta_net import describe_delta_net
from cpumoe.integrations.transformers.recognition.mixers.gqa import describe_gqa
from cpumoe.integrations.transformers.recognition.mixers.mla import describe_mla
from cpumoe.integrations.transformers.recognition.mixers.short_conv import describe_short_conv
from cpumoe.integrations.transformers.recognition.mixers.variants import QUERY_NORMS, Choices
from cpumoe.integrations.transformers.recognition.parts import NotDescribed, Parts, first_of
from cpumoe.integrations.transformers.recognition.rotary import RotaryTables, rotary_of
from cpumoe.integrations.transformers.replacements.recurrent import ConvolutionForm, DeltaForm, Form, state_form
from cpumoe.ops import decoder

_MIXERS = ("self_attn", "linear_attn", "conv")


def mixer_of(layer: Any) -> nn.Module:
    """What mixes tokens in a layer: attention, or what stands in its place. Raises NotDescribed."""
    if (mixer := first_of(layer, _MIXERS)) is None:
        raise NotDescribed(f"{type(layer).__name__} has no {_MIXERS[0]}")
    return mixer


def choices_for(base: Any, index: int) -> Iterator[Choices]:
    """All that a layer may be, the most common first."""
    mixer = mixer_of(base.layers[index])
    if state_form(mixer) is not None:
        yield Choices(rotates=False)
        return
    has_norms = any(hasattr(mixer, name) for name in QUERY_NORMS)
    has_rotary = rotary_of(base) is not None
    for rotates, after in product((True, False) if has_rotary else (False,), (False, True) if has_norms else (False,)):
        yield Choices(False, after, rotates)
        if rotates:
            yield Choices(False, after, rotates, separated=True)
            yield Choices(True, after, rotates)


def describe_mixer(
    base: Any, index: int, mixer: Any, chosen: Choices, tables: RotaryTables, parts: Parts
) -> decoder.Mixer:
    """Return what mixes the tokens of a layer. Raise NotDescribed if no kind fits."""
    form = state_form(mixer)
    if isinstance(form, DeltaForm):
        return describe_delta_net(mixer, form, parts)
    if isinstance(form, ConvolutionForm):
        return describe_short_conv(mixer, parts)
    if not getattr(mixer, "is_causal", True):
        raise NotDescribed(f"its attention ({type(mixer).__name__}) is not causal")
    describe = describe_mla if hasattr(mixer, "kv_lora_rank") else describe_gqa
    return describe(base, index, mixer, chosen, tables, parts)


def cache_form(layer: Any, described: decoder.Layer, dtype: torch.dtype, records: bool = False) -> CacheForm | Form:
    """What a layer keeps of tokens: keys and values, latents and rotated parts of keys side by side, or states."""
    mixer = described.mixer
    if isinstance(mixer, decoder.Mla):
        return CacheForm(1, (mixer.kv_lora_rank, mixer.rope_dim), dtype, joined=True, records=records)
    if isinstance(mixer, decoder.Gqa):
        return CacheForm(mixer.kv_heads, (mixer.head_dim, mixer.value_dim), dtype, records=records)
    form = state_form(mixer_of(layer))
    assert form is not None  # it was described as one
    return form
