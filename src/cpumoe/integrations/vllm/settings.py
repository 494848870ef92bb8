"""Settings of cpumoe that count inside of vLLM too, which come from the environment there."""

from __future__ import annotations

from cpumoe.checkpoints.checkpoint import check_activations
from cpumoe.layers.scheme import Scheme
from cpumoe.settings import ACTIVATIONS, BACKEND, SCHEME

_OF_RESULTS = (ACTIVATIONS, SCHEME, BACKEND)


def activations_wanted() -> str | None:
    """``CPUMOE_ACTIVATIONS``: what weight-only checkpoints are run with; None for activations as they come."""
    return check_activations(ACTIVATIONS.get())


def float_scheme() -> Scheme | None:
    """``CPUMOE_SCHEME``: what experts in float are quantised to; None leaves them as they are."""
    name = SCHEME.get()
    return None if name is None else Scheme.parse(name)


def check() -> None:
    """Raises ValueError for a value that there is not."""
    activations_wanted()
    float_scheme()


def of_results() -> list[str]:
    """Return the settings that results depend on, each with its name."""
    values = {setting.name: setting.get() for setting in _OF_RESULTS}
    if values[BACKEND.name] in ("", "auto"):  # the same as no choice
        values[BACKEND.name] = None
    return [f"{name}={value}" for name, value in values.items()]


def as_text() -> str:
    """Those that change what is computed."""
    return " ".join(f"{s.name}={value}" for s in _OF_RESULTS if (value := s.get()) is not None)
