"""What vLLM calls in each of its processes, up to where cpumoe is imported: an entry point of ``vllm.general_plugins``.

vLLM starts for many models and on many machines, most of which are none of cpumoe's business: there it is not even
imported, and whatever keeps it from being used must not keep vLLM from starting.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os

#: Versions of vLLM that the tests run with.
TESTED = ("0.32.0",)

_SWITCH = "CPUMOE_VLLM"

_log = logging.getLogger("vllm.plugins.cpumoe")  # below vLLM's own, whose handlers show it


def register() -> None:
    """Lets vLLM serve quantised mixture-of-experts checkpoints through cpumoe; may be called again.

    Raises ValueError for a setting in the environment that there is not: it must not be taken for another.
    """
    wanted = os.environ.get(_SWITCH)
    if wanted not in (None, "0", "1"):
        raise ValueError(
            f"{_SWITCH}={wanted!r}; 0 (vLLM is left as it is) and 1 (also versions that were not tried) are accepted"
        )
    if wanted == "0" or not _is_for_us(any_version=wanted == "1"):
        return
    try:
        from cpumoe.integrations.vllm import registration, settings
    except Exception as problem:  # a missing core, a CPU that is not known
        _tell(problem)
        return
    settings.check()
    try:
        registration.register()
    except Exception as problem:
        _tell(problem)


def _is_for_us(any_version: bool) -> bool:
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    version = vllm.__version__.partition("+")[0]
    if version not in TESTED and not any_version:
        _log.warning(
            "cpumoe %s was tried with vLLM %s, and this is %s, which it leaves as it is; %s=1 uses it nevertheless",
            importlib.metadata.version("cpumoe"),
            " and ".join(TESTED),
            version,
            _SWITCH,
        )
        return False
    return True


def _tell(problem: Exception) -> None:
    _log.warning(
        "cpumoe cannot be used and leaves vLLM as it is: %s: %s (%s=0 asks no more)",
        type(problem).__name__,
        problem,
        _SWITCH,
    )
