"""Where files have the experts of a model: each matrix of each expert, before anything is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import gcd

import torch
from torch import Tensor

from cpumoe.checkpoints.checkpoint import LAYER
from cpumoe.checkpoints.model_layout import ExpertsLayout, FusedExperts, FusedMatrix
from cpumoe.errors import CheckpointError
from cpumoe.integrations.transformers.layout.disk_names import (
    DiskNames,
    Group,
    Origin,
    expected_names,
    is_merged,
    trace,
)
from cpumoe.integrations.transformers.layout.expert_modules import ExpertsModule

#: Names of an expert's gate, up and down that tools write, whatever transformers calls them.
SPELLINGS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_LINEAR = re.compile(r"(?P<module>.*)\.(?P<expert>[0-9]{1,9})\.(?P<projection>\w+)\.(?P<kind>weight|bias)")


class ExpertPlaces:
    """Finds the experts of a model in files.

    Args:
        names: what the names in the files become in the model.
        shapes: shapes of the tensors in the files; those of quantised linears are not known.
        modules: the experts modules of the model, by name.
    """

    def __init__(
        self, names: DiskNames, shapes: Mapping[str, tuple[int, ...]], modules: Mapping[str, ExpertsModule]
    ) -> None:
        self._names = names
        self._shapes = shapes
        self._modules = modules
        self._origins: dict[str, Origin] = {}
        self._spelled = self._find_spelled()

    def layout(self, module: str, per_token: int) -> ExpertsLayout:
        """The experts of one module."""
        kind = self._modules[module]
        targets = [self._names.stored_as(f"{module}.{name}") for name in kind.products]
        is_there = any(target in self._names.direct or target in self._names.made for target in targets)
        if not is_there and (spelled := self._spelling_of(module)) is not None:
            return self._layout(module, per_token, self._spelled_linears(module, *spelled))
        if kind.marks.is_flat:
            return self._flat_layout(module, per_token)
        if not is_there:
            return self._absent_layout(module, per_token)
        origins = [self._origin(module, name) for name in kind.products]
        wanted = _by_projection(kind, *(origin.places for origin in origins))
        by_linear = [_linears(places, origins[place // (len(wanted) - 1)]) for place, places in enumerate(wanted)]
        if all(by_linear):
            linears = tuple(zip(*(names or () for names in by_linear), strict=True))
            return self._layout(module, per_token, tuple(tuple(_module(n) for n in names) for names in linears))
        fused = FusedExperts(
            self._fused(module, wanted[:-1], origins[0], kind.first_bias),
            self._fused(module, wanted[-1:], origins[1], kind.second_bias),
        )
        prefix, projections = self._usual_spelling(module)
        linears = self._spelled_linears(module, prefix, projections)
        return ExpertsLayout(module, prefix, kind.shape, linears, fused, per_token)

    def _absent_layout(self, module: str, per_token: int) -> ExpertsLayout:
        """Experts of which the files have nothing: where they should be."""
        kind, (prefix, projections) = self._modules[module], self._usual_spelling(module)
        linears = self._spelled_linears(module, prefix, projections)
        if self._names.leaf_names(f"{module}.{kind.marks.second}") is not None:  # transformers merges them
            return self._layout(module, per_token, linears)

        def matrix(name: str, bias: str | None) -> FusedMatrix:
            biases = () if bias is None else (f"{prefix}.{bias}",)
            interleaved = kind.interleaved and name != kind.marks.second
            return FusedMatrix((f"{prefix}.{name}",), kind.marks.is_transposed, interleaved, biases=biases)

        first, second = kind.marks.first_names[0], kind.marks.second
        fused = FusedExperts(matrix(first, kind.first_bias), matrix(second, kind.second_bias))
        return ExpertsLayout(module, prefix, kind.shape, linears, fused, per_token)

    def _flat_layout(self, module: str, per_token: int) -> ExpertsLayout:
        """Experts whose rows and numbers share a dimension: [E * I, H] for gate, up and down."""
        kind = self._modules[module]
        names = [self._names.direct.get(f"{module}.{name}", f"{module}.{name}") for name in kind.products]
        gate_up, down = FusedMatrix(tuple(names[:-1]), flat=True), FusedMatrix((names[-1],), transposed=True, flat=True)
        prefix, projections = self._usual_spelling(module)
        linears = self._spelled_linears(module, prefix, projections)
        return ExpertsLayout(module, prefix, kind.shape, linears, FusedExperts(gate_up, down), per_token)

    def _layout(self, module: str, per_token: int, linears: tuple[tuple[str, ...], ...]) -> ExpertsLayout:
        first = linears[0][0]
        match = _LINEAR.fullmatch(f"{first}.weight")
        prefix = match["module"] if match is not None else first
        return ExpertsLayout(module, prefix, self._modules[module].shape, linears, None, per_token)

    # ---- one linear for each expert, under names that transformers may not expect --------------------------------

    def _find_spelled(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Modules whose experts have linears of their own in the files: prefix, and names of gate, up and down."""
        found: dict[str, tuple[str, dict[str, str]]] = {}
        spellings: dict[str, tuple[str, ...]] = {}
        for name, renamed in self._names.unplaced.items():
            match, on_disk = _LINEAR.fullmatch(renamed), _LINEAR.fullmatch(name)
            if match is None or on_disk is None:
                continue
            spelling = next((s for s in SPELLINGS if match["projection"] in s), None)
            module = next((m for m in self._names.possible_names(match["module"]) if m in self._modules), None)
            if spelling is not None and module is not None:
                _, written = found.setdefault(module, (on_disk["module"], {}))
                if spellings.setdefault(module, spelling) == spelling:
                    written.setdefault(match["projection"], on_disk["projection"])
        return {
            module: (prefix, tuple(written.get(name, name) for name in spellings[module]))
            for module, (prefix, written) in found.items()
        }

    def _spelling_of(self, module: str) -> tuple[str, tuple[str, ...]] | None:
        """Prefix and names of the linears of a module's experts, or of one that it is tied to."""
        second = self._modules[module].marks.second
        tied = [other.removesuffix(f".{second}") for other in self._names.tied_to(f"{module}.{second}")]
        return next((self._spelled[name] for name in (module, *tied) if name in self._spelled), None)

    def _spelled_linears(self, module: str, prefix: str, spelling: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        shape = self._modules[module].shape
        projections = spelling if shape.activation.gated else spelling[1:]
        return tuple(tuple(f"{prefix}.{e}.{name}" for name in projections) for e in range(shape.expert_count))

    def _usual_spelling(self, module: str) -> tuple[str, tuple[str, ...]]:
        """Prefix and names that quantised files give the linears of a module's experts, if each has its own."""
        for name in self._possible_prefixes(module):
            renamed, _ = self._names.renamed(f"{name}.0.up_proj.weight", converting=False)
            match = _LINEAR.fullmatch(renamed)
            if match is not None and module in self._names.possible_names(match["module"]):
                return name, SPELLINGS[0]
        raise CheckpointError(f"{module}: no name in files becomes that of its experts in transformers")

    def _possible_prefixes(self, module: str) -> Iterable[str]:
        for parameter in reversed(self._modules[module].products):
            for source in self._names.sources_of(f"{module}.{parameter}"):
                yield source.rpartition(".")[0]
        for other, disk in self._names.direct.items():  # what stands beside the experts has kept its place
            parent = module.rpartition(".")[0]
            if other.startswith(f"{parent}."):
                inside = other.removeprefix(f"{parent}.")
                if disk.endswith(f".{inside}"):
                    yield f"{disk.removesuffix(inside)}{module.rpartition('.')[2]}"
                    break
        if in_layer := LAYER.match(module):
            for other, disk in self._names.direct.items():  # or its layer has
                if other.startswith(in_layer[0]) and (match := LAYER.match(disk)) is not None:
                    yield match[0] + module.removeprefix(in_layer[0])
                    break
        yield from self._names.possible_names(module)

    # ---- what transformers merges, or takes as it is ---------------------------------------------------------------

    def _origin(self, module: str, parameter: str) -> Origin:
        """Where a parameter of an experts module comes from."""
        target, kind = self._names.stored_as(f"{module}.{parameter}"), self._modules[module]
        unit = gcd(kind.shape.hidden_size, kind.shape.intermediate_size)
        unit = unit // 2 if unit % 2 == 0 else 1  # two places at least: halves and turned matrices differ then
        group = self._names.made.get(target)
        if group is None:
            name = self._names.direct.get(target)
            if name is None:
                raise CheckpointError(f"{target} is not in the files, and other experts of the layer are")
            places = torch.arange(_numel(shape := self._shrunk(kind, parameter, unit))).view(shape)
            return Origin(places, {name: places})
        if target not in self._origins:
            self._origins |= self._trace(group, module, parameter, unit)
        if target not in self._origins:
            raise CheckpointError(f"{target}: transformers' converter makes {', '.join(self._origins)} instead")
        return self._origins[target]

    def _trace(self, group: Group, module: str, parameter: str, unit: int) -> dict[str, Origin]:
        kind = self._modules[module]
        wanted = _canonical(kind, parameter)
        patterns = group.converter.source_patterns
        count = kind.shape.expert_count * len(group.converter.target_patterns)
        merged = (wanted[0] // len(patterns) // unit, wanted[1] // unit)
        stored: dict[str, tuple[int, ...]] = {p: merged for p in patterns if is_merged(p)}
        for pattern in patterns:
            if not is_merged(pattern):
                for name in expected_names(group, pattern, 1):
                    stored[name] = self._fused_shape(name, wanted, len(patterns), kind, unit)
        targets = {group.target: self._names.shape_of(group.target)}
        try:
            return trace(group, count, targets, stored, unit)
        except (ValueError, RuntimeError, StopIteration) as problem:
            raise CheckpointError(f"{group.target}: transformers' converter fails ({problem})") from None

    def _fused_shape(
        self, name: str, wanted: tuple[int, int], parts: int, kind: ExpertsModule, unit: int
    ) -> tuple[int, ...]:
        """The shape of a stored tensor with all experts, shrunk; what it should be if the files have another."""
        count, (rows, columns) = kind.shape.expert_count, wanted
        accepted = [(count, rows // parts, columns), (count, columns, rows // parts)]
        found = self._shapes.get(name)
        shape = found if found in accepted else accepted[0]
        return (count, *(size // unit for size in shape[1:]))

    def _shrunk(self, kind: ExpertsModule, parameter: str, unit: int) -> tuple[int, ...]:
        rows, columns = _canonical(kind, parameter)
        sizes = (columns, rows) if kind.marks.is_transposed else (rows, columns)
        return (kind.shape.expert_count, *(size // unit for size in sizes))

    def _fused(self, module: str, wanted: list[Tensor], origin: Origin, bias: str | None) -> FusedMatrix:
        views = [_view(places, origin) for places in wanted]
        biases = () if bias is None else tuple(self._names.sources_of(f"{module}.{bias}") or [f"{module}.{bias}"])
        names = tuple(dict.fromkeys(view[0] for view in views if view is not None))
        kinds = [view[1:] for view in views if view is not None]
        if len(kinds) == len(wanted):
            for (transposed, parts), interleaved in _ARRANGEMENTS.items():
                if kinds == [(transposed, part) for part in parts] and len(names) == (
                    1 if parts != ("all", "all") else 2
                ):
                    return FusedMatrix(names, transposed, interleaved, biases=biases)
        raise CheckpointError(f"{module}: its experts lie in {', '.join(origin.sources)} in a way that is not known")


#: (inputs before outputs, what of a tensor gate and up are) -> whether gate and up alternate
_ARRANGEMENTS: dict[tuple[bool, tuple[str, ...]], bool] = {
    (transposed, parts): parts == ("even", "odd")
    for transposed in (False, True)
    for parts in (("all",), ("first", "second"), ("even", "odd"), ("all", "all"))
}


def _canonical(kind: ExpertsModule, parameter: str) -> tuple[int, int]:
    """Outputs and inputs of a product."""
    shape = kind.shape
    if parameter != kind.marks.second:
        return shape.gate_up_rows, shape.hidden_size
    return shape.hidden_size, shape.intermediate_size


def _by_projection(kind: ExpertsModule, first: Tensor, second: Tensor) -> list[Tensor]:
    """Places of gate, up and down, or of up and down, [E, rows, columns] each."""
    if kind.marks.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    if not kind.shape.activation.gated:
        return [first, second]
    gate_up = (first[:, 0::2], first[:, 1::2]) if kind.interleaved else first.chunk(2, 1)
    return [*gate_up, second]


def _linears(places: Tensor, origin: Origin) -> list[str] | None:
    """The stored tensors of each expert's matrix, if it has one of its own, as it is; None otherwise."""
    starts = {int(numbers.flatten()[0]): name for name, numbers in origin.sources.items()}
    names = [starts.get(int(expert[0, 0])) for expert in places]
    if any(n is None or not torch.equal(origin.sources[n], e) for n, e in zip(names, places, strict=True)):
        return None
    return [name for name in names if name is not None]


def _view(places: Tensor, origin: Origin) -> tuple[str, bool, str] | None:
    """Which stored tensor a matrix of all experts is in, whether inputs come first there, and which part it is."""
    rows = places.shape[1]
    for name, numbers in origin.sources.items():
        if numbers.dim() != 3:
            continue
        for transposed in (False, True):
            whole = numbers.transpose(1, 2) if transposed else numbers
            parts = {
                "all": whole,
                "first": whole[:, :rows],
                "second": whole[:, rows:],
                "even": whole[:, 0::2],
                "odd": whole[:, 1::2],
            }
            for part, view in parts.items():
                if view.shape == places.shape and torch.equal(view, places):
                    return name, transposed, part
    return None


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
