"""What vLLM's log and its compiler are told: what cpumoe computes, and once each reason why it leaves something."""

from __future__ import annotations

import logging

from vllm.config import get_current_vllm_config

import cpumoe
from cpumoe.integrations.vllm import settings
from cpumoe.layers.scheme import Scheme

log = logging.getLogger("vllm.plugins.cpumoe")

EXPERTS, LINEARS = "experts", "quantised linears"

_taken: dict[str, dict[str, None]] = {}  # kinds of layers -> their schemes, in the order in which they came
_reasons: set[str] = set()


def take(kind: str, scheme: Scheme | None) -> None:
    """A layer of the model that is being made is ours; ``scheme`` is what it runs in, None for floats as they are.

    vLLM keeps compiled models on disk by its own configuration: that what is compiled calls cpumoe becomes part of it.
    """
    _taken.setdefault(kind, {})[str(scheme or "float")] = None
    additional = get_current_vllm_config().additional_config
    if isinstance(additional, dict):
        additional["cpumoe"] = f"{cpumoe.__version__} {settings.as_text()}"


def tell_taken() -> None:
    """One line for a model, all layers of which are known when the first is finished."""
    if not _taken:
        return
    what = " and ".join(f"the {kind} ({', '.join(schemes)})" for kind, schemes in sorted(_taken.items()))
    _taken.clear()
    log.info(
        "cpumoe %s computes %s of this model, with %s on %d threads; CPUMOE_VLLM=0 leaves them to vLLM",
        cpumoe.__version__,
        what,
        cpumoe.isa(),
        cpumoe.get_num_threads(),
    )


def tell_left(what: str, reason: object) -> None:
    """Something is vLLM's; the same reason is told once, for the first that it is true of."""
    if str(reason) not in _reasons:
        _reasons.add(str(reason))
        log.warning("cpumoe leaves %s to vLLM: %s", what, reason)
