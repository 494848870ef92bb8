"""Quantised mixture-of-experts models on CPUs."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cpumoe_command.python_m  # noqa: F401  # must come before PyTorch: sets Ctrl-C for "python -m cpumoe"

# cpu must be first: it guards oneDNN and sees whether PyTorch was imported before. numa places threads.
from cpumoe import cpu, numa  # noqa: F401
from cpumoe.cpu import get_num_threads, guard_onednn, instruction_sets, isa, set_num_threads
from cpumoe.errors import CheckpointError, CpumoeError, NoBackend, UnsupportedScheme
from cpumoe.import_hooks import after_import
from cpumoe.integrations.transformers import hook

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from cpumoe.integrations.transformers.calibration.quantizing import quantize_checkpoint
    from cpumoe.integrations.transformers.loading.float_models import accelerate
    from cpumoe.integrations.transformers.loading.model_loading import load_model
    from cpumoe.integrations.transformers.loading.plugin import PackedConfig
    from cpumoe.integrations.transformers.own_sequences import own_sequences
    from cpumoe.layers.activation import Activation
    from cpumoe.layers.backends import explain, select_backend
    from cpumoe.layers.config import MoEConfig
    from cpumoe.layers.experts import Experts
    from cpumoe.layers.layer import MoELayer
    from cpumoe.layers.linear import QuantizedLinear
    from cpumoe.layers.parallel_layout import ParallelLayout
    from cpumoe.layers.routing import routing_method, select_experts
    from cpumoe.layers.routing_methods import RoutingMethod
    from cpumoe.layers.scheme import GroupShape, Scheme, TensorFormat

#: Names whose modules are imported when they are first used: importing PyTorch or transformers takes seconds, which
#: ``cpumoe --help`` must not.
_LAZY = {
    "Activation": "cpumoe.layers.activation",
    "Experts": "cpumoe.layers.experts",
    "GroupShape": "cpumoe.layers.scheme",
    "MoEConfig": "cpumoe.layers.config",
    "MoELayer": "cpumoe.layers.layer",
    "ParallelLayout": "cpumoe.layers.parallel_layout",
    "QuantizedLinear": "cpumoe.layers.linear",
    "RoutingMethod": "cpumoe.layers.routing_methods",
    "Scheme": "cpumoe.layers.scheme",
    "TensorFormat": "cpumoe.layers.scheme",
    "explain": "cpumoe.layers.backends",
    "routing_method": "cpumoe.layers.routing",
    "select_backend": "cpumoe.layers.backends",
    "select_experts": "cpumoe.layers.routing",
}
#: Those that need transformers.
_OF_TRANSFORMERS = {
    "PackedConfig": "cpumoe.integrations.transformers.loading.plugin",
    "accelerate": "cpumoe.integrations.transformers.loading.float_models",
    "load_model": "cpumoe.integrations.transformers.loading.model_loading",
    "own_sequences": "cpumoe.integrations.transformers.own_sequences",
    "quantize_checkpoint": "cpumoe.integrations.transformers.calibration.quantizing",
}
#: Subpackages that can be used without an import of their own.
_MODULES = ("layers", "ops")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        if name == "layers":  # with the modules that public names come from, for cpumoe.layers.scheme and the like
            for module_name in _LAZY.values():
                importlib.import_module(module_name)
        return importlib.import_module(f"cpumoe.{name}")
    if name in _LAZY:
        found = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = found
        return found
    if name not in _OF_TRANSFORMERS:
        raise AttributeError(f"module 'cpumoe' has no attribute {name!r}")
    if needed := hook.too_old():
        raise ImportError(f"cpumoe.{name} needs {needed}")
    if hook.is_missing():
        raise ImportError(f"cpumoe.{name} needs transformers: pip install 'cpumoe[transformers]'")
    return getattr(importlib.import_module(_OF_TRANSFORMERS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def _register_operators(_: ModuleType) -> None:
    importlib.import_module("cpumoe.ops")
    cpu.warn_of_environment()


hook.install()
# torch.ops.cpumoe.* exists as soon as both PyTorch and cpumoe are imported, in either order.
after_import("torch", _register_operators)

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
