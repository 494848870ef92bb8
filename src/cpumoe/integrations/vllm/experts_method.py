"""What vLLM calls for the experts of a layer that is served, quantised in any scheme."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from cpumoe.integrations.vllm.served_experts import ServedExperts


class ExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]  # untyped base
    """The method of a RoutedExperts whose weights are quantised."""

    def __init__(self, moe: Any, served: ServedExperts) -> None:
        super().__init__(moe)
        self.served = served

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.served.open(layer, params_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.served.close(layer)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None  # of vLLM's own kernels

    @property
    def is_monolithic(self) -> bool:
        """Whether the choice of experts is made here; else by vLLM's router."""
        return self.served.routing is not None

    @property
    def supports_eplb(self) -> bool:
        return True

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        return self.served.route_and_compute(layer, x, router_logits)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: object = None,
        shared_experts_input: object = None,
    ) -> Tensor:
        return self.served.compute(layer, x, topk_ids, topk_weights)
