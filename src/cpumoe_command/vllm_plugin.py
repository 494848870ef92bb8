"""What vLLM calls in each of its processes, up to where cpumoe is imported: an entry point of ``vllm.general_plugins``.

vLLM starts for many models, most of which are none of cpumoe's business: whatever keeps cpumoe from being used must not
keep vLLM from starting.
"""

from __future__ import annotations

import logging
import os

_SWITCH = "CPUMOE_VLLM"

_log = logging.getLogger("vllm.plugins.cpumoe")  # below vLLM's own, whose handlers show it


def register() -> None:
    """Lets vLLM serve quantised mixture-of-experts checkpoints through cpumoe; may be called again."""
    wanted = os.environ.get(_SWITCH)
    if wanted not in (None, "0", "1"):
        raise ValueError(
            f"{_SWITCH}={wanted!r}; 0 (vLLM is left as it is) and 1 (also versions that were not tried) are accepted"
        )
    if wanted == "0":
        return
    try:
        from cpumoe.integrations.vllm import registration

        registration.register(any_version=wanted == "1")
    except Exception as problem:  # a missing core, a CPU or a version that is not known: all of it is told
        _log.warning(
            "cpumoe cannot be used and leaves vLLM as it is: %s: %s (%s=0 asks no more)",
            type(problem).__name__,
            problem,
            _SWITCH,
        )
