"""compressed-tensors checkpoints: their ``quantization_config``, and how their linears are stored.

Parsed here and not with the package of that name: it refuses files that its own earlier versions wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from cpumoe.checkpoints.formats.by_tensors import EXPERTS
from cpumoe.checkpoints.formats.compressed_schemes import (
    activations_section,
    is_activation_order,
    read_scheme,
    stored_activations,
    weights_section,
)
from cpumoe.checkpoints.formats.compressed_storages import FORMATS, IntegerStorage, formats_of, storage_in
from cpumoe.checkpoints.formats.fields import read_names, read_object
from cpumoe.checkpoints.formats.input_order import is_own_order, refuse_no_grouping
from cpumoe.checkpoints.formats.kv_cache_scheme import KvCacheScheme, read_kv_cache
from cpumoe.checkpoints.formats.name_patterns import NamePatterns, TimeBudget
from cpumoe.checkpoints.storage import LinearStorage, Quantization
from cpumoe.checkpoints.tensor_file import FLOAT_DTYPES
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.scheme import Scheme
from cpumoe.option_values import PACK_QUANTIZED

if TYPE_CHECKING:
    from cpumoe.checkpoints.named_tensors import NamedTensors

_COMPRESSED = "compressed"
#: Values of ``quantization_status``. Writers leave any of them in files whose tensors are compressed.
_STATUSES = ("initialized", "calibration", "frozen", _COMPRESSED, "decompressed")
_G_IDX, _SHAPE = ".weight_g_idx", ".weight_shape"


@dataclass(frozen=True)
class _Group:
    targets: tuple[str, ...]
    storage: LinearStorage


@dataclass(frozen=True)
class _Found:
    """What files tell of integers that their configuration does not.

    Attributes:
        shaped: where linears have their sizes (``weight_shape``).
        indexed: where linears have an index of groups (``weight_g_idx``) that the configuration does not announce.
        ordered: where these may hold activation order.
    """

    shaped: frozenset[str]
    indexed: frozenset[str]
    ordered: frozenset[str]

    def storage_of(self, module: str, announced: LinearStorage) -> LinearStorage:
        if not isinstance(announced, IntegerStorage):
            return announced
        place = _place(module)
        storage = replace(announced, has_shape=place in self.shaped)
        if place in self.ordered:
            return replace(storage, activation_order=True)
        return replace(storage, has_g_idx=place in self.indexed)


def _place(module: str) -> str:
    """Return what the names of a layer's experts start with, which are stored alike; else the name of the linear."""
    experts = EXPERTS.match(module)
    return module if experts is None else experts[0]


