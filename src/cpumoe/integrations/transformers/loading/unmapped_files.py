"""Checkpoint files that the system does not map, because they are larger than memory: transformers reads them too."""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor
from transformers import modeling_utils

from cpumoe.checkpoints.tensor_file import TensorFile


def read_unmapped(files: Iterable[TensorFile]) -> None:
    """Make transformers open files that cannot be mapped through :class:`UnmappedFile` from now on, if there are any.

    It maps whole files for writing, which Linux refuses if memory could not hold all of the file.
    """
    if not all(file.can_be_mapped for file in files):
        modeling_utils.safe_open = _safe_open


def _safe_open(filename: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return safetensors.safe_open(filename, *arguments, **options)
    except (MemoryError, OSError, RuntimeError):
        return UnmappedFile(filename)


class UnmappedFile:
    """What transformers uses of ``safetensors.safe_open``, with reads of single tensors instead of a memory map."""

    def __init__(self, path: str) -> None:
        self._file = TensorFile(Path(path))

    def __enter__(self) -> UnmappedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keys(self) -> KeysView[str]:
        return self._file.tensors.keys()

    def metadata(self) -> Any:
        return self._file.metadata

    def get_tensor(self, name: str) -> Tensor:
        return self._file.read(name)

    def get_slice(self, name: str) -> TensorSlice:
        return TensorSlice(self._file, name)


class TensorSlice:
    """A tensor of a file that is read when it is indexed."""

    def __init__(self, file: TensorFile, name: str) -> None:
        self._file, self._name = file, name

    def get_shape(self) -> list[int]:
        return list(self._file.tensors[self._name].shape)

    def get_dtype(self) -> str:
        return self._file.tensors[self._name].dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self._file.read(self._name)[index]
