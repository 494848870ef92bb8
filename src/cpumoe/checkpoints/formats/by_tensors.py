"""What ``quant_method: fp8`` and ModelOpt have in common: one way of storing for all linears that have a scale.

Lists of what was left in float are matched in another way by each tool, and some files have none; routers are often
left out of them without a word. So the files decide, as far as they are known.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property

from cpumoe.checkpoints.storage import AnnouncedKvCache, LinearStorage, Quantization
from cpumoe.layers.scheme import Scheme

#: What the names of a layer's experts start with.
EXPERTS = re.compile(r"(?:.*\.)?experts(?=\.)")


class QuantizedByTensors(Quantization):
    """Linears that have the tensor with the scales; of a layer's experts all, if one of them has it."""

    def __init__(
        self,
        storage: LinearStorage,
        left_in_float: Collection[str] = (),
        names: Collection[str] | None = None,
        kv_cache: AnnouncedKvCache | None = None,
    ) -> None:
        self.storage = storage
        self.kv_cache = kv_cache
        self._left_in_float = tuple(left_in_float)
        self._names = names

    def with_tensors(self, names: Collection[str]) -> Quantization:
        return type(self)(self.storage_with(names), self._left_in_float, names, self.kv_cache)

    def storage_with(self, names: Collection[str]) -> LinearStorage:
        """How linears are stored, if the files have tensors of these names."""
        return self.storage

    def storage_of(self, module: str) -> LinearStorage | None:
        if self._names is None:
            is_left = any(module == name or module.startswith(f"{name}.") for name in self._left_in_float)
            return self.storage if ".layers." in f".{module}" and not is_left else None
        if f"{module}.{self.storage.scale_suffix}" in self._names:
            return self.storage
        experts = EXPERTS.match(module)
        return self.storage if experts is not None and experts[0] in self._experts else None

    @cached_property
    def _experts(self) -> frozenset[str]:
        """What the names of experts start with that have a scale: one of them without it lacks it."""
        suffix = f".{self.storage.scale_suffix}"
        matches = (EXPERTS.match(name) for name in self._names or () if name.endswith(suffix))
        return frozenset(match[0] for match in matches if match is not None)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return (self.storage.scheme,)
