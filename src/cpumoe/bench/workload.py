"""Packed random weights for the layers of known models, and routing."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from cpumoe import _core, ops
from cpumoe.bench.shapes import Shape
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.activation import Activation
from cpumoe.layers.activation_rounding import input_scale_for, needs_input_scales
from cpumoe.layers.experts import Experts
from cpumoe.layers.packed_weights import builder_for, put_weight
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.routing import select_experts
from cpumoe.layers.routing_methods import RoutingMethod
from cpumoe.layers.scheme import INTEGERS, GroupShape, Scheme
from cpumoe.layers.small_floats import SMALL_FLOATS

#: Calls take layers with this many bytes of weights in turn, so that decode reads DRAM and not a cache.
ROTATED_BYTES = 1_100_000_000

# Layers that are packed. Further ones, which only small layers need, are copies: packing hundreds takes minutes.
_PACKED_LAYERS = 8

#: The most calls that are timed for a row. More layers than this would never be called, however small they are.
MOST_CALLS = 400


def fitting_scheme(scheme: Scheme, shape: Shape) -> Scheme:
    """The scheme if its groups divide the sizes, else, for integers, the one with the largest group that does."""
    if scheme.fits(shape.hidden) and scheme.fits(shape.intermediate):
        return scheme
    for size in (128, 64, 32) if scheme.weights.element in INTEGERS else ():
        if shape.hidden % size == 0 and shape.intermediate % size == 0:
            return replace(scheme, weights=replace(scheme.weights, group=GroupShape.per_group(size)))
    raise UnsupportedScheme(
        f"{scheme} does not fit {shape}; sizes must be multiples of "
        f"{32 if scheme.weights.element in INTEGERS else scheme.group_size}"
    )


def random_weight(
    num_experts: int, out: int, inputs: int, scheme: Scheme, seed: int, largest_input: float = 5.0
) -> QuantizedWeight:
    """Values [experts, out, in] over the whole range, and scales in bf16, or in fp32 if there is one per channel.

    ``largest_input`` is the magnitude that few inputs exceed, for schemes that store a scale of them.
    """
    generator = torch.Generator().manual_seed(seed)
    form, small = scheme.weights, SMALL_FLOATS.get(scheme.weights.element)
    largest = 0.06 / inputs**0.5  # of the weights, so that outputs stay near the inputs
    shape = (num_experts, *form.scale_shape(out, inputs))
    if form.scale == "none":
        floats = (torch.rand((num_experts, out, inputs), generator=generator) * 2 - 1) * largest
        return quantize_weight(floats, scheme)
    low = -form.largest - 1 if small is None else 0
    codes = torch.randint(low, low + 2**form.bits, (num_experts, out, inputs), dtype=torch.int16, generator=generator)
    if form.element == "fp8":
        values = torch.where(codes % 128 == 127, 0, codes).to(torch.uint8).view(torch.float8_e4m3fn)  # 127 is NaN
    else:
        values = codes.to(torch.int8)
    size = largest / (2 ** (form.bits - 1) if small is None else small.largest)  # of a scale
    scales = (torch.rand(shape, generator=generator) + 0.5) * size
    zeros, factors = None, None
    if form.scale == "e8m0":
        power = 127 + math.floor(math.log2(size))
        scales = torch.randint(power - 2, power + 3, shape, dtype=torch.uint8, generator=generator)
    elif form.scale == "e4m3":
        scales, factors = (scales / size).to(torch.float8_e4m3fn), torch.full((num_experts, out), size)
    elif scheme.group_size is not None:
        scales = scales.to(torch.bfloat16)
    if not form.symmetric:
        zeros = torch.randint(low, low + 2**form.bits, shape, dtype=torch.int16, generator=generator).to(torch.int8)
    input_scales = None
    if needs_input_scales(scheme):
        input_scales = input_scale_for(torch.full((num_experts, 1), largest_input), scheme)
    return QuantizedWeight(form.element, values, scales, zeros, factors, input_scales=input_scales)


def _random_packed(shape: Shape, rows: int, inputs: int, scheme: Scheme, gated: bool, seed: int) -> Tensor:
    """Packed weights of all experts. Only a few are different: speed depends on addresses, not on values."""
    distinct = min(shape.num_experts, 4)
    # What lies between the products is the product of two numbers of about 0.035.
    weight = random_weight(distinct, rows, inputs, scheme, seed, 5.0 if gated else 0.01)
    builder = builder_for(weight, scheme, shape.num_experts, rows, inputs, gated)
    order = ops.ROWS_GATE_THEN_UP if gated else ops.ROWS_PLAIN
    for expert in range(shape.num_experts):
        one = slice(expert % distinct, expert % distinct + 1)
        put_weight(builder, expert, weight[one], order, "values")
    return builder.finish()


def random_experts(shape: Shape, scheme: Scheme, seed: int = 0) -> Experts:
    """One layer with random packed weights."""
    activation = Activation(shape.activation)
    gate_up = _random_packed(shape, 2 * shape.intermediate, shape.hidden, scheme, True, seed)
    down = _random_packed(shape, shape.hidden, shape.intermediate, scheme, False, seed + 1)
    return Experts.from_packed(gate_up, down, activation=activation)


def rotating_experts(shape: Shape, scheme: Scheme) -> list[Experts]:
    """As many layers as exceed the caches, two at least; no more than can be called."""
    layers = [random_experts(shape, scheme)]
    while len(layers) < 2 or (not exceed_caches(layers) and len(layers) < MOST_CALLS):
        if len(layers) < _PACKED_LAYERS:
            layers.append(random_experts(shape, scheme, seed=len(layers) * 2))
        else:
            layers.append(_copy_of(layers[len(layers) % _PACKED_LAYERS]))
    return layers


def _copy_of(layer: Experts) -> Experts:
    """The same weights at other addresses, allocated as when they are packed."""
    copies = {}
    for name in ("gate_up_packed", "down_packed"):
        copies[name] = torch.empty_like(layer.get_buffer(name))
        _core.advise_huge_pages(copies[name])
        copies[name].copy_(layer.get_buffer(name))
    return Experts.from_packed(**copies, activation=layer.config.activation)


def exceed_caches(layers: list[Experts]) -> bool:
    """Whether calls that take these layers in turn find no weights in a cache."""
    return sum(layer.packed_bytes for layer in layers) >= ROTATED_BYTES


def random_routing(shape: Shape, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """ids and weights [tokens, topk]; experts are chosen as often as the load of the shape says."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.empty((tokens, shape.num_experts))
    load = None if shape.load is None else torch.tensor(shape.load)
    weights, ids = select_experts(logits, shape.topk, RoutingMethod.SIMULATED, load=load, generator=generator)
    return ids, weights
