"""Shapes of known models, packed random weights for them, and routing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpumoe import ops
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.activation import Activation
from cpumoe.layers.experts import Experts
from cpumoe.layers.packed_weights import packed_spec
from cpumoe.layers.routing import RoutingMethod, select_experts
from cpumoe.layers.scheme import Scheme

#: Weights rotated through so that decode reads DRAM, not a cache.
ROTATED_BYTES = 1_100_000_000


@dataclass(frozen=True)
class Shape:
    """One mixture-of-experts layer."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    topk: int
    activation: str = "silu"
    load: tuple[float, ...] | None = None  # relative load of each expert; None: all alike

    def operations(self, tokens: int) -> float:
        """Integer multiplications and additions of one call."""
        return 2.0 * tokens * self.topk * 3 * self.hidden * self.intermediate


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 2048, 768, 128, 8),
        Shape("deepseek-v2-lite", 2048, 1408, 64, 6),
        Shape("mixtral-8x7b", 4096, 14336, 8, 2),
        Shape("gpt-oss-20b", 2880, 2880, 32, 4, "swiglu_oai"),
    )
}


def fitting_scheme(scheme: Scheme, shape: Shape) -> Scheme:
    """The scheme, or the one with the largest group of 128, 64 and 32 that divides the shape (gpt-oss: 2880)."""
    for size in (scheme.group_size, 128, 64, 32):
        if size is None or (shape.hidden % size == 0 and shape.intermediate % size == 0):
            return scheme if size == scheme.group_size else Scheme.parse(f"w4a8-g{size}")
    raise UnsupportedScheme(f"{scheme} does not fit {shape}; sizes must be multiples of 32")


def random_values(experts: int, out: int, inputs: int, scheme: Scheme, seed: int) -> tuple[Tensor, Tensor]:
    """Integers [experts, out, in] over the whole range and bf16 (per channel: fp32) scales."""
    generator = torch.Generator().manual_seed(seed)
    low = -scheme.weights.largest - 1
    values = torch.randint(low, -low, (experts, out, inputs), dtype=torch.int8, generator=generator)
    groups = 1 if scheme.group_size is None else inputs // scheme.group_size
    scales = (torch.rand((experts, out, groups), generator=generator) + 0.5) * (0.06 / -low / inputs**0.5)
    return values, scales if scheme.group_size is None else scales.to(torch.bfloat16)


def _random_packed(shape: Shape, rows: int, inputs: int, scheme: Scheme, gated: bool, seed: int) -> Tensor:
    """Packed weights of all experts. A few random experts are repeated: addresses matter here, not values."""
    distinct = min(shape.experts, 4)
    values, scales = random_values(distinct, rows, inputs, scheme, seed)
    builder = ops.PackedBuilder(packed_spec(scheme, scales.dtype, shape.experts, rows, inputs, gated=gated))
    order = ops.ROWS_GATE_THEN_UP if gated else ops.ROWS_PLAIN
    for expert in range(shape.experts):
        one = slice(expert % distinct, expert % distinct + 1)
        builder.put(expert, values[one], scales[one], None, order, "values")
    return builder.finish()


def random_experts(shape: Shape, scheme: Scheme, seed: int = 0) -> Experts:
    """One layer with random packed weights."""
    activation = Activation(shape.activation)
    gate_up = _random_packed(shape, 2 * shape.intermediate, shape.hidden, scheme, True, seed)
    down = _random_packed(shape, shape.hidden, shape.intermediate, scheme, False, seed + 1)
    return Experts.from_packed(gate_up, down, activation=activation)


def rotating_experts(shape: Shape, scheme: Scheme) -> list[Experts]:
    """As many layers as it takes to exceed the caches."""
    layers = [random_experts(shape, scheme)]
    while sum(layer.packed_bytes for layer in layers) < ROTATED_BYTES or len(layers) < 2:
        layers.append(random_experts(shape, scheme, seed=len(layers) * 2))
    return layers


def random_routing(shape: Shape, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """ids and weights [tokens, topk], experts as likely as the shape's load says."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.empty((tokens, shape.experts))
    load = None if shape.load is None else torch.tensor(shape.load)
    weights, ids = select_experts(logits, shape.topk, RoutingMethod.SIMULATED, load=load, generator=generator)
    return ids, weights
