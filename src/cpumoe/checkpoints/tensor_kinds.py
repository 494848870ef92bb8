"""Kinds of tensors: what part of a model a tensor belongs to, by its name."""

from __future__ import annotations

import re

from cpumoe.checkpoints.architectures import Architecture
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.layer_names import EXPERT

NOT_LOADED = "not loaded"
OTHER = "other"
# The first pattern that fits a name decides. Routers come before these: the table of architectures has their names.
_PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (NOT_LOADED, r"vision|multi_modal_projector|rotary_emb\.inv_freq$"),
        ("experts", EXPERT.pattern),
        ("norms", r"norm\w*\.(weight|bias)$"),
        ("shared experts", r"\.shared_experts?\."),
        ("attention", r"\.(self_attn|attn|attention)\."),
        ("dense mlp", r"\.(mlp|feed_forward|block_sparse_moe)\."),
        ("embeddings", r"(^|\.)embed_tokens\."),
        ("lm_head", r"(^|\.)lm_head\."),
    )
)
ORDER = (
    "experts",
    "shared experts",
    "router",
    "attention",
    "dense mlp",
    "embeddings",
    "lm_head",
    "norms",
    OTHER,
    NOT_LOADED,
)
LINEARS = ("shared experts", "attention", "dense mlp", "lm_head")  # whose weights a tool may quantise
PER_MLP = ("shared experts", "dense mlp", "router")  # what layers with experts and layers without differ in


def kind_of(tensor: str, architecture: Architecture | None) -> str:
    module = tensor.rpartition(".")[0]
    if architecture is not None and module.endswith(architecture.unquantized):
        return "router"
    return next((kind for kind, pattern in _PATTERNS if pattern.search(tensor)), OTHER)


def kinds_of(checkpoint: Checkpoint, architecture: Architecture | None, not_loaded: tuple[str, ...]) -> dict[str, str]:
    """Tensor -> its kind. ``not_loaded``: what the names of further tensors start with that are left where they are."""
    return {
        name: NOT_LOADED if name.startswith(not_loaded) else kind_of(name, architecture) for name in checkpoint.names
    }
