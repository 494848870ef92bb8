"""Experts in float: vLLM asks for the method of these by the name of a class, for which ours is registered."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

from cpumoe.integrations.vllm.served_experts import ServedExperts
from cpumoe.integrations.vllm.telling import tell_left, tell_taken

log = logging.getLogger("vllm.plugins.cpumoe")


class FloatExpertsMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]  # untyped base
    """The method of a RoutedExperts whose weights are not quantised; vLLM's own where cpumoe does not serve them."""

    served: ServedExperts | None = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        try:
            served = ServedExperts(layer, None)
        except (ValueError, RuntimeError) as problem:
            tell_left(layer.layer_name, problem)
            super().create_weights(
                layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
            )
            return
        self.served = served
        tell_taken("float")
        served.open(layer, params_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.served is None:
            super().process_weights_after_loading(layer)
        else:
            self.served.close(layer)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return super().get_fused_moe_quant_config(layer) if self.served is None else None

    @property
    def is_monolithic(self) -> bool:
        if self.served is None:
            return bool(super().is_monolithic)
        return self.served.routing is not None

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        if self.served is None:
            result: Tensor = super().apply_monolithic(layer, x, router_logits, input_ids)
            return result
        return self.served.route_and_compute(layer, x, router_logits)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Tensor:
        if self.served is None:
            result: Tensor = super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
            return result
        return self.served.compute(layer, x, topk_ids, topk_weights)


def register() -> None:
    """Puts the method into the place of vLLM's, unless another plug-in has done so before."""
    name = UnquantizedFusedMoEMethod.__name__
    if name in op_registry_oot:
        log.warning("cpumoe leaves experts in float to %s, which is registered already", op_registry_oot[name])
        return
    UnquantizedFusedMoEMethod.register_oot(FloatExpertsMethod)
