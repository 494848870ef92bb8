"""compressed-tensors checkpoints: their ``quantization_config``, and how their linears are stored.

Parsed here and not with the package of that name: it refuses files that its own earlier versions wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from cpumoe.checkpoints.formats.name_patterns import NamePatterns, TimeBudget
from cpumoe.checkpoints.storage import LinearStorage, Quantization, StoredTensor
from cpumoe.checkpoints.tensor_file import FLOAT_DTYPES, TensorInfo
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.rounding import pack_nibbles, unpack_nibbles
from cpumoe.layers.scheme import Scheme

Format = Literal["int-quantized", "pack-quantized"]
FORMATS: tuple[Format, ...] = get_args(Format)

_WORD_BITS = 32  # weights of few bits are packed into words of this size


@dataclass(frozen=True)
class IntegerStorage(LinearStorage):
    """Symmetric integers with a scale per row or per group.

    ``int-quantized`` has a byte for each of them in ``weight``. ``pack-quantized`` has as many as fit into words in
    ``weight_packed``, where the last word of a row may be filled up, and the size of the linear in ``weight_shape``.
    """

    scale_suffix: ClassVar[str] = "weight_scale"

    format: Format

    @property
    def _is_packed(self) -> bool:
        return self.format == "pack-quantized"

    @property
    def _per_word(self) -> int:
        return _WORD_BITS // self.scheme.weights.bits

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        scale = StoredTensor(FLOAT_DTYPES, self.scheme.weights.group.scale_shape(rows, columns))
        if not self._is_packed:
            return {"weight": StoredTensor(("I8",), (rows, columns)), "weight_scale": scale}
        return {
            "weight_packed": StoredTensor(("I32",), (rows, -(-columns // self._per_word))),
            "weight_scale": scale,
            "weight_shape": StoredTensor(("I64", "I32"), (2,), by_rows=False, values=(rows, columns)),
        }

    def size(self, found: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> tuple[int, int]:
        def matrix(suffix: str) -> tuple[int, ...]:
            shape = found[suffix].shape if suffix in found else ()
            return shape if len(shape) == 2 else ()

        weight, scale = matrix("weight_packed" if self._is_packed else "weight"), matrix("weight_scale")
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
        return torch.bfloat16 if dtypes.get("weight_scale") == "BF16" else torch.float32

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> tuple[Tensor, Tensor]:
        scales = tensors["weight_scale"]
        if scales.dtype == torch.float16:  # packing takes bf16 and fp32
            scales = scales.to(torch.float32)
        return self._integers(tensors, columns), scales

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

    def decode_plainly(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        scales = tensors["weight_scale"]
        if not self._is_packed:
            return tensors["weight"], scales
        # Element j is in word j / (32 / bits), low bits first, stored plus half the range.
        bits, columns = self.scheme.weights.bits, int(tensors["weight_shape"][1])
        shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
        elements = (tensors["weight_packed"].unsqueeze(-1) >> shifts) & (2**bits - 1)
        return (elements.flatten(1)[:, :columns] - 2 ** (bits - 1)).to(torch.int8), scales

    def encode(self, values: Tensor, scales: Tensor) -> dict[str, Tensor]:
        if not self._is_packed:
            return {"weight": values, "weight_scale": scales}
        rows, columns = values.shape
        padded = torch.zeros((rows, -(-columns // self._per_word) * self._per_word), dtype=torch.int8)
        padded[:, :columns] = values
        stored = pack_nibbles(padded) if self.scheme.weights.bits == 4 else padded.view(torch.uint8) ^ 0x80
        return {
            "weight_packed": stored.contiguous().view(torch.int32),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
        }


@dataclass(frozen=True)
class _Group:
    targets: tuple[str, ...]
    storage: IntegerStorage


@dataclass(frozen=True)
class QuantizationConfig(Quantization):
    """Which modules of a compressed-tensors checkpoint are quantised, and how."""

    suffixes: ClassVar[frozenset[str]] = frozenset(("weight_packed", "weight_scale", "weight_shape"))

    groups: tuple[_Group, ...]
    ignore: tuple[str, ...]

    @classmethod
    def parse(cls, section: object) -> QuantizationConfig:
        top = _mapping(section, "quantization_config")
        status = top.get("quantization_status", "compressed")
        if status != "compressed":
            raise UnsupportedScheme(f"quantization_status {status!r} is not served; 'compressed' is")
        for name in ("sparsity_config", "transform_config"):
            part = top.get(name)
            if part and not (isinstance(part, Mapping) and part.get("format") == "dense"):
                raise UnsupportedScheme(f"{name} {part} changes the weights in a way that is not served")
        groups = [
            cls._parse_group(name, _mapping(group, name), top.get("format"))
            for name, group in _mapping(top.get("config_groups"), "config_groups").items()
        ]
        if not groups:
            raise CheckpointError("quantization_config has no config_groups")
        parsed = cls(tuple(groups), _strings(top.get("ignore"), "ignore"))
        _ = parsed._patterns  # compiles them, which refuses what is no pattern
        return parsed

    @classmethod
    def _parse_group(cls, name: str, group: Mapping[str, Any], default_format: object) -> _Group:
        format_name = group.get("format") or default_format
        weights = _mapping(group.get("weights"), f"{name}.weights")
        activations = group.get("input_activations")
        described = _describe(weights, activations)
        if format_name not in FORMATS:
            accepted = " and ".join(FORMATS)
            raise UnsupportedScheme(f"{name}: format {format_name!r} ({described}) is not served; {accepted} are")
        if group.get("output_activations"):
            raise UnsupportedScheme(f"{name}: quantised output activations are not served")
        inputs = _mapping(activations, f"{name}.input_activations") if activations else {}
        per_token = inputs.get("type", "int") == "int" and inputs.get("num_bits") == 8 and inputs.get("dynamic") is True
        if not per_token or inputs.get("strategy", "token") != "token":
            raise UnsupportedScheme(f"{name}: {described} is not served; 8-bit dynamic per-token activations are")
        bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
        if strategy is None:
            strategy = "group" if isinstance(size, int) and size > 0 else "channel"
        served = (
            weights.get("type", "int") == "int"
            and bits in (4, 8)
            and weights.get("symmetric", True) is True
            and not weights.get("dynamic", False)
            and strategy in ("channel", "group")
            and weights.get("actorder") in (None, "weight", "static")  # these leave no trace in the file
        )
        if not served:
            raise UnsupportedScheme(f"{name}: {described} is not served; symmetric int4 and int8 weights are")
        if strategy == "group" and not (isinstance(size, int) and size > 0):
            raise CheckpointError(f"{name}: strategy 'group' with group_size={size!r}; a positive number is accepted")
        scheme = Scheme.parse(f"w{bits}a8" + (f"-g{size}" if strategy == "group" else ""))
        return _Group(_strings(group.get("targets"), f"{name}.targets"), IntegerStorage(scheme, format_name))

    def storage_of(self, module: str) -> IntegerStorage | None:
        """How the linear named ``module`` is stored; None if it was left in float.

        A group that names the module itself comes before one that names the class of all linears.
        """
        ignored, targeted = self._patterns
        if ignored.match(module):
            return None
        for group, targets in zip(self.groups, targeted, strict=True):
            if targets.match(module):
                return group.storage
        return next((group.storage for group in self.groups if "Linear" in group.targets), None)

    @cached_property
    def _patterns(self) -> tuple[NamePatterns, list[NamePatterns]]:
        """The patterns of ``ignore``, and those of each group's targets."""
        budget = TimeBudget()
        return NamePatterns(self.ignore, budget), [NamePatterns(group.targets, budget) for group in self.groups]

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return tuple(group.storage.scheme for group in self.groups)


