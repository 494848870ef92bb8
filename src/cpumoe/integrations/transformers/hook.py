"""Registers the plug-in with transformers as soon as transformers is imported, and costs nothing until then.

``import cpumoe`` must be enough for ``AutoModelForCausalLM.from_pretrained`` to read quantised checkpoints. But it must
not import transformers, which takes seconds, for a user who only wants a layer. ``CPUMOE_TRANSFORMERS=0`` leaves
transformers as it is; ``cpumoe.load_model`` works nevertheless.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any

from cpumoe import settings
from cpumoe.import_hooks import after_import
from cpumoe.quant_methods import QUANT_METHODS

_log = logging.getLogger("cpumoe")

# Names that transformers accepts as experts_implementation. A name without a scheme takes that of CPUMOE_SCHEME.
_SCHEMES = ["w4a8", "w4a8-g32", "w4a8-g64", "w4a8-g128", "w8a8"]
_SCHEMES += ["w4a16-g32", "w4a16-g128", "w8a16", "mxfp4a16", "nvfp4a16"]
_SCHEMES += ["fp8", "fp8-block", "fp8a16", "mxfp4", "mxfp8", "bf16"]
EXPERTS_IMPLEMENTATIONS = ("cpumoe", *(f"cpumoe-{scheme}" for scheme in _SCHEMES))


#: Older versions lack functions that the plug-in builds on.
OLDEST = (5, 22)


@cache
def too_old() -> str | None:
    """What is needed in the place of a transformers that is too old, in words; None where it is not, or not there.

    transformers is not imported for that.
    """
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= OLDEST:
        return None
    oldest = ".".join(map(str, OLDEST))
    return f"transformers {oldest} or newer, and this is {version}: pip install 'cpumoe[transformers]'"


def is_missing() -> bool:
    """Return whether transformers is not installed. What it brings (huggingface_hub, tqdm) may be missing too then."""
    return importlib.util.find_spec("transformers") is None


def _always() -> bool:
    return True


def _add_quantizers(auto: ModuleType, is_wanted: Callable[[], bool] = _always) -> None:
    """Lets quantised files go through our reader, which leaves schemes that we do not support to transformers.

    ``is_wanted`` is asked each time; if it says no, transformers' own reader is used.
    """
    quantizers, configs = dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    for name, method in QUANT_METHODS.items():
        stock_quantizer, stock_config = quantizers.get(method, _not_read), configs.get(method, _NotRead)
        auto.AUTO_QUANTIZER_MAPPING[name] = _quantizer_maker(stock_quantizer, is_wanted)
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[name] = _ConfigMaker(stock_config, is_wanted)


def _not_read(*_: Any, **__: Any) -> Any:
    raise ValueError("transformers itself does not read files with this quant_method")


class _NotRead:
    """Stands for a configuration class that transformers does not have."""

    from_dict = staticmethod(_not_read)


def _quantizer_maker(stock: Any, is_wanted: Callable[[], bool]) -> Callable[..., Any]:
    def make_quantizer(config: Any, **options: Any) -> Any:
        if not is_wanted():
            return stock(config, **options)
        from cpumoe.integrations.transformers.loading import plugin

        return plugin.make_quantizer(config, stock, **options)

    return make_quantizer


class _ConfigMaker:
    """Takes the place of a configuration class, of which transformers calls ``from_dict`` only."""

    def __init__(self, stock: Any, is_wanted: Callable[[], bool]) -> None:
        self._stock = stock
        self._is_wanted = is_wanted

    def from_dict(self, section: dict[str, Any], **options: Any) -> Any:
        if not self._is_wanted():
            return self._stock.from_dict(section, **options)
        from cpumoe.integrations.transformers.loading import plugin

        return plugin.make_config(section, self._stock, **options)


def _add_experts(moe: ModuleType) -> None:
    for name in EXPERTS_IMPLEMENTATIONS:
        scheme = name.partition("-")[2] or None

        def forward(module: Any, *arguments: Any, _scheme: str | None = scheme) -> Any:
            from cpumoe.integrations.transformers.loading import float_models

            return float_models.experts_forward(module, _scheme, *arguments)

        moe.ALL_EXPERTS_FUNCTIONS.register(name, forward)


def _check_experts_implementation(modeling_utils: ModuleType) -> None:
    """Checks experts_implementation: transformers accepts it even if the model ignores it or its experts are packed."""
    stock = modeling_utils.PreTrainedModel.get_correct_experts_implementation

    def get_correct_experts_implementation(self: Any, requested: str | None) -> Any:
        if requested in EXPERTS_IMPLEMENTATIONS:
            from cpumoe.integrations.transformers.loading import float_models

            float_models.check_experts_implementation(self, requested)
        return stock(self, requested)

    modeling_utils.PreTrainedModel.get_correct_experts_implementation = get_correct_experts_implementation


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "transformers.quantizers.auto": _add_quantizers,
    "transformers.integrations.moe": _add_experts,
    "transformers.modeling_utils": _check_experts_implementation,
}


def _take_over(module: ModuleType) -> None:
    if too_old() is None:
        _CHANGES[module.__name__](module)
    _log_take_over()


@cache  # logged once
def _log_take_over() -> None:
    if needed := too_old():
        # Where vLLM is, it brings the version that it wants, and loads models itself.
        level = logging.INFO if "vllm" in sys.modules else logging.WARNING
        _log.log(level, "cpumoe leaves transformers as it is: it needs %s", needed)
        return
    _log.info(
        "transformers loads quantised checkpoints (%s) through cpumoe from here on and knows "
        "experts_implementation=%r and others; %s=0 switches this off",
        ", ".join(dict.fromkeys(QUANT_METHODS.values())),
        EXPERTS_IMPLEMENTATIONS[0],
        settings.TRANSFORMERS.name,
    )


@cache  # the value at the time when cpumoe is imported counts
def is_on() -> bool:
    """Whether the plug-in is switched on."""
    return settings.TRANSFORMERS.is_on()


def install() -> None:
    """Called once, when cpumoe is imported."""
    if not is_on():
        return
    for name in _CHANGES:
        after_import(name, _take_over)


# ---- load_model while the plug-in is switched off ------------------------------------------------------------------

_in_own_reader: ContextVar[bool] = ContextVar("cpumoe_in_own_reader", default=False)
_own_reader_lock = threading.Lock()
_own_reader_blocks: list[object] = []  # one entry for each block that is running, in any thread
_MAPPINGS = ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING")
_stock_readers: dict[tuple[str, str], Any] = {}  # (mapping, method) -> what it has without us


@contextmanager
def own_reader() -> Iterator[None]:
    """Inside the block quantised files go through our reader even if the plug-in is switched off.

    Several threads may be inside such blocks: the first to enter changes the mappings of transformers and the last to
    leave restores them. Meanwhile threads outside of a block still get transformers' own reader.
    """
    if is_on():
        yield
        return
    from transformers.quantizers import auto

    block = object()
    with _own_reader_lock:
        if not _own_reader_blocks:
            places = ((name, method) for name in _MAPPINGS for method in QUANT_METHODS)
            _stock_readers.update(((name, method), getattr(auto, name).get(method)) for name, method in places)
            _add_quantizers(auto, is_wanted=_in_own_reader.get)
        _own_reader_blocks.append(block)
    token = _in_own_reader.set(True)
    try:
        yield
    finally:
        _in_own_reader.reset(token)
        with _own_reader_lock:
            _own_reader_blocks.remove(block)
            if not _own_reader_blocks:
                for (name, method), stock in _stock_readers.items():
                    if stock is None:
                        del getattr(auto, name)[method]
                    else:
                        getattr(auto, name)[method] = stock
