"""Routing methods by name. :mod:`cpumoe.layers.routing` implements them."""

from __future__ import annotations

import enum


class RoutingMethod(enum.Enum):
    """How experts are chosen and weighted."""

    DEFAULT = "default"  # softmax over all experts, then top-k
    RENORMALIZE = "renormalize"  # top-k of the logits, then softmax (or sigmoid) over the chosen
    RENORMALIZE_NAIVE = "renormalize_naive"  # score, top-k, divide by the sum of the chosen
    DEEPSEEK_V3 = "deepseek_v3"  # score, correction bias for the choice, groups; division by the sum is an option
    LLAMA4 = "llama4"  # top-1, then sigmoid
    TOPK = "topk"  # top-k of the raw logits
    CUSTOM = "custom"  # a callable of the user's
    SIMULATED = "simulated"  # a given load distribution
    UNSPECIFIED = "unspecified"  # nothing that has a name; no backend accepts it
