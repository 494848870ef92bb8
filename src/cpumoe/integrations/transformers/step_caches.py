"""transformers' growing cache as a step takes it: room behind the keys and values of a layer, or its states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from cpumoe.integrations.transformers.preallocated_cache import CacheForm, holds_layers, make_roomy
from cpumoe.integrations.transformers.replacements.recurrent import Form
from cpumoe.ops.decoder import LayerCache


class StepCaches:
    """What the layers of a model keep of their tokens.

    Args:
        forms: of each layer.
        dtype: of hidden states.
    """

    def __init__(self, forms: Sequence[CacheForm | Form], dtype: torch.dtype) -> None:
        self.forms = tuple(forms)
        self._dtype = dtype

    def in_records(self) -> StepCaches:
        """The same with keys and values in int8; states stay what they are."""
        forms = [replace(form, records=True) if isinstance(form, CacheForm) else form for form in self.forms]
        return StepCaches(forms, self._dtype)

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
            if not isinstance(form, CacheForm):
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
        if not isinstance(form, CacheForm) or not holds_layers(cache) or index >= len(cache.layers):
            return False
        layer = cache.layers[index]
        return bool(layer.get_seq_length() > 0 and layer.keys.shape[1] == form.heads)

    def reserve(self, cache: Any, batch: int, new: int) -> list[LayerCache] | None:
        """For each layer what a step of ``new`` tokens of ``batch`` sequences writes to; None for states of others."""
        states = {
            index: form.states(cache, index, batch, self._dtype)
            for index, form in enumerate(self.forms)
            if not isinstance(form, CacheForm)
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
            if isinstance(form, CacheForm):
                cache.layers[index].advance(new)
