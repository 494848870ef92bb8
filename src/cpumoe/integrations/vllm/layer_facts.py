"""A mixture-of-experts layer of vLLM in our words: its activation, its routing, and why it may not be served."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.activation import Activation
from cpumoe.layers.routing import select_experts
from cpumoe.layers.routing_methods import RoutingMethod

#: Activations without parameters.
_PLAIN = {
    MoEActivation.GELU: Activation("gelu"),
    MoEActivation.GELU_TANH: Activation("gelu_tanh"),
    MoEActivation.RELU2: Activation("relu2", gated=True),
    MoEActivation.SILU_NO_MUL: Activation("silu_no_mul"),
    MoEActivation.GELU_NO_MUL: Activation("gelu_no_mul"),
    MoEActivation.GELU_TANH_NO_MUL: Activation("gelu_tanh_no_mul"),
    MoEActivation.RELU2_NO_MUL: Activation("relu2"),
}

_SCORINGS = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}


def activation_of(moe: Any) -> Activation:
    """The activation of a FusedMoEConfig; raises UnsupportedScheme for one that there is not.

    Where gate and up rows alternate is not part of it: they are told apart when they are loaded.
    """
    kind, limit, alpha, beta = moe.activation, moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind is MoEActivation.SWIGLUOAI:
        return Activation("swiglu_oai", alpha=alpha or 1.702, limit=limit or 7.0)
    if kind is MoEActivation.SWIGLUSTEP:
        return Activation("swiglu_step", limit=limit or 7.0)
    if kind in (MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE):
        if limit is None and kind is MoEActivation.SILU:
            return Activation("silu")
        if limit is not None and (alpha or 1.0, beta or 0.0) == (1.0, 0.0):
            # silu(min(gate, limit)) * up within the limit; silu grows where it is positive
            return Activation("swiglu_step", limit=limit, gate_limit=limit / (1.0 + math.exp(-limit)))
        if limit is not None and beta == 1.0:
            return Activation("swiglu_oai", alpha=alpha or 1.0, limit=limit)
    raise UnsupportedScheme(f"the activation {kind.value} (limit {limit}, alpha {alpha}, beta {beta}) is not served")


@dataclass(frozen=True)
class Routing:
    """How a layer chooses experts, where it does so by its own numbers.

    ``custom``: a function of the model's.
    """

    topk: int
    scoring: str
    renormalize: bool
    groups: int | None
    topk_groups: int | None
    factor: float
    custom: Any = None

    def choose(self, x: Tensor, router_logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights [tokens, K] and ids [tokens, K] of tokens [tokens, H] with logits [tokens, experts]."""
        if self.custom is not None:
            weights, ids = self.custom(
                hidden_states=x, gating_output=router_logits, topk=self.topk, renormalize=self.renormalize
            )
            return weights, ids
        # Scores, groups and a bias for the choice, all of them or some: the most general of the methods.
        return select_experts(
            router_logits,
            self.topk,
            RoutingMethod.DEEPSEEK_V3,
            scoring=self.scoring,
            renormalize=self.renormalize,
            correction_bias=bias,
            num_expert_group=self.groups,
            topk_group=self.topk_groups,
            routed_scaling_factor=self.factor,
        )


def routing_of(layer: Any) -> Routing | None:
    """The routing of a RoutedExperts; None where vLLM's router has to do it.

    That is where it does more than choose: physical experts of a load balancer, a table by token ids, experts that are
    none, choices that are recorded or made up.
    """
    moe, bias = layer.moe_config, layer.e_score_correction_bias
    model = get_current_vllm_config().model_config
    if (
        moe.moe_parallel_config.enable_eplb
        or moe.has_hash_routing
        or (bias is not None and bias.numel() != moe.num_logical_experts)
        or moe.routing_method.name == "Simulated"
        or (model is not None and getattr(model, "enable_return_routed_experts", False))
        or layer.scoring_func not in _SCORINGS
    ):
        return None
    grouped = layer.use_grouped_topk and (layer.num_expert_group or 0) > 1
    return Routing(
        layer.top_k,
        _SCORINGS[layer.scoring_func],
        layer.renormalize,
        layer.num_expert_group if grouped else None,
        layer.topk_group if grouped else None,
        layer.routed_scaling_factor,
        layer.custom_routing_function,
    )
