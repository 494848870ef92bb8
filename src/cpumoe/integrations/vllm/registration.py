"""Registers cpumoe with vLLM: its configurations of quantisation, experts in float, and the 4-bit operator."""

from __future__ import annotations

import logging
from functools import cache

import vllm

from cpumoe.integrations.vllm.symbols import missing_symbols

log = logging.getLogger("vllm.plugins.cpumoe")


@cache  # vLLM may call it again
def register() -> None:
    """Takes over what is cpumoe's, or says in a sentence why not."""
    if missing := missing_symbols():
        log.warning("cpumoe leaves vLLM %s as it is, which lacks %s", vllm.__version__, ", ".join(missing))
        return
    from cpumoe.integrations.vllm import float_experts, int4_operator, served_configs

    served_configs.register()
    float_experts.register()
    int4_operator.register()
