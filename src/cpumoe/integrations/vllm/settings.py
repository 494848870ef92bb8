"""Settings of cpumoe that count inside of vLLM too, which come from the environment there."""

from __future__ import annotations

import os

from cpumoe.checkpoints.checkpoint import check_activations
from cpumoe.layers.scheme import Scheme

_NAMES = ("CPUMOE_ACTIVATIONS", "CPUMOE_SCHEME", "CPUMOE_BACKEND")


def activations_wanted() -> str | None:
    """``CPUMOE_ACTIVATIONS``: what weight-only checkpoints are run with; None for activations as they come."""
    return check_activations(os.environ.get("CPUMOE_ACTIVATIONS"))


def float_scheme() -> Scheme | None:
    """``CPUMOE_SCHEME``: what experts in float are quantised to; None leaves them as they are."""
    name = os.environ.get("CPUMOE_SCHEME")
    return None if name is None else Scheme.parse(name)


def check() -> None:
    """Raises ValueError for a value that there is not."""
    activations_wanted()
    float_scheme()


def of_results() -> list[str]:
    """Return the settings that results depend on, each with its name."""
    values = {name: os.environ.get(name) for name in _NAMES}
    if values.get("CPUMOE_BACKEND") in ("", "auto"):  # the same as no choice
        values["CPUMOE_BACKEND"] = None
    return [f"{name}={value}" for name, value in values.items()]


def as_text() -> str:
    """Those that change what is computed."""
    return " ".join(f"{name}={os.environ[name]}" for name in _NAMES if name in os.environ)
