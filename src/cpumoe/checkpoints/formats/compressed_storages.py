"""How compressed-tensors stores linears: integers, packed or a byte each, and small floats (``float_storages.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from cpumoe.checkpoints.formats.float_storages import (
    Fp4Storage,
    Fp6Storage,
    Fp8Storage,
    InputScaleStorage,
    one_scale,
    the_one_scale,
)
from cpumoe.checkpoints.formats.input_order import (
    group_index_of,
    grouping_check,
    input_order_of,
    is_own_order,
    plain_input_order,
    refuse_no_grouping,
)
from cpumoe.checkpoints.formats.refused_numbers import refuse_unless_positive
from cpumoe.checkpoints.formats.words import WORD_BITS, copied, pack_words, signed_bytes, unpack_words
from cpumoe.checkpoints.storage import LinearStorage, StoredTensor, matrix_shape
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES, TensorInfo
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.nibbles import unpack_nibbles
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import INTEGERS, GroupShape, Scheme, TensorFormat
from cpumoe.option_values import INT_QUANTIZED, INTEGER_FORMATS, PACK_QUANTIZED

FLOAT_QUANTIZED, NAIVE_QUANTIZED = "float-quantized", "naive-quantized"
# The formats of small floats by element and scales, the one that is written first.
_FLOAT_FORMATS = {
    ("fp4", "e4m3"): ("nvfp4-pack-quantized",),
    ("fp4", "e8m0"): ("mxfp4-pack-quantized",),
    ("fp6-e2m3", "e8m0"): ("mxfp6-pack-quantized",),
    ("fp8", "e8m0"): ("mxfp8-quantized",),
    ("fp8", "float"): (FLOAT_QUANTIZED, NAIVE_QUANTIZED),
}
#: All formats of compressed-tensors that are served.
FORMATS = (*INTEGER_FORMATS, *dict.fromkeys(name for names in _FLOAT_FORMATS.values() for name in names))


def formats_of(scheme: Scheme) -> tuple[str, ...]:
    """The formats that files may have weights of a scheme in."""
    weights = scheme.weights
    if scheme.activations is not None and scheme.activations.element == "fp6-e3m2":
        return ()  # activations of 6 bits are e2m3 there
    if weights.element not in INTEGERS:
        return _FLOAT_FORMATS.get((weights.element, weights.scale), ())
    if not weights.symmetric:
        return (PACK_QUANTIZED, NAIVE_QUANTIZED)
    return (*INTEGER_FORMATS, NAIVE_QUANTIZED)


def storage_in(
    scheme: Scheme,
    format_name: str,
    activation_order: bool = False,
    activations: TensorFormat | None = None,
    has_one_scale: bool = False,
) -> LinearStorage:
    """How weights of a scheme are stored in one of its formats.

    ``activations`` are those that the files name, if not those of the scheme; ``has_one_scale``: integers that have a
    scale per row in memory have one for all of a linear in the files.
    """
    element = scheme.weights.element
    if element in INTEGERS:
        return IntegerStorage(
            scheme, format_name, activation_order, has_one_scale=has_one_scale, stored_activations=activations
        )
    storages: dict[str, type[LinearStorage]] = {"fp4": Fp4Storage, "fp6-e2m3": Fp6Storage, "fp8": Fp8Storage}
    return storages[element](scheme, format_name, stored_activations=activations)


def storage_for(
    scheme: Scheme,
    integer_format: str = PACK_QUANTIZED,
    activation_order: bool = False,
    activations: TensorFormat | None = None,
) -> LinearStorage:
    """How weights of a scheme are written; integers in the format that is given.

    ``activations`` are those that the files name, if not those of the scheme.
    """
    weights = scheme.weights
    if weights.element not in INTEGERS:
        formats = formats_of(scheme)
        if not formats:
            has_weights = (weights.element, weights.scale) in _FLOAT_FORMATS
            held = "fp6-e3m2 activations" if has_weights else f"{weights.element} weights"
            raise UnsupportedScheme(f"{scheme}: compressed-tensors has no format for {held}")
        # Weights alone in 8-bit floats have the format that compressed-tensors has for all that is left.
        is_plain = weights.element == "fp8" and weights.scale == "float" and scheme.activations is None
        return storage_in(scheme, formats[-1] if is_plain else formats[0], activations=activations)
    if integer_format == INT_QUANTIZED and scheme.activations is None:
        raise UnsupportedScheme(
            f"{scheme} in the format {INT_QUANTIZED}, which no reader expects without quantised activations; "
            f"{PACK_QUANTIZED} is accepted"
        )
    return storage_in(scheme, integer_format, activation_order, activations)


@dataclass(frozen=True)
class IntegerStorage(InputScaleStorage):
    """Integers with a scale, and if they are asymmetric a zero point, per row or per group.

    Symmetric ones may have one scale for all of a linear, which every row has in memory.

    ``int-quantized`` and ``naive-quantized`` have a byte for each of them in ``weight``. ``pack-quantized`` has as many
    as fit into words in ``weight_packed``, where the last word of a row may be filled up, and the size of the linear in
    ``weight_shape``, which some writers leave out. Its zero points are packed into words as well, along the rows.
    Activations with a stored scale have it in ``input_scale``.

    ``weight_g_idx`` has the group of every input. With ``activation_order`` the inputs of a group are anywhere. Some
    linears may have the index without it (``has_g_idx``): it must leave the inputs in their own order.
    """

    scale_suffix: ClassVar[str] = "weight_scale"

    activation_order: bool = False
    has_g_idx: bool = False
    has_shape: bool = True
    has_one_scale: bool = False

    @property
    def stored_weights(self) -> TensorFormat:
        weights = self.scheme.weights
        return replace(weights, group=GroupShape.per_tensor()) if self.has_one_scale else weights

    @property
    def group_index_suffix(self) -> str | None:
        return "weight_g_idx" if self.activation_order else None

    def without_order(self) -> IntegerStorage:
        return replace(self, activation_order=False)

    @property
    def _is_packed(self) -> bool:
        return self.format == PACK_QUANTIZED

    @property
    def _per_word(self) -> int:
        return WORD_BITS // self.scheme.weights.bits

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        scale_shape = self.scheme.weights.group.scale_shape(rows, columns)
        scale = StoredTensor(FLOAT_DTYPES, scale_shape, contents=refuse_unless_positive)
        if self.has_one_scale:
            scale = one_scale()
        symmetric = self.scheme.weights.symmetric
        others = self._input_tensors()
        if self.activation_order:
            contents = grouping_check(columns, self.scheme.group_size)
            others["weight_g_idx"] = StoredTensor(
                ("I32",), (columns,), by_rows=False, contents=contents, inspected=True
            )
        elif self.has_g_idx:
            others["weight_g_idx"] = StoredTensor(
                ("I32",), (columns,), by_rows=False, optional=True, check=self._check_order
            )
        if not self._is_packed:
            zeros = {} if symmetric else {"weight_zero_point": StoredTensor(("I8",), scale_shape)}
            return {"weight": StoredTensor(("I8",), (rows, columns)), "weight_scale": scale} | zeros | others
        tensors = {
            "weight_packed": StoredTensor(("I32",), (rows, -(-columns // self._per_word))),
            "weight_scale": scale,
        } | others
        if not symmetric:
            words = (-(-rows // self._per_word), scale_shape[1])
            tensors["weight_zero_point"] = StoredTensor(("I32",), words, by_rows=False)
        if self.has_shape:
            tensors["weight_shape"] = StoredTensor(
                ("I64", "I32"), (2,), by_rows=False, values=(rows, columns), optional=True
            )
        return tensors

    def _check_order(self, name: str, group_index: Tensor) -> None:
        if is_own_order(group_index, self.scheme.group_size):
            return
        refuse_no_grouping(name, group_index, self.scheme.group_size)
        raise UnsupportedScheme(
            f"{name} is in activation order, and {self.scheme} has no groups of inputs; an index in the order of the "
            "inputs is accepted"
        )

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
        zeros = tensors.get("weight_zero_point")
        if zeros is not None and self._is_packed:
            zeros = self._zero_points(zeros, rows).flatten(-3, -2)
        return QuantizedWeight(
            self.scheme.weights.element,
            self._integers(tensors, columns),
            tensors["weight_scale"].repeat_interleave(rows, -2) if self.has_one_scale else tensors["weight_scale"],
            zeros,
            input_order=self._input_order(tensors),
            input_scales=self._input_scales(tensors),
        )

    def _input_order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return input_order_of(tensors["weight_g_idx"]) if self.activation_order else None

    def _integers(self, tensors: Mapping[str, Tensor], columns: int) -> Tensor:
        """No copy in the cases that matter: int32 words seen as bytes are nibbles in the order that packing takes."""
        if not self._is_packed:
            return tensors["weight"]
        stored_bytes = tensors["weight_packed"].view(torch.uint8)
        if self.scheme.weights.bits == 4:
            nibbles = stored_bytes[..., : -(-columns // 2)]
            return nibbles if columns % 2 == 0 else unpack_nibbles(nibbles)[..., :columns]
        return signed_bytes(stored_bytes[..., :columns])

    def _zero_points(self, words: Tensor, rows: int) -> Tensor:
        """[..., words, groups] int32, packed along the rows -> [..., rows, groups] int8."""
        across = unpack_words(copied(words.transpose(-2, -1)), self.scheme.weights.bits)
        return across[..., :rows].transpose(-2, -1).contiguous()

    def decode_plainly(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        element, scales, zeros = self.scheme.weights.element, tensors["weight_scale"], tensors.get("weight_zero_point")
        inputs = self._plain_input_scales(tensors)
        order = plain_input_order(tensors["weight_g_idx"]) if self.activation_order else None
        if self.has_one_scale:
            scales = scales.view(1, 1).expand(len(tensors["weight_packed" if self._is_packed else "weight"]), 1)
        if not self._is_packed:
            return QuantizedWeight(element, tensors["weight"], scales, zeros, input_order=order, input_scales=inputs)
        # Element j is in word j / (32 / bits), low bits first, stored plus half the range.
        bits, packed = self.scheme.weights.bits, tensors["weight_packed"]
        rows, columns = len(packed), packed.shape[1] * WORD_BITS // bits
        if "weight_shape" in tensors:
            rows, columns = tensors["weight_shape"].tolist()
        shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)

        def elements(words: Tensor) -> Tensor:
            codes: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
            flat: Tensor = codes.flatten(1) - 2 ** (bits - 1)
            return flat

        return QuantizedWeight(
            element,
            elements(packed)[:, :columns].to(torch.int8),
            scales,
            None if zeros is None else elements(zeros.T).T[:rows].to(torch.int8),
            input_order=order,
            input_scales=inputs,
        )

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        values, zeros = weight.values, weight.zero_points
        tensors = {"weight_scale": the_one_scale(weight, self) if self.has_one_scale else weight.scales}
        tensors |= self._encoded_input_scale(weight)
        if not self._is_packed:
            return {"weight": values} | tensors | ({} if zeros is None else {"weight_zero_point": zeros})
        tensors = {"weight_packed": self._words(values)} | tensors
        if zeros is not None:
            tensors["weight_zero_point"] = self._words(zeros.T).T.contiguous()
        if weight.input_order is not None:
            tensors["weight_g_idx"] = group_index_of(weight.input_order, values.shape[1], self.scheme.group_size)
        return tensors | {"weight_shape": torch.tensor(values.shape, dtype=torch.int64)}

    def _words(self, values: Tensor) -> Tensor:
        """[rows, columns] int8 -> int32 words along the columns, the last of a row filled up with zeros."""
        rows, columns = values.shape
        padded = torch.zeros((rows, -(-columns // self._per_word) * self._per_word), dtype=torch.int8)
        padded[:, :columns] = values
        return pack_words(padded, self.scheme.weights.bits)
