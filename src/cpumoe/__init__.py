"""Quantised mixture-of-experts models on CPUs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import cpumoe_command.python_m  # noqa: F401  # must come before PyTorch: sets Ctrl-C for "python -m cpumoe"
from cpumoe import cpu  # must be first: it guards oneDNN and sees whether PyTorch was imported before
from cpumoe.cpu import get_num_threads, guard_onednn, instruction_sets, isa, set_num_threads
from cpumoe.errors import CheckpointError, CpumoeError, NoBackend, UnsupportedScheme
from cpumoe.integrations.transformers import hook
from cpumoe.layers.activation import Activation
from cpumoe.layers.backends import explain, select_backend
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.experts import Experts
from cpumoe.layers.layer import MoELayer
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.parallel_layout import ParallelLayout
from cpumoe.layers.routing import RoutingMethod, routing_method, select_experts
from cpumoe.layers.scheme import GroupShape, Scheme, TensorFormat

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from cpumoe.integrations.transformers.float_models import accelerate
    from cpumoe.integrations.transformers.model_loading import load_model
    from cpumoe.integrations.transformers.own_sequences import own_sequences
    from cpumoe.integrations.transformers.plugin import PackedConfig
    from cpumoe.integrations.transformers.quantizing import quantize_checkpoint

#: Names whose modules are imported when they are first used, because importing transformers takes seconds.
_LAZY = {
    "PackedConfig": "cpumoe.integrations.transformers.plugin",
    "accelerate": "cpumoe.integrations.transformers.float_models",
    "load_model": "cpumoe.integrations.transformers.model_loading",
    "own_sequences": "cpumoe.integrations.transformers.own_sequences",
    "quantize_checkpoint": "cpumoe.integrations.transformers.quantizing",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'cpumoe' has no attribute {name!r}")
    if needed := hook.too_old():
        raise ImportError(f"cpumoe.{name} needs {needed}")
    try:
        module = importlib.import_module(_LAZY[name])
    except ModuleNotFoundError as problem:
        if problem.name != "transformers":
            raise
        raise ImportError(f"cpumoe.{name} needs transformers: pip install 'cpumoe[transformers]'") from None
    return getattr(module, name)


hook.install()

__all__ = [
    "Activation",
    "CheckpointError",
    "CpumoeError",
    "Experts",
    "GroupShape",
    "MoEConfig",
    "MoELayer",
    "NoBackend",
    "PackedConfig",
    "ParallelLayout",
    "QuantizedLinear",
    "RoutingMethod",
    "Scheme",
    "TensorFormat",
    "UnsupportedScheme",
    "accelerate",
    "cpu",
    "explain",
    "get_num_threads",
    "guard_onednn",
    "instruction_sets",
    "isa",
    "load_model",
    "own_sequences",
    "quantize_checkpoint",
    "routing_method",
    "select_backend",
    "select_experts",
    "set_num_threads",
]
