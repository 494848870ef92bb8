"""Lightning attention (MiniMax) with one operator for its pass over the state.

transformers multiplies blocks of 256 tokens behind an empty cache, and loops over tokens in Python behind a filled one.
The layers are known by the attributes they have; what is put in place is compared with what it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.integrations.transformers.replacements.replacement_check import (
    FEATURES,
    is_near,
    left_padding,
    replace_forwards,
    twin_of,
    wants_gradient_through,
)


@dataclass(frozen=True)
class LightningLayer:
    """The facts of a layer of lightning attention."""

    heads: int
    head_dim: int

    def projections(self) -> dict[str, tuple[int, int]]:
        inner = self.heads * self.head_dim
        return {"qkv_proj": (FEATURES, 3 * inner), "output_gate": (FEATURES, inner), "out_proj": (inner, FEATURES)}


def speed_up_lightning_attention(model: nn.Module) -> None:
    """Gives the layers of lightning attention of a model their one-step form, where it computes what they compute."""
    called = frozenset(("qkv_proj", "out_proj", "output_gate", "norm", "act_fn"))
    replace_forwards(model, describe, lightning_forward, _difference, called)


def describe(module: Any) -> LightningLayer | None:
    """What a module is as lightning attention; None if it is none, or one that is built in another way."""
    names = ("qkv_proj", "out_proj", "output_gate", "norm", "act_fn", "slope_rate", "num_attention_heads", "head_dim")
    if not all(hasattr(module, name) for name in (*names, "layer_idx")):
        return None
    layer = LightningLayer(module.num_attention_heads, module.head_dim)
    return layer if module.slope_rate.shape == (layer.heads, 1, 1) else None


def lightning_forward(
    module: Any,
    layer: LightningLayer,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """[B, T, H] -> [B, T, H] and the state behind the tokens, which the cache gets too."""
    state = None if past_key_values is None else past_key_values.get_linear_cache(module.layer_idx)
    served = not module.training and hidden_states.is_cpu and (state is None or isinstance(state, Tensor))
    served = served and (attention_mask is None or attention_mask.shape == hidden_states.shape[:2])
    if not served or wants_gradient_through(module, hidden_states):
        return _original(module, hidden_states, attention_mask, past_key_values, position_embeddings, options)
    qkv = module.act_fn(module.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    slopes = module.slope_rate.view(-1).to(torch.float32)
    mixed, state = ops.lightning_attention(qkv, slopes, layer.heads, state)
    out = module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * module.norm(mixed))
    if past_key_values is not None:
        past_key_values.set_linear_cache(module.layer_idx, state)
    return out, state


def _original(
    module: Any, hidden_states: Tensor, mask: Tensor | None, cache: Any, positions: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = type(module).forward(
        module,
        hidden_states,
        position_embeddings=positions,
        attention_mask=mask,
        past_key_values=cache,
        **options,
    )
    return out


class _States:
    """A cache for one layer, as far as lightning attention asks for it."""

    def __init__(self) -> None:
        self.state: Tensor | None = None

    def get_linear_cache(self, index: int) -> Tensor | None:
        return self.state

    def set_linear_cache(self, index: int, state: Tensor) -> None:
        self.state = state


#: Tokens of the calls one after the other, behind an empty cache; the first call has padding on its left.
_CALLS: Sequence[int] = (7, 1, 3, 1)


def _difference(module: nn.Module, layer: LightningLayer) -> str:
    """What the one-step form does differently from the layer's own code; empty if nothing."""
    twin = twin_of(module, layer.projections())
    ours, theirs = _States(), _States()
    for index, tokens in enumerate(_CALLS):
        x = torch.randn(2, tokens, FEATURES)
        mask = left_padding(tokens) if index == 0 else None
        got = lightning_forward(twin, layer, x, None, mask, ours)
        expected = _original(twin, x, mask, theirs, None, {})
        assert ours.state is not None and theirs.state is not None
        if not is_near(got[0], expected[0]):
            return f"its output is another for {tokens} tokens behind {sum(_CALLS[:index])}"
        if not (is_near(got[1], expected[1]) and is_near(ours.state, theirs.state)):
            return f"its state is another for {tokens} tokens behind {sum(_CALLS[:index])}"
    return ""
