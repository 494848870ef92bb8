"""AWQ checkpoints, in the ``gemm`` version that AutoAWQ, GPTQModel and AutoRound write.

``qweight`` is [in, out / 8]: a word has eight neighbouring outputs of one input, in the order that their kernels take
them: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on. With 8 bits it is [in, out / 4], and the order 0, 2, 1, 3.
``qzeros`` hold the zero points in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpumoe.checkpoints.formats.transposed_configs import (
    ModuleRules,
    TransposedQuantization,
    read_flag,
    read_scheme,
    read_text,
)
from cpumoe.checkpoints.formats.transposed_words import TransposedStorage, in_row_order
from cpumoe.checkpoints.formats.words import WORD_BITS
from cpumoe.checkpoints.storage import Quantization
from cpumoe.errors import UnsupportedScheme

_CACHED_BYTES = 2 << 20  # words that are worked on at once: a pass over them finds them in the cache

#: Bits to shift by -> the lower parts of that size.
_LOW_PARTS = {4: 0x0F0F0F0F, 8: 0x00FF00FF, 16: 0x0000FFFF}

#: Bits of a weight -> the outputs of a word, the lowest bits first.
_ROW_ORDERS = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}


@dataclass(frozen=True)
class AwqStorage(TransposedStorage):
    """One linear of an AWQ checkpoint."""

    @property
    def row_order(self) -> Sequence[int]:
        return _ROW_ORDERS[self.scheme.weights.bits]

    def _weight_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return columns, -(-rows // self._per_word)

    def _values(self, words: Tensor, rows: int, columns: int) -> Tensor:
        each = self._per_word
        if rows % each or columns % each:
            raise ValueError(f"{rows} outputs and {columns} inputs; AWQ has multiples of {each}")
        out = torch.empty((len(words), rows, columns // each), dtype=torch.int32)
        step = max(1, _CACHED_BYTES // (4 * words[0].numel()))
        for first in range(0, len(words), step):
            _turn(words[first : first + step], out[first : first + step], self.row_order)
        stored_bytes = out.view(torch.uint8)
        return stored_bytes if each == 8 else stored_bytes.bitwise_xor_(0x80).view(torch.int8)

    def _true_zeros(self, words: Tensor) -> Tensor:
        return words

    def _stored_zeros(self, words: Tensor) -> Tensor:
        return words

    def _plain_integers(self, words: Tensor) -> Tensor:
        return self._parts(words).T

    def _plain_zero_points(self, words: Tensor) -> Tensor:
        return self._parts(words).T

    def _weight_words(self, values: Tensor) -> Tensor:
        return self._words(in_row_order(values, self.row_order).T)


def _turn(words: Tensor, out: Tensor, row_order: Sequence[int]) -> None:
    """Words [n, in, out / p] of p outputs each -> words [n, out, in / p] of p inputs each, the first lowest.

    With p words of neighbouring inputs, p times p parts change places across the diagonal: first with the neighbour,
    then pairs, and, where p is 8, then fours.
    """
    count, columns, width = words.shape
    each, levels = len(row_order), len(row_order).bit_length() - 1
    apart = words.view(count, columns // each, each, width).permute(2, 0, 3, 1).contiguous()  # [p, n, out / p, in / p]
    by_bits = apart.unflatten(0, (2,) * levels)  # fours, pairs, neighbours
    spare = torch.empty_like(by_bits[0])
    for level in range(levels):
        bits = (WORD_BITS // each) << level
        low, high = by_bits.select(levels - 1 - level, 0), by_bits.select(levels - 1 - level, 1)
        # The upper parts of `low` and the lower parts of `high` change places.
        torch.bitwise_right_shift(low, bits, out=spare)
        spare.bitwise_xor_(high).bitwise_and_(_LOW_PARTS[bits])
        high.bitwise_xor_(spare)
        low.bitwise_xor_(spare.bitwise_left_shift_(bits))
    rows = out.view(count, width, each, columns // each)
    for place, row in enumerate(row_order):
        rows[:, :, row].copy_(apart[place])


class AwqQuantization(TransposedQuantization):
    """The ``quantization_config`` of an AWQ checkpoint."""

    @classmethod
    def parse(cls, section: object) -> Quantization:
        assert isinstance(section, Mapping)  # its quant_method was read
        version = read_text(section, ("version", "format", "checkpoint_format"), "gemm")
        if version != "gemm":
            raise UnsupportedScheme(f"version {version!r} is not served; 'gemm' is")
        older = {"bits": section.get("w_bit"), "group_size": section.get("q_group_size")}
        settings = older | {name: section[name] for name in older if name in section}
        scheme = read_scheme(settings, not read_flag(section, "zero_point", True))
        return cls(AwqStorage(scheme, "awq"), ModuleRules({}, ()))
