"""Keys and values in int8: the operators, and steps of the core over caches that hold records."""

from __future__ import annotations

import pytest
import torch

import cpumoe
from cpumoe.ops import cache_record_bytes, from_cache_records, to_cache_records

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_definition(values: torch.Tensor) -> torch.Tensor:
    """What comes back of [..., D] in fp32."""
    back = []
    for group in values.float().split(64, -1):
        largest = group.abs().amax(-1, keepdim=True)
        back.append((group * torch.div(torch.tensor(127.0), largest)).round() * (largest / 127))
    return torch.cat(back, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1, 5, 64, 65, 128, 200, 576])
def test_records_hold_what_their_definition_says(depth: int, dtype: torch.dtype) -> None:
    values = torch.randn(3, 2, 7, depth).to(dtype)
    records = to_cache_records(values)
    assert records.dtype == torch.int8 and records.shape == (3, 2, 7, cache_record_bytes(depth))
    back = from_cache_records(records, depth, torch.float32)
    assert torch.allclose(back, by_definition(values), rtol=1e-6, atol=1e-7)
    assert torch.equal(from_cache_records(records, depth, dtype), back.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_came_back_gives_the_same_records(dtype: torch.dtype) -> None:
    values = (torch.randn(500, 130) * torch.randn(500, 1).exp()).to(dtype)
    records = to_cache_records(values)
    assert torch.equal(to_cache_records(from_cache_records(records, 130, dtype)), records)


def test_what_is_no_number_stays_in_its_group() -> None:
    values = torch.randn(4, 130)
    values[0, 3], values[1, 70], values[2, 129] = torch.inf, torch.nan, -torch.inf
    values[3, 64:128] = 1e-20
    back = from_cache_records(to_cache_records(values), 130, torch.bfloat16)
    for row, group in ((0, 0), (1, 1), (2, 2)):
        broken = torch.zeros(130, dtype=torch.bool)
        broken[group * 64 : group * 64 + 64] = True
        assert torch.equal(back[row].isnan(), broken)
    assert not back[3, 64:128].any() and back[3, :64].any()


def test_other_layouts_no_rows_and_operators() -> None:
    values = torch.randn(2, 3, 5, 40)
    turned = to_cache_records(values.transpose(1, 2))
    assert torch.equal(turned, to_cache_records(values).transpose(1, 2))
    assert to_cache_records(values[:0]).shape == (0, 3, 5, cache_record_bytes(40))
    part = to_cache_records(values)[:, 1:, ::2]
    expected = from_cache_records(to_cache_records(values), 40, torch.float32)[:, 1:, ::2]
    assert torch.equal(torch.ops.cpumoe.from_cache_records(part, 40, torch.float32), expected)
    torch.library.opcheck(torch.ops.cpumoe.to_cache_records.default, (values,))
    torch.library.opcheck(torch.ops.cpumoe.from_cache_records.default, (turned, 40, torch.float16))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="values is int64"):
        to_cache_records(torch.zeros(2, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="records are"):
        from_cache_records(torch.zeros(2, 13, dtype=torch.int8), 8, torch.float32)
    with pytest.raises(ValueError, match="records is uint8"):
        from_cache_records(torch.zeros(2, 12, dtype=torch.uint8), 8, torch.float32)
    for depth in (0, -3, 1 << 20):
        with pytest.raises(ValueError, match="1 to 65536 are accepted"):
            cache_record_bytes(depth)


def test_the_same_bits_for_any_number_of_threads() -> None:
    values = torch.randn(700, 130)
    results = []
    for threads in (1, 2, 3):
        cpumoe.set_num_threads(threads)
        records = to_cache_records(values)
        results.append((records, from_cache_records(records, 130, torch.bfloat16)))
    for records, back in results[1:]:
        assert torch.equal(records, results[0][0]) and torch.equal(back, results[0][1])
