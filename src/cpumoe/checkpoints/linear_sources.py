"""Quantised linears of a checkpoint that are not experts: finding, checking and reading them."""

from __future__ import annotations

import re
from dataclasses import replace

from torch import Tensor

from cpumoe.checkpoints.architectures import known_architecture
from cpumoe.checkpoints.checkpoint import Checkpoint, TensorCheck, naming
from cpumoe.checkpoints.layer_names import EXPERT, prediction_layers
from cpumoe.checkpoints.storage import LinearStorage, StoredTensor
from cpumoe.checkpoints.tensor_file import FLOAT_DTYPES
from cpumoe.errors import CheckpointError
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.packed_weights import packed_spec
from cpumoe.layers.quantized_experts import QuantizedWeight

# A target of "Linear" in quantization_config means a class of modules, which names do not tell.
_NOT_LINEAR = re.compile(r"vision|embed|norm$")


class LinearSource:
    """One quantised linear of a checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, name: str, rows: int, columns: int, storage: LinearStorage, has_bias: bool
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

    def load(self) -> QuantizedLinear:
        tensors = {}
        for suffix, stored in self.storage.tensors(self.rows, self.columns).items():
            if stored.is_known:
                self._checkpoint.refuse_other_contents(f"{self.name}.{suffix}", stored)
                continue
            tensor = self._checkpoint.read(f"{self.name}.{suffix}").reshape(stored.shape)
            if stored.contents is not None:
                stored.contents(f"{self.name}.{suffix}", tensor)
            tensors[suffix] = tensor if stored.by_rows else tensor.unsqueeze(0)
        bias = self._checkpoint.read(f"{self.name}.bias") if self.has_bias else None
        if bias is None and (added := added_bias(self._checkpoint, self.name, self.rows, self.storage)) is not None:
            self._checkpoint.refuse_other_contents(f"{self.name}.bias", added)
        with naming(self.name):
            weight = replace(self.storage.decode(tensors, self.rows, self.columns), bias=bias)
            return QuantizedLinear.from_weight(weight, self.storage.scheme)

    def stored_weight(self) -> QuantizedWeight:
        """What the files have, read without the code that loads it."""
        return stored_weight(self._checkpoint, self.name, self.storage)

    @property
    def packed_bytes(self) -> int:
        """Bytes in memory."""
        scheme = self.storage.scheme
        scheme.check_inputs(self.columns, self.name)
        infos = self._checkpoint.infos_of(self.name, self.storage.tensors(self.rows, self.columns))
        scale_dtype = self.storage.scale_dtype({suffix: info.dtype for suffix, info in infos.items()})
        orders = 1 if self.storage.has_input_order else 0
        spec = packed_spec(scheme, scale_dtype, 1, self.rows, self.columns, has_bias=self.has_bias, input_orders=orders)
        return spec.packed_bytes


def added_bias(checkpoint: Checkpoint, name: str, rows: int, storage: LinearStorage | None) -> StoredTensor | None:
    """What a bias must be that is in the files and not in the model; None if there is none, or it must not be there."""
    if storage is None or not storage.adds_biases or f"{name}.bias" not in checkpoint:
        return None
    return StoredTensor(FLOAT_DTYPES, (rows,), check=_refuse_numbers)


def _refuse_numbers(name: str, bias: Tensor) -> None:
    if (wrong := bias.nonzero()).numel():
        at = int(wrong[0])
        raise CheckpointError(f"{name} has {float(bias[at])} for output {at}, and the model has no bias; 0 is accepted")


def is_tied_away(checkpoint: Checkpoint, name: str, storage: LinearStorage) -> bool:
    """Whether a head that is tied to the embeddings has no tensors of its own, whatever config.json says of it."""
    return not checkpoint.infos_of(name, storage.tensors(1, 1))


def stored_weight(checkpoint: Checkpoint, name: str, storage: LinearStorage) -> QuantizedWeight:
    """The quantised linear ``name`` as the definition of its format has it."""
    found = checkpoint.infos_of(name, (*storage.tensors(1, 1), "bias"))
    tensors = {suffix: checkpoint.read(f"{name}.{suffix}") for suffix in found}
    bias = tensors.pop("bias", None)
    return replace(storage.decode_plainly(tensors), bias=bias)


def find_linears(checkpoint: Checkpoint, check: TensorCheck) -> dict[str, LinearSource]:
    """The quantised linears that are not experts, by name: found by their tensors, with the sizes of these.

    What they lack, and what they have too much, is added to ``check``. The plug-ins know a model's linears from the
    model itself; this is for those who have the files alone.
    """
    quantization = checkpoint.quantization
    if quantization is None:
        return {}
    architecture = known_architecture(checkpoint.config)
    unquantized = () if architecture is None else architecture.unquantized
    not_loaded = prediction_layers(checkpoint)
    linears: dict[str, LinearSource] = {}
    for tensor in checkpoint.names:
        name, _, suffix = tensor.rpartition(".")
        is_quantized_weight = suffix == "weight" and checkpoint.info(tensor).dtype not in FLOAT_DTYPES
        if name in linears or not (is_quantized_weight or suffix in quantization.suffixes):
            continue
        storage = checkpoint.storage_of(name)
        if storage is None or EXPERT.search(name) or _NOT_LINEAR.search(name) or name.endswith(unquantized):
            continue
        if name.startswith(not_loaded):
            continue
        rows, columns = _stored_size(checkpoint, name, storage)
        linears[name] = LinearSource(checkpoint, name, rows, columns, storage, f"{name}.bias" in checkpoint)
        linears[name].check(check)
    check.nothing_else_under(*(f"{name}." for name in linears))
    return linears


def _stored_size(checkpoint: Checkpoint, name: str, storage: LinearStorage) -> tuple[int, int]:
    found = checkpoint.infos_of(name, storage.tensors(1, 1))
    return storage.size(found, lambda suffix: checkpoint.read(f"{name}.{suffix}"))
