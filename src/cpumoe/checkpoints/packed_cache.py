"""The packed cache: packed weights in a file, so that a second start is a memory map.

One safetensors file per model and options, with packed tensors at multiples of 64 bytes. Its metadata says what it was
made from (:meth:`Checkpoint.fingerprint` and the headers of the source files) and by which version, and has a checksum
of every tensor: a file made from anything else, or whose bytes are not those that were written, is replaced.

All checksums are compared at each start, which reads the file once: 0.06 to 0.1 s per GB in the page cache
on two CPUs, and what the disk takes for the rest. Weights of which some bits are wrong would still give text.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from cpumoe import __version__, cpu, numa
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.mapped_file import map_file
from cpumoe.checkpoints.tensor_file import TensorFile, TensorFileWriter, bytes_of
from cpumoe.errors import CheckpointError

_log = logging.getLogger("cpumoe")
_FORMAT = "3"  # of this file; the packed weights have a version of their own in their headers

_READ_ONLY = 0o444  # a file that is mapped must not be written to; a new one takes its name instead
_MOST_THREADS = 8  # one reads 10 GB/s from memory


class PackedCache:
    """The cache file of one checkpoint and one set of options inside ``folder``."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, options: Mapping[str, str | None]) -> None:
        source = [checkpoint.fingerprint(), [file.header_digest for file in checkpoint.files]]
        config = json.dumps(checkpoint.config, sort_keys=True)
        self._fingerprint = _digest([_FORMAT, __version__, source, config, dict(options)])
        # The name depends on the place and the options alone, so that a changed source replaces its old cache.
        name = _digest([str(checkpoint.folder.resolve()), dict(options)])[:16]
        self.path = folder / f"{checkpoint.folder.resolve().name}-{name}.packed.safetensors"

    def is_current(self) -> bool:
        """Return whether there is a file that was made from this very source, by its header alone."""
        try:
            with TensorFile(self.path) as file:
                return file.metadata.get("fingerprint") == self._fingerprint
        except (CheckpointError, OSError):
            return False

    def load(self) -> dict[str, Tensor] | None:
        """The packed tensors by name, mapped from the file; None if there is no whole cache of this very source."""
        if not self.path.exists():
            return None
        try:
            with TensorFile(self.path) as file:
                if file.metadata.get("fingerprint") != self._fingerprint:
                    _log.info("%s was made from another state of the checkpoint and will be replaced", self.path)
                    return None
                tensors = _checked(file)
                if numa.obstacle(numa.read_topology()) is None:
                    _log.info("weights mapped from %s lie where the page cache has them, not on nodes", self.path)
                return tensors
        except (CheckpointError, OSError) as problem:
            _log.warning("%s; it will be replaced", problem)
            return None

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes the file; it appears under its name only when it is whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        metadata = {"fingerprint": self._fingerprint, "checksums": json.dumps(_checksums(tensors))}
        with TensorFileWriter(self.path, specs, metadata, mode=_READ_ONLY) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)


def _checked(file: TensorFile) -> dict[str, Tensor]:
    """The tensors of a cache file, mapped, if their bytes are those that were written."""
    mapped = map_file(file.fileno(), file.path)
    mapped.madvise(mmap.MADV_WILLNEED)
    try:
        # Each tensor has a storage of its own: pickling one slice of a common storage would write all of it.
        tensors = {
            name: torch.frombuffer(mapped, dtype=torch.uint8, count=info.bytes, offset=info.start)
            for name, info in file.tensors.items()
        }
        expected = dict(json.loads(file.metadata.get("checksums", "{}")))
    except (ValueError, TypeError) as problem:  # it was cut since its header was read, or its metadata is damaged
        raise CheckpointError(f"{file.path} is damaged ({problem})") from None
    found = _checksums(tensors)
    if found != expected:
        names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise CheckpointError(f"{file.path} is damaged: {names[0]} does not have the checksum that was written")
    return tensors


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    def checksum(name: str) -> str:
        seed = xxhash.xxh3_64_intdigest(name.encode())  # bytes under another name have another checksum
        digest: str = xxhash.xxh3_64_hexdigest(bytes_of(tensors[name].contiguous()), seed)
        return digest

    with ThreadPoolExecutor(min(_MOST_THREADS, cpu.get_num_threads())) as threads:
        return dict(zip(tensors, threads.map(checksum, tensors), strict=True))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
