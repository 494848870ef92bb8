"""What transformers makes of a config.json: defaults for what it leaves out, and refusals of what it cannot mean."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from cpumoe.errors import CheckpointError


def completed_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same with all fields that the class of its ``model_type`` has; None if transformers is not installed.

    Raises CheckpointError with what transformers says of a field.
    """
    try:
        from transformers import CONFIG_MAPPING
        from transformers import __version__ as version
    except ImportError:
        return None
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise CheckpointError(f"model_type {kind!r:.80} is not known to transformers {version}")
    try:
        complete: dict[str, Any] = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(config))).to_dict()
    except Exception as problem:  # whatever its validators raise, the configuration is all that they look at
        raise CheckpointError(f"transformers cannot make a model of config.json: {problem!r:.500}") from problem
    return complete
