"""Where the experts of one layer are on disk: an expert source for each form that is known.

A source first lists the tensors it needs, so that all that is wrong is known before a byte of weights is read, and then
reads experts as integers and scales. A new on-disk form is a new source; everything behind it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from cpumoe.checkpoints.architectures import Projections
from cpumoe.checkpoints.checkpoint import Checkpoint, TensorCheck
from cpumoe.checkpoints.formats.compressed_tensors import LinearFormat, StoredTensor
from cpumoe.checkpoints.tensor_file import DTYPES
from cpumoe.errors import CheckpointError
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.layers.rounding import quantize_weight, scale_dtype_of
from cpumoe.layers.scheme import Scheme

FLOAT_DTYPES = ("BF16", "F16", "F32")


class ExpertSource(Protocol):
    """The experts of one layer, somewhere on disk."""

    prefix: str  # what the names of its tensors start with

    @property
    def config(self) -> MoEConfig: ...

    @property
    def expert_bytes(self) -> int:
        """Bytes that one expert occupies while it is read."""
        ...

    def check(self, check: TensorCheck) -> None:
        """Announces every tensor that will be read."""
        ...

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        """Experts ``first`` to ``first + count - 1``."""
        ...


class FloatExpertSource(ExpertSource, Protocol):
    """Experts in float, which may also be read as they are."""

    def linear_names(self, expert: int) -> tuple[str, str, str]:
        """Names of the gate, up and down linears of one expert, as a checkpoint with one linear each has them."""
        ...

    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """gate_up [count, 2 I, H] (gate rows first), down [count, H, I] and their biases, in the stored dtype."""
        ...


class Buffers:
    """Memory that is used again for the next experts, so that the kernel does not hand out fresh pages each time."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with any content."""
        size = torch.Size(shape).numel()
        held = self._tensors.get(name)
        if held is None or held.numel() < size or held.dtype != dtype:
            self._tensors[name] = held = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)


# ---- one linear per projection and expert --------------------------------------------------------------------------


class _PerExpert:
    """Experts whose linears are stored one by one: ``PREFIX.N.gate_proj.weight`` and so on."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, projections: Projections, config: MoEConfig, has_bias: bool
    ) -> None:
        self.prefix = prefix
        self.config = config
        self._checkpoint = checkpoint
        self._projections = projections
        self._has_bias = has_bias

    def linear_names(self, expert: int) -> tuple[str, str, str]:
        gate, up, down = (f"{self.prefix}.{expert}.{name}" for name in self._projections)
        return gate, up, down

    def _linears(self, expert: int) -> Iterator[tuple[str, int, int]]:
        """Name, rows and columns of the linears of one expert."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        gate, up, down = self.linear_names(expert)
        yield gate, inner, hidden
        yield up, inner, hidden
        yield down, hidden, inner

    def _check_linears(self, check: TensorCheck, stored: Callable[[int, int], dict[str, StoredTensor]]) -> None:
        for expert in range(self.config.local_experts):
            for name, rows, columns in self._linears(expert):
                for suffix, tensor in stored(rows, columns).items():
                    check.expect(f"{name}.{suffix}", tensor)
                if self._has_bias:
                    check.expect(f"{name}.bias", StoredTensor(self._first_dtype("bias", FLOAT_DTYPES), (rows,)))

    def _read_suffix(
        self, suffix: str, first: int, count: int, width: Callable[[int], tuple[int, ...]], buffers: Buffers
    ) -> tuple[Tensor, Tensor]:
        """The tensors ``suffix`` of some experts: gate rows then up rows [count, 2 I, ...], and down [count, H, ...].

        ``width`` gives what follows the rows, from the number of inputs.
        """
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        dtype = DTYPES[self._checkpoint.info(f"{self.prefix}.0.{self._projections.gate}.{suffix}").dtype]
        gate_up = buffers.get(f"gate_up.{suffix}", (count, 2 * inner, *width(hidden)), dtype)
        down = buffers.get(f"down.{suffix}", (count, hidden, *width(inner)), dtype)
        for index in range(count):
            gate_name, up_name, down_name = self.linear_names(first + index)
            self._checkpoint.read_into(f"{gate_name}.{suffix}", gate_up[index, :inner])
            self._checkpoint.read_into(f"{up_name}.{suffix}", gate_up[index, inner:])
            self._checkpoint.read_into(f"{down_name}.{suffix}", down[index])
        return gate_up, down

    def _read_biases(self, first: int, count: int, buffers: Buffers) -> tuple[Tensor | None, Tensor | None]:
        if not self._has_bias:
            return None, None
        return self._read_suffix("bias", first, count, lambda _: (), buffers)

    def _first_dtype(self, suffix: str, accepted: tuple[str, ...]) -> tuple[str, ...]:
        """The dtype of the first expert's tensor, which all others must have; what is accepted, if there is none."""
        name = f"{self.prefix}.0.{self._projections.gate}.{suffix}"
        if name in self._checkpoint and self._checkpoint.info(name).dtype in accepted:
            return (self._checkpoint.info(name).dtype,)
        return accepted


