"""Adapter of transformers' KV cache to the native decoder: room after the tokens of a layer, or recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from cpumoe.integrations.transformers.preallocated_cache import CacheForm, holds_layers, make_roomy
from cpumoe.ops.decoder import Layer, Mla
from cpumoe.ops.decoder_steps import CachePart, Decoder, LayerCache


class StepCaches:
    """The layers of transformers' cache in the cache layouts of a decoder.

    Attributes:
        forms: the form of each layer's keys and values; None for layers with recurrent states.
    """

    def __init__(self, decoder: Decoder, *, is_int8: bool = False) -> None:
        self._layouts = decoder.cache_layouts
        self.forms = tuple(_form(*layer, is_int8) for layer in zip(decoder.model.layers, self._layouts, strict=True))

    def past(self, cache: Any, batch: int) -> int | None:
        """How many tokens a cache holds, whose layers get room for more; None for a cache of another kind or model."""
        if not holds_layers(cache):
            return None
        layers: list[Any] = cache.layers
        if cache.layer_class_to_replicate is not None:
            while len(layers) < len(self.forms):
                layers.append(cache.layer_class_to_replicate())
        if len(layers) != len(self.forms):
            return None
        lengths = set()
        for index, form in enumerate(self.forms):
            if form is None:
                if type(layers[index]) is not LinearAttentionLayer or layers[index].record_past:
                    return None
                continue
            if not make_roomy(cache, index) or not layers[index].has_form(batch, form):
                return None
            lengths.add(layers[index].get_seq_length())
        return lengths.pop() if len(lengths) == 1 else None

    def has_heads_of(self, cache: Any, index: int) -> bool:
        """Whether a layer of a cache holds tokens, with as many heads as the steps keep."""
        form = self.forms[index]
        if form is None or not holds_layers(cache) or index >= len(cache.layers):
            return False
        layer = cache.layers[index]
        return bool(layer.get_seq_length() > 0 and layer.keys.shape[1] == form.heads)

    def reserve(self, cache: Any, batch: int, new: int) -> list[LayerCache] | None:
        """For each layer what a step of ``new`` tokens of ``batch`` sequences writes to; None for states of others."""
        states = {
            index: states_in(cache, index, batch, self._layouts[index])
            for index, form in enumerate(self.forms)
            if form is None
        }
        if None in states.values():
            return None
        entries: list[LayerCache] = []
        for index, form in enumerate(self.forms):
            found = states.get(index)
            entries.append(cache.layers[index].reserve(batch, form, new) if found is None else found)
        return entries

    def advance(self, cache: Any, new: int) -> None:
        """Counts the tokens that a step has written."""
        for index, form in enumerate(self.forms):
            if form is not None:
                cache.layers[index].advance(new)


def _form(layer: Layer[Tensor], layout: tuple[CachePart, ...], is_int8: bool) -> CacheForm | None:
    """Return the form of a layer's keys and values; None for recurrent states."""
    first = layout[0]
    if not first.per_token:
        return None
    heads, width = first.shape
    records = is_int8 and first.may_be_int8
    if isinstance(layer.mixer, Mla):  # transformers keeps latents as keys, and the rotated parts of keys as values
        rank = layer.mixer.kv_lora_rank
        return CacheForm(heads, (rank, width - rank), first.dtype, joined=True, records=records)
    return CacheForm(heads, (width, layout[1].shape[1]), first.dtype, records=records)


def states_in(cache: Any, layer: int, batch: int, parts: Sequence[CachePart]) -> tuple[Tensor, ...] | None:
    """Return the recurrent states of a layer, to be changed in place; zeros before the first token.

    None if transformers' cache has states of other shapes or dtypes.
    """
    states = []
    for part in parts:
        sizes, is_conv, state = (batch, *part.shape), part.name == "conv_state", None
        if cache is not None:
            get = cache.get_conv_state if is_conv else cache.get_recurrent_state
            state = get(layer, state_idx=0)
        if state is None:
            state = torch.zeros(sizes, dtype=part.dtype)
            if cache is not None:
                if is_conv:
                    cache.update_conv_state(state, layer, conv_kernel_size=part.shape[1])
                else:
                    cache.update_recurrent_state(state, layer)
                state = get(layer, state_idx=0)
        if not _is_plain(state, sizes, part.dtype):
            return None
        states.append(state)
    return tuple(states)


def _is_plain(state: Tensor | None, sizes: tuple[int, ...], dtype: torch.dtype) -> bool:
    if state is None or state.shape != sizes or state.dtype != dtype:
        return False
    return state.device.type == "cpu" and state.is_contiguous()
