"""Fields of a ``quantization_config``, checked: what is not well-formed raises CheckpointError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpumoe.errors import CheckpointError


def read_object(value: object, name: str) -> Mapping[str, Any]:
    """Return a JSON object; ``name`` is that of the field."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{name} is {value!r:.80}; a JSON object is accepted")
    return value


def read_names(section: Mapping[str, Any], *fields: str, place: str = "") -> tuple[str, ...]:
    """Return the list of names in the first field that is present; ``place`` is a prefix for messages."""
    field, names = next(((f, value) for f in fields if (value := section.get(f)) is not None), ("", ()))
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{place}{field} is {names!r:.80}; a list of names is accepted")
    return tuple(names)