class QuantizedPerExpert(_PerExpert):
    """Integers and scales as compressed-tensors writes them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        projections: Projections,
        config: MoEConfig,
        has_bias: bool,
        form: LinearFormat,
    ) -> None:
        super().__init__(checkpoint, prefix, projections, config, has_bias)
        self.format = form
        self._scale_dtypes = self._first_dtype("weight_scale", FLOAT_DTYPES)
        scale = torch.bfloat16 if self._scale_dtypes == ("BF16",) else torch.float32
        self.config = replace(config, scale_dtype=scale)

    @property
    def expert_bytes(self) -> int:
        per_byte = 8 // self.config.scheme.weights.bits if self.format.form == "pack-quantized" else 1
        return 3 * self.config.hidden_size * self.config.intermediate_size // per_byte

    def _stored(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        tensors = self.format.tensors(rows, columns)
        return tensors | {"weight_scale": replace(tensors["weight_scale"], dtypes=self._scale_dtypes)}

    def check(self, check: TensorCheck) -> None:
        self._check_linears(check, self._stored)

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        form, hidden, inner = self.format, self.config.hidden_size, self.config.intermediate_size
        if form.form == "pack-quantized":
            for expert in range(first, first + count):
                for name, rows, columns in self._linears(expert):
                    check_weight_shape(self._checkpoint, name, rows, columns)

        def stored_width(columns: int) -> tuple[int, ...]:
            return self._stored(1, columns)[form.weight_name].shape[1:]

        def scale_width(columns: int) -> tuple[int, ...]:
            return self._stored(1, columns)["weight_scale"].shape[1:]

        gate_up, down = self._read_suffix(form.weight_name, first, count, stored_width, buffers)
        gate_up_scale, down_scale = self._read_suffix("weight_scale", first, count, scale_width, buffers)
        gate_up_bias, down_bias = self._read_biases(first, count, buffers)
        return QuantizedExperts(
            form.held(gate_up, hidden),
            packable_scale(gate_up_scale),
            form.held(down, inner),
            packable_scale(down_scale),
            gate_up_bias,
            down_bias,
        )


class FloatPerExpert(_PerExpert):
    """Float weights, quantised as they are read."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, projections: Projections, config: MoEConfig, has_bias: bool
    ) -> None:
        super().__init__(checkpoint, prefix, projections, config, has_bias)
        self._dtypes = self._first_dtype("weight", FLOAT_DTYPES)
        self.config = replace(config, scale_dtype=scale_dtype_of(DTYPES[self._dtypes[0]]))

    @property
    def expert_bytes(self) -> int:
        return _float_expert_bytes(self.config)

    def check(self, check: TensorCheck) -> None:
        self._check_linears(check, lambda rows, columns: {"weight": StoredTensor(self._dtypes, (rows, columns))})

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        return _quantized(*self.read_float(first, count, buffers), self.config.scheme, self.prefix)

    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        gate_up, down = self._read_suffix("weight", first, count, lambda columns: (columns,), buffers)
        return gate_up, down, *self._read_biases(first, count, buffers)


