"""Quantised mixture-of-experts models on CPUs."""

from __future__ import annotations

from cpumoe.cpu import get_num_threads, guard_onednn, instruction_sets, isa, set_num_threads

guard_onednn()  # before torch runs its first product

from cpumoe.activation import Activation  # noqa: E402
from cpumoe.backends import explain, select_backend  # noqa: E402
from cpumoe.config import MoEConfig, ParallelLayout  # noqa: E402
from cpumoe.errors import CpumoeError, NoBackend, UnsupportedScheme  # noqa: E402
from cpumoe.experts import Experts  # noqa: E402
from cpumoe.layer import MoELayer  # noqa: E402
from cpumoe.linear import QuantizedLinear  # noqa: E402
from cpumoe.routing import RoutingMethod, routing_method, select_experts  # noqa: E402
from cpumoe.scheme import GroupShape, Scheme, TensorFormat  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "CpumoeError",
    "Experts",
    "GroupShape",
    "MoEConfig",
    "MoELayer",
    "NoBackend",
    "ParallelLayout",
    "QuantizedLinear",
    "RoutingMethod",
    "Scheme",
    "TensorFormat",
    "UnsupportedScheme",
    "explain",
    "get_num_threads",
    "guard_onednn",
    "instruction_sets",
    "isa",
    "routing_method",
    "select_backend",
    "select_experts",
    "set_num_threads",
]
