"""What configurations of GPTQ, AWQ and AutoRound have in common: few fields, and the files say what is quantised."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cpumoe.checkpoints.formats.name_patterns import NamePatterns
from cpumoe.checkpoints.formats.transposed_words import TransposedStorage
from cpumoe.checkpoints.storage import LinearStorage, Quantization
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.scheme import Scheme


@dataclass(frozen=True)
class ModuleRules:
    """What a configuration says of single modules: by name, and else by the first pattern that matches.

    The values are None for modules that were left in float.
    """

    by_name: Mapping[str, TransposedStorage | None]
    by_pattern: Sequence[tuple[NamePatterns, TransposedStorage | None]]

    def find(self, module: str, otherwise: TransposedStorage | None) -> TransposedStorage | None:
        if module in self.by_name:
            return self.by_name[module]
        return next((storage for patterns, storage in self.by_pattern if patterns.match(module)), otherwise)

    @property
    def storages(self) -> list[TransposedStorage]:
        values = [*self.by_name.values(), *(storage for _, storage in self.by_pattern)]
        return [storage for storage in values if storage is not None]


class TransposedQuantization(Quantization):
    """Linears of the decoder layers, but for those that the files have in float.

    Configurations do not say reliably which these are: the lists of modules that were not converted are matched in
    another way by each tool (AutoAWQ's ``["gate"]`` means routers and not ``gate_proj``), and routers are left out
    without a word. So the files decide; rules for single modules say how they are stored.
    """

    suffixes: ClassVar[frozenset[str]] = frozenset(("qweight", "qzeros", "scales", "g_idx"))

    def __init__(self, default: TransposedStorage, rules: ModuleRules, names: Collection[str] | None = None) -> None:
        self.default = default
        self._rules = rules
        self._names = names
        # Tools write it for all linears or for none, so that one without it lacks it.
        self._has_g_idx = names is not None and any(name.endswith(".g_idx") for name in names)

    def with_tensors(self, names: Collection[str]) -> Quantization:
        return type(self)(self.default, self._rules, names)

    def storage_of(self, module: str) -> LinearStorage | None:
        in_layers = ".layers." in f".{module}"
        if self._names is None:
            return self._rules.find(module, self.default if in_layers else None)
        is_quantized = any(f"{module}.{suffix}" in self._names for suffix in self.suffixes)
        if not is_quantized and f"{module}.weight" in self._names:
            return None
        storage = self._rules.find(module, self.default if in_layers or is_quantized else None)
        return None if storage is None else replace(storage, has_g_idx=storage.has_g_idx or self._has_g_idx)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return tuple(dict.fromkeys(storage.scheme for storage in (self.default, *self._rules.storages)))


def read_scheme(settings: Mapping[str, Any], symmetric: bool) -> Scheme:
    """The scheme of ``bits`` and ``group_size``."""
    bits, size = settings.get("bits"), settings.get("group_size")
    if type(bits) is not int or type(size) is not int or (size < 1 and size != -1):
        raise CheckpointError(f"bits is {bits!r:.40} and group_size {size!r:.40}; numbers are accepted, and -1 per row")
    kind = f"bits={bits}, group_size={size}, {'' if symmetric else 'a'}symmetric"
    if bits not in (4, 8):
        raise UnsupportedScheme(f"{kind} is not served: 4 and 8 bits are")
    try:
        return Scheme.parse(f"w{bits}a16" + (f"-g{size}" if size > 0 else "") + ("" if symmetric else "-asym"))
    except UnsupportedScheme as problem:
        raise UnsupportedScheme(f"{kind} is not served: {problem}") from None


def read_flag(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{name} is {value!r:.80}; true or false is accepted")
    return value


def read_text(settings: Mapping[str, Any], names: Sequence[str], default: str) -> str:
    """A field that different versions of a tool give different names, in lower case."""
    found = {name: settings[name] for name in names if settings.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, str):
            raise CheckpointError(f"{name} is {value!r:.80}; a text is accepted")
    values = {value.lower() for value in found.values()}
    if len(values) > 1:
        raise CheckpointError(f"{' and '.join(f'{n} is {v!r}' for n, v in found.items())}; one of them is accepted")
    return values.pop() if values else default


def read_overrides(value: object, name: str) -> Mapping[str, Mapping[str, Any]]:
    """A field that has settings by module or pattern."""
    is_valid = isinstance(value, Mapping) and all(isinstance(item, Mapping) for item in value.values())
    if value is not None and not is_valid:
        raise CheckpointError(f"{name} is {value!r:.80}; a JSON object of objects is accepted")
    return value if isinstance(value, Mapping) else {}


def refuse_fields(settings: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuses fields that change what the weights mean, if they say anything."""
    for name, reason in reasons.items():
        if settings.get(name):
            raise UnsupportedScheme(f"{name} {settings[name]!r:.80} is not served: {reason}")
