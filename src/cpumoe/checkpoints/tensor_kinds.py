"""Kinds of tensors: what part of a model a tensor belongs to, by its name."""

from __future__ import annotations

import re
from collections.abc import Collection

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.layer_names import EXPERT
from cpumoe.checkpoints.model_layout import ModelLayout

NOT_LOADED = "not loaded"
OTHER = "other"
VISION = "images and sound"
# The first pattern that fits a name decides.
_PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (VISION, r"vision|visual|audio|multi_modal_projector"),
        ("experts", EXPERT.pattern),
        ("norms", r"norm\w*\.(weight|bias)$"),
        ("shared experts", r"\.shared_experts?\."),
        ("attention", r"\.(self_attn|attn|attention|linear_attn|mamba|conv)\."),
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
    VISION,
    OTHER,
    NOT_LOADED,
)


def kinds_of(checkpoint: Checkpoint, layout: ModelLayout | None, experts: Collection[str]) -> dict[str, str]:
    """Tensor -> its kind; ``experts``: names of those that belong to routed experts."""
    routers = frozenset() if layout is None else layout.routers
    left_out = frozenset() if layout is None else layout.left_out

    def kind(name: str) -> str:
        if name in left_out:
            return NOT_LOADED
        if name in experts:
            return "experts"
        if name in routers:
            return "router"
        return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)

    return {name: kind(name) for name in checkpoint.names}
