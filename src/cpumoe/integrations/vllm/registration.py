"""Registers cpumoe with vLLM: its configurations of quantisation, experts in float, and the 4-bit operator."""

from __future__ import annotations

import logging
from functools import cache

import vllm
from vllm.platforms import current_platform

from cpumoe import __version__
from cpumoe.integrations.vllm.symbols import missing_symbols

log = logging.getLogger("vllm.plugins.cpumoe")

#: Versions of vLLM that the tests run with.
TESTED = ("0.32.0",)


@cache  # vLLM may call it again
def register(any_version: bool = False) -> None:
    """Takes over what is cpumoe's, or says in a sentence why not."""
    if not current_platform.is_cpu():
        log.debug("cpumoe leaves vLLM as it is: it runs on %s", current_platform.device_name)
        return
    version = vllm.__version__.partition("+")[0]
    if version not in TESTED and not any_version:
        log.warning(
            "cpumoe %s was tried with vLLM %s, and this is %s, which it leaves as it is; CPUMOE_VLLM=1 uses it "
            "nevertheless",
            __version__,
            " and ".join(TESTED),
            version,
        )
        return
    if missing := missing_symbols():
        log.warning("cpumoe leaves vLLM %s as it is, which lacks %s", version, ", ".join(missing))
        return
    from cpumoe.integrations.vllm import float_experts, int4_operator, served_configs

    served_configs.register()
    float_experts.register()
    int4_operator.register()
