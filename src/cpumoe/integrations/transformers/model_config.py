"""A config.json as transformers understands it: missing fields get their defaults, impossible values are refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from cpumoe.errors import CheckpointError


def completed_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration with all fields of the class for its ``model_type``; None if transformers is not installed.

    Raises CheckpointError with the message of transformers if it refuses a field.
    """
    try:
        from transformers import CONFIG_MAPPING
        from transformers import __version__ as version
    except ModuleNotFoundError as problem:
        if problem.name != "transformers":
            raise
        return None
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise CheckpointError(f"model_type {kind!r:.80} is not known to transformers {version}")
    try:
        complete: dict[str, Any] = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(config))).to_dict()
    except Exception as problem:  # only transformers' own code runs here, and its validators raise all kinds of errors
        raise CheckpointError(f"transformers cannot make a model of config.json: {problem!r:.500}") from problem
    return complete
