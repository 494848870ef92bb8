"""Integers of AMD's Quark: int8 a byte each, and int4 and uint4 in groups, packed into int32 words.

int8: ``weight`` [out, in], and ``weight_scale`` [out], or one number for all of a linear.

int4 and uint4 in groups lie as AWQ has them, under other names: ``weight`` [in, out / 8], ``weight_scale``
[groups, out] and ``weight_zero_point`` [groups, out / 8]. A word has eight neighbouring outputs of one input, in the
order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on, or as they come (``pack_method`` is ``reorder`` or ``order``).
int4 is in two's complement and symmetric; uint4 has zero points.

Symmetric weights and inputs have zero points too (``weight_zero_point``, ``input_zero_point``); all of them are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from cpumoe.checkpoints.formats.awq import AwqStorage
from cpumoe.checkpoints.formats.compressed_storages import IntegerStorage
from cpumoe.checkpoints.storage import StoredTensor
from cpumoe.errors import CheckpointError
from cpumoe.layers.quantized_experts import QuantizedWeight

WEIGHT_ZERO_POINT, INPUT_ZERO_POINT = "weight_zero_point", "input_zero_point"

#: ``pack_method`` -> the outputs of a word of 4-bit integers, the lowest bits first.
ROW_ORDERS: dict[object, tuple[int, ...]] = {"reorder": (0, 2, 4, 6, 1, 3, 5, 7), "order": (0, 1, 2, 3, 4, 5, 6, 7)}

_SIGN_BITS = 0x88888888 - (1 << 32)  # of eight 4-bit integers, as int32 has the word


@dataclass(frozen=True)
class QuarkInt8Storage(IntegerStorage):
    """int8 with a scale per row, or one for all of a linear, which every row has in memory.

    ``zero_points`` are the suffixes of the zero points that the files have. A linear may lack them.
    """

    zero_points: tuple[str, ...] = (WEIGHT_ZERO_POINT, INPUT_ZERO_POINT)

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        tensors = super().tensors(rows, columns)
        scale = tensors[self.scale_suffix]
        if not self.has_one_scale:
            scale = replace(scale, shape=(rows,))
        zeros = {WEIGHT_ZERO_POINT: replace(scale, dtypes=("I8", "I32"), contents=None)}
        if self.input_scale_suffix is not None:
            zeros[INPUT_ZERO_POINT] = replace(zeros[WEIGHT_ZERO_POINT], shape=(1,), by_rows=False)
        known = {
            suffix: replace(zero, optional=True, check=_refuse_zero_points)
            for suffix, zero in zeros.items()
            if suffix in self.zero_points
        }
        return tensors | {self.scale_suffix: scale} | known

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
        scale = tensors[self.scale_suffix]
        return super().decode(
            {**tensors, self.scale_suffix: scale if self.has_one_scale else scale.unsqueeze(-1)}, rows, columns
        )

    def decode_plainly(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        scale = tensors[self.scale_suffix]
        used = {suffix: tensor for suffix, tensor in tensors.items() if suffix not in self.zero_points}
        return super().decode_plainly(used | {self.scale_suffix: scale if self.has_one_scale else scale.view(-1, 1)})

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        tensors = super().encode(weight)
        tensors[self.scale_suffix] = tensors[self.scale_suffix].flatten()
        stored = self.tensors(*weight.values.shape)
        zeros = {suffix: torch.zeros(stored[suffix].shape, dtype=torch.int8) for suffix in stored.keys() - tensors}
        return tensors | zeros


def _refuse_zero_points(name: str, zeros: Tensor) -> None:
    """Raise CheckpointError for zero points other than 0."""
    if bool(zeros.any()):
        found = int(zeros.reshape(-1)[zeros.reshape(-1).nonzero()[0, 0]])
        raise CheckpointError(f"{name} holds {found}, and config.json says that it is symmetric; 0 is accepted")


@dataclass(frozen=True)
class QuarkInt4Storage(AwqStorage):
    """int4 (symmetric, in two's complement) or uint4 (with zero points) in groups.

    ``pack_method``: a key of ``ROW_ORDERS``. ``zero_points`` as in :class:`QuarkInt8Storage`.
    """

    scale_suffix: ClassVar[str] = "weight_scale"
    weight_suffix: ClassVar[str] = "weight"
    zero_suffix: ClassVar[str] = WEIGHT_ZERO_POINT

    pack_method: str = "reorder"
    zero_points: tuple[str, ...] = (WEIGHT_ZERO_POINT, INPUT_ZERO_POINT)

    @property
    def row_order(self) -> Sequence[int]:
        return ROW_ORDERS[self.pack_method]

    @property
    def _stored_offset(self) -> int:
        return self._middle if self.scheme.weights.symmetric else 0

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        tensors = super().tensors(rows, columns)
        if not self.scheme.weights.symmetric:
            return tensors
        zeros = tensors.pop(self.zero_suffix)
        return tensors | (
            {self.zero_suffix: replace(zeros, optional=True)} if self.zero_suffix in self.zero_points else {}
        )

    def _unsigned(self, words: Tensor) -> Tensor:
        """Return words of unsigned integers; the reverse is the same."""
        return words ^ _SIGN_BITS if self.scheme.weights.symmetric else words

    def _values(self, words: Tensor, rows: int, columns: int) -> Tensor:
        nibbles = super()._values(words, rows, columns)
        return nibbles.bitwise_xor_(0x88) if self.scheme.weights.symmetric else nibbles

    def _true_zeros(self, words: Tensor) -> Tensor:
        return self._unsigned(words)

    def _stored_zeros(self, words: Tensor) -> Tensor:
        return self._unsigned(words)

    def _plain_integers(self, words: Tensor) -> Tensor:
        return super()._plain_integers(self._unsigned(words))

    def _plain_zero_points(self, words: Tensor) -> Tensor:
        return super()._plain_zero_points(self._unsigned(words))

    def _weight_words(self, values: Tensor) -> Tensor:
        return self._unsigned(super()._weight_words(values))
