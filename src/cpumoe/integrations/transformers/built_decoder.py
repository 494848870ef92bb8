"""A decoder that was built from a model, and what tells whether the model has changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cpumoe import _core
from cpumoe.integrations.transformers.call_options import names_in, names_in_files_of
from cpumoe.integrations.transformers.recognition.build import build, with_own_heads
from cpumoe.integrations.transformers.recognition.parts import matrix_of
from cpumoe.integrations.transformers.recognition.recognize import norm_of, recognize_decoder
from cpumoe.integrations.transformers.recognition.rotary import rotary_of
from cpumoe.integrations.transformers.recognition.values import LayerVariant, Source, UnsupportedDecoder
from cpumoe.integrations.transformers.step_caches import StepCaches
from cpumoe.integrations.transformers.watched_modules import (
    Entry,
    WatchedValues,
    copied_tensors,
    is_foreign,
    watched_entries,
    watched_owner,
)
from cpumoe.ops.decoder import DecoderModel, Gqa
from cpumoe.ops.decoder_steps import Decoder

#: The module of transformers whose hooks stay where hidden states or attentions have been asked for once.
_CAPTURING = "transformers.utils.output_capturing"


@dataclass(frozen=True)
class BuiltDecoder:
    """A decoder and what it was built from; never changed, so that threads may use it while another one is built.

    Attributes:
        recognized: what the decoder was built from.
        positions: that its rotary tables have.
        has_head: whether steps can go on to logits.
        own_heads: layers whose caches have the heads of this rank alone. Latents are those of all heads.
        hooks: of the modules that a step does not call, two dicts for each.
        has_foreign_forward: whether one of these has another forward than its class or this package gave it.
        watched: entries for ``_core.has_changed``.
        values: of the small tensors that the decoder holds copies of.
        known_options: names that the code of the model mentions, without the head and with it.
    """

    recognized: DecoderModel[Source]
    decoder: Decoder
    positions: int
    has_head: bool
    caches: StepCaches
    dtype: torch.dtype
    own_heads: tuple[int, ...]
    hooks: tuple[dict[int, Any], ...]
    has_foreign_forward: bool
    watched: tuple[Entry, ...]
    values: WatchedValues
    known_options: tuple[frozenset[str], frozenset[str]]

    def serves(self, last: int, with_head: bool) -> bool:
        """Return whether this is the decoder for positions up to ``last`` of a model that has not changed."""
        if last >= self.positions or (with_head and not self.has_head):
            return False
        return not _core.has_changed(self.watched) and not self.values.have_changed()

    def is_watched(self) -> bool:
        """Return whether other code's hooks or forwards are inside, which a step would leave out."""
        return self.has_foreign_forward or has_hooks(self.hooks)


def has_hooks(hooks: Iterable[dict[int, Any]]) -> bool:
    """Return whether there are hooks; transformers' own are for calls that ask for more results."""
    return any(
        any(getattr(hook, "__module__", None) != _CAPTURING for hook in found.values()) for found in hooks if found
    )


def build_decoder(
    base: Any,
    owner: Any,
    head: Any,
    variants: Callable[[Any], tuple[LayerVariant, ...]],
    positions: int,
    *,
    is_int8: bool,
) -> BuiltDecoder:
    """Build the decoder of a base model as it is. Raise UnsupportedDecoder if there is none.

    Args:
        owner: the model with the head around it, or None.
        head: that steps may go on to, or None.
        variants: returns the variant of each layer.
        positions: number of positions of the rotary tables.
        is_int8: whether the KV cache has int8 records.
    """
    others = (norm_of(base), base.embed_tokens, rotary_of(base), head)
    modules = [*base.layers.modules(), *(m for m in others if m is not None)]
    owners = [m for m in (base, owner) if m is not None]
    watched = (  # first: what another thread changes from here on is noticed in the next call
        *(entry for m in modules for entry in watched_entries(m)),
        *(entry for m in owners for entry in watched_owner(m)),
    )
    rotary = rotary_of(base)
    angles = () if rotary is None else (b for b in rotary.buffers() if b.dim() <= 1)  # of which there are tables
    values = WatchedValues((*(tensor for m in modules for tensor in copied_tensors(m)), *angles))
    _refuse_fewer_layers(base)
    recognized = recognize_decoder(base, variants(base))
    model = build(base, recognized, torch.arange(positions))
    if head is not None:
        model = replace(model, head=matrix_of(head))
    if (group := model.group) is not None:
        model = with_own_heads(model, group.rank, group.ranks)
    own_heads = tuple(
        index for index, layer in enumerate(model.layers) if isinstance(layer.mixer, Gqa) and layer.mixer.ranks > 1
    )
    decoder = Decoder(model)
    caches = StepCaches(decoder, is_int8=is_int8)
    if not any(caches.forms):
        raise UnsupportedDecoder("none of its layers has attention, whose cache would count the tokens")
    classes: set[type] = {type(module) for module in base.layers.modules()}
    known = frozenset().union(_names_in_forward(base), *(names_in_files_of(each) for each in classes))
    return BuiltDecoder(
        recognized,
        decoder,
        positions,
        head is not None,
        caches,
        model.embedding.dtype,
        own_heads,
        tuple(hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)),
        any(is_foreign(vars(m).get("forward")) for m in modules),
        watched,
        values,
        (known, known if owner is None else known | _names_in_forward(owner)),
    )


def entries_of(base: Any, owner: Any) -> tuple[Entry, ...]:
    """Return the entries of all modules of a base model, and of the model with the head around it."""
    modules = [m for m in base.modules() if m is not base]
    owners = [base]
    if owner is not None:
        owners.append(owner)
        modules += [m for child in owner.children() if child is not base for m in child.modules()]
    return (
        *(entry for m in modules for entry in watched_entries(m)),
        *(entry for m in owners for entry in watched_owner(m)),
    )


def _refuse_fewer_layers(base: Any) -> None:
    """Raise UnsupportedDecoder if the configuration has fewer layers: the model's own code leaves out the last ones."""
    count = getattr(base.config, "num_hidden_layers", None)
    if isinstance(count, int) and count < len(base.layers):
        raise UnsupportedDecoder(
            f"its configuration has num_hidden_layers={count}, and it has {len(base.layers)} layers"
        )


def _names_in_forward(module: nn.Module) -> frozenset[str]:
    """Return the names that the forwards of a module's classes mention."""
    return frozenset(names_in(vars(each).get("forward") for each in type(module).__mro__))
