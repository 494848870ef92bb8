"""Names of decoder layers and of experts in a checkpoint: which layers there are, and which of them are the model's."""

from __future__ import annotations

import re
from collections import Counter
from typing import TypeGuard

from cpumoe.checkpoints.checkpoint import LAYER, Checkpoint
from cpumoe.errors import CheckpointError

#: Names of routed experts and of what is inside them; shared ones have another name.
EXPERT = re.compile(r"(^|\.)experts(\.|$)")


def layers_prefix(checkpoint: Checkpoint) -> str:
    """What the names of the decoder layers start with: ``model.layers.``, or that inside a multimodal model."""
    counts = Counter(match[1] for name in checkpoint.names if (match := LAYER.match(name)) and "vision" not in name)
    if not counts:
        raise CheckpointError(f"{checkpoint.folder}: no tensor belongs to a decoder layer (model.layers.N.)")
    return counts.most_common(1)[0][0]


def prediction_layers(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What the names of layers that predict further tokens start with; these layers are not loaded.

    DeepSeek-V3 and GLM-4.5 have them behind the last layer. They are known by ``eh_proj``, which joins the hidden state
    with the embedding of the next token: a layer without it is a layer of the model, whatever its number.
    """
    layers = checkpoint.text_config.get("num_hidden_layers")
    further = checkpoint.text_config.get("num_nextn_predict_layers")
    if not _is_count(layers) or not _is_count(further):
        return ()
    prefix = layers_prefix(checkpoint)
    joining = (LAYER.match(name) for name in checkpoint.names if ".eh_proj." in name)
    found = {match[0]: int(match[2]) for match in joining if match and match[1] == prefix}
    return tuple(layer for layer, number in found.items() if layers <= number < layers + further)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
