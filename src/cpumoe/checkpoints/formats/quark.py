"""Checkpoints of AMD's Quark, ``quant_method: quark``: 8-bit floats, MX formats of 4 and 6 bits, and integers.

``weight`` has the codes: e4m3 a byte each, e2m1 two to a byte and six-bit floats four to three bytes, the first in the
lowest bits. ``weight_scale`` is one number, [out] for a scale per row, or E8M0 (uint8) [out, in / 32]; ``input_scale``
is one number where activations have a stored scale. ``quark_integers.py`` has integers. ``global_quant_config`` says
what linears are, except for those that a pattern of ``layer_quant_config`` or ``exclude`` matches.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from cpumoe.checkpoints.formats.fields import read_names, read_object
from cpumoe.checkpoints.formats.float_storages import Fp4Storage, Fp6Storage, Fp8Storage
from cpumoe.checkpoints.formats.kv_cache_scheme import KvCacheScheme
from cpumoe.checkpoints.formats.name_patterns import NamePatterns, TimeBudget
from cpumoe.checkpoints.formats.quark_integers import (
    INPUT_ZERO_POINT,
    ROW_ORDERS,
    WEIGHT_ZERO_POINT,
    QuarkInt4Storage,
    QuarkInt8Storage,
)
from cpumoe.checkpoints.storage import PER_TOKEN_INSTEAD, LinearStorage, Quantization, StoredTensor
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import (
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    PER_TENSOR_FP8,
    PER_TENSOR_INT8,
    PER_TOKEN_FP8,
    PER_TOKEN_INT8,
    STATIC_FP8,
    STATIC_INT8,
    GroupShape,
    Scheme,
    TensorFormat,
    stored_format,
)

_METHOD = "quark"


@dataclass(frozen=True)
class QuarkFp4Storage(Fp4Storage):
    """4-bit floats under Quark's names."""

    weight_suffix: ClassVar[str] = "weight"


@dataclass(frozen=True)
class QuarkFp6Storage(Fp6Storage):
    """6-bit floats under Quark's names."""

    weight_suffix: ClassVar[str] = "weight"


