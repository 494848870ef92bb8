"""Expert sources for layers whose experts lie in one tensor for each matrix, quantised or not."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from cpumoe.checkpoints.checkpoint import Checkpoint, TensorCheck
from cpumoe.checkpoints.expert_sources import Buffers, ExpertSource, FloatExpertSource, scale_dtype_of_stored
from cpumoe.checkpoints.storage import LinearStorage, StoredTensor
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight


class _Fused(ExpertSource):
    """Experts of which each matrix is one tensor, or one and its scales: ``PREFIX.gate_up_proj``, ``PREFIX.down_proj``.

    ``interleaved``: gate and up alternate; otherwise all of gate comes before all of up.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: MoEConfig, interleaved: bool) -> None:
        self.prefix = prefix
        self.config = config
        self._checkpoint = checkpoint
        self._interleaved = interleaved

    def linear_names(self, expert: int) -> tuple[str, str, str]:
        prefix = f"{self.prefix}.{expert}"
        return f"{prefix}.gate_proj", f"{prefix}.up_proj", f"{prefix}.down_proj"

    @abstractmethod
    def _stored_matrices(self) -> dict[str, StoredTensor]:
        """What each expert has besides biases, by what follows the prefix in its name."""

    def check(self, check: TensorCheck) -> None:
        count, hidden, inner = self.config.local_experts, self.config.hidden_size, self.config.intermediate_size
        tensors = self._stored_matrices()
        if self.config.has_bias:
            tensors |= {
                "gate_up_proj_bias": StoredTensor(FLOAT_DTYPES, (2 * inner,)),
                "down_proj_bias": StoredTensor(FLOAT_DTYPES, (hidden,)),
            }
        for name, stored in tensors.items():
            check.expect(f"{self.prefix}.{name}", replace(stored, shape=(count, *stored.shape)))

    def _part(self, name: str, first: int, count: int, buffers: Buffers) -> Tensor:
        """Experts ``first`` to ``first + count - 1`` of a tensor, [count, ...]."""
        info = self._checkpoint.info(f"{self.prefix}.{name}")
        out = buffers.get(name, (count, *info.shape[1:]), DTYPES[info.dtype])
        self._checkpoint.read_into(f"{self.prefix}.{name}", out, first * (info.bytes // self.config.local_experts))
        return out

    def _bias(self, matrix: str, first: int, count: int, buffers: Buffers) -> Tensor | None:
        return self._part(f"{matrix}_bias", first, count, buffers) if self.config.has_bias else None

    def _slice(self, name: str, expert: int) -> Tensor:
        """One expert of a tensor in memory of its own, and not with the code that loads it."""
        info = self._checkpoint.info(f"{self.prefix}.{name}")
        out = torch.empty(info.shape[1:], dtype=DTYPES[info.dtype])
        self._checkpoint.read_into(f"{self.prefix}.{name}", out, expert * info.bytes // info.shape[0])
        return out

    def _bias_slice(self, matrix: str, expert: int) -> Tensor | None:
        return self._slice(f"{matrix}_bias", expert) if self.config.has_bias else None

    @property
    def _gate_and_up(self) -> tuple[slice, slice]:
        """Their places among the rows of both."""
        inner = self.config.intermediate_size
        return (slice(0, None, 2), slice(1, None, 2)) if self._interleaved else (slice(inner), slice(inner, None))


class FusedFloat(_Fused, FloatExpertSource):
    """Float weights of all experts in one tensor, [experts, in, out]: gpt-oss (gate and up alternate), Llama 4."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: MoEConfig, interleaved: bool) -> None:
        super().__init__(checkpoint, prefix, config, interleaved)
        name = f"{prefix}.gate_up_proj"
        found = checkpoint.info(name).dtype if name in checkpoint else None
        self._dtypes = (found,) if found in FLOAT_DTYPES else FLOAT_DTYPES
        self.config = replace(config, scale_dtype=scale_dtype_of_stored(self._dtypes[0]))

    def _stored_matrices(self) -> dict[str, StoredTensor]:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return {
            "gate_up_proj": StoredTensor(self._dtypes, (hidden, 2 * inner)),
            "down_proj": StoredTensor(self._dtypes, (inner, hidden)),
        }

    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        def rows_apart(rows: Tensor) -> Tensor:  # [count, 2 I, ...]
            return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1) if self._interleaved else rows

        chunk = (first, count, buffers)
        gate_up, down = (self._part(name, *chunk).transpose(1, 2) for name in ("gate_up_proj", "down_proj"))
        gate_up_bias, down_bias = (self._bias(name, *chunk) for name in ("gate_up_proj", "down_proj"))
        return rows_apart(gate_up), down, None if gate_up_bias is None else rows_apart(gate_up_bias), down_bias

    def stored_expert(self, expert: int) -> dict[str, QuantizedWeight]:
        gate_up, down = self._slice("gate_up_proj", expert).T, self._slice("down_proj", expert).T  # [2 I, H], [H, I]
        gate_up_bias, down_bias = (self._bias_slice(name, expert) for name in ("gate_up_proj", "down_proj"))
        gate, up = self._gate_and_up
        gate_name, up_name, down_name = self.linear_names(expert)
        return self._rounded(
            {
                gate_name: (gate_up[gate], None if gate_up_bias is None else gate_up_bias[gate]),
                up_name: (gate_up[up], None if gate_up_bias is None else gate_up_bias[up]),
                down_name: (down, down_bias),
            }
        )


class FusedQuantized(_Fused):
    """Weights of all experts in one tensor that is quantised in the files, [experts, out, ...], and one of scales.

    Their names are those of the float ones, followed by ``_`` and what the storage calls its tensors.
    """

    storage: LinearStorage

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, config: MoEConfig, interleaved: bool, storage: LinearStorage
    ) -> None:
        super().__init__(checkpoint, prefix, replace(config, scale_dtype=storage.scale_dtype({})), interleaved)
        self.storage = storage
        hidden, inner = config.hidden_size, config.intermediate_size
        self._sizes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}

    @property
    def expert_bytes(self) -> int:
        return sum(self.storage.read_bytes(*size) for size in self._sizes.values())

    def _stored_matrices(self) -> dict[str, StoredTensor]:
        return {
            f"{matrix}_{suffix}": stored
            for matrix, size in self._sizes.items()
            for suffix, stored in self.storage.tensors(*size).items()
        }

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        def weight(matrix: str) -> QuantizedWeight:
            size = self._sizes[matrix]
            suffixes = self.storage.tensors(*size)
            tensors = {suffix: self._part(f"{matrix}_{suffix}", first, count, buffers) for suffix in suffixes}
            return replace(self.storage.decode(tensors, *size), bias=self._bias(matrix, first, count, buffers))

        return QuantizedExperts(weight("gate_up_proj"), weight("down_proj"), interleaved=self._interleaved)

    def stored_expert(self, expert: int) -> dict[str, QuantizedWeight]:
        def weight(matrix: str) -> QuantizedWeight:
            suffixes = self.storage.tensors(*self._sizes[matrix])
            tensors = {suffix: self._slice(f"{matrix}_{suffix}", expert) for suffix in suffixes}
            return replace(self.storage.decode_plainly(tensors), bias=self._bias_slice(matrix, expert))

        gate_up, (gate, up) = weight("gate_up_proj"), self._gate_and_up
        weights = (gate_up[gate], gate_up[up], weight("down_proj"))
        return dict(zip(self.linear_names(expert), weights, strict=True))
