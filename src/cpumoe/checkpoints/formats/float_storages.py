"""How 4-, 6- and 8-bit floats are stored: codes, and scales of one or two levels.

The names of tensors are those of compressed-tensors; other formats that differ in names alone are subclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cpumoe.checkpoints.formats.refused_numbers import (
    refuse_nan_codes,
    refuse_nan_powers,
    refuse_negative_codes,
    refuse_unless_positive,
)
from cpumoe.checkpoints.storage import LinearStorage, StoredTensor, matrix_shape
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES, TensorInfo
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.activation_rounding import needs_input_scales
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import GroupShape

_PER_TENSOR = GroupShape.per_tensor()


def one_scale(dtypes: tuple[str, ...] = FLOAT_DTYPES) -> StoredTensor:
    """A positive number for all of a linear."""
    return StoredTensor(dtypes, (1,), by_rows=False, contents=refuse_unless_positive)


def one_for_each(numbers: Tensor) -> Tensor:
    """One number for each linear, [..., linears, 1] as they are read -> fp32 [..., linears]."""
    return numbers.to(torch.float32).flatten(-2)


def the_one_scale(weight: QuantizedWeight, storage: LinearStorage) -> Tensor:
    """Return the scale that all rows of a weight share, [1]."""
    scales = weight.scales
    if bool((scales != scales[0, 0]).any()):
        raise UnsupportedScheme(f"{storage.scheme} with one scale for all rows of a linear; these have several")
    return scales[0]


def _powers_of_two(shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(("U8",), shape, contents=refuse_nan_powers)


@dataclass(frozen=True)
class InputScaleStorage(LinearStorage):
    """A linear with one number for the stored scale of its inputs, for schemes with static input scales."""

    input_suffix: ClassVar[str] = "input_scale"

    @property
    def input_scale_suffix(self) -> str | None:
        return self.input_suffix if needs_input_scales(self.scheme) else None

    def _input_tensors(self, dtypes: tuple[str, ...] = FLOAT_DTYPES) -> dict[str, StoredTensor]:
        return {} if self.input_scale_suffix is None else {self.input_scale_suffix: one_scale(dtypes)}

    def _input_scales(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        suffix = self.input_scale_suffix
        return None if suffix is None else self._held_input_scale(one_for_each(tensors[suffix]))

    def _plain_input_scales(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        suffix = self.input_scale_suffix
        return None if suffix is None else self._held_input_scale(tensors[suffix].to(torch.float32).view(1))

    def _encoded_input_scale(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        if self.input_scale_suffix is None:
            return {}
        assert weight.input_scales is not None  # every weight of such a scheme has one
        return {self.input_scale_suffix: self._held_input_scale(weight.input_scales[:1])}

    def _held_input_scale(self, scale: Tensor) -> Tensor:
        """Convert a stored input scale to the one in memory; the conversion is its own inverse."""
        return scale


@dataclass(frozen=True)
class Fp4Storage(InputScaleStorage):
    """Codes of e2m1, two to a byte with the first in the low nibble, and scales of a byte.

    ``nvfp4-pack-quantized`` has e4m3 scales for 16 inputs each, which a global scale divides, and with quantised
    activations the global scale of these; ``mxfp4-pack-quantized`` has E8M0 scales for 32.
    """

    scale_suffix: ClassVar[str] = "weight_scale"
    weight_suffix: ClassVar[str] = "weight_packed"
    global_suffix: ClassVar[str] = "weight_global_scale"
    input_suffix: ClassVar[str] = "input_global_scale"
    divides: ClassVar[bool] = True  # whether global scales divide; else they multiply

    @property
    def input_scale_suffix(self) -> str | None:
        is_other = not self._has_global_scale and needs_input_scales(self.scheme)
        return "input_scale" if is_other else super().input_scale_suffix

    @property
    def _has_global_scale(self) -> bool:
        return self.scheme.weights.scale == "e4m3"

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        shape = self.scheme.weights.group.scale_shape(rows, columns)
        tensors = {self.weight_suffix: StoredTensor(("U8",), (rows, -(-columns // 2)))}
        if not self._has_global_scale:
            return tensors | {"weight_scale": _powers_of_two(shape)} | self._input_tensors()
        tensors["weight_scale"] = StoredTensor(("F8_E4M3",), shape, contents=refuse_negative_codes)
        return tensors | {self.global_suffix: one_scale(("F32",))} | self._input_tensors(("F32",))

    def size(self, found: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> tuple[int, int]:
        weight, scale = matrix_shape(found, self.weight_suffix), matrix_shape(found, "weight_scale")
        if weight:
            return weight[0], weight[1] * 2
        return (scale[0], scale[1] * (self.scheme.group_size or 1)) if scale else (0, 0)

    def scale_dtype(self, dtypes: Mapping[str, str]) -> torch.dtype:
        return torch.float8_e4m3fn if self._has_global_scale else torch.uint8

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
        factors, inputs = None, self._input_scales(tensors)
        if self._has_global_scale:
            scale = one_for_each(tensors[self.global_suffix])  # [..., linears]
            factors = (1.0 / scale if self.divides else scale).repeat_interleave(rows, -1)
        weight, scales = tensors[self.weight_suffix], tensors["weight_scale"]
        return QuantizedWeight("fp4", weight, scales, factors=factors, input_scales=inputs)

    def decode_plainly(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        packed = tensors[self.weight_suffix]
        codes = torch.empty((packed.shape[0], 2 * packed.shape[1]), dtype=torch.int8)
        codes[:, 0::2], codes[:, 1::2] = packed % 16, packed // 16
        factors, inputs = None, self._plain_input_scales(tensors)
        if self._has_global_scale:
            scale = tensors[self.global_suffix].view(1)
            factors = (1.0 / scale if self.divides else scale) * torch.ones(len(codes))
        return QuantizedWeight("fp4", codes, tensors["weight_scale"], factors=factors, input_scales=inputs)

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        codes = weight.values.view(torch.uint8)
        tensors = {self.weight_suffix: codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": weight.scales}
        if self._has_global_scale:
            assert weight.factors is not None  # every weight with e4m3 scales has them
            if bool((weight.factors != weight.factors[0]).any()):
                raise UnsupportedScheme(
                    f"{self.format} has one global scale for all rows of a linear; these have several"
                )
            factor = weight.factors[:1]
            tensors[self.global_suffix] = 1.0 / factor if self.divides else factor
        return tensors | self._encoded_input_scale(weight)

    def _held_input_scale(self, scale: Tensor) -> Tensor:
        return scale if self.divides or not self._has_global_scale else 1.0 / scale  # global scales divide in memory


@dataclass(frozen=True)
class Fp6Storage(InputScaleStorage):
    """Codes of 6 bits, four to three bytes with the first in the lowest bits, and E8M0 scales for 32 inputs each."""

    scale_suffix: ClassVar[str] = "weight_scale"
    weight_suffix: ClassVar[str] = "weight_packed"

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        return {
            self.weight_suffix: StoredTensor(("U8",), (rows, -(-columns // 4) * 3)),
            "weight_scale": _powers_of_two(self.scheme.weights.group.scale_shape(rows, columns)),
            **self._input_tensors(),
        }

    def size(self, found: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> tuple[int, int]:
        weight, scale = matrix_shape(found, self.weight_suffix), matrix_shape(found, "weight_scale")
        if weight:
            return weight[0], weight[1] * 4 // 3
        return (scale[0], scale[1] * (self.scheme.group_size or 1)) if scale else (0, 0)

    def read_bytes(self, rows: int, columns: int) -> int:
        return super().read_bytes(rows, columns) + 2 * rows * columns  # the codes, and as much while they are found

    def scale_dtype(self, dtypes: Mapping[str, str]) -> torch.dtype:
        return torch.uint8

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
        threes: Tensor = tensors[self.weight_suffix].unflatten(-1, (-1, 3))
        first, second, third = threes.unbind(-1)
        codes = torch.empty((*threes.shape[:-1], 4), dtype=torch.uint8)
        codes[..., 0] = first & 63
        codes[..., 1] = first >> 6 | (second & 15) << 2
        codes[..., 2] = second >> 4 | (third & 3) << 4
        codes[..., 3] = third >> 2
        values = codes.flatten(-2)[..., :columns].view(torch.int8)
        scales, inputs = tensors["weight_scale"], self._input_scales(tensors)
        return QuantizedWeight(self.scheme.weights.element, values, scales, input_scales=inputs)

    def decode_plainly(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        packed, scales = tensors[self.weight_suffix].to(torch.int64), tensors["weight_scale"]
        words = packed[:, 0::3] + 256 * packed[:, 1::3] + 65536 * packed[:, 2::3]
        codes = torch.stack([words // 64**place % 64 for place in range(4)], -1).flatten(1)
        inputs = self._plain_input_scales(tensors)
        return QuantizedWeight(self.scheme.weights.element, codes.to(torch.int8), scales, input_scales=inputs)

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        first, second, third, fourth = weight.values.view(torch.uint8).unflatten(-1, (-1, 4)).unbind(-1)
        packed = torch.stack((first | second << 6, second >> 2 | third << 4, third >> 4 | fourth << 2), -1)
        tensors = {self.weight_suffix: packed.flatten(-2), "weight_scale": weight.scales}
        return tensors | self._encoded_input_scale(weight)


@dataclass(frozen=True)
class Fp8Storage(InputScaleStorage):
    """Codes of e4m3, a byte each, and scales that multiply them.

    Scales are floating point numbers for a row, for all of a linear or for blocks of 128x128 (where the last ones may
    be smaller), or E8M0 for 32 inputs. Activations with a stored scale have theirs beside them.
    """

    scale_suffix: ClassVar[str] = "weight_scale"

    @property
    def _is_per_tensor(self) -> bool:
        return self.scheme.weights.group == _PER_TENSOR

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        shape = self.scheme.weights.group.scale_shape(rows, columns)
        if self.scheme.weights.scale == "e8m0":
            scale = _powers_of_two(shape)
        else:
            scale = StoredTensor(FLOAT_DTYPES, shape, contents=refuse_unless_positive)
        return {
            "weight": StoredTensor(("F8_E4M3",), (rows, columns), contents=refuse_nan_codes),
            self.scale_suffix: one_scale() if self._is_per_tensor else scale,
            **self._input_tensors(),
        }

    def size(self, found: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> tuple[int, int]:
        weight, scale = matrix_shape(found, "weight"), matrix_shape(found, self.scale_suffix)
        if weight or not scale:
            return (weight[0], weight[1]) if weight else (0, 0)
        group = self.scheme.weights.group
        return scale[0] * (group.rows or 1), scale[1] * (group.columns or 1)

    def scale_dtype(self, dtypes: Mapping[str, str]) -> torch.dtype:
        return torch.uint8 if self.scheme.weights.scale == "e8m0" else DTYPES[dtypes.get(self.scale_suffix, "F32")]

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
        """Of several linears with one scale each the scales are [..., linears, 1]."""
        scales, inputs = tensors[self.scale_suffix], self._input_scales(tensors)
        return QuantizedWeight("fp8", tensors["weight"], scales, input_scales=inputs)

    def decode_plainly(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        scales, inputs = tensors[self.scale_suffix], self._plain_input_scales(tensors)
        if self._is_per_tensor:
            scales = scales.view(1, 1)
        return QuantizedWeight("fp8", tensors["weight"], scales, input_scales=inputs)

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        # In memory each row may have the one scale of a linear.
        scales = the_one_scale(weight, self) if self._is_per_tensor else weight.scales
        return {"weight": weight.values, self.scale_suffix: scales, **self._encoded_input_scale(weight)}
