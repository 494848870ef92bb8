"""Registers the plug-in with transformers as soon as transformers is imported, and costs nothing until then.

``import cpumoe`` must be enough for ``AutoModelForCausalLM.from_pretrained`` to read quantised checkpoints, and must
not import transformers (seconds) for those who only want a layer. ``CPUMOE_TRANSFORMERS=0`` leaves transformers as it
is; what is asked of cpumoe itself (``cpumoe.load_model``) works nevertheless.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

_log = logging.getLogger("cpumoe")

_SWITCH = "CPUMOE_TRANSFORMERS"

# Names that transformers accepts as experts_implementation; the scheme is in the name, or in CPUMOE_SCHEME.
EXPERTS_IMPLEMENTATIONS = ("cpumoe", *(f"cpumoe-{s}" for s in ("w4a8", "w4a8-g32", "w4a8-g64", "w4a8-g128", "w8a8")))


def _add_quantizer(auto: ModuleType) -> None:
    """compressed-tensors files go through our reader, or on to transformers' own if we do not serve their scheme."""
    stock_quantizer = auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"]
    stock_config = auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"]

    def make_quantizer(config: Any, **options: Any) -> Any:
        from cpumoe.integrations.transformers import plugin

        return plugin.make_quantizer(config, stock_quantizer, **options)

    class ConfigOfCompressedTensors:
        """Stands where transformers looks for the configuration class."""

        @staticmethod
        def from_dict(section: dict[str, Any], **options: Any) -> Any:
            from cpumoe.integrations.transformers import plugin

            return plugin.make_config(section, stock_config, **options)

    auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"] = make_quantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] = ConfigOfCompressedTensors


def _add_experts(moe: ModuleType) -> None:
    for name in EXPERTS_IMPLEMENTATIONS:
        scheme = name.partition("-")[2] or None

        def forward(module: Any, *arguments: Any, _scheme: str | None = scheme) -> Any:
            from cpumoe.integrations.transformers import float_models

            return float_models.experts_forward(module, _scheme, *arguments)

        moe.ALL_EXPERTS_FUNCTIONS.register(name, forward)


def _check_experts_implementation(modeling_utils: ModuleType) -> None:
    """transformers accepts experts_implementation for models that never look at it, and for packed experts too."""
    stock = modeling_utils.PreTrainedModel.get_correct_experts_implementation

    def get_correct_experts_implementation(self: Any, requested: str | None) -> Any:
        if requested in EXPERTS_IMPLEMENTATIONS:
            from cpumoe.integrations.transformers import float_models

            float_models.check_experts_implementation(self, requested)
        return stock(self, requested)

    modeling_utils.PreTrainedModel.get_correct_experts_implementation = get_correct_experts_implementation


_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "transformers.quantizers.auto": _add_quantizer,
    "transformers.integrations.moe": _add_experts,
    "transformers.modeling_utils": _check_experts_implementation,
}


def _take_over(name: str, module: ModuleType) -> None:
    _AFTER_IMPORT.pop(name)(module)
    _say()


@cache  # once
def _say() -> None:
    _log.info(
        "transformers loads compressed-tensors checkpoints through cpumoe from here on and knows "
        "experts_implementation=%r and others; %s=0 switches this off",
        EXPERTS_IMPLEMENTATIONS[0],
        _SWITCH,
    )


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules above as usual, and adds a step behind their execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _take_over(fullname, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@cache  # what holds when cpumoe is imported
def is_on() -> bool:
    """Whether transformers is to know of cpumoe."""
    value = os.environ.get(_SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{_SWITCH}={value!r}; 0 (transformers is left as it is) and 1 (the default) are accepted")
    return value == "1"


def install() -> None:
    """Called once, when cpumoe is imported."""
    if not is_on():
        return
    for name in list(_AFTER_IMPORT):
        if name in sys.modules:
            _take_over(name, sys.modules[name])
    if _AFTER_IMPORT:
        sys.meta_path.insert(0, _Finder())


@contextmanager
def taken_over() -> Iterator[None]:
    """Inside the block compressed-tensors files go through our reader even where the plug-in is switched off."""
    if is_on():
        yield
        return
    from transformers.quantizers import auto

    mappings = (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    before = [mapping["compressed-tensors"] for mapping in mappings]
    _add_quantizer(auto)
    try:
        yield
    finally:
        for mapping, stock in zip(mappings, before, strict=True):
            mapping["compressed-tensors"] = stock
