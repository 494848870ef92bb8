"""A linear whose tensors somebody else reads, and hands over one by one in any order.

In memory it may be several linears, one below the other (query, key and value), of each of which some rows are held;
the files may have them one by one or some of them in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cpumoe.checkpoints.held_scales import held_scheme, held_weight
from cpumoe.checkpoints.linear_sources import LinearSource
from cpumoe.checkpoints.named_tensors import HeldTensors, TensorCheck, naming
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.errors import CheckpointError
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import Scheme


@dataclass(frozen=True)
class LinearPart:
    """One of the linears that are one in memory.

    Attributes:
        name: for messages.
        storage: how it is stored.
        rows: in the files.
        first, count: the rows that are held here.
    """

    name: str
    storage: LinearStorage
    rows: int
    first: int
    count: int


class PushedLinear:
    """Takes the tensors of a linear, and packs it when all have come.

    Args:
        name: of the linear in memory, for messages.
        columns: its inputs.
        parts: from the first row to the last.
    """

    def __init__(self, name: str, columns: int, parts: Sequence[LinearPart]) -> None:
        self._columns = columns
        self._parts = tuple(parts)
        self._tensors = HeldTensors(name)
        self._come: dict[tuple[int, ...], int] = {}  # parts that are one in the files -> how many of their tensors
        self._linears: list[QuantizedLinear] | None = None

    @property
    def suffixes(self) -> tuple[str, ...]:
        """All tensors that a linear of the files may have, by the last part of their names."""
        return tuple(dict.fromkeys(suffix for part in self._parts for suffix in part.storage.tensors(1, 1)))

    def push(self, parts: tuple[int, ...], suffix: str, tensor: Tensor) -> None:
        """Takes a tensor of a linear in the files, which is one of the parts, or some that follow one another.

        Raises CheckpointError if it, or what has come, is not what it should be.
        """
        storage = self._parts[parts[0]].storage
        name, suffixes = self._name(parts), storage.tensors(1, 1)
        if suffix not in suffixes:
            raise CheckpointError(f"{name} has a tensor {suffix}; {', '.join(suffixes)} are accepted")
        if any(self._parts[part].storage != storage for part in parts):
            raise CheckpointError(f"{name} is one linear, and config.json has several schemes for what it consists of")
        self._tensors.add(f"{name}.{suffix}", tensor)
        self._come[parts] = self._come.get(parts, 0) + 1
        if self._is_complete():
            self._linears = self._packed()
            self._tensors.drop(list(self._tensors.names))

    def finish(self) -> list[QuantizedLinear]:
        """The linear, or those that its outputs come from, one after another, where they cannot be one; none for none.

        Raises CheckpointError with the names of what has not come.
        """
        if self._linears is None:
            check = TensorCheck(self._tensors)
            come = {part for parts in self._come for part in parts}
            for parts in [*self._come, *((part,) for part in range(len(self._parts)) if part not in come)]:
                for suffix in self._parts[parts[0]].storage.tensors(1, 1):
                    check.expect_any(f"{self._name(parts)}.{suffix}")
            check.raise_problems()
            raise CheckpointError(f"{self._tensors.place}: its tensors overlap")
        linears, self._linears = self._linears, None  # whoever holds on to this does not hold the weights
        return linears

    def _name(self, parts: tuple[int, ...]) -> str:
        """Of a linear of the files; parts that are one there have no name but their numbers."""
        if len(parts) == 1:
            return self._parts[parts[0]].name
        return str(self._tensors.place) + ("" if len(parts) == len(self._parts) else str(list(parts)))

    def _is_complete(self) -> bool:
        if sum(map(len, self._come)) != len(self._parts):
            return False
        return all(count == len(self._parts[parts[0]].storage.tensors(1, 1)) for parts, count in self._come.items())

    def _packed(self) -> list[QuantizedLinear]:
        sources = [self._source(parts) for parts in sorted(self._come)]
        check = TensorCheck(self._tensors)
        for source, _ in sources:
            source.check(check)
        check.raise_problems()
        runs: list[tuple[list[QuantizedWeight], Scheme]] = []
        with naming(str(self._tensors.place)):
            for source, ranges in sources:
                # What was one scale for all of a linear each of its rows has, if there is such a scheme.
                scheme = held_scheme(source.storage.scheme)
                weight = held_weight(source.read(), source.storage.scheme, source.rows).rows(ranges)
                if len(weight.values) == 0:
                    continue
                last, of_last = runs[-1] if runs else ([], None)
                if of_last == scheme and last[-1].goes_above(weight, scheme.weights.group.rows):
                    last.append(weight)
                else:
                    runs.append(([weight], scheme))
            joined = ((QuantizedWeight.below_one_another(weights), scheme) for weights, scheme in runs)
            return [QuantizedLinear.from_weight(weight, scheme) for weight, scheme in joined]

    def _source(self, parts: tuple[int, ...]) -> tuple[LinearSource, list[tuple[int, int]]]:
        """A linear of the files, and the rows of it that are held."""
        rows, ranges = 0, []
        for part in parts:
            ranges.append((rows + self._parts[part].first, self._parts[part].count))
            rows += self._parts[part].rows
        storage = self._parts[parts[0]].storage
        return LinearSource(self._tensors, self._name(parts), rows, self._columns, storage, has_bias=False), ranges
