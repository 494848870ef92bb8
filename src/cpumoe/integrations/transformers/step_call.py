"""The calls of a model that its native decoder can compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpumoe.integrations.transformers.call_options import names_of_attention_functions
from cpumoe.integrations.transformers.replacements.attention import PASSED_OVER
from cpumoe.layers.linear import QuantizedLinear

#: Arguments of a base model that a step understands; others must not ask for anything.
_SERVED = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")

#: Of those that attention may ignore because they are in its mask, these keep packed sequences apart, which a step
#: does not.
_PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
_IGNORED = frozenset(PASSED_OVER) - _PACKED

#: Attributes of a configuration that ask for results which a step does not have.
_MORE_RESULTS = ("output_hidden_states", "output_attentions", "output_router_logits")

_FEW_ROWS = 16  # up to here our product with a head in float is faster than PyTorch's


class OwnCode(Exception):
    """Why a call is computed by the model's own code, layer by layer."""


@dataclass(frozen=True)
class StepCall:
    """A call that a step may compute.

    Attributes:
        x: token ids int64 [B, T], or embeddings [B, T, H].
        keep: logits of the last so many tokens; 0 for all.
    """

    x: Tensor
    cache: Any
    returns_cache: bool
    mask: Tensor | None
    positions: Tensor | None
    keep: int


@dataclass(frozen=True)
class Positions:
    """Positions of the tokens of a call, int64 [B or 1, T], and padding, int64 [B]; None for the usual ones."""

    positions: Tensor | None
    padding: Tensor | None
    last: int


def call_for(
    given: Mapping[str, Any], config: Any, head: Any, dtype: torch.dtype, known_options: frozenset[str]
) -> StepCall:
    """Return the call as a step computes it. Raise OwnCode if the model's own code has to compute it.

    Args:
        given: the arguments by name.
        config: of the base model.
        head: the model that has the head, for calls that go on to logits.
        dtype: of hidden states.
        known_options: names that the code of the model mentions.
    """
    keep = given.get("logits_to_keep", 0) if head is not None else 0
    for name, option in given.items():
        if name in _SERVED or name in _IGNORED or name == "return_dict":
            continue
        if name == "logits_to_keep" and head is not None:
            continue
        if option is False and name == "is_causal":
            raise OwnCode("is_causal=False")
        if option is None or option is False:
            continue
        if name in _PACKED or name in known_options or name in names_of_attention_functions():
            raise OwnCode(f"it has the argument {name}")
    for name in _MORE_RESULTS:
        if given.get(name, getattr(config, name, False)):
            raise OwnCode(f"{name}=True")
    tokens, embeds, cache = given.get("input_ids"), given.get("inputs_embeds"), given.get("past_key_values")
    if (tokens is None) == (embeds is None):
        raise OwnCode("it needs either input_ids or inputs_embeds")
    x: Any = tokens if embeds is None else embeds
    if not x.is_cpu or x.dim() != (2 if embeds is None else 3) or x.numel() == 0:
        raise OwnCode("its tokens are not [batch, tokens] on the CPU")
    if x.dtype != (torch.int64 if embeds is None else dtype):
        raise OwnCode(f"its tokens are {x.dtype}")
    use_cache = given.get("use_cache")
    if use_cache is None:
        use_cache = getattr(config, "use_cache", True)
    returns_cache = bool(use_cache) or cache is not None
    if cache is None:
        from transformers import DynamicCache

        cache = DynamicCache(config=config)
    if head is not None and not _keeps(head, x, keep):
        raise OwnCode("PyTorch is faster at so many logits of a float head")
    return StepCall(x, cache, returns_cache, given.get("attention_mask"), given.get("position_ids"), keep)


def _keeps(head: Any, x: Tensor, keep: Any) -> bool:
    """Return whether the step computes the logits: of many rows, PyTorch computes a float head faster."""
    if not isinstance(keep, int) or keep < 0:
        return False
    kept = min(keep, x.shape[1]) if keep else x.shape[1]
    return isinstance(head.get_output_embeddings(), QuantizedLinear) or x.shape[0] * kept <= _FEW_ROWS


def positions_for(call: StepCall, past: int) -> Positions:
    """Return where the tokens of a call are after ``past`` tokens. Raise OwnCode for positions that no step has."""
    batch, count = call.x.shape[:2]
    mask, positions = call.mask, call.positions
    padding = None
    if mask is not None:
        if mask.dim() != 2 or mask.shape != (batch, past + count):
            raise OwnCode("its attention_mask is not [batch, tokens]")
        if not bool(mask.all()) and (padding := _left_padding(mask)) is None:
            raise OwnCode("its attention_mask has more than padding on the left")
    if positions is None:
        return Positions(None, padding, past + count - 1)
    if positions.dim() == 3 and bool((positions == positions[:1]).all()):
        positions = positions[0]  # of text all axes have the same
    if positions.dim() != 2 or positions.shape[1] != count or positions.shape[0] not in (1, batch):
        raise OwnCode("its position_ids are not [batch, tokens]")
    if mask is None and bool((positions.diff() != 1).any()):
        raise OwnCode("its position_ids are those of packed sequences")  # transformers keeps them apart
    positions = positions.to(torch.int64)
    if mask is not None and padding is not None:  # positions of padding may be anything, -1 for one
        positions = positions.where(mask[:, past:].bool(), 0)
    return Positions(positions.contiguous(), padding, int(positions.max()))


def _left_padding(mask: Tensor) -> Tensor | None:
    """The places of padding before each sequence, int64 [B]; None if the mask is more than that."""
    real = mask.to(torch.bool)
    padding = real.shape[1] - real.sum(1)
    expected = torch.arange(real.shape[1]) >= padding.unsqueeze(1)
    return padding if torch.equal(real, expected) else None
