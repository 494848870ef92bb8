"""What the descriptions of GQA and MLA share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpumoe.integrations.transformers.recognition.mixers.variants import Choices
from cpumoe.integrations.transformers.recognition.parts import Parts, describe_matrix, first_of
from cpumoe.integrations.transformers.recognition.rotary import RotaryTables
from cpumoe.ops import decoder

_GATES = ("gate_proj", "g_proj")


def rope_of(index: int, chosen: Choices, tables: RotaryTables) -> decoder.Rope:
    table = tables.number(index, chosen.interleaved) if chosen.rotates else -1
    return decoder.Rope(table, chosen.interleaved, chosen.separated)


def query_factors_of(base: Any, positions: Tensor) -> Tensor | None:
    """Return the factors of queries that grow with the position beyond the original context length (Llama 4)."""
    rope = getattr(base.config, "rope_parameters", None) or {}
    beta, length = (rope.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if not beta or not length:
        return None
    factors: Tensor = 1 + beta * torch.log(1 + torch.floor(positions / length))
    return factors


def gate_of(attention: Any, parts: Parts) -> decoder.Matrix | None:
    gate = first_of(attention, _GATES)
    parts.take_all_of(gate)
    return None if gate is None else describe_matrix(gate, "the gate of attention")
