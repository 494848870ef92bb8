"""How compressed-tensors stores linears: integers, packed or a byte each, and 4-bit floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cpumoe.checkpoints.formats.input_order import group_index_of, input_order_of, plain_input_order
from cpumoe.checkpoints.storage import LinearStorage, StoredTensor, matrix_shape
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES, TensorInfo
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.nibbles import pack_nibbles, unpack_nibbles
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import Scheme

INT_QUANTIZED, PACK_QUANTIZED = "int-quantized", "pack-quantized"
#: Formats that integers may be written in.
INTEGER_FORMATS = (INT_QUANTIZED, PACK_QUANTIZED)
#: The format of 4-bit floats, by their scales.
FP4_FORMATS = {"e4m3": "nvfp4-pack-quantized", "e8m0": "mxfp4-pack-quantized"}

_WORD_BITS = 32  # weights of few bits are packed into words of this size


def storage_for(scheme: Scheme, integer_format: str = PACK_QUANTIZED, activation_order: bool = False) -> LinearStorage:
    """How weights of a scheme are stored; integers in the format that is given."""
    weights = scheme.weights
    if weights.element == "fp4":
        return Fp4Storage(scheme, FP4_FORMATS[weights.scale])
    if integer_format == INT_QUANTIZED and scheme.activations is None:
        raise UnsupportedScheme(
            f"{scheme} in the format {INT_QUANTIZED}, which no reader expects without quantised activations; "
            f"{PACK_QUANTIZED} is accepted"
        )
    return IntegerStorage(scheme, integer_format, activation_order)


@dataclass(frozen=True)
class IntegerStorage(LinearStorage):
    """Integers with a scale, and if they are asymmetric a zero point, per row or per group.

    ``int-quantized`` has a byte for each of them in ``weight``. ``pack-quantized`` has as many as fit into words in
    ``weight_packed``, where the last word of a row may be filled up, and the size of the linear in ``weight_shape``.
    Its zero points are packed into words as well, along the rows, and it may have the inputs of a group anywhere:
    ``weight_g_idx`` has the group of every input.
    """

    scale_suffix: ClassVar[str] = "weight_scale"

    activation_order: bool = False

    @property
    def has_input_order(self) -> bool:
        return self.activation_order

    @property
    def _is_packed(self) -> bool:
        return self.format == PACK_QUANTIZED

    @property
    def _per_word(self) -> int:
        return _WORD_BITS // self.scheme.weights.bits

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        scale_shape = self.scheme.weights.group.scale_shape(rows, columns)
        scale = StoredTensor(FLOAT_DTYPES, scale_shape)
        if not self._is_packed:
            return {"weight": StoredTensor(("I8",), (rows, columns)), "weight_scale": scale}
        tensors = {
            "weight_packed": StoredTensor(("I32",), (rows, -(-columns // self._per_word))),
            "weight_scale": scale,
        }
        if not self.scheme.weights.symmetric:
            words = (-(-rows // self._per_word), scale_shape[1])
            tensors["weight_zero_point"] = StoredTensor(("I32",), words, by_rows=False)
        if self.activation_order:
            tensors["weight_g_idx"] = StoredTensor(("I32",), (columns,), by_rows=False)
        tensors["weight_shape"] = StoredTensor(("I64", "I32"), (2,), by_rows=False, values=(rows, columns))
        return tensors

    def size(self, found: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> tuple[int, int]:
        weight = matrix_shape(found, "weight_packed" if self._is_packed else "weight")
        scale = matrix_shape(found, "weight_scale")
        if self._is_packed and "weight_shape" in found and str(found["weight_shape"]) in ("I64 [2]", "I32 [2]"):
            rows, columns = read("weight_shape").tolist()
            expected = self.tensors(rows, columns)
            # It comes first because the last word of a row may be filled up, and only if one of the others agrees.
            if weight == expected["weight_packed"].shape or scale == expected["weight_scale"].shape:
                return rows, columns
        if weight:
            return weight[0], weight[1] * (self._per_word if self._is_packed else 1)
        return (scale[0], scale[1] * (self.scheme.group_size or 1)) if scale else (0, 0)

    def scale_dtype(self, dtypes: Mapping[str, str]) -> torch.dtype:
        return DTYPES[dtypes.get("weight_scale", "F32")]

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
        scales = tensors["weight_scale"]
        zeros = tensors.get("weight_zero_point")
        return QuantizedWeight(
            self.scheme.weights.element,
            self._integers(tensors, columns),
            scales,
            None if zeros is None else self._zero_points(zeros, rows).flatten(-3, -2),
            input_order=self._input_order(tensors),
        )

    def _input_order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        if not self.activation_order:
            return None
        return input_order_of(tensors["weight_g_idx"], self.scheme.group_size, "weight_g_idx")

    def _integers(self, tensors: Mapping[str, Tensor], columns: int) -> Tensor:
        """No copy in the cases that matter: int32 words seen as bytes are nibbles in the order that packing takes."""
        if not self._is_packed:
            return tensors["weight"]
        stored_bytes = tensors["weight_packed"].view(torch.uint8)
        if self.scheme.weights.bits == 4:
            nibbles = stored_bytes[..., : -(-columns // 2)]
            return nibbles if columns % 2 == 0 else unpack_nibbles(nibbles)[..., :columns]
        # q + 128 as an unsigned byte is q with its sign bit flipped
        return (stored_bytes[..., :columns] ^ 0x80).view(torch.int8)

    def _zero_points(self, words: Tensor, rows: int) -> Tensor:
        """[..., words, groups] int32, packed along the rows -> [..., rows, groups] int8."""
        across = words.transpose(-2, -1).contiguous().view(torch.uint8)  # [..., groups, 4 * words]
        return unpack_nibbles(across)[..., :rows].transpose(-2, -1).contiguous()

    def decode_plainly(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        element, scales = self.scheme.weights.element, tensors["weight_scale"]
        if not self._is_packed:
            return QuantizedWeight(element, tensors["weight"], scales)
        # Element j is in word j / (32 / bits), low bits first, stored plus half the range.
        bits, (rows, columns) = self.scheme.weights.bits, tensors["weight_shape"].tolist()
        shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)

        def elements(words: Tensor) -> Tensor:
            codes: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
            flat: Tensor = codes.flatten(1) - 2 ** (bits - 1)
            return flat

        zeros = tensors.get("weight_zero_point")
        return QuantizedWeight(
            element,
            elements(tensors["weight_packed"])[:, :columns].to(torch.int8),
            scales,
            None if zeros is None else elements(zeros.T).T[:rows].to(torch.int8),
            input_order=plain_input_order(tensors["weight_g_idx"]) if self.activation_order else None,
        )

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        values, scales = weight.values, weight.scales
        if not self._is_packed:
            return {"weight": values, "weight_scale": scales}
        tensors = {"weight_packed": self._words(values), "weight_scale": scales}
        if weight.zero_points is not None:
            tensors["weight_zero_point"] = self._words(weight.zero_points.T).T.contiguous()
        if weight.input_order is not None:
            tensors["weight_g_idx"] = group_index_of(weight.input_order, values.shape[1], self.scheme.group_size)
        return tensors | {"weight_shape": torch.tensor(values.shape, dtype=torch.int64)}

    def _words(self, values: Tensor) -> Tensor:
        """[rows, columns] int8 -> int32 words along the columns, the last of a row filled up with zeros."""
        rows, columns = values.shape
        padded = torch.zeros((rows, -(-columns // self._per_word) * self._per_word), dtype=torch.int8)
        padded[:, :columns] = values
        stored = pack_nibbles(padded) if self.scheme.weights.bits == 4 else padded.view(torch.uint8) ^ 0x80
        return stored.contiguous().view(torch.int32)


@dataclass(frozen=True)
class Fp4Storage(LinearStorage):
    """Codes of e2m1, two to a byte with the first in the low nibble, and scales of a byte.

    ``nvfp4-pack-quantized`` has e4m3 scales for 16 inputs each, which a global scale divides; ``mxfp4-pack-quantized``
    has E8M0 scales for 32.
    """

    scale_suffix: ClassVar[str] = "weight_scale"

    @property
    def _has_global_scale(self) -> bool:
        return self.scheme.weights.scale == "e4m3"

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        scale_shape = self.scheme.weights.group.scale_shape(rows, columns)
        tensors = {
            "weight_packed": StoredTensor(("U8",), (rows, -(-columns // 2))),
            "weight_scale": StoredTensor(("F8_E4M3" if self._has_global_scale else "U8",), scale_shape),
        }
        if self._has_global_scale:
            tensors["weight_global_scale"] = StoredTensor(("F32",), (1,), by_rows=False)
        return tensors

    def size(self, found: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> tuple[int, int]:
        weight, scale = matrix_shape(found, "weight_packed"), matrix_shape(found, "weight_scale")
        if weight:
            return weight[0], weight[1] * 2
        return (scale[0], scale[1] * (self.scheme.group_size or 1)) if scale else (0, 0)

    def scale_dtype(self, dtypes: Mapping[str, str]) -> torch.dtype:
        return torch.float8_e4m3fn if self._has_global_scale else torch.uint8

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
        factors = None
        if self._has_global_scale:  # [..., linears, 1] -> [..., linears * rows]
            factors = (1.0 / _checked_global_scale(tensors)).expand(*tensors["weight_global_scale"].shape[:-1], rows)
            factors = factors.flatten(-2)
        return QuantizedWeight("fp4", tensors["weight_packed"], tensors["weight_scale"], factors=factors)

    def decode_plainly(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        packed = tensors["weight_packed"]
        codes = torch.empty((packed.shape[0], 2 * packed.shape[1]), dtype=torch.int8)
        codes[:, 0::2], codes[:, 1::2] = packed % 16, packed // 16
        factors = None
        if self._has_global_scale:
            factors = torch.full((len(codes),), float(1.0 / tensors["weight_global_scale"]))
        return QuantizedWeight("fp4", codes, tensors["weight_scale"], factors=factors)

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        codes = weight.values.view(torch.uint8)
        tensors = {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": weight.scales}
        if self._has_global_scale:
            assert weight.factors is not None  # every weight with e4m3 scales has them
            if bool((weight.factors != weight.factors[0]).any()):
                raise UnsupportedScheme(
                    f"{self.format} has one global scale for all rows of a linear; these have several"
                )
            tensors["weight_global_scale"] = 1.0 / weight.factors[:1]
        return tensors


def _checked_global_scale(tensors: Mapping[str, Tensor]) -> Tensor:
    scale = tensors["weight_global_scale"]
    refused = scale[~(torch.isfinite(scale) & (scale > 0))]
    if len(refused):  # the reader names the linear
        raise ValueError(f"weight_global_scale is {float(refused[0])}; a positive number is accepted")
    return scale
