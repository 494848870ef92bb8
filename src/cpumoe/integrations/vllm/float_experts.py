"""Experts in float: vLLM asks for the method of these by the name of a class, for which ours is registered."""

from __future__ import annotations

import logging
from typing import Any

from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

from cpumoe.integrations.vllm.experts_method import ServedMethod
from cpumoe.integrations.vllm.served_experts import ServedExperts
from cpumoe.integrations.vllm.telling import tell_left

log = logging.getLogger("vllm.plugins.cpumoe")


class FloatExpertsMethod(ServedMethod, UnquantizedFusedMoEMethod):  # type: ignore[misc]  # untyped base
    """The method of a RoutedExperts whose weights are not quantised; vLLM's own where cpumoe does not serve them."""

    _refusal: Exception | None = None  # of vLLM's own method

    def __init__(self, moe: Any) -> None:
        try:
            super().__init__(moe)
        except (NotImplementedError, ValueError) as problem:  # an activation or a size that its kernels do not have
            self.unquantized_backend = self.experts_cls = None
            self.supports_pre_processed_weights = False
            self._refusal = problem

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        try:
            self.served = ServedExperts(layer, None)
        except (ValueError, RuntimeError) as problem:
            tell_left(layer.layer_name, problem)
            if self._refusal is not None:
                raise self._refusal from problem
        super().create_weights(layer, *sizes, **attributes)


def register() -> None:
    """Puts the method into the place of vLLM's, unless another plug-in has done so before."""
    name = UnquantizedFusedMoEMethod.__name__
    if name in op_registry_oot:
        log.warning("cpumoe leaves experts in float to %s, which is registered already", op_registry_oot[name])
    else:
        UnquantizedFusedMoEMethod.register_oot(FloatExpertsMethod)
