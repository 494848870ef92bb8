"""gpt-oss as OpenAI publishes it, ``quant_method: mxfp4``: experts in MXFP4, all of a layer in one tensor, rest float.

``PREFIX.gate_up_proj_blocks`` [experts, rows, inputs / 32, 16] has two codes of e2m1 to a byte, the first in the low
nibble, and ``PREFIX.gate_up_proj_scales`` [experts, rows, inputs / 32] their E8M0 scales; ``down_proj`` is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from cpumoe.checkpoints.formats.fields import read_names
from cpumoe.checkpoints.formats.name_patterns import NamePatterns
from cpumoe.checkpoints.storage import LinearStorage, Quantization, StoredTensor
from cpumoe.checkpoints.tensor_file import TensorInfo
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import Scheme

_BLOCK = 32  # inputs that share a scale

_EXPERTS = re.compile(r"(?:.*\.)?experts(?=\.|$)")


@dataclass(frozen=True)
class Mxfp4Storage(LinearStorage):
    """Blocks of 32 codes of e2m1, two to a byte with the first in the low nibble, and an E8M0 scale for each block."""

    scale_suffix: ClassVar[str] = "scales"
    fused: ClassVar[bool] = True

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        blocks = -(-columns // _BLOCK)
        return {
            "blocks": StoredTensor(("U8",), (rows, blocks, _BLOCK // 2)),
            "scales": StoredTensor(("U8",), (rows, blocks)),
        }

    def size(self, found: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> tuple[int, int]:
        for suffix, dimensions in (("blocks", 3), ("scales", 2)):
            if suffix in found and len(shape := found[suffix].shape) == dimensions:
                return shape[0], shape[1] * _BLOCK
        return 0, 0

    def scale_dtype(self, dtypes: Mapping[str, str]) -> torch.dtype:
        return torch.uint8

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
        """No copy: the blocks of a row, one after another, are the nibbles that packing takes."""
        return QuantizedWeight("fp4", tensors["blocks"].flatten(-2), tensors["scales"])

    def decode_plainly(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        blocks = tensors["blocks"]  # [rows, blocks, 16]
        codes = torch.empty((*blocks.shape[:2], _BLOCK), dtype=torch.int8)
        codes[..., 0::2], codes[..., 1::2] = blocks % 16, blocks // 16
        return QuantizedWeight("fp4", codes.view(len(blocks), -1), tensors["scales"])

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        codes = weight.values.view(torch.uint8).unflatten(-1, (-1, _BLOCK))
        return {"blocks": codes[..., 0::2] | codes[..., 1::2] << 4, "scales": weight.scales}


@dataclass(frozen=True)
class Mxfp4(Quantization):
    """Which layers have their experts in MXFP4: all but those that ``modules_to_not_convert`` names."""

    suffixes: ClassVar[frozenset[str]] = frozenset(
        f"{matrix}_{part}" for matrix in ("gate_up_proj", "down_proj") for part in ("blocks", "scales")
    )
    storage: ClassVar[LinearStorage] = Mxfp4Storage(Scheme.parse("mxfp4a16"), "mxfp4")

    not_converted: tuple[str, ...]

    @classmethod
    def parse(cls, section: object) -> Mxfp4:
        assert isinstance(section, Mapping)  # its quant_method was read
        parsed = cls(read_names(section, "modules_to_not_convert"))
        _ = parsed._patterns  # compiles them, which refuses what is no pattern
        return parsed

    def storage_of(self, module: str) -> LinearStorage | None:
        experts = _EXPERTS.match(module)
        if experts is None or experts[0].endswith(self.not_converted) or self._patterns.match(experts[0]):
            return None
        return self.storage

    @cached_property
    def _patterns(self) -> NamePatterns:
        """What transformers takes the names for, besides the ends of names: expressions for whole parts of a name."""
        return NamePatterns([rf"re:(?:{name})(?:(?<=\.)|(?=\.|$))" for name in self.not_converted])

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return (self.storage.scheme,)
