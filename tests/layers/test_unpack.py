"""Unpacking gives back what was packed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpumoe import Scheme, ops
from cpumoe.ops import unpack


@settings(deadline=None)
@given(
    scheme=st.sampled_from(["w4a8", "w4a8-g32", "w4a8-g64", "w4a8-g96", "w4a8-g128", "w4a8-g256", "w8a8"]),
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
    largest = parsed.weights.largest
    values = torch.randint(-largest - 1, largest + 1, (experts, rows, columns), dtype=torch.int8)
    scales = torch.rand(experts, rows, groups if parsed.group_size else 1) + 0.01
    scales = scales.bfloat16() if narrow_scales else scales
    biases = torch.randn(experts, rows) if bias else None
    order = (2 if interleaved else 1) if gated else 0
    blob = torch.ops.cpumoe.pack(
        values, scales, biases, columns, parsed.group_size or -1, parsed.weights.element, order, "values"
    )
    got_values, got_scales, got_bias = unpack(blob)
    if order == 2:
        values, scales, biases = (
            None if t is None else torch.cat((t[:, 0::2], t[:, 1::2]), 1) for t in (values, scales, biases)
        )
    assert torch.equal(got_values, values)
    assert got_scales.dtype == scales.dtype and torch.equal(got_scales, scales)
    assert (got_bias is None) == (biases is None) and (biases is None or torch.equal(got_bias, biases))
    last_values, last_scales, _ = unpack(blob, experts - 1, 1)
    assert torch.equal(last_values, values[-1:]) and torch.equal(last_scales, scales[-1:])


def test_experts_outside_are_refused():
    blob = torch.ops.cpumoe.pack(
        torch.zeros(2, 32, 32, dtype=torch.int8), torch.ones(2, 32, 1), None, 32, -1, "int4", ops.ROWS_PLAIN
    )
    with pytest.raises(ValueError, match="0 to 1 are packed"):
        unpack(blob, 1, 2)
