"""Where the experts of one layer are on disk: an expert source for each arrangement that is known.

A source first lists the tensors it needs, so that all that is wrong is known before a byte of weights is read, and then
reads experts as integers and scales. How a quantised linear is stored, its :class:`LinearStorage` knows; a new
arrangement of experts is a new source, and everything behind it stays as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cpumoe.checkpoints.architectures import Projections
from cpumoe.checkpoints.checkpoint import Checkpoint, TensorCheck
from cpumoe.checkpoints.linear_sources import added_bias, stored_weight
from cpumoe.checkpoints.storage import LinearStorage, StoredTensor
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight
from cpumoe.layers.rounding import quantize_weight, scale_dtype_of


class ExpertSource(ABC):
    """The experts of one layer, somewhere on disk."""

    prefix: str  # what the names of their tensors start with
    config: MoEConfig  # of the layer that they become in memory
    storage: LinearStorage | None = None  # how each linear is stored; None for float, quantised as it is read

    @property
    @abstractmethod
    def expert_bytes(self) -> int:
        """Bytes that one expert occupies while it is read."""

    @abstractmethod
    def linear_names(self, expert: int) -> tuple[str, str, str]:
        """Names of the gate, up and down linears of one expert, as a checkpoint with one linear each has them."""

    @abstractmethod
    def check(self, check: TensorCheck) -> None:
        """Announces every tensor that will be read."""

    @abstractmethod
    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        """Experts ``first`` to ``first + count - 1``."""

    @abstractmethod
    def stored_expert(self, expert: int) -> dict[str, QuantizedWeight]:
        """Gate, up and down of one expert by name, plainly and without the code of :meth:`read`.

        Float weights become what rounding to nearest makes of them.
        """


class FloatExpertSource(ExpertSource):
    """Experts in float, which may also be read as they are."""

    @property
    def expert_bytes(self) -> int:
        # Quantising goes through fp32 with several temporaries: 16 bytes for each weight.
        return 3 * self.config.hidden_size * self.config.intermediate_size * 16

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        gate_up, down, gate_up_bias, down_bias = self.read_float(first, count, buffers)
        scheme = self.config.scheme
        return QuantizedExperts(
            replace(quantize_weight(gate_up, scheme, f"{self.prefix} gate_up"), bias=gate_up_bias),
            replace(quantize_weight(down, scheme, f"{self.prefix} down"), bias=down_bias),
        )

    @abstractmethod
    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """gate_up [count, 2 I, H] (gate rows first), down [count, H, I] and their biases, in the stored dtype."""

    def _rounded(self, floats: dict[str, tuple[Tensor, Tensor | None]]) -> dict[str, QuantizedWeight]:
        """Gate, up and down [rows, columns] with their biases, by name, rounded to nearest.

        Gate and up are one matrix for what a scheme finds from all of a matrix: the global scale of nvfp4.
        """
        (gate, up, down), scheme = floats, self.config.scheme
        both = quantize_weight(torch.cat((floats[gate][0], floats[up][0])), scheme, f"{gate} and {up}")
        rows = len(floats[gate][0])
        weights = {gate: both[:rows], up: both[rows:], down: quantize_weight(floats[down][0], scheme, down)}
        return {name: replace(weight, bias=floats[name][1]) for name, weight in weights.items()}


class Buffers:
    """Memory that is used again for the next experts, so that the kernel does not hand out fresh pages each time."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with any content."""
        size = torch.Size(shape).numel()
        tensor = self._tensors.get(name)
        if tensor is None or tensor.numel() < size or tensor.dtype != dtype:
            self._tensors[name] = tensor = torch.empty(size, dtype=dtype)
        return tensor[:size].view(shape)


