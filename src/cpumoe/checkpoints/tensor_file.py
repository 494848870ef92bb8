"""Safetensors files: reading tensors one by one into memory of our own, and writing them as they are made.

Headers are checked by ``safetensors_header.py``. All bytes are read with ``pread`` and not through a memory map: a
map's pages count as this process's memory for as long as the file is open, and a checkpoint may be larger than the
machine. Of a tensor any part can be read, and what is not asked for is not read, or hardly.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from cpumoe import _core
from cpumoe.checkpoints.regular_files import open_regular
from cpumoe.checkpoints.safetensors_header import TensorInfo as TensorInfo  # for those who have a file
from cpumoe.checkpoints.safetensors_header import read_header
from cpumoe.errors import CheckpointError

#: Safetensors' names of dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
FLOAT_DTYPES = ("BF16", "F16", "F32")  # of weights that are not quantised, and of scales
_KIND = "a safetensors file"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# A call of the system for a run takes as long as to copy some kilobytes. Runs that are shorter than this and not
# farther apart are read together with what lies between: those of scales, mostly, which are few bytes beside the
# weights. Runs of weights are longer, and to read those of other ranks would move all of a model through each.
SHORT_RUN, SHORT_DISTANCE = 32, 1024

_COPIED_BYTES = 64 << 20  # of a tensor that is copied, at once

#: Data starts at a multiple of this, and so does every tensor whose predecessors have such sizes (packed weights do).
ALIGNMENT = 64


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer


def identity(stat: os.stat_result) -> list[int]:
    """Size, times and inode of a file.

    The time of the last change of an inode (ctime) cannot be set, so a file that was rewritten with its old size and
    old modification time is noticed too.
    """
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


class TensorFile:
    """One safetensors file, open for reading. Reads may come from several threads at once.

    ``bytes_read`` counts those of tensors.
    """

    _fd = -1  # also of one whose making has failed half way

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._counting = threading.Lock()
        try:
            self._fd = open_regular(path, _KIND)
            self._opened = identity(os.fstat(self._fd))
            header = read_header(self._fd)
        except CheckpointError:
            raise
        except (OSError, ValueError) as problem:
            raise CheckpointError(f"{path} cannot be read as {_KIND}: {problem}") from None
        self.header_digest = hashlib.sha256(header.text).hexdigest()
        self.metadata = header.metadata
        self.tensors = header.tensors

    @cached_property
    def can_be_mapped(self) -> bool:
        """Whether the system maps all of the file for writing in memory of our own."""
        try:
            mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY).close()
        except (OSError, ValueError):
            return False
        return True

    def read(self, name: str) -> Tensor:
        """The tensor ``name``, in fresh memory."""
        info = self.tensors[name]
        if info.dtype not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} is {info.dtype}; accepted are {', '.join(DTYPES)}")
        out = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: Tensor, first_byte: int = 0) -> None:
        """Fills ``out``, a contiguous tensor, with the bytes of ``name`` from ``first_byte`` on."""
        info = self.tensors[name]
        wanted = out.numel() * out.element_size()
        if not out.is_contiguous() or first_byte + wanted > info.bytes:
            raise ValueError(f"{name}: {wanted} bytes from {first_byte} on do not lie in its {info.bytes}")
        if wanted:
            self._read(name, first_byte, wanted, out.view(-1).view(torch.uint8).unsqueeze(0))

    def read_part(self, name: str, out: Tensor, start: Sequence[int]) -> None:
        """Fills ``out`` with the part of ``name`` that begins at the place ``start`` and has the shape of ``out``.

        No other bytes are read, but for those between short runs that are close together. ``out`` may be a view with
        strides, as long as what lies side by side in the file does so in it.
        """
        info, shape = self.tensors[name], tuple(out.shape)
        inside = len(start) == len(shape) == len(info.shape) and all(
            first >= 0 and first + size <= whole for first, size, whole in zip(start, shape, info.shape, strict=True)
        )
        if not inside or DTYPES.get(info.dtype) != out.dtype:
            raise ValueError(f"{name} is {info}; {out.dtype} {list(shape)} from {list(start)} on is no part of it")
        if out.numel() == 0:
            return
        # From the last dimension on that is cut, what is wanted is one run of bytes; those of the dimension before it
        # are read together.
        cut = max((axis for axis, size in enumerate(shape) if size != info.shape[axis]), default=0)
        strides = [prod(info.shape[axis + 1 :]) * out.element_size() for axis in range(len(shape))]
        first_byte = sum(first * stride for first, stride in zip(start, strides, strict=True))
        outer = shape[: max(0, cut - 1)]
        for place in itertools.product(*map(range, outer)):
            matrix = out[place] if cut else out.unsqueeze(0)  # [runs, ...]
            if not matrix[:1].is_contiguous():
                raise ValueError(f"{name}: {list(shape)} with strides {list(out.stride())}; whole runs are accepted")
            runs: Tensor = matrix.view(len(matrix), -1).view(torch.uint8)
            behind = sum(index * stride for index, stride in zip(place, strides, strict=False))
            stride = strides[cut - 1] if cut else runs.shape[1]
            if runs.shape[1] < SHORT_RUN and stride <= SHORT_DISTANCE:
                self._read_with_gaps(name, first_byte + behind, stride, runs)
            else:
                self._read(name, first_byte + behind, stride, runs)

    def _read_with_gaps(self, name: str, first_byte: int, stride: int, out: Tensor) -> None:
        """The same as :meth:`_read`, and all that lies between the first and the last run is read as well."""
        count, run = out.shape
        rows = torch.empty((count, stride), dtype=torch.uint8)
        self._read(name, first_byte, count * stride, rows.view(1, -1)[:, : (count - 1) * stride + run])
        out.copy_(rows[:, :run])

    def _read(self, name: str, first_byte: int, stride: int, out: Tensor) -> None:
        """Fills uint8 [runs, bytes] with runs of bytes of ``name``, the first at ``first_byte``, each ``stride`` on."""
        count = _core.read_runs(self._fd, self.tensors[name].start + first_byte, stride, out)
        with self._counting:
            self.bytes_read += count
        if count < out.numel():
            raise CheckpointError(f"{self.path} ended while {name} was read; was it cut while being used?")

    def fileno(self) -> int:
        return self._fd

    def refuse_changed(self) -> None:
        """Raises CheckpointError if what has the file's name now is not what was opened."""
        try:
            changed = identity(self.path.stat()) != self._opened
        except OSError:
            changed = True
        if changed:
            raise CheckpointError(f"{self.path} was changed while it was read; load it again when it is whole")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()  # a load that failed has no one else to close it

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def naming_file(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Adds the path to errors without one, or with that of ``partial``: a full disk does not say which file it is."""
    try:
        yield
    except OSError as problem:
        if problem.errno is None or problem.filename not in (None, str(partial)):
            raise
        raise OSError(problem.errno, problem.strerror, str(path)) from problem


class TensorFileWriter:
    """Writes a safetensors file tensor by tensor, in the order in which they were announced.

    The file appears under its name only when all of them are there: until then its name ends in ``.partial``, and it is
    removed if something goes wrong. ``mode`` gives it other permissions than files usually get.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str],
        mode: int | None = None,
    ) -> None:
        self.path = path
        self._mode = mode
        self._partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")  # others may write the same file
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        offset = 0
        self._sizes: dict[str, int] = {}
        for name, (dtype, shape) in tensors.items():
            size = prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
            self._sizes[name] = size
        self._pending: Iterator[str] = iter(tensors)
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        with naming_file(self.path, self._partial):
            self._file = self._partial.open("wb")
        try:
            with naming_file(self.path, self._partial):
                self._file.write(struct.pack("<Q", len(text)) + text)
        except OSError:
            self._discard()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        expected = next(self._pending, None)
        if name != expected or tensor.numel() * tensor.element_size() != self._sizes[name]:
            raise ValueError(f"{name} {list(tensor.shape)} was not announced as the next tensor ({expected} was)")
        with naming_file(self.path, self._partial):
            self._file.write(bytes_of(tensor.contiguous()))

    def copy(self, name: str, read_into: Callable[[str, Tensor, int], None]) -> None:
        """Write the next tensor piece by piece: it may be larger than the memory.

        Args:
            name: of the tensor, in both files.
            read_into: fills a uint8 tensor with the bytes of ``name`` from a given one on.
        """
        expected = next(self._pending, None)
        if name != expected:
            raise ValueError(f"{name} was not announced as the next tensor ({expected} was)")
        size = self._sizes[name]
        buffer = torch.empty(min(size, _COPIED_BYTES), dtype=torch.uint8)
        for first in range(0, size, _COPIED_BYTES):
            piece = buffer[: size - first]
            read_into(name, piece, first)
            with naming_file(self.path, self._partial):
                self._file.write(bytes_of(piece))

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        missing = next(self._pending, None)
        try:
            if kind is None and missing is None:
                with naming_file(self.path, self._partial):
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    if self._mode is not None:
                        os.fchmod(self._file.fileno(), self._mode)
                    self._partial.rename(self.path)
        finally:
            self._discard()
        if kind is None and missing is not None:
            raise ValueError(f"{missing} was announced but not written")

    def _discard(self) -> None:
        """Closes the file and removes it, unless it has its final name by now."""
        with suppress(OSError):  # on a full disk, what is still buffered cannot be written now either
            self._file.close()
        self._partial.unlink(missing_ok=True)
