"""Names of decoder layers and of experts in a checkpoint: which layers there are, and which of them are the model's."""

from __future__ import annotations

import re
from collections import Counter
from typing import TypeGuard

from cpumoe.checkpoints.architectures import Architecture
from cpumoe.checkpoints.checkpoint import LAYER, Checkpoint, TensorCheck
from cpumoe.errors import CheckpointError

#: Names of routed experts and of what is inside them; shared ones have another name.
EXPERT = re.compile(r"(^|\.)experts(\.|$)")


def architecture_if_needed(checkpoint: Checkpoint) -> Architecture | None:
    """The architecture; None for one that is not in the table and has no experts, and so needs no entry there."""
    try:
        return checkpoint.architecture
    except CheckpointError:
        if any(map(EXPERT.search, checkpoint.names)):
            raise
        return None


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


def check_layers_behind(checkpoint: Checkpoint, check: TensorCheck) -> None:
    """Adds the tensors of layers behind the last one to ``check``, except those of layers that predict further tokens.

    transformers leaves out some by their number alone, and a num_hidden_layers that is too small would cut a model.
    """
    layers = checkpoint.text_config.get("num_hidden_layers")
    if not _is_count(layers):
        return
    prefix, left_out = layers_prefix(checkpoint), prediction_layers(checkpoint)
    for name in sorted(checkpoint.names):
        match = LAYER.match(name)
        behind = match is not None and match[1] == prefix and int(match[2]) >= layers
        if behind and not name.startswith(left_out):
            check.extra.append(name)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
