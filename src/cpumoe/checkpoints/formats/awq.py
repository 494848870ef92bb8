"""AWQ checkpoints, in the ``gemm`` version that AutoAWQ, GPTQModel and AutoRound write.

``qweight`` is [in, out / 8]: a word has eight neighbouring outputs of one input, in the order that their kernels take
them: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on. ``qzeros`` hold the zero points in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

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
from cpumoe.checkpoints.storage import Quantization
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.scheme import Scheme

_CACHED_BYTES = 2 << 20  # words that are worked on at once: a pass over them finds them in the cache

#: Bits to shift by -> the lower parts of that size.
_LOW_PARTS = {4: 0x0F0F0F0F, 8: 0x00FF00FF, 16: 0x0000FFFF}


@dataclass(frozen=True)
class AwqStorage(TransposedStorage):
    """One linear of an AWQ checkpoint."""

    row_order: ClassVar[Sequence[int]] = (0, 2, 4, 6, 1, 3, 5, 7)

    def _weight_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return columns, -(-rows // self._per_word)

    def _values(self, words: Tensor, rows: int, columns: int) -> Tensor:
        if rows % 8 or columns % 8:
            raise ValueError(f"{rows} outputs and {columns} inputs; AWQ has multiples of 8")
        out = torch.empty((len(words), rows, columns // 8), dtype=torch.int32)
        step = max(1, _CACHED_BYTES // (4 * words[0].numel()))
        for first in range(0, len(words), step):
            _turn(words[first : first + step], out[first : first + step], self.row_order)
        return out.view(torch.uint8)

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
    """Words [n, in, out / 8] of eight outputs each -> words [n, out, in / 8] of eight inputs each, the first lowest.

    Eight words of neighbouring inputs are eight times eight parts, which change places across the diagonal: first with
    the neighbour, then pairs, then fours.
    """
    count, columns, width = words.shape
    eight = words.view(count, columns // 8, 8, width).permute(2, 0, 3, 1).contiguous()  # [8, n, out / 8, in / 8]
    by_bits = eight.view(2, 2, 2, count, width, columns // 8)  # fours, pairs, neighbours
    spare = torch.empty_like(by_bits[0])
    for bits, low, high in (
        (4, by_bits[:, :, 0], by_bits[:, :, 1]),
        (8, by_bits[:, 0], by_bits[:, 1]),
        (16, by_bits[0], by_bits[1]),
    ):
        # The upper parts of `low` and the lower parts of `high` change places.
        torch.bitwise_right_shift(low, bits, out=spare)
        spare.bitwise_xor_(high).bitwise_and_(_LOW_PARTS[bits])
        high.bitwise_xor_(spare)
        low.bitwise_xor_(spare.bitwise_left_shift_(bits))
    rows = out.view(count, width, 8, columns // 8)
    for place, row in enumerate(row_order):
        rows[:, :, row].copy_(eight[place])


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
        return cls(awq_storage(scheme, "awq"), ModuleRules({}, ()))


def awq_storage(scheme: Scheme, format_name: str) -> AwqStorage:
    """How a linear is stored; other than 4 bits is refused."""
    if scheme.weights.bits != 4:
        raise UnsupportedScheme(f"AWQ with bits={scheme.weights.bits} is not served; 4 bits are")
    return AwqStorage(scheme, format_name)