class FusedFloat:
    """Float weights of all experts in one tensor, [experts, in, out]: gpt-oss (gate and up in turn), Llama 4."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, config: MoEConfig, has_bias: bool, interleaved: bool
    ) -> None:
        self.prefix = prefix
        self._checkpoint = checkpoint
        self._has_bias = has_bias
        self._interleaved = interleaved
        name = f"{prefix}.gate_up_proj"
        found = checkpoint.info(name).dtype if name in checkpoint else None
        self._dtypes = (found,) if found in FLOAT_DTYPES else FLOAT_DTYPES
        self.config = replace(config, scale_dtype=scale_dtype_of(DTYPES[self._dtypes[0]]))

    @property
    def expert_bytes(self) -> int:
        return _float_expert_bytes(self.config)

    def linear_names(self, expert: int) -> tuple[str, str, str]:
        prefix = f"{self.prefix}.{expert}"
        return f"{prefix}.gate_proj", f"{prefix}.up_proj", f"{prefix}.down_proj"

    def check(self, check: TensorCheck) -> None:
        experts, hidden, inner = self.config.local_experts, self.config.hidden_size, self.config.intermediate_size
        check.expect(f"{self.prefix}.gate_up_proj", StoredTensor(self._dtypes, (experts, hidden, 2 * inner)))
        check.expect(f"{self.prefix}.down_proj", StoredTensor(self._dtypes, (experts, inner, hidden)))
        if self._has_bias:
            check.expect(f"{self.prefix}.gate_up_proj_bias", StoredTensor(FLOAT_DTYPES, (experts, 2 * inner)))
            check.expect(f"{self.prefix}.down_proj_bias", StoredTensor(FLOAT_DTYPES, (experts, hidden)))

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        return _quantized(*self.read_float(first, count, buffers), self.config.scheme, self.prefix)

    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        def part(name: str) -> Tensor:
            info = self._checkpoint.info(f"{self.prefix}.{name}")
            out = buffers.get(name, (count, *info.shape[1:]), DTYPES[info.dtype])
            self._checkpoint.read_into(f"{self.prefix}.{name}", out, first * (info.bytes // self.config.local_experts))
            return out

        def rows_apart(rows: Tensor) -> Tensor:  # [count, 2 I, ...]
            return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1) if self._interleaved else rows

        gate_up, down = rows_apart(part("gate_up_proj").transpose(1, 2)), part("down_proj").transpose(1, 2)
        if not self._has_bias:
            return gate_up, down, None, None
        return gate_up, down, rows_apart(part("gate_up_proj_bias")), part("down_proj_bias")


def _float_expert_bytes(config: MoEConfig) -> int:
    # Quantising goes through fp32 with several temporaries: 16 bytes for each weight.
    return 3 * config.hidden_size * config.intermediate_size * 16


def _quantized(
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    scheme: Scheme,
    name: str,
) -> QuantizedExperts:
    return QuantizedExperts(
        *quantize_weight(gate_up, scheme, f"{name} gate_up"),
        *quantize_weight(down, scheme, f"{name} down"),
        gate_up_bias,
        down_bias,
    )


def packable_scale(scale: Tensor) -> Tensor:
    return scale.to(torch.float32) if scale.dtype == torch.float16 else scale


def check_weight_shape(checkpoint: Checkpoint, name: str, rows: int, columns: int) -> None:
    stored = checkpoint.read(f"{name}.weight_shape").tolist()
    if stored != [rows, columns]:
        raise CheckpointError(f"{name}.weight_shape is {stored}; [{rows}, {columns}] is accepted")
