"""Where the experts of one layer are on disk: an expert source for each arrangement that is known.

A source first lists the tensors it needs, so that all that is wrong is known before a byte of weights is read, and then
reads experts as integers and scales. How a quantised linear is stored, its :class:`LinearStorage` knows; a new
arrangement of experts is a new source, and everything behind it stays as it is. Here are those with one linear for each
expert and projection; ``fused_sources.py`` has those of which all experts lie in one tensor.

A source reads what one rank holds: some of the experts, or a slice of the intermediate size of each. It announces the
tensors of all experts nevertheless: what is missing must stop every rank, and not the one alone that would read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from cpumoe.checkpoints.held_scales import held_weight, is_per_tensor
from cpumoe.checkpoints.linear_sources import added_bias, stored_weight
from cpumoe.checkpoints.model_layout import ExpertsLayout
from cpumoe.checkpoints.named_tensors import NamedTensors, TensorCheck
from cpumoe.checkpoints.storage import LinearStorage, StoredTensor
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES
from cpumoe.checkpoints.tensor_parts import TensorPart, slice_of
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.parallel_layout import ExpertsPart
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight
from cpumoe.layers.rounding import quantize_weight, scale_dtype_of, scales_span_columns, scales_span_rows
from cpumoe.layers.scheme import WHOLE_FLOATS, Scheme


class ExpertSource(ABC):
    """The experts of one layer, somewhere on disk."""

    def __init__(
        self,
        checkpoint: NamedTensors,
        layout: ExpertsLayout,
        part: ExpertsPart,
        config: MoEConfig,
        storage: LinearStorage | None = None,
    ) -> None:
        """Describe the experts of a layer in files, and the part of them to read.

        Args:
            checkpoint: the tensors.
            layout: what the experts are, and where.
            part: which of them are read, and which slice of each.
            config: of the layer, except for the dtype of its scales.
            storage: how each linear is stored; None for float, quantised as it is read.
        """
        self.checkpoint = checkpoint
        self.layout = layout
        self.part = part
        self.storage = storage
        self._dtypes = self._first_dtypes()
        stored = scale_dtype_of_stored(self._dtypes.get("weight"))
        self._config = replace(config, scale_dtype=stored if storage is None else storage.scale_dtype(self._dtypes))

    @abstractmethod
    def _first_dtypes(self) -> dict[str, str]:
        """Return the dtypes of the first expert's tensors by suffix, or of fused tensors of all experts.

        Dtypes that are not accepted are left out. All experts must have the same, because they are read into the same
        memory.
        """

    @property
    def config(self) -> MoEConfig:
        """Of the layer that they become in the memory of this rank."""
        return self._config

    @property
    def prefix(self) -> str:
        """What messages call them."""
        return self.layout.prefix

    @property
    def read_parts(self) -> tuple[ExpertsPart, ExpertsPart]:
        """What is read of gate_up and of down."""
        return self.part, self.part

    @property
    def cuts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The intermediate neurons that are read of gate_up and of down: the first, and how many."""
        size, unit = self.layout.shape.intermediate_size, self._config.scheme.slice_unit
        gate_up, down = self.read_parts
        return gate_up.cut(size, unit), down.cut(size, unit)

    @property
    def has_down_bias(self) -> bool:
        """Whether the bias of down is held here: sums of slices are added, and one of them has it."""
        return self.layout.shape.has_bias and self.part.slice == 0

    @property
    @abstractmethod
    def expert_bytes(self) -> int:
        """Bytes that one expert occupies while it is read."""

    @property
    def input_scales(self) -> int:
        """Stored scales of the first product's inputs that an expert has: 2 where those of gate and up differ."""
        return 0

    def linear_names(self, expert: int) -> tuple[str, ...]:
        """Names of gate, up and down, or up and down, of one of the layer's experts, in files with one linear each."""
        return self.layout.linears[expert]

    @abstractmethod
    def check(self, check: TensorCheck) -> None:
        """Announces every tensor of the layer's experts, whole, whichever part is read."""

    @abstractmethod
    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        """Experts ``first`` to ``first + count - 1`` of those that are held."""

    @abstractmethod
    def stored_expert(self, expert: int) -> dict[str, QuantizedWeight]:
        """Gate, up and down of one of the layer's experts by name, plainly and without the code of :meth:`read`.

        They are whole, whichever part is read. Float weights become what rounding to nearest makes of them.
        """


