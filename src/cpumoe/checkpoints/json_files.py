"""JSON of a checkpoint: objects whose every field has one value, of a size that can be meant."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from cpumoe.checkpoints.regular_files import open_regular
from cpumoe.errors import CheckpointError

_LARGEST_FILE = 256 << 20  # bytes; the index of a model with 10**5 tensors has ten million
_MOST_DIGITS = 40  # tokenizers have a "model_max_length" of 10**30; beyond 4300 digits Python refuses to convert


class _LongInteger:
    """Stands for an integer with more digits than any that is meant, until its field is known."""

    def __init__(self, digits: str) -> None:
        self.count = len(digits.removeprefix("-"))


def _integer(digits: str) -> int | _LongInteger:
    return int(digits) if len(digits) <= _MOST_DIGITS else _LongInteger(digits)


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``object_pairs_hook``: of two fields with one name, readers would not agree on which is meant."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{name!r} is there twice; leave one of them")
    return fields


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = unique_fields(pairs)
    for name, value in pairs:
        _refuse_long(name, value)
    return fields


def _refuse_long(name: str, value: object) -> None:
    if isinstance(value, _LongInteger):
        raise ValueError(f"{name} is an integer of {value.count} digits; up to {_MOST_DIGITS} are accepted")
    if isinstance(value, list):
        for item in value:
            _refuse_long(name, item)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        with os.fdopen(open_regular(path, "JSON"), "rb") as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_FILE:
                raise CheckpointError(f"{path} has more than {_LARGEST_FILE >> 20} MiB, which no such file needs")
            text = file.read().decode("utf-8")
        value = json.loads(text, parse_int=_integer, object_pairs_hook=_object)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as problem:  # ValueError: of bytes that are no text, and of JSON
        raise CheckpointError(f"{path} cannot be read as JSON: {problem}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; a JSON object is accepted")
    return value
