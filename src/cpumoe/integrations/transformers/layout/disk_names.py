"""From names in files to names in a model, by transformers' own renamings and converters, which run over names alone.

A converter says how tensors of files become those of a model: experts are merged, gate and up joined, dimensions
swapped. It is run here over small tensors of numbers that stand for the places in the stored tensors, so that what it
does is known before a byte is read, whatever operations it consists of.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

#: The number of an expert: the last part of a name that is a number.
_NUMBERED = re.compile(r"(?P<head>.*\.)(?P<number>[0-9]{1,9})(?P<tail>(?:\.[^.0-9][^.]*)+)")


@dataclass
class Group:
    """Tensors of files that together become tensors of a model through one converter.

    ``sources``: pattern of the converter -> names in the files.
    """

    target: str
    converter: Any
    sources: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def targets(self) -> list[str]:
        """Names of all tensors of the model that the converter makes."""
        first, *others = self.converter.target_patterns
        return [self.target, *(self.target.replace(first, other) for other in others)]


class DiskNames:
    """What the names in files become in a model.

    Args:
        model: a transformers model, of which weights may be on the meta device.
        names: names in the files, those of quantised linears as if they were in float (``....q_proj.weight``).
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._converter_of = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._model = model
        self._base = model.base_model_prefix
        self._state = model.state_dict()
        self._tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
        #: Name in the model -> name in the files, where a tensor is loaded as it is.
        self.direct: dict[str, str] = {}
        #: Name in the model -> tensors that a converter makes it of, and perhaps others beside it.
        self.made: dict[str, Group] = {}
        #: Name in the files -> its name after all renamings, where the model has no such tensor.
        self.unplaced: dict[str, str] = {}
        for name in sorted(names, key=dot_natural_key):
            self._add(name)

    def _add(self, name: str) -> None:
        target, pattern = self.renamed(name)
        if target not in self._state and name in self._state:  # files as the model has it in memory
            target, pattern = self._rename(name, [], [])
        if target not in self._state:
            self.unplaced[name] = self.renamed(name, converting=False)[0]
        elif pattern is None:
            self.direct[target] = name
        else:
            if target not in self.made:
                group = Group(target, self._converter_of[pattern])
                self.made |= dict.fromkeys(group.targets, group)
            self.made[target].sources[pattern].append(name)

    def shape_of(self, target: str) -> tuple[int, ...]:
        """The shape of a tensor of the model."""
        return tuple(self._state[target].shape)

    def renamed(self, name: str, *, converting: bool = True) -> tuple[str, str | None]:
        """What transformers calls a tensor of the files, and the pattern of the converter that takes it, or None."""
        return self._rename(name, self._renamings, self._converters if converting else [])

    def _rename(self, name: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        target, pattern = rename_source_key(name, renamings, converters, self._base, self._state)
        return target, pattern

    def possible_names(self, name: str) -> tuple[str, ...]:
        """A name with and without the prefix of the model inside its head, which transformers adds and drops."""
        prefix = f"{self._base}."
        return (name, name.removeprefix(prefix) if name.startswith(prefix) else prefix + name)

    def stored_as(self, target: str) -> str:
        """The tensor of the model under whose name files have ``target``: another one if they are tied."""
        is_there = target in self.direct or target in self.made
        return target if is_there else self._tied.get(target, target)

    def tied_to(self, target: str) -> list[str]:
        """Tensors of the model that are the same as ``target``."""
        return [other for pair in self._tied.items() if target in pair for other in pair if other != target]

    def sources_of(self, target: str) -> list[str]:
        """Names in the files of all that a tensor of the model is made of."""
        target = self.stored_as(target)
        if target in self.direct:
            return [self.direct[target]]
        group = self.made.get(target)
        return [] if group is None else [name for names in group.sources.values() for name in names]

    def read(self, target: str, read: Callable[[str], Tensor]) -> Tensor | None:
        """A tensor of the model, made of those that ``read`` gives by their names in the files; None without them."""
        if target in self.direct:
            return read(self.direct[target])
        group = self.made.get(target)
        if group is None:
            return None
        converter = deepcopy(group.converter)
        for pattern, names in group.sources.items():
            for name in names:
                converter.add_tensor(group.target, name, pattern, partial(read, name))
        made = converter.convert(group.target, model=self._model, config=self._model.config)
        return _one(made[target])

    def leaf_names(self, target: str) -> list[str] | None:
        """Last parts of the names that transformers itself merges experts from, for a merged tensor of the model.

        ``["w1", "w3"]`` for ``....experts.gate_up_proj`` of Mixtral; None if it merges none.
        """
        for converter in self._converters:
            ends = any(target.endswith(pattern.lstrip("\\").lstrip(".")) for pattern in converter.target_patterns)
            if ends and all("*" in pattern for pattern in converter.source_patterns):
                return [pattern.removesuffix(".weight").rpartition(".")[2] for pattern in converter.source_patterns]
        return None


# ---- where the parts of a tensor come from ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """A tensor of the model, shrunk, in which each number stands for a place in a stored tensor.

    ``sources``: name of a stored tensor -> the numbers of its places, in its own shape, shrunk.
    """

    places: Tensor
    sources: Mapping[str, Tensor]


def trace(
    group: Group, count: int, targets: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], unit: int
) -> dict[str, Origin]:
    """Runs a converter over places.

    Args:
        group: the converter and what it takes.
        count: how many experts it merges.
        targets: shapes of tensors of the model, as far as they are known.
        stored: shapes of stored tensors, shrunk, by name; or by pattern for the tensors that are merged.
        unit: elements for which one place stands, along each dimension but that of the experts.

    Returns what each tensor of the model is made of.
    """
    converter = deepcopy(group.converter)
    sources: dict[str, Tensor] = {}
    first = 0
    for pattern in converter.source_patterns:
        for name in expected_names(group, pattern, count):
            shape = stored.get(name, stored.get(pattern))
            if shape is None:
                raise ValueError(f"{name} is not there")
            last = first + torch.Size(shape).numel()
            sources[name] = torch.arange(first, last).view(shape)
            first = last
            converter.add_tensor(group.target, name, pattern, partial(_given, sources[name]))
    shapes = _Shapes({name: (shape[0], *(size // unit for size in shape[1:])) for name, shape in targets.items()})
    made = converter.convert(group.target, model=shapes, config=None)
    return {name: Origin(_one(places), sources) for name, places in made.items()}


def _given(tensor: Tensor) -> Tensor:
    return tensor


def _one(tensors: Tensor | list[Tensor]) -> Tensor:
    return tensors[0] if isinstance(tensors, list) else tensors


class _Shapes:
    """Stands for the model where a converter asks for the shape of what it makes."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], device="meta")


def is_merged(pattern: str) -> bool:
    """Whether a pattern of a converter stands for one tensor of each expert."""
    return "*" in pattern


def expected_names(group: Group, pattern: str, count: int) -> list[str]:
    """The names that a pattern should have in the files: those of all experts, whether they are there or not."""
    found = group.sources.get(pattern, [])
    if not is_merged(pattern):
        return found[:1] or [_respelled(group, pattern)]
    name = found[0] if found else _respelled(group, pattern)
    match = _NUMBERED.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} has no number of an expert")
    return [f"{match['head']}{number}{match['tail']}" for number in range(count)]


def _respelled(group: Group, pattern: str) -> str:
    """A name that fits a pattern which no tensor of the files fits, after the model of one that does."""
    other, names = next((other, names) for other, names in group.sources.items() if names)
    ending, wanted = (p.rpartition("*")[2].replace("\\", "").lstrip(".") for p in (other, pattern))
    return names[0].removesuffix(ending) + wanted