def write_config(storages: Mapping[str, IntegerStorage], ignore: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint.

    Args:
        storages: target (``"Linear"``, a name, or a ``re:`` pattern) -> how the linears that it means are stored.
        ignore: names of the linears that are left in float.
    """
    targets: dict[IntegerStorage, list[str]] = {}
    for target, storage in storages.items():
        targets.setdefault(storage, []).append(target)
    formats = {storage.format for storage in targets}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": targets_of_group,
                "format": storage.format,
                "weights": {
                    "num_bits": storage.scheme.weights.bits,
                    "type": "int",
                    "symmetric": True,
                    "dynamic": False,
                    "strategy": "channel" if storage.scheme.group_size is None else "group",
                    "group_size": storage.scheme.group_size,
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "dynamic": True,
                    "strategy": "token",
                },
                "output_activations": None,
            }
            for index, (storage, targets_of_group) in enumerate(targets.items())
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _describe(weights: Mapping[str, Any], activations: object) -> str:
    def text(part: Mapping[str, Any]) -> str:
        shape = part.get("strategy") or "?"
        size = f" of {part['group_size']}" if part.get("group_size") else ""
        kind = "" if part.get("symmetric", True) else "asymmetric "
        order = f" in activation order ({part['actorder']})" if part.get("actorder") else ""
        kinds = (("dynamic ", True), ("locally dynamic ", "local"))
        dynamic = next((text for text, value in kinds if part.get("dynamic") == value), "")
        return f"{dynamic}{kind}{part.get('num_bits')}-bit {part.get('type', 'int')} per {shape}{size}{order}"

    inputs = text(activations) if isinstance(activations, Mapping) and activations else "left in float"
    return f"weights {text(weights)}, activations {inputs}"


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{name} is {value!r:.80}; a JSON object is accepted")
    return value


def _strings(value: object, name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{name} is {value!r:.80}; a list of names is accepted")
    return tuple(value)
