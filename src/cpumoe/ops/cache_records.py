"""Keys and values in int8: what a cache holds of a token and a head, as a record of bytes.

A record of D values is their codes, a byte each, zeros up to a multiple of 4, and one fp32 scale for every 64 values. A
value comes back as its code times its group's scale, rounded to the dtype that is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe.ops.registration import register_into
from cpumoe.option_values import INT8_CACHE


def check_kv_cache(kv_cache: str | None, name: str = "kv_cache") -> str | None:
    """Refuses what keys and values cannot be held as on request; ``name`` is that of the argument."""
    if kv_cache not in (None, INT8_CACHE):
        raise ValueError(f"{name}={kv_cache!r}; {INT8_CACHE!r}, or nothing for the model's own dtype, is accepted")
    return kv_cache


def cache_record_bytes(depth: int) -> int:
    """Bytes of a record of ``depth`` values."""
    return _core.cache_record_bytes(depth)


def _to_cache_records_out(values: Tensor) -> Tensor:
    return values.new_empty((*values.shape[:-1], cache_record_bytes(values.shape[-1])), dtype=torch.int8)


def _to_cache_records(out: Tensor, values: Tensor) -> None:
    rows = values.detach().reshape(-1, values.shape[-1])
    _core.write_cache_records(rows.contiguous(), out.view(-1, out.shape[-1]))


def _from_cache_records_out(records: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
    return records.new_empty((*records.shape[:-1], depth), dtype=dtype)


def _from_cache_records(out: Tensor, records: Tensor, depth: int, dtype: torch.dtype) -> None:
    _core.read_cache_records(records.reshape(-1, records.shape[-1]).contiguous(), out.view(-1, depth))


# [..., D] in fp32, bf16 or fp16 -> int8 [..., cache_record_bytes(D)]. A group with a NaN or an infinity comes back as
# NaN, one whose values are all below 1e-16 as zeros. What came back in the values' own dtype gives the same records.
to_cache_records = register_into("to_cache_records(Tensor values) -> Tensor", _to_cache_records_out, _to_cache_records)

# int8 [..., cache_record_bytes(D)] -> [..., D] in fp32, bf16 or fp16.
from_cache_records = register_into(
    "from_cache_records(Tensor records, int depth, ScalarType dtype) -> Tensor",
    _from_cache_records_out,
    _from_cache_records,
)
