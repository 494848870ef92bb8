"""Deprecated name of ``cpumoe.simulation.routing_trace``."""

from __future__ import annotations

import warnings
from typing import Any

_NEW_NAME = "cpumoe.simulation.routing_trace"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from importlib import import_module

    found = getattr(import_module(_NEW_NAME), name)
    warnings.warn(f"{__name__}.{name} is now {_NEW_NAME}.{name}", FutureWarning, stacklevel=2)
    return found
