"""What becomes of experts and linears that are read from a checkpoint: packed, in float, whole or of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import torch
from torch import Tensor, nn

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.contents import experts_bytes
from cpumoe.checkpoints.expert_sources import ExpertSource
from cpumoe.checkpoints.held_scales import is_per_tensor
from cpumoe.checkpoints.linear_sources import LinearSource
from cpumoe.checkpoints.loading import find_experts, load_experts
from cpumoe.checkpoints.model_layout import LinearPlace
from cpumoe.checkpoints.tensor_file import DTYPES
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.packed_weights import packed_spec
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import Scheme
from cpumoe.parallel.experts import ParallelExperts
from cpumoe.parallel.linear import SplitLinear, is_split
from cpumoe.parallel.ranks import Ranks

_ELEMENTS_AT_ONCE = 4 << 20  # weights that are quantised together: they go through several fp32 temporaries

LINEAR_TENSORS = frozenset({"weight_packed"})
_SPLIT_TENSORS = frozenset({"own.weight_packed"})


@dataclass(frozen=True)
class PackedModule:
    """The replacement of one module.

    Attributes:
        load: reads and packs it.
        restore: makes it from packed tensors of the names ``tensor_names``.
        weight_bytes: what its weights take in memory.
    """

    load: Callable[[], nn.Module]
    restore: Callable[[dict[str, Tensor]], nn.Module]
    tensor_names: frozenset[str]
    weight_bytes: int


def packed_experts(source: ExpertSource) -> PackedModule:
    """The experts of a source."""
    activation = source.config.activation

    def restore(tensors: dict[str, Tensor]) -> nn.Module:
        return Experts.from_packed(**tensors, activation=activation)

    size = _experts_bytes(source.config, source.storage, source.input_scales)
    load = cache(lambda: load_experts(source))
    return PackedModule(load, restore, frozenset({"gate_up_packed", "down_packed"}), size)


_experts_bytes = lru_cache(experts_bytes)  # most layers have the same sizes


def spread_experts(checkpoint: Checkpoint, whole: ExpertSource, scheme: Scheme | None, ranks: Ranks) -> PackedModule:
    """What this rank holds of the experts of a layer; ``whole`` says what they are and is not read."""
    config = whole.config
    part = ranks.layout.part_of(config.experts, config.intermediate_size)

    def spread(own: nn.Module | None) -> nn.Module:
        assert own is None or isinstance(own, Experts)
        return ParallelExperts(own, config, ranks)

    if not part.experts:
        return PackedModule(cache(lambda: spread(None)), lambda _: spread(None), frozenset(), 0)
    own = packed_experts(find_experts(checkpoint, whole.layout, scheme, part))
    load = cache(lambda: spread(own.load()))
    return PackedModule(load, lambda held: spread(own.restore(held)), own.tensor_names, own.weight_bytes)


def stored_linear(source: LinearSource) -> PackedModule:
    """A linear that is quantised in the files."""
    return PackedModule(source.load, _restored_linear, LINEAR_TENSORS, source.packed_bytes())


def quantized_linear(floats: FloatLinear, scheme: Scheme) -> PackedModule:
    """A linear that is float in the files, quantised as it is read."""
    return PackedModule(partial(floats.packed, scheme), _restored_linear, LINEAR_TENSORS, floats.packed_bytes(scheme))


def _restored_linear(tensors: dict[str, Tensor]) -> nn.Module:
    return QuantizedLinear(**tensors)


@dataclass(frozen=True)
class FloatLinear:
    """A linear that is float in the files, where it is called ``name``; of its rows those from ``first`` on."""

    checkpoint: Checkpoint
    name: str
    place: LinearPlace
    first: int = 0

    def part(self, parts: int, index: int) -> FloatLinear:
        """One of equal parts of the rows."""
        rows = self.place.rows // parts
        return replace(self, place=replace(self.place, rows=rows), first=index * rows)

    def rows(self, first: int, last: int) -> Tensor:
        """[last - first, columns], as stored."""
        out = torch.empty((last - first, self.place.columns), dtype=self._dtype_of(self.place.source))
        self.checkpoint.read_part(self.place.source, out, (self.first + first, 0))
        return out

    def bias(self) -> Tensor | None:
        """[rows], as stored, or None."""
        if not self.place.has_bias:
            return None
        name = f"{self.name}.bias"
        out = torch.empty(self.place.rows, dtype=self._dtype_of(name))
        self.checkpoint.read_part(name, out, (self.first,))
        return out

    def _dtype_of(self, name: str) -> torch.dtype:
        return DTYPES[self.checkpoint.info(name).dtype]

    def packed(self, scheme: Scheme) -> QuantizedLinear:
        """Quantised as it is read."""
        return pack_float_linear(self.rows, self.place.rows, self.place.columns, scheme, self.bias())

    def packed_bytes(self, scheme: Scheme) -> int:
        """Bytes of the packed linear."""
        place = self.place
        spec = packed_spec(scheme, torch.float32, 1, place.rows, place.columns, has_bias=place.has_bias)
        return spec.packed_bytes

    def loaded(self, dtype: torch.dtype) -> nn.Linear:
        """As it is, in this dtype."""
        linear = nn.Linear(self.place.columns, self.place.rows, self.place.has_bias, device="meta")
        linear.weight = nn.Parameter(self.rows(0, self.place.rows).to(dtype), requires_grad=False)
        if (bias := self.bias()) is not None:
            linear.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        return linear


def split_linear(
    quantized: LinearSource | None, floats: FloatLinear, scheme: Scheme | None, dtype: torch.dtype, ranks: Ranks
) -> PackedModule | None:
    """This rank's outputs of a linear.

    Args:
        quantized: where it is quantised in the files; else ``floats`` are read.
        scheme: to quantise floats to; None leaves them in ``dtype``.
        ranks: that the model is spread over; linears are, over each tensor parallel group of them.

    Returns None for a linear that stays whole on every rank (:func:`cpumoe.parallel.linear.is_split`).
    """
    if not is_split(floats.place, quantized, scheme, ranks.layout):
        return None
    group = ranks.group

    def restore(tensors: dict[str, Tensor]) -> nn.Module:
        return SplitLinear(QuantizedLinear(tensors["own.weight_packed"]), group)

    if quantized is not None:
        stored = partial(quantized.load, group.size, group.rank)
        size = quantized.packed_bytes(group.size)
        return PackedModule(lambda: SplitLinear(stored(), group), restore, _SPLIT_TENSORS, size)
    own = floats.part(group.size, group.rank)
    if scheme is not None:
        size = own.packed_bytes(scheme)
        return PackedModule(lambda: SplitLinear(own.packed(scheme), group), restore, _SPLIT_TENSORS, size)
    load = partial(own.loaded, dtype)
    # Floats are not in caches of packed weights: they are read again.
    size = own.place.rows * (own.place.columns + own.place.has_bias) * dtype.itemsize
    return PackedModule(lambda: SplitLinear(load(), group), lambda _: SplitLinear(load(), group), frozenset(), size)


def pack_float_linear(
    weight_rows: Callable[[int, int], Tensor], rows: int, columns: int, scheme: Scheme, bias: Tensor | None
) -> QuantizedLinear:
    """Quantises and packs a float weight a few rows at a time, so that even a head needs little more than its result.

    ``weight_rows(first, last)`` returns [last - first, columns].
    """
    block = scheme.weights.group.rows or 1
    step = max(1, _ELEMENTS_AT_ONCE // columns // block) * block
    pieces = [(first, min(first + step, rows)) for first in range(0, rows, step)]
    largest = None
    if scheme.weights.scale == "e4m3" or is_per_tensor(scheme):  # all rows share a scale
        largest = torch.stack([weight_rows(*piece).abs().amax().to(torch.float32) for piece in pieces]).amax()
    parts = [quantize_weight(weight_rows(*piece), scheme, largest_magnitude=largest) for piece in pieces]
    joined = QuantizedWeight.joined(parts)
    if is_per_tensor(scheme):
        joined = replace(joined, scales=parts[0].scales)
    return QuantizedLinear.from_weight(replace(joined, bias=bias), scheme)
