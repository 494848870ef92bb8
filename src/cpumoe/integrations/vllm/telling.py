"""What vLLM's log is told: once what cpumoe computes, and once each reason why it leaves something to vLLM."""

from __future__ import annotations

import logging
from functools import cache

import cpumoe

log = logging.getLogger("vllm.plugins.cpumoe")


@cache
def tell_taken(schemes: str) -> None:
    """Experts, or experts and linears, of these schemes are ours."""
    log.info(
        "cpumoe %s computes the experts of this model and its quantised linears (%s), with %s on %d threads; "
        "CPUMOE_VLLM=0 leaves them to vLLM",
        cpumoe.__version__,
        schemes,
        cpumoe.isa(),
        cpumoe.get_num_threads(),
    )


def tell_left(what: str, reason: object) -> None:
    """Something is vLLM's; the same reason is told once, for the first that it is true of."""
    if str(reason) not in _reasons:
        _reasons.add(str(reason))
        log.warning("cpumoe leaves %s to vLLM: %s", what, reason)


_reasons: set[str] = set()