class FloatExpertSource(ExpertSource):
    """Experts in float, which may also be read as they are."""

    @property
    def read_parts(self) -> tuple[ExpertsPart, ExpertsPart]:
        """What is read of gate_up and of down: whole experts where scales depend on more than a slice.

        A slice must have the integers and scales that it has in the whole matrix.
        """
        form, whole = self._config.scheme.weights, replace(self.part, slices=1, slice=0)
        return (
            whole if scales_span_rows(form) else self.part,
            whole if scales_span_columns(form) else self.part,
        )

    @property
    def expert_bytes(self) -> int:
        # Quantising goes through fp32 with several temporaries: 16 bytes for each weight. Floats that stay as they are
        # are there twice while they are packed.
        weights, shape = self.config.scheme.weights, self.layout.shape
        each = weights.bits // 4 if weights.element in WHOLE_FLOATS else 16
        (_, rows), (_, columns) = self.cuts
        return (rows * shape.gate_up_rows // shape.intermediate_size + columns) * shape.hidden_size * each

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        gate_up, down, gate_up_bias, down_bias = self.read_float(first, count, buffers)
        scheme = self.config.scheme
        place = self.part.cut(self.layout.shape.intermediate_size, scheme.slice_unit)
        first_weight = replace(quantize_weight(gate_up, scheme, f"{self.prefix} gate_up"), bias=gate_up_bias)
        second = replace(quantize_weight(down, scheme, f"{self.prefix} down"), bias=down_bias)
        gate_up_part, down_part = self.read_parts
        if gate_up_part != self.part:
            first_weight = first_weight.row_slice(*place, blocks=2 if self.config.activation.gated else 1)
        if down_part != self.part:
            second = second.column_slice(*place)
        return QuantizedExperts(first_weight, second)

    @abstractmethod
    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """gate_up [count, 2 I, H] (gate rows first; [count, I, H] without a gate), down [count, H, I] and their biases,
        in the stored dtype; of each the slice that ``read_parts`` says."""

    def _rounded(self, floats: dict[str, tuple[Tensor, Tensor | None]]) -> dict[str, QuantizedWeight]:
        """Gate, up and down, or up and down, [rows, columns] with their biases, by name, rounded to nearest.

        Gate and up are one matrix for what a scheme finds from all of a matrix: the global scale of nvfp4.
        """
        (*first, down), scheme = floats, self.config.scheme
        joined = torch.cat([floats[name][0] for name in first])
        both = quantize_weight(joined, scheme, " and ".join(first))
        parts = both.halves() if len(first) == 2 else (both,)
        weights = dict(zip(first, parts, strict=True)) | {down: quantize_weight(floats[down][0], scheme, down)}
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
    """Linears of one expert that become one matrix in memory, one below the other: gate and up, or one alone."""

    name: str
    linears: slice  # which of the expert's
    count: int  # how many that are
    stored_rows: int  # of each linear in the files
    rows: int  # of each linear as it is read
    columns: int
    tensors: dict[str, StoredTensor]  # of each linear in the files, by suffix
    parts: dict[str, TensorPart]  # what is read of those that are decoded

    def buffers(self, count: int, buffers: Buffers) -> dict[str, Tensor]:
        """Memory for ``count`` experts by suffix, [count, linears, ...]."""
        return {
            suffix: buffers.get(
                f"{self.name}.{suffix}", (count, self.count, *part.shape), DTYPES[self.tensors[suffix].dtypes[0]]
            )
            for suffix, part in self.parts.items()
        }

    def joined(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same with all rows in one dimension, [count, linears * rows, ...], for tensors that go by rows."""
        return {suffix: t.flatten(1, 2) if self.tensors[suffix].by_rows else t for suffix, t in tensors.items()}


class _PerExpert(ExpertSource):
    """Experts whose linears are stored one by one: ``PREFIX.N.gate_proj.weight`` and so on."""

    @cached_property
    def _blocks(self) -> tuple[_Block, _Block]:
        """gate_up and down."""
        hidden, inner = self.layout.shape.hidden_size, self.layout.shape.intermediate_size
        first = len(self.layout.linears[0]) - 1
        (rows_before, rows), (columns_before, columns) = self.cuts
        sizes = ((inner, hidden), (rows, hidden), (rows_before, hidden))
        sizes_of_down = ((hidden, inner), (hidden, columns), (hidden, columns_before))
        return (
            self._block("gate_up", slice(0, first), first, *sizes),
            self._block("down", slice(first, None), 1, *sizes_of_down),
        )

    def _block(
        self,
        name: str,
        linears: slice,
        count: int,
        stored: tuple[int, int],
        read: tuple[int, int],
        before: tuple[int, int],
    ) -> _Block:
        """Rows and columns of each linear: ``stored``, ``read``, and what lies ``before`` that."""
        tensors = self._tensors(*stored)
        parts = {
            suffix: part
            for suffix, part in self._parts(stored, read, before).items()
            if not tensors[suffix].is_known and (suffix != "bias" or name != "down" or self.has_down_bias)
        }
        return _Block(name, linears, count, stored[0], *read, tensors, parts)

    def _parts(self, stored: tuple[int, int], read: tuple[int, int], before: tuple[int, int]) -> dict[str, TensorPart]:
        """What is read of the tensors of a linear, by suffix."""
        smaller, missed = self._accepted_tensors(*read), self._accepted_tensors(*before)
        return {
            suffix: slice_of(tensor.shape, smaller[suffix].shape, missed[suffix].shape)
            for suffix, tensor in self._accepted_tensors(*stored).items()
        }

    def _first_dtypes(self) -> dict[str, str]:
        tensors = self._accepted_tensors(1, 1)
        found = self.checkpoint.infos_of(self.linear_names(0)[0], tensors)
        return {suffix: info.dtype for suffix, info in found.items() if info.dtype in tensors[suffix].dtypes}

    def _accepted_tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        """The tensors of a linear by suffix, with its bias if it has one."""
        weight = {"weight": StoredTensor(FLOAT_DTYPES, (rows, columns))}
        tensors = weight if self.storage is None else self.storage.tensors(rows, columns)
        return tensors | ({"bias": StoredTensor(FLOAT_DTYPES, (rows,))} if self.layout.shape.has_bias else {})

    def _tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        return {
            suffix: replace(stored, dtypes=(self._dtypes[suffix],))
            if suffix in self._dtypes and not stored.is_known
            else stored
            for suffix, stored in self._accepted_tensors(rows, columns).items()
        }

    def check(self, check: TensorCheck) -> None:
        for expert in range(self.layout.shape.expert_count):
            for block in self._blocks:
                for name in self.linear_names(expert)[block.linears]:
                    for suffix, stored in self._tensors_of(name, block).items():
                        check.expect(f"{name}.{suffix}", stored)

    def _tensors_of(self, name: str, block: _Block) -> dict[str, StoredTensor]:
        """The tensors of the linear ``name``, with a bias of zeros if a tool has added one."""
        has_bias = self.layout.shape.has_bias
        bias = None if has_bias else added_bias(self.checkpoint, name, block.stored_rows, self.storage)
        return block.tensors if bias is None else {**block.tensors, "bias": bias}

    def _read_blocks(self, first: int, count: int, buffers: Buffers) -> list[dict[str, Tensor]]:
        """The tensors of ``count`` experts by suffix: those of gate and up together, and those of down."""
        read = [block.buffers(count, buffers) for block in self._blocks]
        for index, expert in enumerate(self.part.experts[first : first + count]):  # as they lie in the file, mostly
            for block, tensors in zip(self._blocks, read, strict=True):
                for place, name in enumerate(self.linear_names(expert)[block.linears]):
                    for suffix, stored in self._tensors_of(name, block).items():
                        if stored.is_known:  # small, and what it must hold is known of the whole
                            self.checkpoint.refuse_other_contents(f"{name}.{suffix}", stored)
                        elif suffix in tensors:
                            self._read_tensor(
                                f"{name}.{suffix}", stored, block.parts[suffix], tensors[suffix][index, place]
                            )
        return [block.joined(tensors) for block, tensors in zip(self._blocks, read, strict=True)]

    def _read_tensor(self, name: str, stored: StoredTensor, part: TensorPart, out: Tensor) -> None:
        if part.shape == stored.shape:
            self.checkpoint.read_into(name, out)  # which asks for no shape: one number may be [] or [1]
        else:
            for start, piece in part.ranges(out):
                self.checkpoint.read_part(name, piece, start)
        if stored.contents is not None:
            stored.contents(part.text(name, stored.shape), out)


class QuantizedPerExpert(_PerExpert):
    """Weights that are quantised in the files."""

    storage: LinearStorage

    @property
    def expert_bytes(self) -> int:
        return sum(block.count * self.storage.read_bytes(block.rows, block.columns) for block in self._blocks)

    def read(self, first: int, count: int, buffers: Buffers) -> QuantizedExperts:
        gate_up, down = (
            self._held(block, tensors)
            for block, tensors in zip(self._blocks, self._read_blocks(first, count, buffers), strict=True)
        )
        return QuantizedExperts(gate_up, down)

    def _held(self, block: _Block, tensors: dict[str, Tensor]) -> QuantizedWeight:
        weight = replace(self.storage.decode(tensors, block.rows, block.columns), bias=tensors.get("bias"))
        weight = held_weight(weight, self.storage.scheme, block.rows)
        if weight.input_scales is None or block.count == 1 or self.input_scales == 2:
            return weight
        return replace(weight, input_scales=weight.input_scales[..., :1])

    @cached_property
    def input_scales(self) -> int:
        suffix = self.storage.input_scale_suffix
        if suffix is None:
            return 0
        held = (self.linear_names(expert) for expert in self.part.experts)
        pairs = (linears[:2] for linears in held if len(linears) == 3)
        return 1 + any(self._number(f"{gate}.{suffix}") != self._number(f"{up}.{suffix}") for gate, up in pairs)

    def _number(self, name: str) -> float | None:
        """The one number of a tensor; None if it is none, which a check of the tensors has more to say of."""
        if name not in self.checkpoint or prod(self.checkpoint.info(name).shape) != 1:
            return None
        return float(self.checkpoint.read(name))

    def stored_expert(self, expert: int) -> dict[str, QuantizedWeight]:
        weights = {name: stored_weight(self.checkpoint, name, self.storage) for name in self.linear_names(expert)}
        if is_per_tensor(self.storage.scheme):
            weights = self._with_scales_as_held(weights)
        if self.layout.shape.has_bias:
            return weights
        return {name: replace(weight, bias=None) for name, weight in weights.items()}  # zeros that a tool has added

    def _with_scales_as_held(self, weights: dict[str, QuantizedWeight]) -> dict[str, QuantizedWeight]:
        """The definition of what ``held_weight`` does, for gate, up and down of one expert."""
        return {name: replace(w, scales=w.scales.expand(len(w.values), 1)) for name, w in weights.items()}


class FloatPerExpert(_PerExpert, FloatExpertSource):
    """Float weights, one linear per projection and expert."""

    def read_float(
        self, first: int, count: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        gate_up, down = self._read_blocks(first, count, buffers)
        return gate_up["weight"], down["weight"], gate_up.get("bias"), down.get("bias")

    def stored_expert(self, expert: int) -> dict[str, QuantizedWeight]:
        def read(name: str) -> tuple[Tensor, Tensor | None]:
            bias = self.checkpoint.read(f"{name}.bias") if f"{name}.bias" in self.checkpoint else None
            return self.checkpoint.read(f"{name}.weight"), bias

        return self._rounded({name: read(name) for name in self.linear_names(expert)})


#: The scheme of float weights that stay as they are, by their safetensors dtype.
FLOAT_SCHEMES = {"BF16": Scheme.parse("bf16"), "F16": Scheme.parse("fp16"), "F32": Scheme.parse("fp32")}


def scale_dtype_of_stored(dtype: str | None) -> torch.dtype:
    """What the scales of float weights with this safetensors dtype have; None if it is not known."""
    return scale_dtype_of(DTYPES[dtype or FLOAT_DTYPES[0]])
