"""The feed-forward part of a layer: router, experts, shared experts and dense blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.layout.expert_modules import recognise_function
from cpumoe.integrations.transformers.recognition.parts import NotDescribed, Parts, describe_matrix, first_of
from cpumoe.integrations.transformers.replacements import routers
from cpumoe.layers.activation import Activation
from cpumoe.layers.backends import NativeBackend
from cpumoe.layers.experts import Experts
from cpumoe.ops import SCORING, decoder
from cpumoe.parallel.experts import ParallelExperts

#: The linears of a dense block; the second may give what the first does as well, before its own.
_DENSE = (("gate_proj", "w1"), ("up_proj", "gate_up_proj", "input_linear", "w3"), ("down_proj", "output_linear", "w2"))
_FUNCTIONS = ("act_fn", "activation")
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")


def describe_block(
    block: Any, layer: Any, parts: Parts, dtype: torch.dtype
) -> tuple[decoder.RoutedExperts | None, decoder.DenseBlock | None]:
    """The experts of a block and what all tokens take, which may be the layer's, or a block without experts.

    ``dtype``: of the rows that it is given.
    """
    children = dict(block.named_children())
    packed = [name for name, child in children.items() if isinstance(child, Experts)]
    if not packed:
        return None, _dense(block, parts)
    if len(packed) > 1:
        raise NotDescribed(f"{type(block).__name__} has {len(packed)} modules with experts")
    experts: Any = children[packed[0]]
    if not isinstance(experts.backend, NativeBackend) or experts.config.held_experts is not None:
        raise NotDescribed("its experts are not all here, or not served by the native kernels")
    found = [child for child in children.values() if routers.is_replaced(child)]
    form = routers.form_of(found[0], block) if len(found) == 1 else None
    if form is None:
        raise NotDescribed(f"{type(block).__name__} has a router that is none we know")
    correction = routers.correction_of(found[0], block)
    parts.take_all_of(experts, found[0])
    parts.take(correction)
    routed = decoder.RoutedExperts(
        _router(found[0], form, correction),
        getattr(experts, "gate_up_packed", None),
        getattr(experts, "down_packed", None),
        _activation(experts.config.activation),
    )
    if isinstance(experts, ParallelExperts):
        travels = experts.travel is not decoder.Travel.STAY
        routed = replace(
            routed,
            spread=True,
            copies=experts.copies,
            loads=experts.loads,
            travel=experts.travel,
            prepared_rows=travels and experts.sends_prepared(dtype),
        )
    holders = (block, layer)
    shared = next((m for h, name in product(holders, _SHARED) if (m := getattr(h, name, None)) is not None), None)
    if shared is None:
        return routed, None
    dense = _dense(shared, parts)
    gate = children.get("shared_expert_gate")
    if gate is not None:
        parts.take_all_of(gate)
        dense = replace(dense, share=describe_matrix(gate, "shared_expert_gate"))
    return routed, dense


def _router(module: Any, form: routers.RouterForm, correction: Tensor | None) -> decoder.Router:
    linear = routers.linear_of(module)
    bias = getattr(linear, "bias", None)
    return decoder.Router(
        decoder.Matrix(linear.weight.detach().contiguous(), None if bias is None else bias.detach().float()),
        module.top_k,
        SCORING[form.scoring],
        form.score_chosen,
        form.renormalize,
        None if correction is None else correction.detach().float().flatten().contiguous(),
        *form.groups,
        form.scale,
        form.in_fp32,
    )


def _dense(block: Any, parts: Parts) -> decoder.DenseBlock:
    linears: list[Any] = [first_of(block, names) for names in _DENSE]
    gate, up, down = linears
    function = next((f for name in _FUNCTIONS if (f := getattr(block, name, None)) is not None), nn.functional.silu)
    if up is None or down is None:
        raise NotDescribed(f"{type(block).__name__} has no gate_proj, up_proj, down_proj and act_fn")
    parts.take_all_of(gate, up, down)
    has_both = up.out_features == 2 * down.in_features
    activation = recognise_function(function, gated=gate is not None or has_both)
    if activation is None:
        raise NotDescribed(f"{type(block).__name__} has an activation ({type(function).__name__}) that is none we know")
    described = None if gate is None else describe_matrix(gate, "gate_proj")
    return decoder.DenseBlock(
        described, describe_matrix(up, "up_proj"), describe_matrix(down, "down_proj"), _activation(activation)
    )


def _activation(activation: Activation) -> decoder.Activation:
    return decoder.Activation(activation.kind, bool(activation.gated), *activation.parameters)
