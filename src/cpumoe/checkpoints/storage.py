"""What generic code asks of an on-disk format.

A format is one file of ``formats/``. It says what a ``quantization_config`` means (:class:`Quantization`) and how one
linear lies in the files (:class:`LinearStorage`). Whoever reads, checks or inspects a checkpoint asks these two and
knows neither the names of tensors nor how their bits are arranged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from cpumoe.checkpoints.tensor_file import DTYPES, TensorInfo
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.activation_rounding import needs_input_scales
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import PER_TENSOR_FP8, PER_TENSOR_INT8, PER_TOKEN_FP8, PER_TOKEN_INT8, Scheme, TensorFormat

if TYPE_CHECKING:
    from cpumoe.checkpoints.named_tensors import NamedTensors


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as it must lie in the file: the accepted safetensors dtypes, and the shape.

    ``by_rows``: its first dimension are the rows of the linear, so that the tensors of several linears can lie in one
    piece of memory, one below the other. ``values``: what it must hold, where that follows from the size of the linear;
    such a tensor is compared and not decoded. ``check`` is for those of which more can be said than that they differ:
    given the name of the tensor and the tensor, it raises CheckpointError or UnsupportedScheme. ``optional``: one that
    is compared may be absent. ``contents`` does the same as ``check`` for a tensor that is decoded: it refuses numbers
    that no such tensor may hold. ``inspected``: one with ``contents`` that is read before any weights are, because it
    holds neither weights nor scales.
    """

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    by_rows: bool = True
    values: tuple[int, ...] | None = None
    check: Callable[[str, Tensor], None] | None = None
    contents: Callable[[str, Tensor], None] | None = None
    optional: bool = False
    inspected: bool = False

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether it may have this shape: tools write one number for all of a linear as [1] or as []."""
        return shape == self.shape or (shape == () and self.shape == (1,) and not self.by_rows)

    @property
    def is_known(self) -> bool:
        """Whether it is known what it holds: nothing is decoded then."""
        return self.values is not None or self.check is not None

    def refuse_other(self, name: str, found: Tensor) -> None:
        """Raises CheckpointError or UnsupportedScheme if the tensor ``name`` does not hold what is known of it."""
        if self.values is not None and found.tolist() != list(self.values):
            raise CheckpointError(f"{name} is {found.tolist()}; {list(self.values)} is accepted")
        if self.check is not None:
            self.check(name, found)

    @property
    def bytes(self) -> int:
        """How many there are, with the first of the dtypes."""
        return prod(self.shape) * DTYPES[self.dtypes[0]].itemsize


#: Activations with one dynamic scale for all tokens of a call -> those that are computed instead, with a scale per
#: token: it is finer, needs nothing from the file, and the result of a token does not depend on the rest of its batch.
PER_TOKEN_INSTEAD = {PER_TENSOR_FP8: PER_TOKEN_FP8, PER_TENSOR_INT8: PER_TOKEN_INT8}


@dataclass(frozen=True)
class LinearStorage(ABC):
    """How one quantised linear lies in the files. A bias is not part of it: it is a float tensor in every format.

    ``scheme`` is what the linear is in memory, ``format`` what config.json calls this way of storing it.
    ``stored_activations`` are those that config.json names, if they are not those of the scheme: files with one dynamic
    scale for all tokens are computed with a scale per token, and are written as they were read.
    """

    scale_suffix: ClassVar[str]  # of the tensor that has the scales
    fused: ClassVar[bool] = False  # a layer's experts lie in one tensor: ``PREFIX.gate_up_proj_SUFFIX`` [experts, ...]
    adds_biases: ClassVar[bool] = False  # whether tools give a bias of zeros to linears that have none

    scheme: Scheme
    format: str
    stored_activations: TensorFormat | None = field(default=None, kw_only=True)

    @property
    def stored_weights(self) -> TensorFormat:
        """The weights as config.json describes them."""
        return self.scheme.weights

    @abstractmethod
    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        """The tensors of a [rows, columns] linear by suffix: the last part of their names."""

    @abstractmethod
    def size(self, found: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> tuple[int, int]:
        """Rows and columns of a linear of which only the files are known; (0, 0) if nothing tells.

        Args:
            found: the tensors that are there, by suffix. Some may be missing, or not be what they should.
            read: gives the contents of one of them; meant for tensors of a few numbers.
        """

    @abstractmethod
    def scale_dtype(self, dtypes: Mapping[str, str]) -> torch.dtype:
        """What the scales have in memory, from the safetensors dtypes of the tensors by suffix."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
        """The weight [..., out, columns] as packing takes it, without a bias.

        Args:
            tensors: by suffix, of one linear or of several of the same size that were read together, such as the gate
                and the up projection. With n linears a tensor that goes by rows is [..., n * rows, ...], and any other
                one is [..., n, ...].
            rows: of each linear.
            columns: of each linear.
        """

    @abstractmethod
    def decode_plainly(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight [rows, columns] of one linear, one value per byte; its tensors are given as they lie.

        This spells out the definition of the format and shares no code with :meth:`decode`: ``cpumoe check`` compares
        the two.
        """

    @abstractmethod
    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """A weight [rows, columns], one value per byte -> the tensors that are stored, by suffix; not its bias."""

    @property
    def input_scale_suffix(self) -> str | None:
        """Of the tensor that has the stored scale of the inputs; None if they are left in float or scaled as seen."""
        return None

    @property
    def group_index_suffix(self) -> str | None:
        """Of the tensor that has the group of every input, where groups are of inputs that do not lie side by side."""
        return None

    @property
    def has_input_order(self) -> bool:
        """Whether scales belong to inputs that do not lie side by side, so that packed inputs have an order."""
        return self.group_index_suffix is not None

    def without_order(self) -> LinearStorage:
        """The same for whoever finds the groups of inputs himself: weights are decoded without their order."""
        return self

    def read_bytes(self, rows: int, columns: int) -> int:
        """Bytes that a linear takes while it is read and decoded."""
        return sum(tensor.bytes for tensor in self.tensors(rows, columns).values())


# The scheme that does without a stored scale of the activations; for others, "-static" is left out of the name.
_WITHOUT_INPUT_SCALES = {"fp8-tensor": "fp8", "nvfp4": "nvfp4a16"}


def refuse_stored_input_scales(*schemes: Scheme | None) -> None:
    """Refuses schemes that float weights alone cannot be quantised to: the scale of the inputs is found with a text."""
    for scheme in schemes:
        if scheme is not None and scheme.activations is not None and needs_input_scales(scheme):
            raise UnsupportedScheme(
                f"scheme {scheme} has a stored scale of the activations, which is found with a text: "
                f"cpumoe quantize FLOAT_MODEL DST --scheme {scheme} --calibration TEXT; without one "
                f"{_WITHOUT_INPUT_SCALES.get(str(scheme), str(scheme).removesuffix('-static'))} is accepted"
            )


def matrix_shape(found: Mapping[str, TensorInfo], suffix: str) -> tuple[int, ...]:
    """The shape of a tensor that is there and has two dimensions; else nothing. For :meth:`LinearStorage.size`."""
    shape = found[suffix].shape if suffix in found else ()
    return shape if len(shape) == 2 else ()


class AnnouncedKvCache(Protocol):
    """A quantised KV cache that a ``quantization_config`` describes."""

    def tensors(self, names: Iterable[str], info: Callable[[str], TensorInfo]) -> dict[str, StoredTensor]:
        """Return its scales and zero points among the tensors of a checkpoint, by name."""
        ...

    def use(self, scale_count: int, held: str | None) -> str:
        """Return what is done about it, in words; ``held``: the ``kv_cache`` that was asked for."""
        ...


class Quantization(ABC):
    """What the ``quantization_config`` of a config.json says: which modules are quantised, and how they are stored."""

    #: Suffixes that only tensors of quantised linears have. (``weight`` is not among them: float linears have it too.)
    suffixes: ClassVar[frozenset[str]]

    #: The quantised KV cache that the configuration announces; None for one in float.
    kv_cache: AnnouncedKvCache | None = None

    @classmethod
    @abstractmethod
    def parse(cls, section: object) -> Quantization:
        """Parses a ``quantization_config`` whose ``quant_method`` is that of this class.

        Raises UnsupportedScheme for what is well-formed and not served, CheckpointError for what is not well-formed.
        """

    @abstractmethod
    def storage_of(self, module: str) -> LinearStorage | None:
        """How the linear named ``module`` is stored; None if it was left in float."""

    def storages_of(self, module: str) -> tuple[LinearStorage, ...]:
        """Return each way in which a linear may be stored, where the configuration leaves that to the tensors."""
        storage = self.storage_of(module)
        return () if storage is None else (storage,)

    def with_tensors(self, names: Collection[str]) -> Quantization:
        """The same for files with tensors of these names: not every configuration lists what was left in float."""
        return self

    def fitted_to(self, tensors: NamedTensors) -> Quantization:
        """Return the same for the files that have these tensors, after a look at headers and at tensors of few numbers.

        Raises UnsupportedScheme or CheckpointError if the tensors are of another kind than the configuration says.
        """
        return self.with_tensors(tensors.names)

    @property
    @abstractmethod
    def schemes(self) -> tuple[Scheme, ...]:
        """All schemes that the configuration speaks of."""
