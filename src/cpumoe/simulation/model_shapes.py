"""Shapes of models whose speed on many ranks is predicted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A model, as far as its speed depends on it.

    Attributes:
        hidden, intermediate, experts, topk: of a layer with experts.
        expert_layers: how many layers have experts.
        layers: how many there are in all.
        other_weights: weights beside experts of which a token uses all: attention, shared experts, dense layers, head.
        groups, topk_groups: experts are chosen of the best groups only.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    topk: int
    expert_layers: int
    layers: int
    other_weights: float
    groups: int = 1
    topk_groups: int = 1


MODELS = {
    model.name: model
    for model in (
        ModelShape("qwen3-30b-a3b", 2048, 768, 128, 8, 48, 48, 1.22e9),
        ModelShape("deepseek-v3", 7168, 2048, 256, 8, 58, 61, 16.1e9, groups=8, topk_groups=4),
        ModelShape("kimi-k2", 7168, 2048, 384, 8, 60, 61, 10.4e9),
    )
}
