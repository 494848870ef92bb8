"""Parts that GQA and MLA share: the gate of attention, RoPE, and the context of a layer."""

from __future__ import annotations

from typing import Any

from cpumoe.integrations.transformers.recognition.parts import Parts
from cpumoe.integrations.transformers.recognition.rotary import RopeTables
from cpumoe.integrations.transformers.recognition.values import LayerVariant, Source, first_of
from cpumoe.ops import decoder

#: Names of the norm of queries.
QUERY_NORMS = ("q_norm", "query_layernorm", "q_layernorm")
_GATES = ("gate_proj", "g_proj")


class LayerContext:
    """A layer during recognition: its base model, its number, the variant that is tried, and its parts."""

    def __init__(self, base: Any, index: int, variant: LayerVariant, tables: RopeTables, parts: Parts) -> None:
        self.base, self.index, self.variant, self.tables, self.parts = base, index, variant, tables, parts

    def rope(self) -> decoder.Rope:
        return self.tables.rope(self.index, self.variant)


def gate_of(attention: Any, parts: Parts) -> decoder.Matrix[Source] | None:
    gate = first_of(attention, _GATES)
    return None if gate is None else parts.matrix(gate, "the gate of attention")
