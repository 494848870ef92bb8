"""A recognised decoder as values and as text: one line for each part, equal layers once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from cpumoe.integrations.transformers.recognition.values import LinearWeight, Source, Stored
from cpumoe.layers.activation import KINDS
from cpumoe.ops import SCORING, decoder

_SCORING = {number: name for name, number in SCORING.items()}
_ACTIVATIONS = {number: name for name, number in KINDS.items()}

_OPTIONAL_PARTS = ("gate", "query_norm", "key_norm", "sinks", "query_factors", "query_down", "correction_bias")


def as_values(part: Any) -> Any:
    """Return a part of a decoder as JSON values: tensors by module and shape, without what a part does not have."""
    if isinstance(part, Source):
        return str(part)
    if isinstance(part, decoder.Matrix) and isinstance(part.weight, LinearWeight):
        return str(part.weight)
    if isinstance(part, Enum):
        return part.name.lower()
    if isinstance(part, tuple):
        return [as_values(item) for item in part]
    if not is_dataclass(part):
        return part
    found = {f.name: as_values(getattr(part, f.name)) for f in fields(part)}
    if isinstance(part, decoder.Router):
        found["scoring"] = _SCORING[part.scoring]
    if isinstance(part, decoder.Activation):
        found["kind"] = _ACTIVATIONS[part.kind]
    kind = {"kind": type(part).__name__} if isinstance(part, decoder.MIXERS) else {}
    return kind | {name: value for name, value in found.items() if value is not None}


def as_lines(model: decoder.DecoderModel[Source]) -> Iterator[str]:
    """Yield lines that show a decoder as one would write it down, equal layers once."""
    assert isinstance(model.embedding, Stored)
    vocabulary, hidden = model.embedding.shape
    yield f"decoder: {len(model.layers)} layers, hidden size {hidden}, vocabulary {vocabulary}"
    first = 0
    shown = [list(_layer_lines(layer)) for layer in model.layers]
    for index, lines in enumerate(shown):
        if index + 1 < len(shown) and shown[index + 1] == lines:
            continue
        yield f"  layer {first}" if first == index else f"  layers {first} to {index}"
        yield from (f"    {line}" for line in lines)
        first = index + 1


def _layer_lines(layer: decoder.Layer[Source]) -> Iterator[str]:
    norms = [n.name for n in fields(layer) if isinstance(getattr(layer, n.name), decoder.Norm)]
    yield f"norms: {', '.join(norms)}"
    yield f"mixer: {type(layer.mixer).__name__} {_facts(layer.mixer)}".rstrip()
    if (experts := layer.experts) is not None:
        assert isinstance(experts.router.weight.weight, Stored)
        facts = _facts(experts.router, {"scoring": _SCORING[experts.router.scoring]})
        activation = _ACTIVATIONS[experts.activation.kind]
        yield f"experts: {experts.router.weight.weight.shape[0]}, {activation}, router {facts}"
    if (dense := layer.dense) is not None:
        gate = " and a gate of their own" if dense.share is not None else ""
        yield f"{'shared experts' if experts is not None else 'dense block'}{gate}"
    if layer.residual_factor != 1.0:
        yield f"residual factor: {layer.residual_factor:g}"


def _facts(part: Any, words: dict[str, str] | None = None) -> str:
    """Return the numbers, switches and optional parts of a part that are not at their defaults."""
    found = []
    for field in fields(part):
        value = (words or {}).get(field.name, getattr(part, field.name))
        if isinstance(value, decoder.Rope):
            pairs = " interleaved" * value.interleaved + " separated" * value.separated
            found.append(f"RoPE table {value.table}{pairs}" if value.table >= 0 else "no RoPE")
        elif value is not None and field.name in _OPTIONAL_PARTS:
            found.append(field.name)
        elif isinstance(value, bool):
            found += [field.name] * value
        elif isinstance(value, int | float | str) and value and value != field.default:
            found.append(f"{field.name} {value:g}" if isinstance(value, float) else f"{field.name} {value}")
    return ", ".join(found)
