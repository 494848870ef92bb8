"""The choice of experts, and the logits of a router for few tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe.ops.registration import register_into

SCORING = {"none": 0, "softmax": 1, "sigmoid": 2, "sqrt_softplus": 3}


def _select_experts_out(router_logits: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (router_logits.shape[0], topk)
    return router_logits.new_empty(shape, dtype=torch.float32), router_logits.new_empty(shape, dtype=torch.int32)


def _select_experts(out: tuple[Tensor, Tensor], router_logits: Tensor, topk: int, *others: Any) -> None:
    _core.select_experts(router_logits.contiguous(), *out, *others)


select_experts = register_into(
    "select_experts(Tensor router_logits, int topk, int scoring, bool score_chosen, Tensor? correction_bias, "
    "int num_expert_group, int topk_group, bool renormalize, float scale) -> (Tensor, Tensor)",
    _select_experts_out,
    _select_experts,
)


def _router_logits_out(x: Tensor, weight: Tensor, bias: Tensor | None, in_fp32: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32 if in_fp32 else x.dtype)


def _router_logits(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, in_fp32: bool) -> None:
    _core.float_linear(x.contiguous(), weight.contiguous(), bias, out)


# [tokens, H] x [experts, H] -> [tokens, experts], summed in fp32 and then rounded to the dtype of x unless in_fp32.
router_logits = register_into(
    "router_logits(Tensor x, Tensor weight, Tensor? bias, bool in_fp32) -> Tensor", _router_logits_out, _router_logits
)