@dataclass(frozen=True)
class QuarkRowFp8Storage(Fp8Storage):
    """8-bit floats whose scales, one per row, have one dimension."""

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        tensors = super().tensors(rows, columns)
        scale = tensors[self.scale_suffix]
        return tensors | {self.scale_suffix: StoredTensor(scale.dtypes, (rows,), contents=scale.contents)}

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedWeight:
        return super().decode({**tensors, self.scale_suffix: tensors[self.scale_suffix].unsqueeze(-1)}, rows, columns)

    def decode_plainly(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        return super().decode_plainly({**tensors, self.scale_suffix: tensors[self.scale_suffix].view(-1, 1)})

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        tensors = super().encode(weight)
        return tensors | {self.scale_suffix: tensors[self.scale_suffix].flatten()}


_MX: dict[object, TensorFormat] = {"fp4": MXFP4, "fp6_e3m2": MXFP6_E3M2, "fp6_e2m3": MXFP6_E2M3}

#: (dtype, qscheme, is_dynamic) -> activations.
_ACTIVATIONS: dict[tuple[object, object, object], TensorFormat] = {
    ("fp8_e4m3", "per_tensor", False): STATIC_FP8,
    ("fp8_e4m3", "per_tensor", True): PER_TENSOR_FP8,
    ("fp8_e4m3", "per_channel", True): PER_TOKEN_FP8,
    ("fp8_e4m3", "per_token", True): PER_TOKEN_FP8,
    ("int8", "per_tensor", False): STATIC_INT8,
    ("int8", "per_tensor", True): PER_TENSOR_INT8,
    ("int8", "per_channel", True): PER_TOKEN_INT8,
    ("int8", "per_token", True): PER_TOKEN_INT8,
}

_ROTATIONS = ("rotation", "quarot")

_STORAGES: dict[str, type[LinearStorage]] = {
    "fp4": QuarkFp4Storage,
    "fp6-e3m2": QuarkFp6Storage,
    "fp6-e2m3": QuarkFp6Storage,
}


class QuarkQuantization(Quantization):
    """The ``quantization_config`` of such a checkpoint."""

    suffixes: ClassVar[frozenset[str]] = frozenset(("weight_scale", "input_scale", WEIGHT_ZERO_POINT, INPUT_ZERO_POINT))

    def __init__(
        self, default: LinearStorage | None, rules: list[tuple[NamePatterns, LinearStorage | None]], left: NamePatterns
    ) -> None:
        self._default, self._rules, self._left = default, rules, left

    @classmethod
    def parse(cls, section: object) -> QuarkQuantization:
        assert isinstance(section, Mapping)  # its quant_method was read
        export = _mapping(section.get("export"), "export")
        if types := section.get("layer_type_quant_config"):
            raise UnsupportedScheme(f"layer_type_quant_config {types!r:.80} is not served; layer_quant_config is")
        _refuse_rotations(section.get("algo_config"))
        pack_method = export.get("pack_method")
        budget = TimeBudget()
        layers = _mapping(section.get("layer_quant_config"), "layer_quant_config")
        of_cache = _mapping(section.get("kv_cache_quant_config"), "kv_cache_quant_config")
        groups = read_names(export, "kv_cache_group") if export.get("kv_cache_group") else list(of_cache)
        # Outputs of these projections are what the KV cache holds; queries may be quantised like keys.
        unquantised = {"output_tensors": None}
        plain = (*groups, "*q_proj") if groups else ()
        rules = [
            (
                _patterns([name], budget),
                _storage(
                    f"layer_quant_config {name!r:.80}",
                    {**_mapping(part, name), **unquantised} if name in plain else part,
                    pack_method,
                ),
            )
            for name, part in layers.items()
        ]
        default = _storage("global_quant_config", section.get("global_quant_config"), pack_method)
        found = cls(default, rules, _patterns(read_names(section, "exclude"), budget))
        if groups:
            found.kv_cache = _kv_cache(groups, {**layers, **of_cache})
        return found

    def storage_of(self, module: str) -> LinearStorage | None:
        if self._left.match(module):
            return None
        return next((storage for patterns, storage in self._rules if patterns.match(module)), self._default)

    def with_tensors(self, names: Collection[str]) -> QuarkQuantization:
        suffixes = {name.rpartition(".")[2] for name in names}
        rules = [(patterns, _with_zero_points(storage, suffixes)) for patterns, storage in self._rules]
        found = type(self)(_with_zero_points(self._default, suffixes), rules, self._left)
        found.kv_cache = self.kv_cache
        return found

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        found = (self._default, *(storage for _, storage in self._rules))
        return tuple(dict.fromkeys(storage.scheme for storage in found if storage is not None))


def _with_zero_points(storage: LinearStorage | None, suffixes: Collection[str]) -> LinearStorage | None:
    """Return a storage of integers without the zero points that no tensor of the files has."""
    if not isinstance(storage, QuarkInt8Storage | QuarkInt4Storage):
        return storage
    return replace(storage, zero_points=tuple(name for name in storage.zero_points if name in suffixes))


def _kv_cache(groups: Sequence[str], configs: Mapping[str, Any]) -> KvCacheScheme:
    """Return the KV cache whose keys and values are the outputs of these linears, of which ``configs`` tell."""
    specs = []
    for name in groups:
        place = f"kv_cache_group {name!r:.80}"
        spec = _single(place, _mapping(configs.get(name), place).get("output_tensors"))
        kind = None if spec is None else (spec.get("dtype"), spec.get("qscheme"), spec.get("symmetric") is not False)
        if kind not in (("fp8_e4m3", "per_tensor", True), ("int8", "per_tensor", True)):
            raise UnsupportedScheme(
                f"{place}: a KV cache {_describe(spec)} is not served; fp8_e4m3 and int8 per_tensor are"
            )
        specs.append(_describe(spec))
    return KvCacheScheme("kv_cache_group", " and ".join(dict.fromkeys(specs)))


def _refuse_rotations(algorithms: object) -> None:
    """Raise UnsupportedScheme for algorithms after which a model multiplies its inputs with matrices."""
    for algorithm in algorithms if isinstance(algorithms, list | tuple) else [algorithms]:
        name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
        if name in _ROTATIONS:
            raise UnsupportedScheme(f"algo_config {name!r} changes the inputs of linears in a way that is not served")


def _patterns(names: tuple[str, ...] | list[str], budget: TimeBudget) -> NamePatterns:
    """Names with the wildcards of a shell, as Quark matches them; ``re:`` as vLLM takes it."""
    return NamePatterns([n if n.startswith("re:") else f"re:{fnmatch.translate(n)}" for n in names], budget)


def _storage(place: str, section: object, pack_method: object) -> LinearStorage | None:
    """How linears with this configuration are stored; None if they are in float."""
    settings = _mapping(section, place)
    for field in ("output_tensors", "bias"):
        if settings.get(field):
            raise UnsupportedScheme(f"{place}: quantised {field} are not served")
    weight, inputs = (_single(f"{place}: {name}", settings.get(name)) for name in ("weight", "input_tensors"))
    if weight is None and inputs is None:
        return None
    described = f"{place}: weights {_describe(weight)} with activations {_describe(inputs)}"
    if weight is None:
        raise UnsupportedScheme(f"{described} are not served; quantised weights are")
    named = None if inputs is None else _activations(inputs)
    form = _integers(weight) or _floats(weight)
    # Integers of 4 bits have no place for a stored scale of their inputs.
    has_place = form is None or form.element != "int4" or named is None or named.dynamic
    if form is None or (named is None) != (inputs is None) or not has_place:
        raise UnsupportedScheme(
            f"{described} are not served; weights in fp8_e4m3 and symmetric int8 (per_tensor or per_channel), in fp4, "
            "fp6_e3m2 and fp6_e2m3 (per_group of 32 with e8m0 scales), in symmetric int4 and asymmetric uint4 "
            "(per_group) are, with activations in float, int8 and fp8_e4m3 (per token, or per tensor), fp4, fp6_e3m2 "
            "and fp6_e2m3"
        )
    try:
        scheme = Scheme(form, named and PER_TOKEN_INSTEAD.get(named, named))
    except UnsupportedScheme as problem:
        raise UnsupportedScheme(f"{described} are not served: {problem}") from None
    stored = named if named in PER_TOKEN_INSTEAD else None
    if form.element == "int4":
        if not isinstance(pack_method, str) or pack_method not in ROW_ORDERS:
            known = " and ".join(map(repr, ROW_ORDERS))
            raise UnsupportedScheme(
                f"{described}: pack_method {pack_method!r:.40} in export is not served; {known} are"
            )
        return QuarkInt4Storage(scheme, _METHOD, pack_method=pack_method, stored_activations=stored)
    if form.element == "int8":
        has_one_scale = weight.get("qscheme") == "per_tensor"
        return QuarkInt8Storage(scheme, _METHOD, has_one_scale=has_one_scale, stored_activations=stored)
    kind = _STORAGES.get(form.element, QuarkRowFp8Storage if form.group == GroupShape.per_row() else Fp8Storage)
    return kind(scheme, _METHOD, stored_activations=stored)


def _integers(spec: Mapping[str, Any]) -> TensorFormat | None:
    """Return weights in integers; None for others. int8 with one scale for a linear has one per row in memory."""
    dtype, qscheme, size, axis = (spec.get(name) for name in ("dtype", "qscheme", "group_size", "ch_axis"))
    is_symmetric = spec.get("symmetric")
    if spec.get("is_dynamic") or spec.get("scale_format") not in (None, "float32"):
        return None
    if dtype == "int8" and is_symmetric is True:
        is_by_rows = qscheme == "per_tensor" or (qscheme == "per_channel" and axis in (None, 0))
        return TensorFormat("int8", GroupShape.per_row()) if is_by_rows else None
    if (dtype, is_symmetric) not in (("int4", True), ("uint4", False)) or qscheme != "per_group":
        return None
    if axis not in (None, 1, -1) or type(size) is not int or size < 1:
        return None
    try:
        return TensorFormat("int4", GroupShape.per_group(size), symmetric=is_symmetric is True)
    except UnsupportedScheme:  # groups of another size
        return None


def _floats(spec: Mapping[str, Any]) -> TensorFormat | None:
    """Return weights in small floats; None for others."""
    if spec.get("is_dynamic") or spec.get("symmetric") is False:
        return None
    if spec.get("dtype") == "fp8_e4m3":
        if spec.get("qscheme") == "per_tensor":
            return TensorFormat("fp8", GroupShape.per_tensor())
        is_per_row = spec.get("qscheme") == "per_channel" and spec.get("ch_axis") in (None, 0)
        return TensorFormat("fp8", GroupShape.per_row()) if is_per_row else None
    form = _mx(spec)
    return None if form is None else stored_format(form)


def _activations(spec: Mapping[str, Any]) -> TensorFormat | None:
    dynamic, dtype, qscheme = spec.get("is_dynamic") is True, spec.get("dtype"), spec.get("qscheme")
    # Integers per token have a zero point here, whatever they would have elsewhere: it is finer, and is not stored.
    if spec.get("symmetric") is False and not (dtype == "int8" and dynamic):
        return None
    if dtype in ("fp8_e4m3", "int8"):
        return _ACTIVATIONS.get((dtype, qscheme, dynamic)) if isinstance(qscheme, str) else None
    return _mx(spec) if dynamic else None


def _mx(spec: Mapping[str, Any]) -> TensorFormat | None:
    fits = (spec.get("qscheme"), spec.get("group_size"), spec.get("scale_format")) == ("per_group", 32, "e8m0")
    dtype = spec.get("dtype")
    return _MX.get(dtype) if fits and spec.get("ch_axis") in (None, 1, -1) and isinstance(dtype, str) else None


def _single(place: str, spec: object) -> Mapping[str, Any] | None:
    """One specification; newer files have it in a list. Several, one for the scales of the other, are refused."""
    if isinstance(spec, list | tuple):
        if len(spec) > 1:
            kinds = " and ".join(_describe(_mapping(part, place)) for part in spec)
            raise UnsupportedScheme(f"{place}: {kinds} on top of each other are not served; one of them is")
        spec = spec[0] if spec else None
    return None if spec is None else _mapping(spec, place)


def _describe(spec: Mapping[str, Any] | None) -> str:
    if spec is None:
        return "in float"
    size = f" of {spec['group_size']}" if spec.get("group_size") else ""
    kind = "dynamic " if spec.get("is_dynamic") else ""
    scales = f" with {spec['scale_format']} scales" if spec.get("scale_format") else ""
    sign = "asymmetric " if spec.get("symmetric") is False else ""
    return f"{kind}{sign}{spec.get('dtype')} {spec.get('qscheme')}{size}{scales}"[:120]


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    return read_object({} if value is None else value, name)
