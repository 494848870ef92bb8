"""Tensors by name, wherever they are: what the readers of experts and linears ask for, and what is wrong with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, KeysView, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cpumoe.checkpoints.storage import StoredTensor
from cpumoe.checkpoints.tensor_file import DTYPE_NAMES, TensorInfo
from cpumoe.errors import CheckpointError, CpumoeError, UnsupportedScheme, printable

_MAX_NAMES = 12  # of one kind in a message


class NamedTensors(ABC):
    """A set of tensors, in files or in memory."""

    #: What messages call the set.
    place: object

    @property
    @abstractmethod
    def names(self) -> KeysView[str]: ...

    @abstractmethod
    def info(self, name: str) -> TensorInfo: ...

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The tensor ``name``."""

    @abstractmethod
    def read_into(self, name: str, out: Tensor, first_byte: int = 0) -> None:
        """Fills the contiguous tensor ``out`` with bytes of ``name``."""

    @abstractmethod
    def read_part(self, name: str, out: Tensor, start: Sequence[int]) -> None:
        """Fills ``out`` with the part of ``name`` that begins at the place ``start`` and has the shape of ``out``."""

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def infos_of(self, module: str, suffixes: Iterable[str]) -> dict[str, TensorInfo]:
        """Those tensors of a module that are there, by the last part of their names."""
        return {suffix: self.info(name) for suffix in suffixes if (name := f"{module}.{suffix}") in self}

    def refuse_other_contents(self, name: str, stored: StoredTensor) -> None:
        """Raises CheckpointError or UnsupportedScheme if the tensor ``name`` does not hold what is known of it."""
        if name in self or not stored.optional:
            stored.refuse_other(name, self.read(name))


class HeldTensors(NamedTensors):
    """Tensors in memory, as somebody else has read them. ``place``: where they belong, for messages."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Raises CheckpointError for a tensor that has come before, or whose dtype no checkpoint has."""
        if name in self._tensors:
            raise CheckpointError(f"{self.place}: {name} was loaded before; one tensor of a name is accepted")
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{self.place}: {name} is {tensor.dtype}, which is no dtype of checkpoints")
        self._tensors[name] = tensor

    def drop(self, names: Iterable[str]) -> None:
        """Lets go of tensors; those that never came are no mistake."""
        for name in names:
            self._tensors.pop(name, None)

    @property
    def names(self) -> KeysView[str]:
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        return TensorInfo(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_into(self, name: str, out: Tensor, first_byte: int = 0) -> None:
        stored = self._tensors[name].contiguous().view(-1).view(torch.uint8)
        out.view(-1).view(torch.uint8).copy_(stored[first_byte : first_byte + out.nbytes])

    def read_part(self, name: str, out: Tensor, start: Sequence[int]) -> None:
        part = self._tensors[name]
        for axis, (first, size) in enumerate(zip(start, out.shape, strict=True)):
            part = part.narrow(axis, first, size)
        out.copy_(part)


class TensorCheck:
    """Gathers what is wrong with a set of tensors, by what headers say of them, so that one message names all of it."""

    def __init__(self, tensors: NamedTensors) -> None:
        self._tensors = tensors
        self._known: dict[str, StoredTensor] = {}  # whose contents are known, or read before weights are
        self.expected: set[str] = set()
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self.extra: list[str] = []

    def expect(self, name: str, stored: StoredTensor, *, read_value: bool = False) -> None:
        """Announce a tensor; ``read_value``: it is of few numbers, which a load does not read."""
        self.expected.add(name)
        if name not in self._tensors:
            if not stored.optional:
                self.missing.append(name)
            return
        info = self._tensors.info(name)
        if info.dtype not in stored.dtypes or not stored.accepts(info.shape):
            accepted = f"{' or '.join(stored.dtypes)} {list(stored.shape)}"
            self.wrong.append(f"{name} is {info}, {accepted} is accepted")
        elif stored.is_known and read_value:
            self._compare(name, stored)
        elif stored.is_known or stored.inspected:
            self._known[name] = stored

    def compare_known(self) -> None:
        """Read all tensors whose contents are known, and all indices. A load checks them when it gets to them."""
        for name, stored in self._known.items():
            self._compare(name, stored)

    def _compare(self, name: str, stored: StoredTensor) -> None:
        try:
            if stored.is_known:
                self._tensors.refuse_other_contents(name, stored)
            elif stored.contents is not None:
                stored.contents(name, self._tensors.read(name))
        except (CheckpointError, UnsupportedScheme) as problem:
            self.wrong.append(str(problem))

    def expect_any(self, name: str) -> None:
        """A tensor that must be there, whatever it is."""
        self.expected.add(name)
        if name not in self._tensors:
            self.missing.append(name)

    def nothing_else_but(self, left_out: Collection[str]) -> None:
        """Every tensor must have been expected, or be one of those that are rightly not loaded."""
        self.extra += sorted(name for name in self._tensors.names - self.expected if name not in left_out)

    def raise_problems(self) -> None:
        parts = [
            f"{len(names)} {kind}: {listed(names)}"
            for kind, found in (("missing", self.missing), ("of another kind", self.wrong), ("unexpected", self.extra))
            for names in [list(dict.fromkeys(found))]  # two checks may find the same
            if names
        ]
        if parts:
            raise CheckpointError(f"{self._tensors.place}: tensors " + "; ".join(parts))


@contextmanager
def naming(module: str) -> Iterator[None]:
    """Adds the name of a module to what the packer refuses, which knows values and not whose they are."""
    try:
        yield
    except CpumoeError:
        raise
    except ValueError as problem:
        raise CheckpointError(f"{module}: {problem}") from problem


def listed(names: list[str]) -> str:
    """Names for a message: the first of them, and how many more there are."""
    shown = ", ".join(map(printable, names[:_MAX_NAMES]))
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
