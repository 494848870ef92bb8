"""The choice of experts, and the logits of a router for few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe.ops.registration import register

SCORING = {"none": 0, "softmax": 1, "sigmoid": 2, "sqrt_softplus": 3}


def _select_experts(
    router_logits: Tensor,
    topk: int,
    scoring: int,
    score_chosen: bool,
    correction_bias: Tensor | None,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    tokens = router_logits.shape[0]
    weights, ids = torch.empty(tokens, topk, dtype=torch.float32), torch.empty(tokens, topk, dtype=torch.int32)
    _core.select_experts(
        router_logits.contiguous(),
        weights,
        ids,
        scoring,
        score_chosen,
        correction_bias,
        num_expert_group,
        topk_group,
        renormalize,
        scale,
    )
    return weights, ids


def _select_experts_fake(router_logits: Tensor, topk: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    shape = (router_logits.shape[0], topk)
    device = router_logits.device
    return (
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
    )


select_experts = register(
    "select_experts(Tensor router_logits, int topk, int scoring, bool score_chosen, Tensor? correction_bias, "
    "int num_expert_group, int topk_group, bool renormalize, float scale) -> (Tensor, Tensor)",
    _select_experts,
    _select_experts_fake,
)


def _router_logits(x: Tensor, weight: Tensor, bias: Tensor | None, in_fp32: bool) -> Tensor:
    logits = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32 if in_fp32 else x.dtype)
    _core.router_logits(x.contiguous(), weight.contiguous(), bias, logits)
    return logits


def _router_logits_fake(x: Tensor, weight: Tensor, bias: Tensor | None, in_fp32: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32 if in_fp32 else x.dtype)


# [tokens, H] x [experts, H] -> [tokens, experts], summed in fp32 and then rounded to the dtype of x unless in_fp32.
router_logits = register(
    "router_logits(Tensor x, Tensor weight, Tensor? bias, bool in_fp32) -> Tensor", _router_logits, _router_logits_fake
)