@dataclass(frozen=True)
class QuantizationConfig(Quantization):
    """Which modules of a compressed-tensors checkpoint are quantised, and how."""

    suffixes: ClassVar[frozenset[str]] = frozenset(
        (
            *(f"weight_{part}" for part in ("packed", "scale", "shape", "zero_point", "g_idx", "global_scale")),
            "input_scale",
            "input_global_scale",
        )
    )

    groups: tuple[_Group, ...]
    ignore: tuple[str, ...]
    status: str = _COMPRESSED
    kv_cache: KvCacheScheme | None = None
    found: _Found | None = None  # in the files; None while these are not known

    @classmethod
    def parse(cls, section: object) -> QuantizationConfig:
        top = read_object(section, "quantization_config")
        status = _COMPRESSED if top.get("quantization_status") is None else top["quantization_status"]
        if status not in _STATUSES:
            raise UnsupportedScheme(f"quantization_status {status!r:.80} is not known; {', '.join(_STATUSES)} are")
        for name in ("sparsity_config", "transform_config"):
            part = top.get(name)
            if part and not (isinstance(part, Mapping) and part.get("format") == "dense"):
                raise UnsupportedScheme(f"{name} {part} changes the weights in a way that is not served")
        groups = [
            cls._parse_group(name, read_object(group, name), top.get("format"))
            for name, group in read_object(top.get("config_groups") or {}, "config_groups").items()
        ]
        kv_cache = read_kv_cache(top)
        if not groups and kv_cache is None:
            raise CheckpointError("quantization_config has no config_groups")
        parsed = cls(tuple(groups), read_names(top, "ignore"), status, kv_cache)
        _ = parsed._patterns  # compiles them, which refuses what is no pattern
        return parsed

    @classmethod
    def _parse_group(cls, name: str, group: Mapping[str, Any], default_format: object) -> _Group:
        format_name = group.get("format") or default_format
        weights = read_object(group.get("weights"), f"{name}.weights")
        activations = group.get("input_activations")
        described = _describe(weights, activations)
        if format_name not in FORMATS:
            known = " and ".join(FORMATS)
            raise UnsupportedScheme(f"{name}: format {format_name!r} ({described}) is not served; {known} are")
        if group.get("output_activations"):
            raise UnsupportedScheme(f"{name}: quantised output activations are not served")
        inputs = None if activations in (None, {}) else read_object(activations, f"{name}.input_activations")
        targets = read_names(group, "targets", place=f"{name}.")
        try:
            scheme = read_scheme(name, weights, inputs)
        except UnsupportedScheme as problem:
            raise UnsupportedScheme(f"{name}: {described} is not served: {problem}") from None
        accepted = formats_of(scheme)
        activation_order = is_activation_order(weights)
        if activation_order:
            accepted = (PACK_QUANTIZED,) if PACK_QUANTIZED in accepted and scheme.group_size is not None else ()
        if format_name not in accepted:
            text = f"{' and '.join(accepted)} is accepted" if accepted else "no format has this"
            raise CheckpointError(f"{name}: {described} in the format {format_name!r}; {text}")
        storage = storage_in(
            scheme, str(format_name), activation_order, stored_activations(inputs), weights.get("strategy") == "tensor"
        )
        return _Group(targets, storage)

    def storage_of(self, module: str) -> LinearStorage | None:
        """How the linear named ``module`` is stored; None if it was left in float.

        A group that names the module itself comes before one that names the class of all linears. Two groups that
        store it in different ways are refused.
        """
        ignored, targeted = self._patterns
        if ignored.match(module):
            return None
        groups = zip(self.groups, targeted, strict=True)
        named = dict.fromkeys(group.storage for group, targets in groups if targets.match(module))
        storages = named or dict.fromkeys(group.storage for group in self.groups if "Linear" in group.targets)
        if len(storages) > 1:
            claimed = " and ".join(f"{storage.scheme} ({storage.format})" for storage in storages)
            raise CheckpointError(f"quantization_config has several schemes for {module}: {claimed}; one is accepted")
        announced = next(iter(storages), None)
        return announced if announced is None or self.found is None else self.found.storage_of(module, announced)

    @cached_property
    def _patterns(self) -> tuple[NamePatterns, list[NamePatterns]]:
        """The patterns of ``ignore``, and those of each group's targets."""
        budget = TimeBudget()
        return NamePatterns(self.ignore, budget), [NamePatterns(group.targets, budget) for group in self.groups]

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return tuple(group.storage.scheme for group in self.groups)

    def with_tensors(self, names: Collection[str]) -> QuantizationConfig:
        """Return the same for files with tensors of these names, whose contents are not known.

        An index of groups that the configuration does not announce may hold activation order, and is read as one.
        """
        return self._with_indices(names, lambda *_: True)

    def fitted_to(self, tensors: NamedTensors) -> QuantizationConfig:
        if self.status != _COMPRESSED:
            self._refuse_float_weights(tensors)
        return self._with_indices(tensors.names, partial(_has_order, tensors))

    def _with_indices(
        self, names: Collection[str], has_order: Callable[[str, LinearStorage], bool]
    ) -> QuantizationConfig:
        """``has_order``: whether an index by its name, of a linear that is stored in some way, holds an order."""
        indexed: set[str] = set()
        ordered: set[str] = set()
        for name in sorted(name for name in names if name.endswith(_G_IDX)):
            module = name.removesuffix(_G_IDX)
            storage, place = self.storage_of(module), _place(module)
            if not isinstance(storage, IntegerStorage) or storage.activation_order:
                continue
            indexed.add(place)
            if place not in ordered and storage.scheme.group_size is not None and has_order(name, storage):
                ordered.add(place)
        shaped = frozenset(_place(name.removesuffix(_SHAPE)) for name in names if name.endswith(_SHAPE))
        return replace(self, found=_Found(shaped, frozenset(indexed), frozenset(ordered)))

    def _refuse_float_weights(self, tensors: NamedTensors) -> None:
        """Raise UnsupportedScheme for weights in float beside their scales: calibrated, and never compressed."""
        scaled = (name.removesuffix("_scale") for name in tensors.names if name.endswith(".weight_scale"))
        floats = [name for name in scaled if name in tensors and tensors.info(name).dtype in FLOAT_DTYPES]
        if floats:
            raise UnsupportedScheme(
                f"quantization_status is {self.status!r}, and {len(floats)} linears have weights in float beside their "
                f"scales, such as {floats[0]} ({tensors.info(floats[0])}); compressed weights are served: "
                "model.save_pretrained(folder, save_compressed=True) of llm-compressor writes them"
            )


def _has_order(tensors: NamedTensors, name: str, storage: LinearStorage) -> bool:
    """Return whether an index of groups holds activation order. What is no index a check of the tensors refuses."""
    info, size = tensors.info(name), storage.scheme.group_size
    if info.dtype != "I32" or len(info.shape) != 1 or is_own_order(index := tensors.read(name), size):
        return False
    try:
        refuse_no_grouping(name, index, size)
    except CheckpointError:
        return False
    return True


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
                "weights": weights_section(storage.stored_weights, storage.has_input_order),
                "input_activations": activations_section(storage.stored_activations or storage.scheme.activations),
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
