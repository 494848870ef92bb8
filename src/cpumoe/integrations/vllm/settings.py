"""Settings of cpumoe that count inside of vLLM too, which come from the environment there."""

from __future__ import annotations

import os

from cpumoe.checkpoints.checkpoint import check_activations
from cpumoe.layers.scheme import Scheme


def activations_wanted() -> str | None:
    """``CPUMOE_ACTIVATIONS``: what weight-only checkpoints are run with; None for activations as they come."""
    return check_activations(os.environ.get("CPUMOE_ACTIVATIONS"))


def float_scheme() -> Scheme | None:
    """``CPUMOE_SCHEME``: what experts in float are quantised to; None leaves them as they are."""
    name = os.environ.get("CPUMOE_SCHEME")
    return None if name is None else Scheme.parse(name)
