"""The packed cache: packed weights in a file, so that a second start is a memory map.

One safetensors file per model and options, with packed tensors at multiples of 64 bytes. Its metadata says what it was
made from (names, sizes and times of change of the source files) and by which version; a file made from anything else
is ignored and replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from cpumoe import __version__
from cpumoe.checkpoint import Checkpoint
from cpumoe.errors import CheckpointError
from cpumoe.formats.tensor_file import TensorFile, TensorFileWriter

_log = logging.getLogger("cpumoe")
_FORMAT = "1"  # of this file; the packed weights have a version of their own in their headers


class PackedCache:
    """The cache file of one checkpoint and one set of options inside ``folder``."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, options: Mapping[str, str | None]) -> None:
        source = [
            (str(file.path.resolve()), (stat := file.path.stat()).st_size, stat.st_mtime_ns)
            for file in checkpoint.files
        ]
        config = json.dumps(checkpoint.config, sort_keys=True)
        self._fingerprint = _digest([_FORMAT, __version__, source, config, dict(options)])
        # The name depends on the place and the options alone, so that a changed source replaces its old cache.
        name = _digest([str(checkpoint.folder.resolve()), dict(options)])[:16]
        self.path = folder / f"{checkpoint.folder.resolve().name}-{name}.packed.safetensors"

    def load(self) -> dict[str, Tensor] | None:
        """The packed tensors by name, mapped from the file; None if there is no cache of this very source."""
        if not self.path.exists():
            return None
        try:
            with TensorFile(self.path) as file:
                if file.metadata.get("fingerprint") != self._fingerprint:
                    _log.info("%s was made from another state of the checkpoint and will be replaced", self.path)
                    return None
                infos = dict(file.tensors)
        except CheckpointError as problem:
            _log.warning("%s; it will be replaced", problem)
            return None
        # A private map: nothing is read until it is used, and pages are shared with other processes. Each tensor has a
        # storage of its own: pickling one slice of a common storage would write all of it.
        with self.path.open("rb") as source:
            mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
        return {
            name: torch.frombuffer(mapped, dtype=torch.uint8, count=info.bytes, offset=info.start)
            for name, info in infos.items()
        }

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes the file; it appears under its name only when it is whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        with TensorFileWriter(self.path, specs, {"fingerprint": self._fingerprint}) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
