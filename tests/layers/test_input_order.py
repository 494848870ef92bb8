"""Activation order: scales that belong to inputs anywhere, with orders of their own for gate, up and down."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cpumoe
from cpumoe.evaluation.selftest import using_isa
from cpumoe.layers import reference
from cpumoe.layers.activation_rounding import held_activations
from cpumoe.layers.backends import NativeBackend
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.packed_weights import unpack_weight
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import Scheme

EXPERTS, HIDDEN, INNER = 4, 160, 96
SCHEMES = ["w4a16-g32", "w4a16-g32-asym", "w8a16-g32", "w4a16-g32+int8", "w4a8-g32"]


def orders(count: int, inputs: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(inputs, generator=generator) for _ in range(EXPERTS * count)]
    return torch.stack(rows).view(EXPERTS, count, inputs).to(torch.int32)


def weight(rows: int, inputs: int, scheme: str, count: int, seed: int) -> QuantizedWeight:
    """Random weights whose inputs are listed in ``count`` orders by the groups that they belong to."""
    generator = torch.Generator().manual_seed(seed)
    floats = torch.randn((EXPERTS, rows, inputs), generator=generator) * 0.1
    quantized = quantize_weight(floats, Scheme.parse(scheme))
    return replace(quantized, input_order=orders(count, inputs, seed))


def layer(scheme: str, gate_up_orders: int) -> Experts:
    gate_up = weight(2 * INNER, HIDDEN, scheme, gate_up_orders, 1)
    down = weight(HIDDEN, INNER, scheme, 1, 2)
    config = MoEConfig(Scheme.parse(scheme), EXPERTS, HIDDEN, INNER, scale_dtype=gate_up.scales.dtype)
    return Experts.from_chunks([QuantizedExperts(gate_up, down)], config)


def plain_weights(quantized: QuantizedWeight, expert: int) -> Tensor:
    """Input by input from the definition: the scale of an input is that of the group in which its order has it."""
    values, scales = quantized.values[expert].float(), quantized.scales[expert].float()
    out = torch.empty_like(values)
    assert quantized.input_order is not None
    for index, rows in enumerate(torch.arange(values.shape[0]).chunk(quantized.input_order.shape[1])):
        for place, column in enumerate(quantized.input_order[expert, index].tolist()):
            zero = 0 if quantized.zero_points is None else quantized.zero_points[expert, rows, place // 32].float()
            out[rows, column] = (values[rows, column] - zero) * scales[rows, place // 32]
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("gate_up_orders", [1, 2])
def test_a_layer_follows_the_definition(scheme: str, gate_up_orders: int) -> None:
    experts = layer(scheme, gate_up_orders)
    assert isinstance(experts.backend, NativeBackend)
    held = experts.quantized()
    for expert in range(EXPERTS):
        for part in (held.gate_up, held.down):
            assert torch.equal(reference.dequantize(part)[expert], plain_weights(part, expert))
    for tokens in (1, 3, 40):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn((tokens, HIDDEN), generator=generator)
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(tokens)])
        weights = torch.rand((tokens, 2), generator=generator)
        result, truth = experts(x, ids, weights), experts.reference(x, ids, weights)
        bound = 1e-4 if experts.config.scheme.product_activations is None else 1e-2
        assert float((result - truth).norm() / truth.norm()) < bound
        for entry in cpumoe.instruction_sets():
            if entry.supported:
                with using_isa(entry.name):
                    assert torch.equal(experts(x, ids, weights), result), entry.name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_linear_follows_the_definition(scheme: str) -> None:
    quantized = weight(70, HIDDEN, scheme, 1, 3)[0]
    linear = QuantizedLinear.from_weight(quantized, Scheme.parse(scheme))
    x = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(4))
    truth = reference.linear(x, reference.dense(quantized), held_activations(Scheme.parse(scheme)))
    assert float((linear(x) - truth).norm() / truth.norm()) < 1e-5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda order: order.index_fill(2, torch.tensor([3]), 7), "every input from 0 to 159 once"),
        (lambda order: order - 1, "every input from 0 to 159 once"),
        (lambda order: order + 1, "every input from 0 to 159 once"),
        (lambda order: order.long(), "int32"),
        (lambda order: order[:, :, :-1], "int32"),
        (lambda order: order.repeat(1, 3, 1), "3 orders of inputs"),
    ],
)
def test_what_is_no_order_is_refused(change: object, said: str) -> None:
    quantized = weight(2 * INNER, HIDDEN, "w4a16-g32", 1, 5)
    changed = replace(quantized, input_order=change(quantized.input_order))  # type: ignore[operator]
    with pytest.raises(ValueError, match=said):
        QuantizedLinear.from_weight(changed[0], Scheme.parse("w4a16-g32"))


def test_packed_weights_may_lie_anywhere() -> None:
    linear = QuantizedLinear.from_weight(weight(70, HIDDEN, "w4a16-g32", 1, 3)[0], Scheme.parse("w4a16-g32"))
    x = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(4))
    memory = torch.empty(linear.weight_packed.numel() + 1, dtype=torch.uint8)
    moved = memory[1 - memory.data_ptr() % 2 :][: linear.weight_packed.numel()]  # begins at an odd address
    moved.copy_(linear.weight_packed)
    assert moved.data_ptr() % 2 == 1
    assert torch.equal(QuantizedLinear(moved)(x), linear(x))


def test_damaged_orders_read_nothing_foreign() -> None:
    """Bytes of packed weights may be anything; wrong numbers are all that may come of it."""
    linear = QuantizedLinear.from_weight(weight(32, HIDDEN, "w4a16-g32", 1, 3)[0], Scheme.parse("w4a16-g32"))
    linear.weight_packed[64 : 64 + 2 * HIDDEN] = 255
    assert linear(torch.ones(3, HIDDEN)).shape == (3, 32)
    assert int(unpack_weight(linear.weight_packed).input_order.max()) == HIDDEN - 1  # type: ignore[union-attr]
