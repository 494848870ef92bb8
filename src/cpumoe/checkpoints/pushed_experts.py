"""Experts whose tensors somebody else reads, and hands over one by one in any order.

Experts are packed, a few at a time, when all of their tensors have come, and these are let go of: beside what is packed
there is little more than what has come of experts that are not complete. How a linear is stored its
:class:`LinearStorage` knows, and which part of it a rank holds the sources of ``loading.py`` do, which read from what
was handed over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from cpumoe.checkpoints.expert_sources import Buffers, ExpertSource
from cpumoe.checkpoints.linear_sources import zero_bias
from cpumoe.checkpoints.loading import expert_source
from cpumoe.checkpoints.model_layout import ExpertsLayout, ExpertsShape, FusedExperts, FusedMatrix
from cpumoe.checkpoints.named_tensors import HeldTensors, TensorCheck, naming
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.errors import CheckpointError
from cpumoe.layers.backends import NativeBackend, select_backend
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.experts import Experts
from cpumoe.layers.packed_weights import ExpertsPacker
from cpumoe.layers.parallel_layout import ExpertsPart
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.layers.scheme import Scheme

_BIAS = "bias"


@dataclass(frozen=True)
class PushedLayer:
    """What is known of a layer before its tensors come.

    Attributes:
        name: of the layer, for messages.
        shape: of the whole layer, all experts and whole ones.
        names: of the experts that are held, for messages.
        storage: how each linear is stored; None for float.
        scheme: what float weights are quantised to; None leaves them as they are.
        slices, slice: the intermediate size is cut into so many parts, of which this is one.
        backend: None takes the first that serves the layer.
    """

    name: str
    shape: ExpertsShape
    names: tuple[str, ...]
    storage: LinearStorage | None
    scheme: Scheme | None = None
    slices: int = 1
    slice: int = 0
    backend: str | None = None

    @property
    def held(self) -> int:
        return len(self.names)

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the linears of an expert."""
        return ("gate", "up", "down") if self.shape.activation.gated else ("up", "down")

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The tensors of a linear, by the last part of their names, without its bias."""
        return ("weight",) if self.storage is None else tuple(self.storage.tensors(1, 1))

    def config_of(self, source: ExpertSource) -> MoEConfig:
        """What the layer is in memory, from the source of some of its experts."""
        count = self.shape.expert_count
        return replace(source.config, experts=count, held_experts=None if self.held == count else self.held)


class PushedExperts(ABC):
    """Takes the tensors of a layer's experts, and packs them."""

    def __init__(self, layer: PushedLayer) -> None:
        self.layer = layer
        self._tensors = HeldTensors(layer.name)
        self._packing: _Packing | None = None

    @abstractmethod
    def finish(self) -> Experts:
        """The layer; raises CheckpointError with the names of what has not come."""

    def _pack(self, first: int, source: ExpertSource) -> None:
        """Packs all experts of a source, of which the first is one's ``first``."""
        layer = self.layer
        check = TensorCheck(self._tensors)
        source.check(check)
        check.raise_problems()
        config = layer.config_of(source)
        if self._packing is None:
            self._packing = _Packing(config, layer.backend)
        elif self._packing.config != config:
            raise CheckpointError(
                f"{layer.names[first]} becomes {config}, and experts before it {self._packing.config}; experts of one "
                "kind are accepted"
            )
        count = source.config.local_experts
        step = max(1, min(count, _AT_ONCE // source.expert_bytes))
        with naming(source.prefix):
            for start in range(0, count, step):
                some = source.read(start, min(step, count - start), self._packing.buffers)
                self._packing.put(first + start, some)

    def _packed(self) -> Experts:
        if self._packing is None:
            raise CheckpointError(f"{self.layer.name}: no tensor of its experts has come")
        packing, self._packing = self._packing, None  # whoever holds on to this does not hold the weights
        with naming(self.layer.name):
            return packing.finish()


_AT_ONCE = 64 << 20  # bytes that are read into memory of our own, where a source has many experts
_MOST_TOGETHER = 8


class _Packing:
    """Packs experts in any order, for the backend that serves them."""

    def __init__(self, config: MoEConfig, backend: str | None) -> None:
        self.config = config
        self.buffers = Buffers()
        self._left = config.local_experts
        self._backend = select_backend(config, backend)
        self._packer = ExpertsPacker(config) if isinstance(self._backend, NativeBackend) else None
        self._parts: dict[int, QuantizedExperts] = {}  # by the first of them, for backends that take all at once

    def put(self, first: int, experts: QuantizedExperts) -> None:
        inputs = experts.gate_up.input_scales
        if inputs is not None and self.config.activation.gated and inputs.shape[-1] == 1:
            # Those of gate and of up, which are the same here, may differ in another expert.
            experts = replace(experts, gate_up=replace(experts.gate_up, input_scales=inputs.expand(-1, 2)))
        if self._packer is None:
            self._parts[first] = experts.copy()
        else:
            self._packer.put(first, experts)
        self._left -= experts.count
        if not self._left:  # whoever hands tensors over may finish a layer much later than it is complete
            self.buffers = Buffers()

    def finish(self) -> Experts:
        if self._packer is not None:
            return Experts(self.config, self._backend, self._packer.finish())
        parts = [self._parts[first] for first in sorted(self._parts)]
        return Experts(self.config, self._backend, self._backend.prepare(parts, self.config))


class PushedLinears(PushedExperts):
    """Experts whose linears come one by one, whole, whichever part is held of them."""

    def __init__(self, layer: PushedLayer) -> None:
        super().__init__(layer)
        bias = (_BIAS,) if layer.shape.has_bias else ()
        self._of_linear = (*layer.suffixes, *bias)
        self._count = len(self._of_linear) * len(layer.projections)
        self._come: Counter[int] = Counter()
        self._ready: list[int] = []
        # Slices in activation order have as many inputs as the fullest of all experts.
        storage = layer.storage
        self._waits_for_all = storage is not None and storage.has_input_order and layer.slices > 1

    def push(self, expert: int, projection: str, suffix: str, tensor: Tensor) -> None:
        """Takes a tensor of one of the experts that are held here.

        Raises CheckpointError for what is not expected, and what is wrong with an expert when it is complete.
        """
        layer = self.layer
        name = f"{layer.names[expert]}.{projection}"
        if suffix == _BIAS and not layer.shape.has_bias:
            zero_bias(tensor.shape[0]).refuse_other(f"{name}.{suffix}", tensor)
            return
        if suffix not in self._of_linear:
            accepted = ", ".join(self._of_linear)
            raise CheckpointError(f"{name} has a tensor {suffix}; {accepted} are accepted")
        self._tensors.add(f"{name}.{suffix}", tensor)
        self._come[expert] += 1
        if self._come[expert] == self._count:
            self._ready.append(expert)
            if len(self._ready) == self._together:
                self._pack_ready()

    def _pack_ready(self) -> None:
        """Packs the experts that are complete; those that follow one another together, which all threads can do."""
        ready, self._ready = sorted(self._ready), []
        while ready:
            count = next((n for n in range(1, len(ready)) if ready[n] != ready[0] + n), len(ready))
            run, ready = tuple(ready[:count]), ready[count:]
            self._pack(run[0], self._source(run))
            for expert in run:
                self._tensors.drop(self._names_of(expert))

    @cached_property
    def _together(self) -> int:
        """How many complete experts are packed together."""
        if self._waits_for_all:
            return self.layer.held
        return max(1, min(_MOST_TOGETHER, _AT_ONCE // self._source((self._ready[0],)).expert_bytes))

    def _names_of(self, expert: int) -> list[str]:
        name = self.layer.names[expert]
        return [f"{name}.{linear}.{suffix}" for linear in self.layer.projections for suffix in self._of_linear]

    def _source(self, experts: tuple[int, ...]) -> ExpertSource:
        """Of some of the experts, as if they were a layer."""
        layer = self.layer
        names = [layer.names[expert] for expert in experts]
        layout = ExpertsLayout(
            module=layer.name,
            prefix=names[0] if len(names) == 1 else layer.name,
            shape=replace(layer.shape, expert_count=len(experts)),
            linears=tuple(tuple(f"{name}.{linear}" for linear in layer.projections) for name in names),
        )
        part = ExpertsPart(tuple(range(len(experts))), layer.slices, layer.slice)
        return expert_source(self._tensors, layout, layer.storage, layer.scheme, part)

    def finish(self) -> Experts:
        every = range(self.layer.held)
        missing = [
            name for expert in every if self._come[expert] < self._count for name in self._names_of(expert)
        ]  # fmt: skip
        check = TensorCheck(self._tensors)
        for name in missing:
            check.expect_any(name)
        check.raise_problems()
        self._pack_ready()
        return self._packed()


class PushedStacks(PushedExperts):
    """Experts that come in one tensor for each matrix, [experts, out, in], cut to what is held here already.

    Rows of gate and up alternate. ``layer.shape`` is that of the whole layer; what the tensors are cut to they tell
    themselves.
    """

    def __init__(self, layer: PushedLayer) -> None:
        super().__init__(layer)
        parts = ("",) if layer.storage is None else tuple(f"_{suffix}" for suffix in layer.suffixes)
        biases = (f"_{_BIAS}",) if layer.shape.has_bias else ()
        self._expected = [f"{matrix}{part}" for matrix in ("gate_up", "down") for part in (*parts, *biases)]

    def push(self, name: str, tensor: Tensor) -> None:
        """``name``: gate_up or down, followed by ``_`` and a suffix of the storage if there is one, or by ``_bias``."""
        if name not in self._expected:
            raise CheckpointError(f"{self.layer.name} has a tensor {name}; {', '.join(self._expected)} are accepted")
        self._tensors.add(name, tensor)
        if len(self._tensors.names) == len(self._expected):
            self._pack(0, self._source())
            self._tensors.drop(self._expected)

    def _source(self) -> ExpertSource:
        layer, rows = self.layer, self._rows()
        biases = {name: (f"{name}_{_BIAS}",) if layer.shape.has_bias else () for name in ("gate_up", "down")}
        layout = ExpertsLayout(
            module=layer.name,
            prefix=layer.name,
            shape=replace(layer.shape, expert_count=layer.held, intermediate_size=rows // 2),
            linears=tuple(tuple(f"{name}.{linear}" for linear in layer.projections) for name in layer.names),
            fused=FusedExperts(
                FusedMatrix(("gate_up",), interleaved=True, biases=biases["gate_up"]),
                FusedMatrix(("down",), biases=biases["down"]),
            ),
        )
        part = ExpertsPart.whole(layer.held)
        return expert_source(self._tensors, layout, layer.storage, layer.scheme, part)

    def _rows(self) -> int:
        """Of gate_up, as it has come."""
        shape = self._tensors.info(self._expected[0]).shape
        return shape[1] if len(shape) > 1 else 0

    def finish(self) -> Experts:
        if self._packing is None:
            check = TensorCheck(self._tensors)
            for name in self._expected:
                check.expect_any(name)
            check.raise_problems()
        return self._packed()
