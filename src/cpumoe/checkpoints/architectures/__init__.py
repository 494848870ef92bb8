"""Architectures: where the experts of a model are, in memory and on disk, and what its config.json says of them.

``families.py`` is the table, ``architecture.py`` what a row of it says, ``layer_shapes.py`` the sizes of linears.
"""

from __future__ import annotations

from collections.abc import Mapping

from cpumoe.checkpoints.architectures.architecture import (
    Architecture,
    ExpertsFacts,
    Projections,
)
from cpumoe.checkpoints.architectures.families import ARCHITECTURES
from cpumoe.checkpoints.architectures.layer_shapes import Config, Sizes, Vectors
from cpumoe.errors import CheckpointError

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Config",
    "ExpertsFacts",
    "Projections",
    "Sizes",
    "Vectors",
    "architecture_of",
    "known_architecture",
    "text_config",
]


def architecture_of(config: Config) -> Architecture:
    """The family of a config.json; raises CheckpointError with the list of those that are known."""
    architecture = known_architecture(config)
    if architecture is None:
        model_type = text_config(config).get("model_type")
        raise CheckpointError(f"model_type {model_type!r:.80} is not known; known are {', '.join(ARCHITECTURES)}")
    return architecture


def known_architecture(config: Config) -> Architecture | None:
    """The family of a config.json, or None; a multimodal model has that of its language model."""
    model_type = text_config(config).get("model_type")
    return ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None


def text_config(config: Config) -> Config:
    """The part of a config.json that describes the language model (multimodal models nest it)."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config