# ---- one linear per projection and expert --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """Linears of one expert that become one matrix in memory, one below the other: gate and up, or down alone."""

    name: str
    projections: tuple[str, ...]
    rows: int  # of each linear
    columns: int
    tensors: dict[str, StoredTensor]  # of each linear, by suffix

    def buffers(self, count: int, buffers: Buffers) -> dict[str, Tensor]:
        """Memory for ``count`` experts by suffix, [count, linears, ...]; none for what is compared and not decoded."""
        return {
            suffix: buffers.get(
                f"{self.name}.{suffix}", (count, len(self.projections), *stored.shape), DTYPES[stored.dtypes[0]]
            )
            for suffix, stored in self.tensors.items()
            if not stored.is_known
        }

    def joined(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same with all rows in one dimension, [count, linears * rows, ...], for tensors that go by rows."""
        return {suffix: t.flatten(1, 2) if self.tensors[suffix].by_rows else t for suffix, t in tensors.items()}


class _PerExpert(ExpertSource):
    """Experts whose linears are stored one by one: ``PREFIX.N.gate_proj.weight`` and so on."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        projections: Projections,
        config: MoEConfig,
        storage: LinearStorage | None = None,
    ) -> None:
        self.prefix = prefix
        self.config = config
        self.storage = storage
        self._checkpoint = checkpoint
        self._projections = projections
        self._dtypes = self._first_dtypes()
        hidden, inner = config.hidden_size, config.intermediate_size
        self._blocks = (
            _Block("gate_up", (projections.gate, projections.up), inner, hidden, self._tensors(inner, hidden)),
            _Block("down", (projections.down,), hidden, inner, self._tensors(hidden, inner)),
        )

    def _first_dtypes(self) -> dict[str, str]:
        """Dtypes of the first expert's tensors by suffix, as far as they are accepted.

        All others must have them too, because they are read into the same memory.
        """
        tensors = self._accepted_tensors(1, 1)
        found = self._checkpoint.infos_of(self.linear_names(0)[0], tensors)
        return {suffix: info.dtype for suffix, info in found.items() if info.dtype in tensors[suffix].dtypes}

    def _accepted_tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        """The tensors of a linear by suffix, with its bias if it has one."""
        weight = {"weight": StoredTensor(FLOAT_DTYPES, (rows, columns))}
        tensors = weight if self.storage is None else self.storage.tensors(rows, columns)
        return tensors | ({"bias": StoredTensor(FLOAT_DTYPES, (rows,))} if self.config.has_bias else {})

    def _tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        return {
            suffix: replace(stored, dtypes=(self._dtypes[suffix],))
            if suffix in self._dtypes and not stored.is_known
            else stored
            for suffix, stored in self._accepted_tensors(rows, columns).items()
        }

    def linear_names(self, expert: int) -> tuple[str, str, str]:
        gate, up, down = (f"{self.prefix}.{expert}.{name}" for name in self._projections)
        return gate, up, down

    def check(self, check: TensorCheck) -> None:
        for expert in range(self.config.local_experts):
            for block in self._blocks:
                for projection in block.projections:
                    name = f"{self.prefix}.{expert}.{projection}"
                    for suffix, stored in self._tensors_of(name, block).items():
                        check.expect(f"{name}.{suffix}", stored)

    def _tensors_of(self, name: str, block: _Block) -> dict[str, StoredTensor]:
        """The tensors of the linear ``name``, with a bias of zeros if a tool has added one."""
        bias = None if self.config.has_bias else added_bias(self._checkpoint, name, block.rows, self.storage)
        return block.tensors if bias is None else {**block.tensors, "bias": bias}

    def _read_blocks(self, first: int, count: int, buffers: Buffers) -> list[dict[str, Tensor]]:
        """The tensors of ``count`` experts by suffix: those of gate and up together, and those of down."""
        read = [block.buffers(count, buffers) for block in self._blocks]
        for index in range(count):  # expert by expert, as they lie in the file
            for block, tensors in zip(self._blocks, read, strict=True):
                for place, projection in enumerate(block.projections):
                    name = f"{self.prefix}.{first + index}.{projection}"
                    for suffix, stored in self._tensors_of(name, block).items():
                        if stored.is_known:
                            self._checkpoint.refuse_other_contents(f"{name}.{suffix}", stored)
                        else:
                            self._checkpoint.read_into(f"{name}.{suffix}", tensors[suffix][index, place])
        return [block.joined(tensors) for block, tensors in zip(self._blocks, read, strict=True)]


class QuantizedPerExpert(_PerExpert):
    """Weights that are quantised in the files."""

    storage: LinearStorage

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        projections: Projections,
        config: MoEConfig,
        storage: LinearStorage,
    ) -> None:
        super().__init__(checkpoint, prefix, projections, config, storage)
        self.config = replace(config, scale_dtype=storage.scale_dtype(self._dtypes))

    @property
    def expert_bytes(self) -> int:
        return sum(
            len(block.projections) * self.storage.read_bytes(block.rows, block.columns) for block in self._blocks
        )

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        gate_up, down = self._read_blocks(first, count, buffers)
        of_gate_up, of_down = self._blocks
        return QuantizedExperts(
            replace(self.storage.decode(gate_up, of_gate_up.rows, of_gate_up.columns), bias=gate_up.get("bias")),
            replace(self.storage.decode(down, of_down.rows, of_down.columns), bias=down.get("bias")),
        )

    def stored_expert(self, expert: int) -> dict[str, QuantizedWeight]:
        weights = {name: stored_weight(self._checkpoint, name, self.storage) for name in self.linear_names(expert)}
        if self.config.has_bias:
            return weights
        return {name: replace(weight, bias=None) for name, weight in weights.items()}  # zeros that a tool has added


class FloatPerExpert(_PerExpert, FloatExpertSource):
    """Float weights, one linear per projection and expert."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, projections: Projections, config: MoEConfig) -> None:
        super().__init__(checkpoint, prefix, projections, config)
        self.config = replace(config, scale_dtype=_scale_dtype_of(self._dtypes.get("weight")))

    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        gate_up, down = self._read_blocks(first, count, buffers)
        return gate_up["weight"], down["weight"], gate_up.get("bias"), down.get("bias")

    def stored_expert(self, expert: int) -> dict[str, QuantizedWeight]:
        def read(name: str) -> tuple[Tensor, Tensor | None]:
            bias = self._checkpoint.read(f"{name}.bias") if f"{name}.bias" in self._checkpoint else None
            return self._checkpoint.read(f"{name}.weight"), bias

        return self._rounded({name: read(name) for name in self.linear_names(expert)})


# ---- all experts in one tensor -------------------------------------------------------------------------------------


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
        self.config = replace(config, scale_dtype=_scale_dtype_of(self._dtypes[0]))

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


def _scale_dtype_of(dtype: str | None) -> torch.dtype:
    """What the scales of float weights with this safetensors dtype have; None if it is not known."""
    return scale_dtype_of(DTYPES[dtype or FLOAT_DTYPES[0]])
