"""Quantised linears of a checkpoint that are not experts: finding, checking and reading them."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from cpumoe.checkpoints.named_tensors import NamedTensors, TensorCheck, naming
from cpumoe.checkpoints.storage import LinearStorage, StoredTensor
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES
from cpumoe.checkpoints.tensor_parts import TensorPart, slice_of
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.packed_weights import packed_spec
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import INTEGERS


class LinearSource:
    """One quantised linear of a checkpoint."""

    def __init__(
        self, checkpoint: NamedTensors, name: str, rows: int, columns: int, storage: LinearStorage, has_bias: bool
    ) -> None:
        self.name = name
        self.rows, self.columns = rows, columns
        self.storage = storage
        self.has_bias = has_bias
        self._checkpoint = checkpoint

    def check(self, check: TensorCheck) -> None:
        """Announces every tensor that will be read."""
        for suffix, stored in self.storage.tensors(self.rows, self.columns).items():
            check.expect(f"{self.name}.{suffix}", stored)
        if self.has_bias:
            check.expect(f"{self.name}.bias", StoredTensor(FLOAT_DTYPES, (self.rows,)))
        elif (bias := added_bias(self._checkpoint, self.name, self.rows, self.storage)) is not None:
            check.expect(f"{self.name}.bias", bias)

    def divides(self, slices: int) -> bool:
        """Whether the rows can be read in so many equal parts, which cut neither blocks of scales nor words."""
        rows, unit = self.rows // slices, self.storage.scheme.weights.group.rows or self.rows
        if self.rows % slices != 0 or rows % unit != 0:
            return False
        try:
            for index in range(slices):
                self._parts(slices, index)
        except UnsupportedScheme:
            return False
        return True

    def _parts(self, slices: int, index: int) -> dict[str, tuple[StoredTensor, TensorPart]]:
        """The stored tensors by suffix, and what one of equal slices of the rows takes of each."""
        rows = self.rows // slices
        whole, smaller, before, one_more = (
            self.storage.tensors(n, self.columns) for n in (self.rows, rows, rows * index, rows * index + 1)
        )
        for suffix, stored in whole.items():
            size, part, missed = (prod(tensors[suffix].shape) for tensors in (whole, smaller, before))
            # A row that needs no more than the rows before it shares its last word or block with them.
            shares = index > 0 and size != part and prod(one_more[suffix].shape) == missed
            if size not in (part, slices * part) or shares:
                raise UnsupportedScheme(
                    f"a stored tensor {list(stored.shape)} does not divide into {slices} slices of "
                    f"{list(smaller[suffix].shape)}; a number that divides it is accepted"
                )
        return {
            suffix: (stored, slice_of(stored.shape, smaller[suffix].shape, before[suffix].shape))
            for suffix, stored in whole.items()
        }

    def load(self, slices: int = 1, index: int = 0) -> QuantizedLinear:
        """Packs the linear, or one of equal parts of its rows, of which alone it reads the bytes."""
        weight = self.read(slices, index)
        with naming(self.name):
            return QuantizedLinear.from_weight(weight, self.storage.scheme)

    def read(self, slices: int = 1, index: int = 0) -> QuantizedWeight:
        """The weight [rows, columns], or one of equal parts of its rows, as packing takes it."""
        tensors, rows = {}, self.rows // slices
        for suffix, (stored, part) in self._parts(slices, index).items():
            name = f"{self.name}.{suffix}"
            if stored.is_known:
                self._checkpoint.refuse_other_contents(name, stored)
                continue
            tensor = self._read(name, part).reshape(part.shape)
            if stored.contents is not None:
                stored.contents(part.text(name, stored.shape), tensor)
            tensors[suffix] = tensor if stored.by_rows else tensor.unsqueeze(0)
        bias = self._read(f"{self.name}.bias", TensorPart((rows,), 0, (index * rows,))) if self.has_bias else None
        if bias is None and (added := added_bias(self._checkpoint, self.name, self.rows, self.storage)) is not None:
            self._checkpoint.refuse_other_contents(f"{self.name}.bias", added)
        with naming(self.name):
            return replace(self.storage.decode(tensors, rows, self.columns), bias=bias)

    def _read(self, name: str, part: TensorPart) -> Tensor:
        if self._checkpoint.info(name).shape == ():
            return self._checkpoint.read(name)  # one number for all of a linear
        out = torch.empty(part.shape, dtype=DTYPES[self._checkpoint.info(name).dtype])
        for start, to in part.ranges(out):
            self._checkpoint.read_part(name, to, start)
        return out

    def stored_weight(self) -> QuantizedWeight:
        """What the files have, read without the code that loads it."""
        weight = stored_weight(self._checkpoint, self.name, self.storage)
        if weight.values.shape[-1] > self.columns and self.storage.scheme.weights.element in INTEGERS:
            weight = replace(weight, values=weight.values[:, : self.columns])  # files that say no size fill up words
        return weight if self.has_bias else replace(weight, bias=None)  # zeros that a tool has added

    def packed_bytes(self, slices: int = 1) -> int:
        """Bytes in memory of the linear, or of one of equal parts of its rows."""
        scheme = self.storage.scheme
        scheme.check_inputs(self.columns, self.name)
        infos = self._checkpoint.infos_of(self.name, self.storage.tensors(self.rows, self.columns))
        scale_dtype = self.storage.scale_dtype({suffix: info.dtype for suffix, info in infos.items()})
        orders = 1 if self.storage.has_input_order else 0
        rows = self.rows // slices
        spec = packed_spec(scheme, scale_dtype, 1, rows, self.columns, has_bias=self.has_bias, input_orders=orders)
        return spec.packed_bytes


def added_bias(checkpoint: NamedTensors, name: str, rows: int, storage: LinearStorage | None) -> StoredTensor | None:
    """What a bias must be that is in the files and not in the model; None if there is none, or it must not be there."""
    if storage is None or not storage.adds_biases or f"{name}.bias" not in checkpoint:
        return None
    return zero_bias(rows)


def zero_bias(rows: int) -> StoredTensor:
    """A bias that a tool has written for a linear that has none."""
    return StoredTensor(FLOAT_DTYPES, (rows,), check=_refuse_numbers)


def _refuse_numbers(name: str, bias: Tensor) -> None:
    if (wrong := bias.nonzero()).numel():
        at = int(wrong[0])
        raise CheckpointError(f"{name} has {float(bias[at])} for output {at}, and the model has no bias; 0 is accepted")


def is_tied_away(checkpoint: NamedTensors, name: str, storage: LinearStorage) -> bool:
    """Whether a head that is tied to the embeddings has no tensors of its own, whatever config.json says of it."""
    return not checkpoint.infos_of(name, storage.tensors(1, 1))


def stored_weight(checkpoint: NamedTensors, name: str, storage: LinearStorage) -> QuantizedWeight:
    """The quantised linear ``name`` as the definition of its format has it."""
    found = checkpoint.infos_of(name, (*storage.tensors(1, 1), "bias"))
    tensors = {suffix: checkpoint.read(f"{name}.{suffix}") for suffix in found}
    bias = tensors.pop("bias", None)
    return replace(storage.decode_plainly(tensors), bias=bias)
