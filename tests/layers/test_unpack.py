"""Unpacking gives back what was packed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpumoe import Scheme, ops
from cpumoe.layers.packed_weights import packed_activations
from cpumoe.ops import unpack


@settings(deadline=None)
@given(
    scheme=st.sampled_from(
        [
            *("w4a8", "w4a8-g32", "w4a8-g64", "w4a8-g96", "w4a8-g128", "w4a8-g256", "w8a8", "w8a8-g32", "w8a16-g160"),
            *("w4a16-asym", "w4a16-g32-asym", "w4a16-g96-asym", "w4a16-g128-asym", "w4a16-g256-asym+int8"),
            *("mxfp4a16", "nvfp4a16"),
        ]
    ),
    groups=st.integers(1, 5),
    rows=st.integers(1, 100),
    experts=st.integers(1, 3),
    gated=st.booleans(),
    interleaved=st.booleans(),
    bias=st.booleans(),
    narrow_scales=st.booleans(),
)
def test_round_trip(scheme, groups, rows, experts, gated, interleaved, bias, narrow_scales):
    parsed = Scheme.parse(scheme)
    columns = groups * (parsed.group_size or 1) + (groups if parsed.group_size is None else 0) * 17
    rows = (rows % 6 + 1) * 32 if gated else rows
    smallest = 0 if parsed.weights.element == "fp4" else -parsed.weights.largest - 1
    values = torch.randint(smallest, smallest + 2**parsed.weights.bits, (experts, rows, columns), dtype=torch.int8)
    shape = (experts, rows, groups if parsed.group_size else 1)
    scales = torch.rand(shape) + 0.01
    scales = scales.bfloat16() if narrow_scales else scales
    zeros = factors = None
    if not parsed.weights.symmetric:
        zeros = torch.randint(-8, 8, shape, dtype=torch.int8)
    if parsed.weights.scale != "float":
        scales = torch.randint(0, 127, shape, dtype=torch.uint8) * (2 if parsed.weights.scale == "e8m0" else 1)
    if parsed.weights.scale == "e4m3":
        scales, factors = scales.view(torch.float8_e4m3fn), torch.rand(experts, rows) + 0.01
    biases = torch.randn(experts, rows) if bias else None
    order = (2 if interleaved else 1) if gated else 0
    input_order = None
    if bias and columns > 1:  # inputs in another order, gate and up rows in one each
        orders = [[torch.randperm(columns) for _ in range(2 if gated else 1)] for _ in range(experts)]
        input_order = torch.stack([torch.stack(of_expert) for of_expert in orders]).to(torch.int32)
    blob = torch.ops.cpumoe.pack(
        *(values, scales, biases, columns, parsed.group_size or -1, parsed.weights.element, order, "values"),
        *(zeros, factors, packed_activations(parsed), input_order),
    )
    if parsed.weights.element == "fp4" and factors is None:  # rows have a factor whatever their scales
        factors = torch.ones(experts, rows)
    packed = (values, scales, zeros, factors, biases)
    if order == 2:
        packed = tuple(None if t is None else torch.cat((t[:, 0::2], t[:, 1::2]), 1) for t in packed)
    packed = (*packed, input_order, None)
    for got, last, expected in zip(unpack(blob), unpack(blob, experts - 1, 1), packed, strict=True):
        assert (got is None) == (last is None) == (expected is None)
        if expected is not None:
            assert got.dtype == expected.dtype and same_bits(got, expected) and same_bits(last, expected[-1:])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_experts_outside_are_refused():
    blob = torch.ops.cpumoe.pack(
        torch.zeros(2, 32, 32, dtype=torch.int8), torch.ones(2, 32, 1), None, 32, -1, "int4", ops.ROWS_PLAIN
    )
    with pytest.raises(ValueError, match="0 to 1 are packed"):
        unpack(blob, 1, 2)
