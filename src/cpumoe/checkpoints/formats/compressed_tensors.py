"""compressed-tensors checkpoints: their ``quantization_config``, and how their linears are stored.

Parsed here and not with the package of that name: it refuses files that its own earlier versions wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from cpumoe.checkpoints.formats.compressed_storages import (
    FP4_FORMATS,
    INT_QUANTIZED,
    INTEGER_FORMATS,
    PACK_QUANTIZED,
    Fp4Storage,
    IntegerStorage,
)
from cpumoe.checkpoints.formats.name_patterns import NamePatterns, TimeBudget
from cpumoe.checkpoints.storage import LinearStorage, Quantization
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.scheme import Scheme

FORMATS = (*INTEGER_FORMATS, *FP4_FORMATS.values())


@dataclass(frozen=True)
class _Group:
    targets: tuple[str, ...]
    storage: LinearStorage


@dataclass(frozen=True)
class QuantizationConfig(Quantization):
    """Which modules of a compressed-tensors checkpoint are quantised, and how."""

    suffixes: ClassVar[frozenset[str]] = frozenset(
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
    )

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
        inputs = None if activations is None else _mapping(activations, f"{name}.input_activations")
        targets = _strings(group.get("targets"), f"{name}.targets")
        try:
            scheme = _scheme_of(name, weights, inputs)
        except UnsupportedScheme as problem:
            raise UnsupportedScheme(f"{name}: {described} is not served: {problem}") from None
        if scheme.weights.element == "fp4":
            if format_name != (expected := FP4_FORMATS[scheme.weights.scale]):
                raise CheckpointError(f"{name}: {described} in the format {format_name!r}; {expected} is accepted")
            return _Group(targets, Fp4Storage(scheme, expected))
        if format_name not in INTEGER_FORMATS or (format_name == INT_QUANTIZED and not scheme.weights.symmetric):
            accepted = PACK_QUANTIZED if not scheme.weights.symmetric else " and ".join(INTEGER_FORMATS)
            raise CheckpointError(f"{name}: {described} in the format {format_name!r}; {accepted} is accepted")
        activation_order = weights.get("actorder") in ("group", "dynamic")  # two names for one thing
        if activation_order and (format_name != PACK_QUANTIZED or scheme.group_size is None):
            raise CheckpointError(f"{name}: {described} in the format {format_name!r}; {PACK_QUANTIZED} is accepted")
        return _Group(targets, IntegerStorage(scheme, str(format_name), activation_order))

    def storage_of(self, module: str) -> LinearStorage | None:
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


def _scheme_of(name: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Scheme:
    """The scheme of a configuration group."""
    if inputs is not None:
        per_token = inputs.get("type", "int") == "int" and inputs.get("num_bits") == 8 and inputs.get("dynamic") is True
        if not per_token or inputs.get("strategy", "token") != "token":
            raise UnsupportedScheme("activations in float, or 8-bit integers, dynamic and per token, are")
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = "group" if isinstance(size, int) and size > 0 else "channel"
    # "weight" and "static" leave no trace in the file: the scales belong to inputs that lie side by side.
    if weights.get("dynamic", False) or weights.get("actorder") not in (None, "weight", "static", "group", "dynamic"):
        raise UnsupportedScheme("weights with stored scales, in activation order 'group', 'weight' or 'static', are")
    symmetric = weights.get("symmetric", True) is True
    if weights.get("type", "int") == "float" and bits == 4 and symmetric and inputs is None:
        fp4: dict[object, str] = {("tensor_group", 16): "nvfp4a16", ("group", 32): "mxfp4a16"}
        if (strategy, size) in fp4:
            return Scheme.parse(fp4[strategy, size])
    if weights.get("type", "int") != "int" or bits not in (4, 8) or strategy not in ("channel", "group"):
        raise UnsupportedScheme("int4, int8 and weight-only nvfp4 and mxfp4 are")
    if strategy == "group" and not (isinstance(size, int) and size > 0):
        raise CheckpointError(f"{name}: strategy 'group' with group_size={size!r}; a positive number is accepted")
    text = f"w{bits}a{16 if inputs is None else 8}"
    return Scheme.parse(text + (f"-g{size}" if strategy == "group" else "") + ("" if symmetric else "-asym"))


def write_config(storages: Mapping[str, LinearStorage], ignore: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint.

    Args:
        storages: target (``"Linear"``, a name, or a ``re:`` pattern) -> how the linears that it means are stored.
        ignore: names of the linears that are left in float.
    """
    targets: dict[LinearStorage, list[str]] = {}
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
                "weights": _weights_section(storage),
                "input_activations": None if storage.scheme.activations is None else _PER_TOKEN_INT8,
                "output_activations": None,
            }
            for index, (storage, targets_of_group) in enumerate(targets.items())
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


_PER_TOKEN_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}


def _weights_section(storage: LinearStorage) -> dict[str, Any]:
    scheme, weights = storage.scheme, storage.scheme.weights
    strategy = "channel" if scheme.group_size is None else "tensor_group" if weights.scale == "e4m3" else "group"
    section: dict[str, Any] = {
        "num_bits": weights.bits,
        "type": "float" if weights.element == "fp4" else "int",
        "symmetric": weights.symmetric,
        "dynamic": False,
        "strategy": strategy,
        "group_size": scheme.group_size,
    }
    if storage.has_input_order:
        section["actorder"] = "group"
    scale_dtypes = {"e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}
    return section | ({"scale_dtype": scale_dtypes[weights.scale]} if weights.scale in scale_dtypes else {})


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
