"""What vLLM calls for the experts of a layer that is served."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from cpumoe.integrations.vllm.served_experts import ServedExperts


class ServedMethod:
    """In front of a method of vLLM's, which does the work where ``served`` is None."""

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
        if self.served is not None:
            self.served.open(layer, params_dtype)
            return
        super().create_weights(  # type: ignore[misc]
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.served is not None:
            self.served.close(layer)
        else:
            super().process_weights_after_loading(layer)  # type: ignore[misc]

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        if self.served is not None:
            return hidden_size, intermediate_size_per_partition
        sizes: tuple[int, int] = super().maybe_roundup_sizes(  # type: ignore[misc]
            hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )
        return sizes

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """What vLLM's own kernels ask for."""
        return None if self.served is not None else super().get_fused_moe_quant_config(layer)  # type: ignore[misc]

    @property
    def is_monolithic(self) -> bool:
        """Whether the choice of experts is made here; else by vLLM's router."""
        if self.served is not None:
            return self.served.routing is not None
        return bool(super().is_monolithic)  # type: ignore[misc]

    @property
    def supports_eplb(self) -> bool:
        return True if self.served is not None else bool(super().supports_eplb)  # type: ignore[misc]

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        if self.served is not None:
            return self.served.route_and_compute(layer, x, router_logits)
        result: Tensor = super().apply_monolithic(layer, x, router_logits, input_ids)  # type: ignore[misc]
        return result

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Tensor:
        if self.served is not None:
            return self.served.compute(layer, x, topk_ids, topk_weights)
        result: Tensor = super().apply(  # type: ignore[misc]
            layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input
        )
        return result


class ExpertsMethod(ServedMethod, FusedMoEMethodBase):  # type: ignore[misc]  # untyped base
    """The method of a RoutedExperts whose weights are quantised."""

    def __init__(self, moe: Any, served: ServedExperts) -> None:
        super().__init__(moe)
        self.served = served
