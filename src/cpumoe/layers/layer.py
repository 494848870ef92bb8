"""MoELayer: router, experts and shared experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cpumoe.layers.experts import Experts
from cpumoe.layers.routing import CustomRouting, check_scaling_factor, parse_method, select_experts
from cpumoe.layers.routing_methods import RoutingMethod


class MoELayer(nn.Module):
    """A whole mixture-of-experts layer.

    ``out = sum of the chosen experts + sigmoid(shared_gate(x)) * shared_experts(x)``; the shared part is optional.
    For inference: call it under ``torch.no_grad()``, or freeze the router (``requires_grad_(False)``).

    Args:
        router: [tokens, H] -> [tokens, experts] logits (an ``nn.Linear`` or a QuantizedLinear).
        experts: the routed experts.
        topk: experts per token.
        method, scoring, renormalize, correction_bias, num_expert_group, topk_group, routed_scaling_factor, custom:
            as in :func:`cpumoe.select_experts`.
        shared_experts: [tokens, H] -> [tokens, H], added for every token.
        shared_gate: [tokens, H] -> [tokens, 1]; the shared part is multiplied by its sigmoid.
        apply_router_weight_on_input: multiply the token by its weight before the first product (Llama 4).
    """

    correction_bias: Tensor | None

    def __init__(
        self,
        router: nn.Module,
        experts: Experts,
        topk: int,
        method: RoutingMethod | str = RoutingMethod.RENORMALIZE,
        *,
        scoring: str | None = None,
        renormalize: bool | None = None,
        correction_bias: Tensor | None = None,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        routed_scaling_factor: float = 1.0,
        custom: CustomRouting | None = None,
        shared_experts: Callable[[Tensor], Tensor] | None = None,
        shared_gate: Callable[[Tensor], Tensor] | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= topk <= experts.config.experts:
            raise ValueError(f"topk={topk}; 1 to {experts.config.experts} are accepted")
        if shared_gate is not None and shared_experts is None:
            raise ValueError("shared_gate without shared_experts")
        check_scaling_factor(routed_scaling_factor)
        self.router = router
        self.experts = experts
        self.topk = topk
        self.method = parse_method(method)
        self.scoring = scoring
        self.renormalize = renormalize
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.routed_scaling_factor = routed_scaling_factor
        self.custom = custom
        self.shared_experts = shared_experts
        self.shared_gate = shared_gate
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.register_buffer("correction_bias", correction_bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])  # [tokens, H]
        weights, ids = select_experts(
            self.router(x),
            self.topk,
            self.method,
            scoring=self.scoring,
            renormalize=self.renormalize,
            correction_bias=self.correction_bias,
            num_expert_group=self.num_expert_group,
            topk_group=self.topk_group,
            routed_scaling_factor=self.routed_scaling_factor,
            custom=self.custom,
        )
        out: Tensor = self.experts(x, ids, weights, apply_router_weight_on_input=self.apply_router_weight_on_input)
        if self.shared_experts is not None:
            shared = self.shared_experts(x)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(x)) * shared
            out = out + shared
        return out.view(hidden_states.shape)
