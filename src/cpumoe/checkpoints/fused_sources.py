"""Expert sources for layers whose experts lie in one tensor for each matrix, quantised or not."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from cpumoe.checkpoints.checkpoint import Checkpoint, TensorCheck
from cpumoe.checkpoints.expert_sources import Buffers, ExpertSource, FloatExpertSource, scale_dtype_of_stored
from cpumoe.checkpoints.model_layout import ExpertsLayout, FusedMatrix
from cpumoe.checkpoints.storage import LinearStorage, StoredTensor
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight


class _Fused(ExpertSource):
    """Experts of which each matrix is one tensor, or one and its scales, or gate and up are one each."""

    def __init__(self, checkpoint: Checkpoint, layout: ExpertsLayout, config: MoEConfig) -> None:
        assert layout.fused is not None  # the caller has looked
        self.layout = layout
        self.config = config
        self.checkpoint = checkpoint
        self._gate_up, self._down = layout.fused.gate_up, layout.fused.down
        shape = layout.shape
        self._sizes = (  # outputs and inputs of each tensor
            (self._gate_up, shape.gate_up_rows // len(self._gate_up.tensors), shape.hidden_size),
            (self._down, shape.hidden_size, shape.intermediate_size),
        )

    @abstractmethod
    def _stored_tensors(self, matrix: FusedMatrix, tensor: str, rows: int, columns: int) -> dict[str, StoredTensor]:
        """The tensors that hold one matrix of an expert, by name."""

    def check(self, check: TensorCheck) -> None:
        count = self.config.local_experts
        for matrix, rows, columns in self._sizes:
            tensors: dict[str, StoredTensor] = {}
            for name in matrix.tensors:
                tensors |= self._stored_tensors(matrix, name, rows, columns)
            tensors |= {name: StoredTensor(FLOAT_DTYPES, (rows,)) for name in matrix.biases}
            for name, stored in tensors.items():
                first, *others = stored.shape
                whole = (count * first, *others) if matrix.flat else (count, first, *others)
                check.expect(name, replace(stored, shape=whole))

    def _part(self, name: str, first: int, count: int, buffers: Buffers) -> Tensor:
        """Experts ``first`` to ``first + count - 1`` of a tensor, [count, ...]."""
        info = self.checkpoint.info(name)
        out = buffers.get(name, (count, *self._expert_shape(name)), DTYPES[info.dtype])
        self.checkpoint.read_into(name, out, first * (info.bytes // self.config.local_experts))
        return out

    def _expert_shape(self, name: str) -> tuple[int, ...]:
        """The shape of one expert's part of a tensor."""
        first, *others = self.checkpoint.info(name).shape
        return tuple(others) if first == self.config.local_experts else (first // self.config.local_experts, *others)

    def _slice(self, name: str, expert: int) -> Tensor:
        """One expert of a tensor in memory of its own, and not with the code that loads it."""
        info = self.checkpoint.info(name)
        out = torch.empty(self._expert_shape(name), dtype=DTYPES[info.dtype])
        self.checkpoint.read_into(name, out, expert * info.bytes // self.config.local_experts)
        return out

    def _biases(self, matrix: FusedMatrix, first: int, count: int, buffers: Buffers) -> Tensor | None:
        if not matrix.biases:
            return None
        return _joined([self._part(name, first, count, buffers) for name in matrix.biases])

    def _bias_slice(self, matrix: FusedMatrix, expert: int) -> Tensor | None:
        return torch.cat([self._slice(name, expert) for name in matrix.biases]) if matrix.biases else None

    @property
    def _first_rows(self) -> tuple[slice, ...]:
        """Places of gate and up among the rows of both; one place if there is no gate."""
        inner = self.config.intermediate_size
        if not self.config.activation.gated:
            return (slice(None),)
        if self._gate_up.interleaved:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(inner), slice(inner, None)


def _joined(parts: list[Tensor]) -> Tensor:
    """[count, rows, ...] of gate and of up -> one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class FusedFloat(_Fused, FloatExpertSource):
    """Float weights of all experts in one tensor, [experts, out, in] or [experts, in, out]."""

    def __init__(self, checkpoint: Checkpoint, layout: ExpertsLayout, config: MoEConfig) -> None:
        super().__init__(checkpoint, layout, config)
        name = self._gate_up.tensors[0]
        found = checkpoint.info(name).dtype if name in checkpoint else None
        self._dtypes = (found,) if found in FLOAT_DTYPES else FLOAT_DTYPES
        self.config = replace(config, scale_dtype=scale_dtype_of_stored(self._dtypes[0]))

    def _stored_tensors(self, matrix: FusedMatrix, tensor: str, rows: int, columns: int) -> dict[str, StoredTensor]:
        size = (columns, rows) if matrix.transposed else (rows, columns)
        return {tensor: StoredTensor(self._dtypes, size)}

    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        def rows_apart(rows: Tensor) -> Tensor:  # [count, rows, ...]
            return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1) if self._gate_up.interleaved else rows

        def weights(matrix: FusedMatrix) -> Tensor:
            parts = [self._part(name, first, count, buffers) for name in matrix.tensors]
            return _joined([part.transpose(1, 2) if matrix.transposed else part for part in parts])

        gate_up_bias, down_bias = (self._biases(m, first, count, buffers) for m in (self._gate_up, self._down))
        gate_up = rows_apart(weights(self._gate_up))
        return gate_up, weights(self._down), None if gate_up_bias is None else rows_apart(gate_up_bias), down_bias

    def stored_expert(self, expert: int) -> dict[str, QuantizedWeight]:
        def weights(matrix: FusedMatrix) -> Tensor:
            parts = [self._slice(name, expert) for name in matrix.tensors]
            return torch.cat([part.T if matrix.transposed else part for part in parts])

        gate_up, down = weights(self._gate_up), weights(self._down)
        gate_up_bias, down_bias = (self._bias_slice(m, expert) for m in (self._gate_up, self._down))
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

    def __init__(
        self, checkpoint: Checkpoint, layout: ExpertsLayout, config: MoEConfig, storage: LinearStorage
    ) -> None:
        super().__init__(checkpoint, layout, replace(config, scale_dtype=storage.scale_dtype({})))
        self.storage = storage

    @property
    def expert_bytes(self) -> int:
        return sum(len(matrix.tensors) * self.storage.read_bytes(*size) for matrix, *size in self._sizes)

    def _stored_tensors(self, matrix: FusedMatrix, tensor: str, rows: int, columns: int) -> dict[str, StoredTensor]:
        return {f"{tensor}_{suffix}": stored for suffix, stored in self.storage.tensors(rows, columns).items()}

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        def weight(matrix: FusedMatrix, rows: int, columns: int) -> QuantizedWeight:
            (tensor,) = matrix.tensors
            suffixes = self.storage.tensors(rows, columns)
            tensors = {suffix: self._part(f"{tensor}_{suffix}", first, count, buffers) for suffix in suffixes}
            return replace(
                self.storage.decode(tensors, rows, columns), bias=self._biases(matrix, first, count, buffers)
            )

        gate_up, down = (weight(*sizes) for sizes in self._sizes)
        return QuantizedExperts(gate_up, down, interleaved=self._gate_up.interleaved)

    def stored_expert(self, expert: int) -> dict[str, QuantizedWeight]:
        def weight(matrix: FusedMatrix, rows: int, columns: int) -> QuantizedWeight:
            (tensor,) = matrix.tensors
            suffixes = self.storage.tensors(rows, columns)
            tensors = {suffix: self._slice(f"{tensor}_{suffix}", expert) for suffix in suffixes}
            return replace(self.storage.decode_plainly(tensors), bias=self._bias_slice(matrix, expert))

        gate_up, down = (weight(*sizes) for sizes in self._sizes)
        weights = [*(gate_up[rows] for rows in self._first_rows), down]
        return dict(zip(self.linear_names(expert), weights, strict=True))
