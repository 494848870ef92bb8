"""Loads a checkpoint folder as a model of transformers: :func:`load_model`."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from cpumoe import cpu
from cpumoe.checkpoints.checkpoint import Checkpoint, check_activations, read_json, text_config
from cpumoe.checkpoints.hub import find_model
from cpumoe.errors import CheckpointError, CpumoeError, UnsupportedScheme
from cpumoe.integrations.transformers.hook import own_reader
from cpumoe.integrations.transformers.layout.model_classes import auto_class_for, config_of
from cpumoe.integrations.transformers.loading.plugin import (
    LoadOptions,
    PackedConfig,
    PackedQuantizer,
    load_options,
)
from cpumoe.integrations.transformers.loading.stock_quantizer import CURE
from cpumoe.layers.scheme import FLOAT, Scheme, named_scheme
from cpumoe.ops.cache_records import check_kv_cache
from cpumoe.parallel.ranks import Ranks

_log = logging.getLogger("cpumoe")


def load_model(
    path: str | Path,
    *,
    scheme: Scheme | str | None = None,
    linears: Scheme | str | None = None,
    cache: str | Path | None = None,
    activations: str | None = None,
    kv_cache: str | None = None,
    dtype: torch.dtype | None = None,
    auto_class: Any = None,
    ranks: Ranks | None = None,
    reserve_bytes: int | None = None,
    revision: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Loads a checkpoint folder as a transformers model with packed experts and linears.

    Args:
        path: folder with config.json and safetensors files, or the id of a model in the local hub cache, with
            ``@revision`` if not of ``main`` (:func:`cpumoe.checkpoints.hub.find_model`; nothing is downloaded).
        scheme: for a float checkpoint only: the scheme to quantise its experts to while they are read
            (``"w4a8-g128"``), or ``"float"`` to leave them to transformers. The default is the value of
            ``CPUMOE_SCHEME``, and without one the experts run as they are stored (``bf16``, ``fp16``, ``fp32``).
        linears: the scheme to quantise linears to that are float in the checkpoint (``"w8a8"``, ``"w4a8-g128"``); None
            leaves them in float.
        cache: folder for packed weights. They are written there the first time and memory-mapped the next time.
        activations: ``"int8"`` runs weight-only checkpoints (w4a16, mxfp4a16, ...) with int8 activations: faster with
            many tokens, and a little further from the float model. The default is the value of ``CPUMOE_ACTIVATIONS``,
            and without one what the checkpoint says.
        kv_cache: ``"int8"`` holds the keys and values of caches in int8, with a scale for every 64 values: about half
            the memory of bf16, and results a little further from the float model. For models whose steps are one call
            of the core. The default is the value of ``CPUMOE_KV_CACHE``, and without one the dtype of the float parts.
        dtype: dtype of the float parts; the default is bf16 if this CPU computes with it, else fp32.
        auto_class: the class of transformers to load with, such as ``AutoModelForImageTextToText`` for a model that
            takes images too. The default is the language model alone, and the whole model where transformers has no
            class for that.
        ranks: the ranks that the model is spread over, of which each calls this
            (:meth:`cpumoe.parallel.ranks.Ranks.join`). Each reads its own experts or slices and, in a tensor parallel
            group, its own outputs of linears. The ranks of such a group must be called with the same tokens, and all
            ranks as often as each other.
        reserve_bytes: memory that has to be left when all weights are in memory, for a KV cache or for other programs.
            The default demands room for the weights alone, without those that are mapped from files, which the kernel
            can drop and read again.
        revision: branch, tag or commit of an id that does not end in one; ``main`` by default. Folders have none.
        options: further arguments of ``from_pretrained``.

    Raises CheckpointError if tensors are missing, unexpected or of another shape, UnsupportedScheme for a scheme that
    is not supported, and NotEnoughMemory before weights are read if they do not fit into the free memory (unless
    ``CPUMOE_MEMORY_CHECK`` is 0).
    """
    with (ranks or Ranks.alone()).together():  # if one cannot load it, the others do not wait for it
        path = find_model(path, revision=revision)
        if (asked := str(options.get("experts_implementation"))).startswith("cpumoe-"):
            raise ValueError(f"experts_implementation={asked!r} has no effect in load_model; scheme= is what it takes")
        found = _look_into(path, auto_class)
        chosen = LoadOptions(
            found.experts_scheme(scheme, activations),
            None if linears is None else Scheme.parse(linears),
            None if cache is None else Path(cache).expanduser(),
            check_activations(activations),
            check_kv_cache(kv_cache),
            leave_experts=found.leaves_experts(scheme),
            ranks=ranks.in_model() if ranks else None,
            reserve_bytes=reserve_bytes,
            strict=True,
        )
        if ranks and chosen.leave_experts:
            raise ValueError(
                f"scheme={FLOAT!r} leaves the experts to transformers, which does not spread them over ranks"
            )
        if dtype is None:
            dtype, reason = cpu.float_dtype()
            _log.info("float parts run in %s: %s", dtype, reason)
        return _loaded(found, chosen, dtype, options)


