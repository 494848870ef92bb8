"""GPTQ checkpoints: as AutoGPTQ, GPTQModel, optimum and (under another name) AutoRound write them.

``qweight`` is [in / integers in a word, out]: a word has neighbouring inputs of one output, the first in its lowest
bits. ``checkpoint_format`` tells what ``qzeros`` hold: ``gptq`` (the first version) the zero points less one,
``gptq_v2`` the zero points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from cpumoe.checkpoints.formats.name_patterns import NamePatterns, TimeBudget
from cpumoe.checkpoints.formats.transposed_configs import (
    ModuleRules,
    TransposedQuantization,
    read_flag,
    read_overrides,
    read_scheme,
    read_text,
    refuse_fields,
)
from cpumoe.checkpoints.formats.transposed_words import TransposedStorage
from cpumoe.checkpoints.formats.words import copied
from cpumoe.checkpoints.storage import Quantization
from cpumoe.errors import CheckpointError, UnsupportedScheme


class ZeroPoints(Enum):
    """What ``qzeros`` hold.

    A zero point of 0 less one is where tools differ. GPTQModel and AutoRound take one from each zero point in the word
    as a whole, so that a 0 borrows from its neighbour; adding in the word gives back what there was, to the bit.
    AutoGPTQ has 15 for it (which is -1), and reads (stored + 1) & 15; as do we where no other tool is named.
    """

    AS_THEY_ARE = "as they are"
    LESS_ONE = "less one"
    LESS_ONE_IN_WORDS = "less one, with borrows"


@dataclass(frozen=True)
class GptqStorage(TransposedStorage):
    """One linear of a GPTQ checkpoint."""

    adds_biases: ClassVar[bool] = True  # AutoGPTQ before 0.8

    zero_points: ZeroPoints = ZeroPoints.LESS_ONE

    @property
    def _ones(self) -> int:
        """A word of ones."""
        return sum(1 << shift for shift in range(0, 32, self.scheme.weights.bits))

    def _weight_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-columns // self._per_word), rows

    def _values(self, words: Tensor, rows: int, columns: int) -> Tensor:
        # The words of an output one after another are its integers in the order and with the offset of packing.
        stored_bytes = copied(words.transpose(-2, -1)).view(torch.uint8)
        if self.scheme.weights.bits == 4:
            return stored_bytes[..., : -(-columns // 2)]
        return stored_bytes[..., :columns].bitwise_xor_(0x80).view(torch.int8)

    def _true_zeros(self, words: Tensor) -> Tensor:
        if self.zero_points is ZeroPoints.AS_THEY_ARE:
            return words
        if self.zero_points is ZeroPoints.LESS_ONE_IN_WORDS:
            return words + self._ones
        # One more in each part and no carry into the next: the highest bit of a part is added by itself.
        high = _signed(self._ones << (self.scheme.weights.bits - 1))
        return ((words & ~high) + self._ones) ^ (words & high)

    def _stored_zeros(self, words: Tensor) -> Tensor:
        if self.zero_points is ZeroPoints.AS_THEY_ARE:
            return words
        if self.zero_points is ZeroPoints.LESS_ONE_IN_WORDS:
            return words - self._ones
        high = _signed(self._ones << (self.scheme.weights.bits - 1))
        return ((words | high) - self._ones) ^ (~words & high)

    def _plain_integers(self, words: Tensor) -> Tensor:
        return self._parts(words.T)

    def _plain_zero_points(self, words: Tensor) -> Tensor:
        if self.zero_points is ZeroPoints.LESS_ONE_IN_WORDS:
            whole = (words.long() & 0xFFFFFFFF) + self._ones
            words = ((whole & 0xFFFFFFFF) - ((whole & 0x80000000) << 1)).to(torch.int32)
        zeros = self._parts(words)
        if self.zero_points is ZeroPoints.LESS_ONE:
            zeros = (zeros + 1) % (2 * self._middle)
        return zeros.T

    def _weight_words(self, values: Tensor) -> Tensor:
        return self._words(values).T.contiguous()


def _signed(word: int) -> int:
    """A word as int32 has it."""
    return (word & 0x7FFFFFFF) - (word & 0x80000000)


#: ``checkpoint_format`` -> what ``qzeros`` hold.
_FORMATS = {"gptq": ZeroPoints.LESS_ONE, "gptq_v2": ZeroPoints.AS_THEY_ARE}


class GptqQuantization(TransposedQuantization):
    """The ``quantization_config`` of a GPTQ checkpoint."""

    @classmethod
    def parse(cls, section: object) -> Quantization:
        assert isinstance(section, Mapping)  # its quant_method was read
        format_name = read_text(section, ("checkpoint_format", "format"), "gptq")
        if format_name not in _FORMATS:
            accepted = " and ".join(_FORMATS)
            raise UnsupportedScheme(f"checkpoint_format {format_name!r} is not served; {accepted} are")
        refuse_fields(section, {"is_marlin_format": "the words are in another order", "adapter": "it adds to weights"})
        if (dtype := read_text(section, ("pack_dtype",), "int32")).removeprefix("torch.") != "int32":
            raise UnsupportedScheme(f"pack_dtype {dtype!r} is not served; int32 is")
        zero_points = _FORMATS[format_name]
        if zero_points is ZeroPoints.LESS_ONE and _borrows(section):
            zero_points = ZeroPoints.LESS_ONE_IN_WORDS

        def storage(settings: Mapping[str, Any]) -> GptqStorage:
            return gptq_storage(settings, format_name, zero_points)

        default, budget = storage(section), TimeBudget()
        rules: list[tuple[NamePatterns, TransposedStorage | None]] = []
        overrides = read_overrides(section.get("dynamic"), "dynamic")
        for pattern in sorted(overrides, key=lambda pattern: not pattern.startswith("-:")):  # as GPTQModel has it
            matched = NamePatterns([f"re:{pattern.removeprefix('-:').removeprefix('+:')}"], budget)
            try:
                stored = None if pattern.startswith("-:") else storage({**section, **overrides[pattern]})
            except (CheckpointError, UnsupportedScheme) as problem:
                raise type(problem)(f"dynamic {pattern!r:.100}: {problem}") from None
            rules.append((matched, stored))
        return cls(default, ModuleRules({}, rules))


def gptq_storage(settings: Mapping[str, Any], format_name: str, zero_points: ZeroPoints) -> GptqStorage:
    """How a linear is stored that has these settings."""
    scheme = read_scheme(settings, read_flag(settings, "sym", True))
    ordered = read_flag(settings, "desc_act", False)  # without it there may be no g_idx
    anywhere = ordered and not read_flag(settings, "static_groups", False) and scheme.group_size is not None
    return GptqStorage(scheme, format_name, ordered, anywhere, zero_points=zero_points)


def _borrows(section: Mapping[str, Any]) -> bool:
    """Whether a tool wrote the file that takes one from zero points in the word as a whole."""
    meta = section.get("meta")
    writers = meta.get("quantizer") if isinstance(meta, Mapping) else None
    return "autoround_version" in section or "gptqmodel" in str(writers)
