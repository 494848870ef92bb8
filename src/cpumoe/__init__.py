"""Quantised mixture-of-experts models on CPUs."""

from __future__ import annotations

from cpumoe import cpu  # first: it guards oneDNN and looks whether PyTorch was imported before
from cpumoe.activation import Activation
from cpumoe.backends import explain, select_backend
from cpumoe.config import MoEConfig, ParallelLayout
from cpumoe.cpu import get_num_threads, guard_onednn, instruction_sets, isa, set_num_threads
from cpumoe.errors import CpumoeError, NoBackend, UnsupportedScheme
from cpumoe.experts import Experts
from cpumoe.layer import MoELayer
from cpumoe.linear import QuantizedLinear
from cpumoe.routing import RoutingMethod, routing_method, select_experts
from cpumoe.scheme import GroupShape, Scheme, TensorFormat

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
    "cpu",
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
