"""The interface to other systems that are measured beside cpumoe (peers), and the weights that they get.

Every peer is first asked for an obstacle: a missing package, a shape that it does not support, too little memory.
Packages are imported only when they are used, and none of them is a dependency of cpumoe.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from cpumoe.bench.measure import Call
from cpumoe.bench.shapes import Shape
from cpumoe.bench.workload import MOST_CALLS, ROTATED_BYTES, fitting_scheme, random_weight
from cpumoe.errors import UnsupportedScheme
from cpumoe.free_memory import available_bytes
from cpumoe.layers import reference
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.scheme import Scheme

GROUPED = Scheme.parse("w4a8-g128")
PER_CHANNEL = Scheme.parse("w4a8")
_DISTINCT = 4  # different experts, which the others repeat, because speed depends on addresses and not on values


@dataclass(frozen=True)
class PreparedPeer:
    """A peer with its weights loaded: one call per copy of the layer, which are to be taken in turn."""

    scheme: str
    calls: list[Call]
    bytes_per_expert: float
    from_memory: bool  # whether the copies together exceed the caches


class Peer(ABC):
    """Another system. ``obstacle`` returns the first reason why it cannot run here, or None."""

    name: str
    packages: tuple[str, ...] = ()  # that must be importable
    building = 0.0  # temporary memory while the copies are built, as a multiple of one copy

    def obstacle(self, shape: Shape) -> str | None:
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                return f"package {package.replace('_', '-')} is not installed"
        if (reason := self.own_obstacle(shape)) is not None:
            return reason
        needed = self.bytes_per_expert(shape) * shape.num_experts * (1 + self.building)
        free = usable_bytes()
        return None if needed <= free else f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"

    def own_obstacle(self, shape: Shape) -> str | None:
        """An obstacle that is special to this system. Its packages are installed when this is called."""
        return None

    def remark(self) -> str | None:
        """A remark that readers of the rows need to understand the results of this system on this machine."""
        return None

    def copies(self, shape: Shape) -> int:
        """As many copies of the layer as exceed the caches, as in cpumoe's own rows, but no more than fit in memory."""
        one = self.bytes_per_expert(shape) * shape.num_experts
        wanted, possible = math.ceil(ROTATED_BYTES / one), int(usable_bytes() / one - self.building)
        return max(1, min(max(2, wanted), MOST_CALLS, possible))

    def prepared(self, shape: Shape, scheme: str, calls: list[Call], bytes_per_expert: float) -> PreparedPeer:
        from_memory = len(calls) * bytes_per_expert * shape.num_experts >= ROTATED_BYTES
        return PreparedPeer(scheme, calls, bytes_per_expert, from_memory)

    @abstractmethod
    def bytes_per_expert(self, shape: Shape) -> float:
        """Bytes of one expert in the memory of this system."""

    @abstractmethod
    def prepare(self, shape: Shape, dtype: torch.dtype) -> PreparedPeer:
        """Loads the copies. ``dtype`` is the dtype of the hidden states and of the results."""


@dataclass(frozen=True)
class LayerWeights:
    """Integers and scales of a few experts; gate rows before up rows."""

    gate_up: QuantizedWeight
    down: QuantizedWeight

    @classmethod
    def random(cls, shape: Shape, scheme: Scheme, seed: int) -> LayerWeights:
        distinct = min(shape.num_experts, _DISTINCT)
        gate_up = random_weight(distinct, 2 * shape.intermediate, shape.hidden, scheme, 2 * seed)
        down = random_weight(distinct, shape.hidden, shape.intermediate, scheme, 2 * seed + 1)
        return cls(gate_up, down)

    def bf16(self) -> tuple[Tensor, Tensor]:
        """gate_up and down as floats."""
        gate_up = reference.dequantize(self.gate_up)
        return gate_up.to(torch.bfloat16), reference.dequantize(self.down).to(torch.bfloat16)


def repeated(few: Tensor, shape: Shape) -> Tensor:
    """All experts of a layer, made by repeating a few; each has its own memory."""
    return few[torch.arange(shape.num_experts) % few.shape[0]]


def weights_per_expert(shape: Shape) -> int:
    return 3 * shape.hidden * shape.intermediate


def scheme_obstacle(shape: Shape) -> str | None:
    try:
        fitting_scheme(GROUPED, shape)
    except UnsupportedScheme as error:
        return str(error)
    return None


def usable_bytes() -> float:
    """Memory that a peer may take: what is available, less a tenth for everything else."""
    return 0.9 * available_bytes()


def sentence(error: BaseException) -> str:
    """The type of an exception and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
