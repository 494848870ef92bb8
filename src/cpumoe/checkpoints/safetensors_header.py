"""Headers of safetensors files: parsed and checked from the first bytes of a file, without a memory map of the rest.

The package ``safetensors`` maps a file to open it, privately for PyTorch, and the system refuses such a map of a file
that is larger than the memory that may be promised. The checks are those of the package: offsets inside the file, no
holes, no overlaps, sizes that fit dtypes and shapes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

from cpumoe.checkpoints.json_files import unique_fields

#: Bits of each element, by safetensors' names of dtypes.
_BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_LENGTH_BYTES = 8
_LARGEST = 100_000_000  # bytes of a header
_MAX_SIZE = 2**64 - 1
_METADATA = "__metadata__"
_GIT_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor; ``start`` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Header:
    """A header: its bytes, the free text in it, and the tensors by name."""

    text: bytes
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]


def read_header(fd: int) -> Header:
    """Return the header of an open file. Raises ValueError for one that is damaged, or does not fit the file."""
    size = os.fstat(fd).st_size
    start = os.pread(fd, len(_GIT_LFS), 0)
    if start == _GIT_LFS:
        raise ValueError("it is a pointer of Git LFS in the place of the file; fetch the file: git lfs pull")
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if size < _LENGTH_BYTES:
        raise ValueError(f"it has {size} bytes, and its header alone has more; download it again")
    if length > _LARGEST:
        raise ValueError(f"its header has {length} bytes; up to {_LARGEST} are accepted")
    if size < _LENGTH_BYTES + length:
        raise ValueError(f"it has {size} bytes, and its header alone {_LENGTH_BYTES + length}; download it again")
    text = os.pread(fd, length, _LENGTH_BYTES)
    fields = _parsed(text)
    metadata = _checked_metadata(fields.pop(_METADATA, None))
    first = _LENGTH_BYTES + length
    tensors = {name: _tensor(name, entry, first) for name, entry in fields.items()}
    end = _end_of_data(tensors, first)
    if size < end:
        raise ValueError(f"it has {size} bytes, and its header announces {end}; download it again")
    if size > end:
        raise ValueError(f"it has {size} bytes, {size - end} more than its header announces; download it again")
    return Header(text, metadata, tensors)


def _parsed(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise ValueError("its header does not begin with {")
    try:
        fields = json.loads(text.decode("utf-8"), object_pairs_hook=unique_fields, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("its header is no JSON object")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"its header has {name}, which is no JSON")


def _checked_metadata(metadata: object) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{_METADATA} is {metadata!r:.80}; an object of texts is accepted")
    return metadata


def _tensor(name: str, entry: object, first: int) -> TensorInfo:
    """One tensor, whose offsets count from ``first``."""
    name.encode()  # UnicodeEncodeError, which is a ValueError, for halves of surrogate pairs
    fields: Mapping[str, object] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{name:.100} has the dtype {dtype!r:.80}; {', '.join(_BITS)} are known")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name:.100} has the shape {shape!r:.80} and the data_offsets {offsets!r:.80}")
    start, end = offsets
    bits = _product((*shape, _BITS[dtype]))
    if bits is None or bits % 8 or end - start != bits // 8:
        raise ValueError(f"{name:.100} is {dtype} {shape!r:.80}, which does not fit its data_offsets {start} and {end}")
    return TensorInfo(dtype, tuple(shape), first + start, end - start)


def _product(sizes: Iterable[int]) -> int | None:
    """Return the product; None for one above 64 bits, which would take long to compute for millions of sizes."""
    product = 1
    for size in sizes:
        product *= size
        if product > _MAX_SIZE:
            return None
    return product


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _MAX_SIZE for size in value)


def _end_of_data(tensors: Mapping[str, TensorInfo], first: int) -> int:
    """Return where the last tensor ends. Each must start where the one before it ends."""
    end = first
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if tensor.start != end:
            raise ValueError(f"{name:.100} starts at byte {tensor.start} of the file; {end} is accepted")
        end += tensor.bytes
    return end
