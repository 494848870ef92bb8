"""Expert sources for layers whose experts lie in one tensor for each matrix, quantised or not."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from cpumoe.checkpoints.expert_sources import Buffers, ExpertSource, FloatExpertSource
from cpumoe.checkpoints.model_layout import FusedMatrix
from cpumoe.checkpoints.named_tensors import TensorCheck
from cpumoe.checkpoints.storage import LinearStorage, StoredTensor
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES
from cpumoe.checkpoints.tensor_parts import TensorPart, slice_of
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight


@dataclass(frozen=True)
class _Matrix:
    """One matrix of all experts: where it is, and what is read of it."""

    place: FusedMatrix
    rows: int  # of each tensor, as it is read
    columns: int
    stored: dict[str, StoredTensor]  # what each tensor has of one expert, by name, biases too
    parts: dict[str, TensorPart]  # what is read of that


class _Fused(ExpertSource):
    """Experts of which each matrix is one tensor, or one and its scales, or gate and up are one each."""

    def _first_dtypes(self) -> dict[str, str]:
        assert self.layout.fused is not None  # the caller has looked
        name = self.layout.fused.gate_up.tensors[0]
        found = self.checkpoint.info(name).dtype if name in self.checkpoint else None
        return {"weight": found} if found in FLOAT_DTYPES else {}

    @cached_property
    def _matrices(self) -> tuple[_Matrix, _Matrix]:
        """gate_up and down."""
        shape, fused = self.layout.shape, self.layout.fused
        assert fused is not None
        hidden, inner, rows = shape.hidden_size, shape.intermediate_size, shape.gate_up_rows
        tensors = len(fused.gate_up.tensors)
        # In one tensor, gate rows come before up rows and each have a slice; where they alternate, slices are of pairs.
        blocks = 2 if rows == 2 * inner and tensors == 1 and not fused.gate_up.interleaved else 1
        each = rows // tensors // inner  # rows of a neuron in a tensor
        (rows_before, read_rows), (columns_before, columns) = self.cuts
        sizes = ((each * inner, hidden), (each * read_rows, hidden), (each * rows_before, hidden))
        sizes_of_down = ((hidden, inner), (hidden, columns), (hidden, columns_before))
        return self._matrix(fused.gate_up, blocks, *sizes), self._matrix(fused.down, 1, *sizes_of_down)

    def _matrix(
        self,
        place: FusedMatrix,
        row_blocks: int,
        stored: tuple[int, int],
        read: tuple[int, int],
        before: tuple[int, int],
    ) -> _Matrix:
        """Rows and columns of an expert's tensors: ``stored``, ``read``, and what lies ``before`` that."""
        whole, smaller, missed = (self._tensors_of(place, *size) for size in (stored, read, before))
        parts = {n: slice_of(whole[n].shape, smaller[n].shape, missed[n].shape, row_blocks) for n in whole}
        return _Matrix(place, *read, whole, parts)

    def _tensors_of(self, place: FusedMatrix, rows: int, columns: int) -> dict[str, StoredTensor]:
        """What the tensors of a matrix have of one expert, by name; ``rows`` are those of each tensor."""
        tensors: dict[str, StoredTensor] = {}
        for name in place.tensors:
            tensors |= self._stored_tensors(place, name, rows, columns)
        return tensors | {name: StoredTensor(FLOAT_DTYPES, (rows,)) for name in place.biases}

    @abstractmethod
    def _stored_tensors(self, place: FusedMatrix, tensor: str, rows: int, columns: int) -> dict[str, StoredTensor]:
        """The tensors that hold one matrix of an expert, by name."""

    def check(self, check: TensorCheck) -> None:
        count = self.layout.shape.expert_count
        for matrix in self._matrices:
            for name, stored in matrix.stored.items():
                first, *others = stored.shape
                whole = (count * first, *others) if matrix.place.flat else (count, first, *others)
                check.expect(name, replace(stored, shape=whole))

    def _read(self, matrix: _Matrix, name: str, first: int, count: int, buffers: Buffers) -> Tensor:
        """Held experts ``first`` to ``first + count - 1`` of a tensor, [count, ...]."""
        part, rows = matrix.parts[name], matrix.stored[name].shape[0]
        out = buffers.get(name, (count, *part.shape), DTYPES[self.checkpoint.info(name).dtype])
        for index, expert in enumerate(self.part.experts[first : first + count]):
            for (start, *others), piece in part.ranges(out[index]):
                if matrix.place.flat:
                    self.checkpoint.read_part(name, piece, (expert * rows + start, *others))
                else:
                    self.checkpoint.read_part(name, piece.unsqueeze(0), (expert, start, *others))
        return out

    def _biases(self, matrix: _Matrix, first: int, count: int, buffers: Buffers) -> Tensor | None:
        is_down = matrix is self._matrices[1]
        if not matrix.place.biases or (is_down and not self.has_down_bias):
            return None
        return _joined([self._read(matrix, name, first, count, buffers) for name in matrix.place.biases])

    def _slice(self, name: str, expert: int) -> Tensor:
        """One of the layer's experts of a tensor, whole, in memory of its own, and not with the code that loads it."""
        info, count = self.checkpoint.info(name), self.layout.shape.expert_count
        first, *others = info.shape
        shape = others if first == count else [first // count, *others]
        out = torch.empty(shape, dtype=DTYPES[info.dtype])
        self.checkpoint.read_into(name, out, expert * info.bytes // count)
        return out

    def _bias_slice(self, place: FusedMatrix, expert: int) -> Tensor | None:
        return torch.cat([self._slice(name, expert) for name in place.biases]) if place.biases else None

    @property
    def _first_rows(self) -> tuple[slice, ...]:
        """Places of gate and up among the rows of both; one place if there is no gate."""
        inner = self.layout.shape.intermediate_size
        if not self.config.activation.gated:
            return (slice(None),)
        if self._matrices[0].place.interleaved:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(inner), slice(inner, None)


def _joined(parts: list[Tensor]) -> Tensor:
    """[count, rows, ...] of gate and of up -> one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class FusedFloat(_Fused, FloatExpertSource):
    """Float weights of all experts in one tensor, [experts, out, in] or [experts, in, out]."""

    def _stored_tensors(self, place: FusedMatrix, tensor: str, rows: int, columns: int) -> dict[str, StoredTensor]:
        size = (columns, rows) if place.transposed else (rows, columns)
        dtypes = tuple(self._dtypes.values()) or FLOAT_DTYPES
        return {tensor: StoredTensor(dtypes, size)}

    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        first_matrix, second = self._matrices

        def rows_apart(rows: Tensor) -> Tensor:  # [count, rows, ...]
            return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1) if first_matrix.place.interleaved else rows

        def weights(matrix: _Matrix) -> Tensor:
            parts = [self._read(matrix, name, first, count, buffers) for name in matrix.place.tensors]
            return _joined([part.transpose(1, 2) if matrix.place.transposed else part for part in parts])

        gate_up_bias, down_bias = (self._biases(m, first, count, buffers) for m in self._matrices)
        gate_up = rows_apart(weights(first_matrix))
        return gate_up, weights(second), None if gate_up_bias is None else rows_apart(gate_up_bias), down_bias

    def stored_expert(self, expert: int) -> dict[str, QuantizedWeight]:
        places = [matrix.place for matrix in self._matrices]

        def weights(place: FusedMatrix) -> Tensor:
            parts = [self._slice(name, expert) for name in place.tensors]
            return torch.cat([part.T if place.transposed else part for part in parts])

        gate_up, down = map(weights, places)
        gate_up_bias, down_bias = (self._bias_slice(place, expert) for place in places)
        *first, last = self.linear_names(expert)
        floats = {
            name: (gate_up[rows], None if gate_up_bias is None else gate_up_bias[rows])
            for name, rows in zip(first, self._first_rows, strict=True)
        }
        return self._rounded(floats | {last: (down, down_bias)})


class FusedQuantized(_Fused):
    """Weights of all experts in one tensor that is quantised in the files, [experts, out, ...], and one of scales.

    Their names are those of the float ones, followed by ``_`` and what the storage calls its tensors.
    """

    storage: LinearStorage

    @property
    def expert_bytes(self) -> int:
        return sum(len(m.place.tensors) * self.storage.read_bytes(m.rows, m.columns) for m in self._matrices)

    def _stored_tensors(self, place: FusedMatrix, tensor: str, rows: int, columns: int) -> dict[str, StoredTensor]:
        return {f"{tensor}_{suffix}": stored for suffix, stored in self.storage.tensors(rows, columns).items()}

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        def weight(matrix: _Matrix) -> QuantizedWeight:
            (tensor,) = matrix.place.tensors
            suffixes = self.storage.tensors(matrix.rows, matrix.columns)
            tensors = {s: self._read(matrix, f"{tensor}_{s}", first, count, buffers) for s in suffixes}
            decoded = self.storage.decode(tensors, matrix.rows, matrix.columns)
            return replace(decoded, bias=self._biases(matrix, first, count, buffers))

        gate_up, down = map(weight, self._matrices)
        return QuantizedExperts(gate_up, down, interleaved=self._matrices[0].place.interleaved)

    def stored_expert(self, expert: int) -> dict[str, QuantizedWeight]:
        def weight(place: FusedMatrix) -> QuantizedWeight:
            (tensor,) = place.tensors
            suffixes = self.storage.tensors(1, 1)
            tensors = {suffix: self._slice(f"{tensor}_{suffix}", expert) for suffix in suffixes}
            return replace(self.storage.decode_plainly(tensors), bias=self._bias_slice(place, expert))

        gate_up, down = (weight(matrix.place) for matrix in self._matrices)
        weights = [*(gate_up[rows] for rows in self._first_rows), down]
        return dict(zip(self.linear_names(expert), weights, strict=True))
