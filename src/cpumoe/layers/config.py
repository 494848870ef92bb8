"""MoEConfig: the facts of one layer from which backends decide."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cpumoe.layers.activation import Activation
from cpumoe.layers.parallel_layout import ParallelLayout
from cpumoe.layers.routing import parse_method
from cpumoe.layers.routing_methods import RoutingMethod
from cpumoe.layers.scheme import SIZE_UNIT, Scheme


@dataclass(frozen=True)
class MoEConfig:
    """One mixture-of-experts layer.

    ``experts`` are those of the whole layer, ``held_experts`` those that this rank holds (None: all of them); ids that
    a layer is called with count the latter. ``hidden_size`` and ``intermediate_size`` are those of this rank;
    ``scale_dtype`` is the dtype of the weight scales. ``expert_map`` asks for a backend that is called with ids of the
    whole layer and maps them to the experts held here; without it, ids count the held experts and -1 is one of another
    rank.
    """

    scheme: Scheme
    experts: int
    hidden_size: int
    intermediate_size: int
    activation: Activation = field(default_factory=Activation)
    has_bias: bool = False
    scale_dtype: torch.dtype = torch.float32
    device: str = "cpu"
    routing: RoutingMethod = RoutingMethod.RENORMALIZE
    logits_dtype: torch.dtype = torch.float32
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    expert_map: bool = False
    held_experts: int | None = None

    @property
    def local_experts(self) -> int:
        """How many experts are held here."""
        return self.experts if self.held_experts is None else self.held_experts

    def __post_init__(self) -> None:
        object.__setattr__(self, "routing", parse_method(self.routing))
        for name, size in (("hidden_size", self.hidden_size), ("intermediate_size", self.intermediate_size)):
            if size < 1 or size % SIZE_UNIT != 0:
                raise ValueError(f"{name}={size}; a positive multiple of 32 is accepted")
        if self.experts < 1:
            raise ValueError(f"experts={self.experts}; 1 or more is accepted")
        if not 1 <= self.local_experts <= self.experts:
            raise ValueError(f"held_experts={self.held_experts}; 1 to {self.experts} are accepted")
        self.scheme.check_inputs(self.hidden_size, "gate_up")
        self.scheme.check_inputs(self.intermediate_size, "down")