@dataclass(frozen=True)
class _Found:
    """What is known of a checkpoint before it is loaded: its ``quantization_config``, and the class to load it with."""

    path: Path
    section: dict[str, Any] | None
    quantized: bool
    model_class: Any

    def _scheme_name(self, asked: Scheme | str | None) -> Scheme | str | None:
        return asked if self.quantized else named_scheme(asked, None)

    def experts_scheme(self, asked: Scheme | str | None, activations: str | None) -> Scheme | None:
        """What float experts are quantised to; None: nothing. Refuses what contradicts the files."""
        name = self._scheme_name(asked)
        if self.quantized and name is not None:
            raise UnsupportedScheme(f"scheme={str(name)!r} for a checkpoint that is quantised already; leave it out")
        if not self.quantized and activations is not None:
            raise ValueError(
                f"activations={activations!r} for a float checkpoint, where the scheme says it: scheme='w4a16-g32+int8'"
            )
        return None if name is None or name == FLOAT else Scheme.parse(name)

    def leaves_experts(self, asked: Scheme | str | None) -> bool:
        """Whether float experts are left to transformers."""
        return not self.quantized and self._scheme_name(asked) == FLOAT


def _look_into(path: Path, auto_class: Any) -> _Found:
    with Checkpoint.open(path) as checkpoint:
        try:
            quantized = checkpoint.quantization is not None
        except UnsupportedScheme as problem:
            raise UnsupportedScheme(f"{problem}; {CURE}") from None
        model_class = auto_class or auto_class_for(_checked_config(checkpoint))
        return _Found(path, checkpoint.quantization_section, quantized, model_class)


def _loaded(found: _Found, chosen: LoadOptions, dtype: torch.dtype, options: dict[str, Any]) -> PreTrainedModel:
    path = found.path
    # transformers knows the configuration in config.json alone.
    known = found.quantized and _says_that_it_is_quantized(path)
    more = {} if known else {"quantization_config": PackedConfig(found.section)}
    token = load_options.set(chosen)
    try:
        with _transformers_errors(path, bool(options)), _progress_on_terminals(), own_reader():
            model: PreTrainedModel = found.model_class.from_pretrained(
                path, dtype=dtype, local_files_only=True, **more, **options
            )
    finally:
        load_options.reset(token)
    if found.quantized and not isinstance(getattr(model, "hf_quantizer", None), PackedQuantizer):
        raise CheckpointError(f"{path}: transformers passed over its quantization_config and made up its weights")
    return model


@contextmanager
def _progress_on_terminals() -> Iterator[None]:
    """Switches off the progress bars of transformers unless stderr is a terminal, as ours are."""
    shown = transformers_logging.is_progress_bar_enabled()
    if shown and not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _says_that_it_is_quantized(path: Path) -> bool:
    """Whether config.json does."""
    config = read_json(path / "config.json")
    return bool(config.get("quantization_config") or text_config(config).get("quantization_config"))


def _checked_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The configuration, of which impossible values are refused before transformers begins to build the model."""
    try:
        checkpoint.check_config()
        return config_of(checkpoint.config)
    except CheckpointError as problem:
        raise CheckpointError(f"{checkpoint.folder}: {problem}") from None


#: Errors that transformers raises both for bad arguments of from_pretrained and for bad configurations.
_ABOUT_ARGUMENTS = (ValueError, ImportError, OSError, RuntimeError)


@contextmanager
def _transformers_errors(path: Path, has_arguments: bool) -> Iterator[None]:
    """Turns errors of transformers about a configuration into CheckpointError; mistakes of our own stay as they are.

    ``has_arguments`` says whether the caller passed arguments on to ``from_pretrained``, which may be the cause.
    """
    try:
        yield
    except (CpumoeError, MemoryError):
        raise
    except Exception as problem:
        about_arguments = isinstance(problem, _ABOUT_ARGUMENTS) and not isinstance(problem, StrictDataclassError)
        if _is_ours(problem) or (has_arguments and about_arguments):
            raise
        text = f"{problem!r:.500}"
        raise CheckpointError(f"{path}: transformers cannot make a model of config.json: {text}") from problem


def _is_ours(problem: BaseException) -> bool:
    """Whether an exception was raised by this package's own code, so that it is a mistake in it."""
    owner = ""
    for frame, _ in traceback.walk_tb(problem.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("cpumoe", "transformers", "huggingface_hub"):
            owner = package  # the innermost of the three is to blame: PyTorch and others below only do what it asks
    return owner == "cpumoe"
