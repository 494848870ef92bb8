"""What GPTQ and AWQ have in common: integers packed into words, inputs before outputs, and zero points beside scales.

A linear [out, in] is stored as ``qweight`` (int32 words), ``qzeros`` [groups, out / integers in a word] (zero points in
words, along the outputs), ``scales`` [groups, out] and, if the tool writes it, ``g_idx`` [in]: the group of each input.
Integers are unsigned; the value is (integer - zero point) * scale.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from cpumoe.checkpoints.formats.input_order import (
    group_index_of,
    grouping_check,
    input_order_of,
    is_own_order,
    own_order,
    plain_input_order,
    refuse_no_grouping,
)
from cpumoe.checkpoints.formats.refused_numbers import refuse_zero
from cpumoe.checkpoints.formats.words import WORD_BITS, pack_words, unpack_words
from cpumoe.checkpoints.storage import LinearStorage, StoredTensor, matrix_shape
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES, TensorInfo
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.quantized_experts import QuantizedWeight


@dataclass(frozen=True)
class TransposedStorage(LinearStorage):
    """How one linear lies in the files.

    ``row_order`` are the outputs that the parts of a word stand for, the lowest bits first. Symmetric weights have
    zero points too: all of them are in the middle of the range, and a file that has another one is refused.
    """

    scale_suffix: ClassVar[str] = "scales"
    weight_suffix: ClassVar[str] = "qweight"
    zero_suffix: ClassVar[str] = "qzeros"
    has_g_idx: bool = False
    activation_order: bool = False  # ``g_idx`` says which group an input is in; else it must say what its place says

    @property
    def group_index_suffix(self) -> str | None:
        return "g_idx" if self.activation_order else None

    def without_order(self) -> TransposedStorage:
        return replace(self, activation_order=False)

    @property
    def row_order(self) -> Sequence[int] | None:
        """The outputs that the parts of a word stand for; None: as they come."""
        return None

    @property
    def _per_word(self) -> int:
        return WORD_BITS // self.scheme.weights.bits

    @property
    def _middle(self) -> int:
        return int(2 ** (self.scheme.weights.bits - 1))

    @property
    def _stored_offset(self) -> int:
        """Difference between the zero points of unsigned integers and the stored ones."""
        return 0

    # ---- what lies in the files ------------------------------------------------------------------------------------

    @abstractmethod
    def _weight_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of ``qweight``."""

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        groups = self.scheme.weights.group.scale_shape(rows, columns)[1]
        words = (groups, -(-rows // self._per_word))
        check = self._check_zero_points if self.scheme.weights.symmetric else None
        tensors = {
            self.weight_suffix: StoredTensor(("I32",), self._weight_shape(rows, columns), by_rows=False),
            self.zero_suffix: StoredTensor(("I32",), words, by_rows=False, check=check),
            self.scale_suffix: StoredTensor(FLOAT_DTYPES, (groups, rows), by_rows=False, contents=refuse_zero),
        }
        if self.has_g_idx or self.activation_order:
            known = None if self.activation_order else self._check_order
            contents = grouping_check(columns, self.scheme.group_size) if self.activation_order else None
            tensors["g_idx"] = StoredTensor(
                ("I32",), (columns,), by_rows=False, check=known, contents=contents, inspected=True
            )
        return tensors

    def size(self, found: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> tuple[int, int]:
        weight, scales = matrix_shape(found, self.weight_suffix), matrix_shape(found, self.scale_suffix)
        if weight:
            rows, columns = self._weight_shape(self._per_word, self._per_word)[::-1]  # of one word each way
            return weight[1] * self._per_word // rows, weight[0] * self._per_word // columns
        return (scales[1], scales[0] * (self.scheme.group_size or 1)) if scales else (0, 0)

    def read_bytes(self, rows: int, columns: int) -> int:
        # The words are there twice while they are brought into the order of packing, and so are the scales.
        stored = self.tensors(rows, columns)
        twice = stored[self.weight_suffix].bytes + stored[self.scale_suffix].bytes
        return sum(t.bytes for t in stored.values()) + twice

    def scale_dtype(self, dtypes: Mapping[str, str]) -> torch.dtype:
        return DTYPES[dtypes.get(self.scale_suffix, "F32")]

    def _check_zero_points(self, name: str, words: Tensor) -> None:
        if not bool((words != self._middle_word).any()):
            return
        zeros = self._plain_zero_points(words)
        row, group = (int(i) for i in (zeros != self._middle).nonzero()[0])
        offset = self._stored_offset
        raise CheckpointError(
            f"{name} has the zero point {int(zeros[row, group]) - offset} for output {row}, group {group}, and "
            f"config.json says that weights are symmetric; {self._middle - offset} is accepted"
        )

    def _check_order(self, name: str, groups: Tensor) -> None:
        """Refuses a ``g_idx`` that does not say what the place of each input says."""
        if is_own_order(groups, self.scheme.group_size):
            return
        refuse_no_grouping(name, groups, self.scheme.group_size)
        own = own_order(len(groups), self.scheme.group_size)
        at = int((groups != own).nonzero()[0])
        raise UnsupportedScheme(
            f"{name} has input {at} in group {int(groups[at])} and not in group {int(own[at])}: groups in activation "
            "order, which config.json does not announce (desc_act true and static_groups false do)"
        )

    # ---- reading ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def _values(self, words: Tensor, rows: int, columns: int) -> Tensor:
        """``qweight`` [linears, ...] -> [linears, rows, columns]: int8, or uint8 nibbles with half the columns."""

    @abstractmethod
    def _true_zeros(self, words: Tensor) -> Tensor:
        """Words of zero points as they are stored -> the zero points themselves, in words."""

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
        words = tensors[self.weight_suffix]
        values = self._values(words.flatten(0, -3), rows, columns).unflatten(0, words.shape[:-2])
        scales = tensors[self.scale_suffix].transpose(-2, -1)
        zeros = None
        if not self.scheme.weights.symmetric:
            zeros = self._zero_points(self._true_zeros(tensors[self.zero_suffix]))[..., :rows].transpose(-2, -1)

        def below_one_another(parts: Tensor) -> Tensor:  # [..., linears, rows, n] -> [..., linears * rows, n]
            return parts.contiguous().flatten(-3, -2)

        return QuantizedWeight(
            self.scheme.weights.element,
            below_one_another(values),
            below_one_another(scales),
            None if zeros is None else below_one_another(zeros),
            input_order=self._input_order(tensors),
        )

    def _input_order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return input_order_of(tensors["g_idx"]) if self.activation_order else None

    def _zero_points(self, words: Tensor) -> Tensor:
        """[..., groups, words] -> [..., groups, outputs] int8, less half of the range as the integers are."""
        zeros = unpack_words(words.contiguous(), self.scheme.weights.bits)
        if self.row_order is None:
            return zeros
        words_apart: Tensor = zeros.unflatten(-1, (-1, self._per_word))
        return words_apart[..., _places(self.row_order)].flatten(-2)

    # ---- the definition --------------------------------------------------------------------------------------------

    def _parts(self, words: Tensor) -> Tensor:
        """Words [n, m] -> their unsigned integers [n, m * integers in a word] in the order of the outputs."""
        bits = self.scheme.weights.bits
        order = self.row_order or range(self._per_word)
        shifts = torch.tensor([bits * order.index(row) for row in range(self._per_word)], dtype=torch.int32)
        parts: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
        return parts.flatten(1)

    @abstractmethod
    def _plain_zero_points(self, words: Tensor) -> Tensor:
        """``qzeros`` -> the zero points [rows, groups], unsigned."""

    @abstractmethod
    def _plain_integers(self, words: Tensor) -> Tensor:
        """``qweight`` -> the unsigned integers [rows, columns]."""

    def decode_plainly(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        scales = tensors[self.scale_suffix].T
        zeros = None
        if not self.scheme.weights.symmetric:
            zeros = (self._plain_zero_points(tensors[self.zero_suffix])[: len(scales)] - self._middle).to(torch.int8)
        values = (self._plain_integers(tensors[self.weight_suffix])[: len(scales)] - self._middle).to(torch.int8)
        order = plain_input_order(tensors["g_idx"]) if self.activation_order else None
        return QuantizedWeight(self.scheme.weights.element, values, scales, zeros, input_order=order)

    # ---- writing ---------------------------------------------------------------------------------------------------

    def _words(self, values: Tensor) -> Tensor:
        """int8 [n, m] in the order of the lowest bits first -> int32 words [n, m / integers in a word]."""
        return pack_words(values, self.scheme.weights.bits)

    @abstractmethod
    def _weight_words(self, values: Tensor) -> Tensor:
        """int8 [rows, columns] -> ``qweight``."""

    @abstractmethod
    def _stored_zeros(self, words: Tensor) -> Tensor:
        """The reverse of :meth:`_true_zeros`."""

    @cached_property
    def _middle_word(self) -> int:
        """The word, as int32 has it, of zero points that are all in the middle of the range."""
        return int(self._stored_zeros(self._words(torch.zeros((1, self._per_word), dtype=torch.int8))))

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        rows, columns = weight.values.shape
        zeros = torch.zeros(weight.scales.shape, dtype=torch.int8) if weight.zero_points is None else weight.zero_points
        if rows % self._per_word or columns % self._per_word:
            raise UnsupportedScheme(
                f"{self.format} for [{rows}, {columns}] weights; multiples of {self._per_word} are accepted"
            )
        tensors = {
            self.weight_suffix: self._weight_words(weight.values),
            self.zero_suffix: self._stored_zeros(self._words(in_row_order(zeros, self.row_order).T)),
            self.scale_suffix: weight.scales.T.contiguous(),
        }
        if self.has_g_idx or self.activation_order:
            tensors["g_idx"] = group_index_of(weight.input_order, columns, self.scheme.group_size)
        return tensors


def in_row_order(values: Tensor, order: Sequence[int] | None) -> Tensor:
    """[rows, n] -> the same with the rows of each word in the order in which a word has them."""
    return values if order is None else values.unflatten(0, (-1, len(order)))[:, list(order)].flatten(0, 1)


def _places(order: Sequence[int]) -> list[int]:
    """Where in a word each of its outputs is."""
    return [order.index(row) for row in range(len(order))]
