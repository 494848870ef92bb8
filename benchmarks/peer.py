"""What it takes to run another system beside cpumoe: its obstacles, its memory, its weights.

Every system is asked for an obstacle first: a package that is missing, a shape it does not serve, too little memory.
Packages are imported only when they are used, and none is a dependency of cpumoe.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from cpumoe import cpu
from cpumoe.bench.measure import Call
from cpumoe.bench.workload import ROTATED_BYTES, Shape, fitting_scheme, random_values
from cpumoe.errors import UnsupportedScheme
from cpumoe.layers import reference
from cpumoe.layers.scheme import Scheme

GROUPED = Scheme.parse("w4a8-g128")
PER_CHANNEL = Scheme.parse("w4a8")
_DISTINCT = 4  # experts with values of their own, which the others repeat: addresses matter here, not values


@dataclass(frozen=True)
class PreparedPeer:
    """A system with its weights loaded: one call per copy of the layer, to be taken in turn."""

    scheme: str
    calls: list[Call]
    bytes_per_expert: float


class Peer(ABC):
    """Another system. ``obstacle`` gives the first reason against running it here, or None."""

    name: str
    packages: tuple[str, ...] = ()  # that must be importable
    building = 0.0  # memory that building the copies takes for a while, in copies

    def obstacle(self, shape: Shape) -> str | None:
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                return f"package {package.replace('_', '-')} is not installed"
        if (reason := self.own_obstacle(shape)) is not None:
            return reason
        needed = self.bytes_per_expert(shape) * shape.experts * (1 + self.building)
        free = available_bytes()
        return None if needed <= free else f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"

    def own_obstacle(self, shape: Shape) -> str | None:
        """The reason that only this system knows; its packages are there."""
        return None

    def remark(self) -> str | None:
        """What a reader of the rows must know about this system on this machine."""
        return None

    def copies(self, shape: Shape) -> int:
        """As many as exceed the caches, two at least as for cpumoe's own rows, but no more than fit."""
        one = self.bytes_per_expert(shape) * shape.experts
        wanted, possible = math.ceil(ROTATED_BYTES / one), int(available_bytes() / one - self.building)
        return max(1, min(max(2, wanted), possible))

    @abstractmethod
    def bytes_per_expert(self, shape: Shape) -> float:
        """Bytes of one expert as this system holds it."""

    @abstractmethod
    def prepare(self, shape: Shape, dtype: torch.dtype) -> PreparedPeer:
        """Loads the copies. ``dtype`` is that of the hidden states and of the results."""


@dataclass(frozen=True)
class LayerWeights:
    """Integers and scales of a few experts; gate rows before up rows."""

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    @classmethod
    def random(cls, shape: Shape, scheme: Scheme, seed: int) -> LayerWeights:
        experts = min(shape.experts, _DISTINCT)
        gate_up = random_values(experts, 2 * shape.intermediate, shape.hidden, scheme, 2 * seed)
        down = random_values(experts, shape.hidden, shape.intermediate, scheme, 2 * seed + 1)
        return cls(*gate_up, *down)

    def bf16(self) -> tuple[Tensor, Tensor]:
        """gate_up and down."""
        gate_up = reference.dequantize(self.gate_up, self.gate_up_scale)
        return gate_up.to(torch.bfloat16), reference.dequantize(self.down, self.down_scale).to(torch.bfloat16)


def repeated(few: Tensor, shape: Shape) -> Tensor:
    """All experts of a layer from a few, each with memory of its own."""
    return few[torch.arange(shape.experts) % few.shape[0]]


def weights_per_expert(shape: Shape) -> int:
    return 3 * shape.hidden * shape.intermediate


def scheme_obstacle(shape: Shape) -> str | None:
    try:
        fitting_scheme(GROUPED, shape)
    except UnsupportedScheme as error:
        return str(error)
    return None


def available_bytes() -> float:
    """Memory that can be had without swapping, less a tenth for everything else."""
    return 0.9 * cpu.memory_bytes()["MemAvailable"]


def sentence(error: BaseException) -> str:
    """The exception's kind and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
