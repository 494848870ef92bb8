"""The feed-forward part of a layer: router, experts, shared experts and dense blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from torch import nn

from cpumoe.integrations.transformers.layout.expert_modules import Role, describe_experts, marks_of, recognise_function
from cpumoe.integrations.transformers.recognition import routers
from cpumoe.integrations.transformers.recognition.parts import Parts
from cpumoe.integrations.transformers.recognition.values import Source, Stored, UnsupportedDecoder, first_of
from cpumoe.layers.activation import Activation
from cpumoe.layers.experts import Experts, activation_for_core
from cpumoe.ops import SCORING, decoder

#: The linears of a dense block; the second may give what the first does as well, before its own.
_DENSE = (("gate_proj", "w1"), ("up_proj", "gate_up_proj", "input_linear", "w3"), ("down_proj", "output_linear", "w2"))
_FUNCTIONS = ("act_fn", "activation")
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")


def recognize_block(
    block: Any, layer: Any, parts: Parts
) -> tuple[decoder.RoutedExperts[Source] | None, decoder.DenseBlock[Source] | None]:
    """Return the routed experts of a block, and its shared experts or dense block; ``layer`` may have the latter."""
    children = dict(block.named_children())
    found = {name: activation for name, child in children.items() if (activation := _activation_in(child)) is not None}
    if not found:
        return None, _dense(block, parts)
    if len(found) > 1:
        raise UnsupportedDecoder(f"{type(block).__name__} has {len(found)} modules with experts")
    (name, activation), *_ = found.items()
    experts = children[name]
    candidates = [child for child in children.values() if routers.is_router(child)]
    form = routers.find_form(candidates[0], block) if len(candidates) == 1 else None
    if form is None:
        raise UnsupportedDecoder(f"{type(block).__name__} has a router that is none we know")
    parts.take(experts)
    path = parts.path(experts)
    routed = decoder.RoutedExperts[Source](
        router=_router(candidates[0], form, block, parts),
        gate_up=Stored(path, "gate_up_packed", ()),
        down=Stored(path, "down_packed", ()),
        activation=activation_for_core(activation),
    )
    shared = next((m for h, n in product((block, layer), _SHARED) if (m := getattr(h, n, None)) is not None), None)
    if shared is None:
        return routed, None
    dense = _dense(shared, parts)
    gate = children.get("shared_expert_gate")
    return routed, dense if gate is None else replace(dense, share=parts.matrix(gate, "shared_expert_gate"))


def _activation_in(module: Any) -> Activation | None:
    """Return the activation of routed experts, packed or as transformers has them; None for another module."""
    if isinstance(module, Experts):
        return module.config.activation
    marks = marks_of(module)
    return describe_experts(module).shape.activation if marks is not None and marks.role is Role.PLAIN else None


def _router(module: Any, form: routers.RouterForm, block: Any, parts: Parts) -> decoder.Router[Source]:
    linear = routers.linear_of(module)
    place = routers.correction_place(module, block)
    parts.take(module)
    return decoder.Router(
        decoder.Matrix(parts.tensor(linear, "weight"), parts.optional(linear, "bias", as_fp32=True)),
        module.top_k,
        SCORING[form.scoring],
        form.score_chosen,
        form.renormalize,
        None if place is None else parts.tensor(*place, as_fp32=True, flat_from=0),
        *form.groups,
        form.scale,
        form.in_fp32,
    )


def _dense(block: Any, parts: Parts) -> decoder.DenseBlock[Source]:
    linears: list[Any] = [first_of(block, names) for names in _DENSE]
    gate, up, down = linears
    function = next((f for name in _FUNCTIONS if (f := getattr(block, name, None)) is not None), nn.functional.silu)
    if up is None or down is None:
        raise UnsupportedDecoder(f"{type(block).__name__} has no gate_proj, up_proj, down_proj and act_fn")
    matrices = (
        None if gate is None else parts.matrix(gate, "gate_proj"),
        parts.matrix(up, "up_proj"),
        parts.matrix(down, "down_proj"),
    )
    has_both = up.out_features == 2 * down.in_features
    activation = recognise_function(function, gated=gate is not None or has_both)
    if activation is None:
        raise UnsupportedDecoder(
            f"{type(block).__name__} has an activation ({type(function).__name__}) that is none we know"
        )
    return decoder.DenseBlock(*matrices, activation_for_core(activation))
