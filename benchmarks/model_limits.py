"""What a step of a whole model must read and compute, and how long the machine needs for that at best."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from model_shape import ModelShape

from cpumoe.layers.packed_weights import packed_spec
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import Scheme
from cpumoe.ops import cache_record_bytes


@dataclass(frozen=True)
class StoredBytes:
    """How many bytes a system stores for each part: of a layer, except for the head and the last norm."""

    linears: float
    router: float
    norms: float
    expert: float  # one of them
    keys_and_values: float  # of one token
    head: float
    last_norm: float


@dataclass(frozen=True)
class StepBytes:
    """What one step of decoding reads from memory. The rows of the embedding, a few kB, are not counted."""

    linears: float
    head: float
    routers: float
    norms: float
    experts: float
    keys_and_values: float

    @property
    def total(self) -> float:
        return sum((self.linears, self.head, self.routers, self.norms, self.experts, self.keys_and_values))

    @property
    def beside_experts(self) -> float:
        return self.total - self.experts

    def as_json(self) -> dict[str, float]:
        return {**asdict(self), "total": self.total}


def cpumoe_bytes(
    shape: ModelShape, scheme: Scheme, head: Scheme | None, dtype: torch.dtype, kv_cache: str | None
) -> StoredBytes:
    """cpumoe's own: packed as the core packs them. ``head``: its scheme, None for float; ``dtype``: of all floats.

    ``kv_cache``: what keys and values are held as, None for floats too.
    """

    def packed(scheme: Scheme, experts: int, rows: int, columns: int, *, gated: bool = False) -> int:
        # The dtype of the scales is the quantiser's choice, so it is asked with a matrix of one group.
        scales = quantize_weight(torch.ones((1, columns), dtype=torch.bfloat16), scheme).scales.dtype
        return packed_spec(scheme, scales, experts, rows, columns, gated=gated).packed_bytes

    gate_up = packed(scheme, shape.experts, 2 * shape.intermediate, shape.hidden, gated=True)
    down = packed(scheme, shape.experts, shape.hidden, shape.intermediate)
    if head is None:
        head_bytes = shape.vocabulary * shape.hidden * dtype.itemsize
    else:
        head_bytes = packed(head, 1, shape.vocabulary, shape.hidden)
    head_bytes_in_cache = shape.head_dim * dtype.itemsize if kv_cache is None else cache_record_bytes(shape.head_dim)
    return StoredBytes(
        linears=sum(packed(scheme, 1, rows, columns) for rows, columns in shape.attention_linears.values()),
        router=shape.experts * shape.hidden * dtype.itemsize,
        norms=sum(shape.norm_sizes) * dtype.itemsize,
        expert=(gate_up + down) / shape.experts,
        keys_and_values=2 * shape.kv_heads * head_bytes_in_cache,
        head=head_bytes,
        last_norm=shape.hidden * dtype.itemsize,
    )


def llama_cpp_bytes(shape: ModelShape) -> StoredBytes:
    """llama.cpp's: Q4_0 has 18 bytes for 32 weights, Q8_0 34; routers and norms in fp32, keys and values in fp16."""
    q4_0, q8_0 = 18 / 32, 34 / 32
    return StoredBytes(
        linears=q4_0 * sum(rows * columns for rows, columns in shape.attention_linears.values()),
        router=4 * shape.experts * shape.hidden,
        norms=4 * sum(shape.norm_sizes),
        expert=q4_0 * 3 * shape.hidden * shape.intermediate,
        keys_and_values=2 * 2 * shape.kv_heads * shape.head_dim,
        head=q8_0 * shape.vocabulary * shape.hidden,
        last_norm=4 * shape.hidden,
    )


def expected_experts(shape: ModelShape, tokens: int) -> float:
    """How many different experts of a layer so many tokens choose, on average, if all are chosen alike."""
    return shape.experts * (1 - (1 - shape.topk / shape.experts) ** tokens)


def step_bytes(shape: ModelShape, stored: StoredBytes, batch: int, depth: float, experts: float) -> StepBytes:
    """For one token of each of ``batch`` sequences behind ``depth`` tokens, of which a layer takes so many experts."""
    return StepBytes(
        linears=shape.layers * stored.linears,
        head=stored.head,
        routers=shape.layers * stored.router,
        norms=shape.layers * stored.norms + stored.last_norm,
        experts=shape.layers * stored.expert * experts,
        keys_and_values=shape.layers * stored.keys_and_values * batch * depth,
    )


@dataclass(frozen=True)
class PromptOperations:
    """Multiplications and additions for a prompt: those with packed weights, and those of causal attention.

    The head is for one token. Routers, norms and the softmax are not counted.
    """

    int8: float
    attention: float


def prompt_operations(shape: ModelShape, tokens: int, *, head_is_packed: bool) -> PromptOperations:
    linears = sum(rows * columns for rows, columns in shape.attention_linears.values())
    experts = shape.topk * 3 * shape.hidden * shape.intermediate
    head = shape.hidden * shape.vocabulary if head_is_packed else 0
    pairs = tokens * (tokens + 1) / 2  # of a query and a key; each is a product with the key and one with the value
    return PromptOperations(
        int8=2.0 * (shape.layers * tokens * (linears + experts) + head),
        attention=2.0 * shape.layers * pairs * 2 * shape.heads * shape.head_dim,
    )
