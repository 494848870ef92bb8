"""compressed-tensors checkpoints: their ``quantization_config``, and integers and scales as they hold them.

Parsed here and not with the package of that name: it refuses files that its own earlier versions wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cpumoe.checkpoints.formats.name_patterns import NamePatterns, TimeBudget
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.rounding import pack_nibbles, unpack_nibbles
from cpumoe.layers.scheme import Scheme

Form = Literal["int-quantized", "pack-quantized"]
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a linear as it must lie in the file: accepted safetensors dtypes and the shape."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LinearFormat:
    """How the linears that a configuration group targets are held."""

    scheme: Scheme
    form: Form

    @property
    def weight_name(self) -> str:
        return "weight" if self.form == "int-quantized" else "weight_packed"

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        """The tensors of a [rows, columns] linear by the last part of their names; a bias is not among them."""
        scale = StoredTensor(("BF16", "F32", "F16"), self.scheme.weights.group.scale_shape(rows, columns))
        if self.form == "int-quantized":
            return {"weight": StoredTensor(("I8",), (rows, columns)), "weight_scale": scale}
        per_word = 32 // self.scheme.weights.bits
        return {
            "weight_packed": StoredTensor(("I32",), (rows, -(-columns // per_word))),
            "weight_scale": scale,
            "weight_shape": StoredTensor(("I64", "I32"), (2,)),
        }

    def held(self, stored: Tensor, columns: int) -> Tensor:
        """[..., rows, stored columns] as read -> int8 values [..., rows, columns], or uint8 nibbles with half of them.

        No copy for the forms that matter: int32 words seen as bytes are nibbles in the order that packing takes.
        """
        if self.form == "int-quantized":
            return stored
        stored_bytes = stored.view(torch.uint8)
        if self.scheme.weights.bits == 4:
            nibbles = stored_bytes[..., : -(-columns // 2)]
            return nibbles if columns % 2 == 0 else unpack_nibbles(nibbles)[..., :columns]
        # q + 128 as an unsigned byte is q with its sign bit flipped
        return (stored_bytes[..., :columns] ^ 0x80).view(torch.int8)

    def encode(self, values: Tensor, scales: Tensor) -> dict[str, Tensor]:
        """int8 values [rows, columns] and scales [rows, groups] -> the tensors that are stored, by name."""
        if self.form == "int-quantized":
            return {"weight": values, "weight_scale": scales}
        rows, columns = values.shape
        bits = self.scheme.weights.bits
        padded = torch.zeros((rows, -(-columns // (32 // bits)) * (32 // bits)), dtype=torch.int8)
        padded[:, :columns] = values
        stored = pack_nibbles(padded) if bits == 4 else padded.view(torch.uint8) ^ 0x80
        return {
            "weight_packed": stored.contiguous().view(torch.int32),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
        }


@dataclass(frozen=True)
class _Group:
    targets: tuple[str, ...]
    format: LinearFormat


@dataclass(frozen=True)
class QuantizationConfig:
    """Which modules of a checkpoint are quantised, and how."""

    groups: tuple[_Group, ...]
    ignore: tuple[str, ...]

    @classmethod
    def parse(cls, config: object) -> QuantizationConfig:
        """Parses the ``quantization_config`` of a config.json.

        Raises UnsupportedScheme for what is well-formed and not served, CheckpointError for what is not well-formed.
        """
        top = _mapping(config, "quantization_config")
        method = top.get("quant_method")
        if method != "compressed-tensors":
            raise UnsupportedScheme(f"quant_method {method!r} is not served; 'compressed-tensors' is")
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
        _ = parsed._patterns  # refuses those that are none
        return parsed

    @classmethod
    def _parse_group(cls, name: str, group: Mapping[str, Any], default_form: object) -> _Group:
        form = group.get("format") or default_form
        weights = _mapping(group.get("weights"), f"{name}.weights")
        activations = group.get("input_activations")
        described = _describe(weights, activations)
        if form not in FORMS:
            raise UnsupportedScheme(f"{name}: format {form!r} ({described}) is not served; {' and '.join(FORMS)} are")
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
        return _Group(_strings(group.get("targets"), f"{name}.targets"), LinearFormat(scheme, form))

    def format_of(self, module: str) -> LinearFormat | None:
        """Format of the linear named ``module``; None when it was left in float.

        A group that names the module itself comes before one that names the class of all linears.
        """
        ignored, targeted = self._patterns
        if ignored.match(module):
            return None
        for group, targets in zip(self.groups, targeted, strict=True):
            if targets.match(module):
                return group.format
        return next((group.format for group in self.groups if "Linear" in group.targets), None)

    @cached_property
    def _patterns(self) -> tuple[NamePatterns, list[NamePatterns]]:
        """Of ``ignore``, and of each group's targets."""
        budget = TimeBudget()
        return NamePatterns(self.ignore, budget), [NamePatterns(group.targets, budget) for group in self.groups]

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return tuple(group.format.scheme for group in self.groups)


def write_config(formats: Mapping[str, LinearFormat], ignore: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint.

    Args:
        formats: target (``"Linear"``, a name, or a ``re:`` pattern) -> format.
        ignore: names of the linears that are left in float.
    """
    targets: dict[LinearFormat, list[str]] = {}
    for target, held_as in formats.items():
        targets.setdefault(held_as, []).append(target)
    forms = {f.form for f in targets}
    return {
        "quant_method": "compressed-tensors",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": of_format,
                "format": f.form,
                "weights": {
                    "num_bits": f.scheme.weights.bits,
                    "type": "int",
                    "symmetric": True,
                    "dynamic": False,
                    "strategy": "channel" if f.scheme.group_size is None else "group",
                    "group_size": f.scheme.group_size,
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
            for index, (f, of_format) in enumerate(targets.items())
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
