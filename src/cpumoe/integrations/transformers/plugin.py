"""Quantised checkpoints in transformers, through :func:`load_model` or ``from_pretrained`` after ``import cpumoe``.

Modules that are quantised in the checkpoint are taken out of the model before transformers loads the rest. Then they
are read expert by expert and put back packed; nothing goes through bf16. Float models are in ``float_models.py``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from cpumoe import cpu
from cpumoe.checkpoints.checkpoint import Checkpoint, check_activations, listed, read_json, text_config
from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.formats.compressed_tensors import QuantizationConfig
from cpumoe.checkpoints.hub import find_model
from cpumoe.checkpoints.packed_cache import PackedCache
from cpumoe.errors import CheckpointError, CpumoeError, UnsupportedScheme
from cpumoe.integrations.transformers.attention import ATTENTION, register_attention
from cpumoe.integrations.transformers.decode import speed_up
from cpumoe.integrations.transformers.expert_modules import marks_of
from cpumoe.integrations.transformers.hook import own_reader
from cpumoe.integrations.transformers.int8_cache import hold_caches
from cpumoe.integrations.transformers.model_classes import auto_class_for, config_of, has_plain_attention
from cpumoe.integrations.transformers.module_sources import PackedModule
from cpumoe.integrations.transformers.packed_modules import PendingModule, find_packed_modules, replace_module
from cpumoe.integrations.transformers.saving import keep_names_when_saved, quantization_section, state_dict_for_saving
from cpumoe.integrations.transformers.special_experts import put_packed
from cpumoe.integrations.transformers.stock_quantizer import CURE, guarded
from cpumoe.layers.backends import NativeBackend
from cpumoe.layers.experts import Experts
from cpumoe.layers.scheme import Scheme
from cpumoe.ops.cache_records import check_kv_cache
from cpumoe.parallel.ranks import Ranks

_log = logging.getLogger("cpumoe")

#: The value of ``load_model(scheme=...)`` that leaves the experts of a float checkpoint to transformers.
FLOAT = "float"

DEFAULT_SCHEME = "w4a8-g128"


@dataclass(frozen=True)
class _Options:
    """What ``load_model`` wants of the quantizer. It cannot be passed on directly: transformers makes the quantizer."""

    scheme: Scheme | None = None
    linears: Scheme | None = None
    cache: Path | None = None
    activations: str | None = None
    kv_cache: str | None = None
    leave_experts: bool = False  # to transformers, if the checkpoint has them in float
    ranks: Ranks | None = None  # that the model is spread over
    strict: bool = False  # refuse schemes that are not supported, instead of leaving them to transformers


_options: ContextVar[_Options] = ContextVar("cpumoe_options", default=_Options())  # noqa: B039  # frozen


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
    **options: Any,
) -> PreTrainedModel:
    """Loads a checkpoint folder as a transformers model with packed experts and linears.

    Args:
        path: folder with config.json and safetensors files, or the id of a model in the local hub cache
            (:func:`cpumoe.checkpoints.hub.find_model`; nothing is downloaded).
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
        options: further arguments of ``from_pretrained``.

    Raises CheckpointError if tensors are missing, unexpected or of another shape, and UnsupportedScheme for a scheme
    that is not supported.
    """
    with (ranks or Ranks.alone()).together():  # if one cannot load it, the others do not wait for it
        path = find_model(path)
        if (asked := str(options.get("experts_implementation"))).startswith("cpumoe-"):
            raise ValueError(f"experts_implementation={asked!r} has no effect in load_model; scheme= is what it takes")
        with Checkpoint.open(path) as checkpoint:
            try:
                quantized = checkpoint.quantization is not None
            except UnsupportedScheme as problem:
                raise UnsupportedScheme(f"{path}: {problem}; {CURE}") from None
            chosen_class = auto_class or auto_class_for(_checked_config(checkpoint))
            section = checkpoint.quantization_section
        name = scheme if scheme is not None else (None if quantized else os.environ.get("CPUMOE_SCHEME"))
        if quantized and name is not None:
            raise UnsupportedScheme(f"scheme={str(name)!r} for a checkpoint that is quantised already; leave it out")
        if not quantized and activations is not None:
            raise ValueError(
                f"activations={activations!r} for a float checkpoint, where the scheme says it: scheme='w4a16-g32+int8'"
            )
        packed_experts = None if name is None or name == FLOAT else Scheme.parse(name)
        packed_linears = None if linears is None else Scheme.parse(linears)
        if dtype is None:
            dtype, reason = cpu.float_dtype()
            _log.info("float parts run in %s: %s", dtype, reason)
        # transformers knows the configuration in config.json alone.
        more = {} if quantized and _says_that_it_is_quantized(path) else {"quantization_config": PackedConfig(section)}
        cache_folder = None if cache is None else Path(cache).expanduser()
        chosen = _Options(
            packed_experts,
            packed_linears,
            cache_folder,
            check_activations(activations),
            check_kv_cache(kv_cache),
            leave_experts=not quantized and name == FLOAT,
            ranks=ranks.in_model() if ranks else None,
            strict=True,
        )
        if ranks and chosen.leave_experts:
            raise ValueError(
                f"scheme={FLOAT!r} leaves the experts to transformers, which does not spread them over ranks"
            )
        token = _options.set(chosen)
        try:
            with _transformers_errors(path, bool(options)), _progress_on_terminals(), own_reader():
                model: PreTrainedModel = chosen_class.from_pretrained(
                    path, dtype=dtype, local_files_only=True, **more, **options
                )
            if quantized and not isinstance(getattr(model, "hf_quantizer", None), PackedQuantizer):
                raise CheckpointError(
                    f"{path}: transformers passed over its quantization_config and made up its weights"
                )
            return model
        finally:
            _options.reset(token)


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


# ---- what transformers calls ---------------------------------------------------------------------------------------


class PackedConfig(QuantizationConfigMixin):  # type: ignore[misc]  # untyped base
    """The ``quantization_config`` of a model with packed weights, as it stands in config.json.

    ``from_pretrained(path, quantization_config=cpumoe.PackedConfig(activations="int8"))`` runs a checkpoint that is
    quantised already with other activations, and ``PackedConfig(kv_cache="int8")`` holds keys and values in int8.
    """

    def __init__(
        self, section: dict[str, Any] | None = None, *, activations: str | None = None, kv_cache: str | None = None
    ) -> None:
        self.section = section
        self.quant_method = "compressed-tensors" if section is None else section["quant_method"]
        self.activations = check_activations(activations)
        self.kv_cache = check_kv_cache(kv_cache)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.section or {"quant_method": self.quant_method})

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a caller may ask of a checkpoint that has a configuration of its own."""
        return {"activations": self.activations, "kv_cache": self.kv_cache}


# transformers takes the loading attributes of these classes alone.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, PackedConfig)


def make_config(section: dict[str, Any], stock: Any, **options: Any) -> Any:
    """The configuration object for a checkpoint's ``quantization_config``: ours if we support its scheme."""
    try:
        parse_quantization(section)
    except UnsupportedScheme as problem:
        if _options.get().strict:
            raise UnsupportedScheme(f"{problem}; {CURE}") from None
        _log.warning(
            "cpumoe does not read this checkpoint (%s); transformers' own reader is used, which turns its experts into "
            "floats. For one that cpumoe reads, %s",
            problem,
            CURE,
        )
        return stock.from_dict(section, **options)
    return PackedConfig(section)


def make_quantizer(config: Any, stock: Any, **options: Any) -> HfQuantizer:
    """Our quantizer for a configuration of ours; else that of transformers, with checks around it."""
    return PackedQuantizer(config, **options) if isinstance(config, PackedConfig) else guarded(stock)(config, **options)


def _folder_of(files: list[Path], source: str) -> Path:
    """The folder of the files that transformers found for ``source``, which is a path or a name on the hub.

    An index may name files anywhere, and transformers follows it. Here the first file is checked to be in the folder of
    ``source``, and :class:`Checkpoint` checks that the others are in the same folder.
    """
    home, folder = Path(source), files[0].parent
    if home.is_file():
        home = home.parent
    if home.is_dir():  # accepted is the folder itself, or a subfolder if the caller named one
        inside = folder.is_relative_to(home) and ".." not in folder.relative_to(home).parts
        inside = inside and folder.resolve().is_relative_to(home.resolve())
    else:
        inside = any(p.name == "snapshots" and p.parent.name.startswith("models--") for p in folder.parents)
        inside = inside and ".." not in folder.parts
    if not inside:
        raise CheckpointError(
            f"{files[0]} is not in the folder of {source}; files of the folder itself are accepted in an index"
        )
    return folder


def _agree_on_model(options: _Options, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Raises RankError where another rank loads another model, or the same one in another way."""
    assert options.ranks is not None
    headers = [file.header_digest for file in checkpoint.files]
    contents = hashlib.sha256(json.dumps([checkpoint.config, headers], sort_keys=True).encode()).hexdigest()[:16]
    options.ranks.agree("checkpoint", f"{checkpoint.folder.name} ({contents})")
    said = {name: str(getattr(options, name)) for name in ("scheme", "linears", "kv_cache")}
    said |= {"activations": str(checkpoint.activations), "dtype": str(dtype)}
    options.ranks.agree("way of loading", str(said))


class PackedQuantizer(HfQuantizer):  # type: ignore[misc]  # untyped base
    """Takes the modules that become packed out of a model, and puts them back with their weights."""

    quantization_config: PackedConfig

    def __init__(self, quantization_config: PackedConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._options = _options.get()
        self._packed: dict[str, PackedModule] = {}
        self._checkpoint: Checkpoint | None = None

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        devices = device_map.values() if isinstance(device_map, dict) else [device_map or "cpu"]
        if other := [d for d in devices if str(d) not in ("cpu", "auto")]:
            raise ValueError(f"device_map names {other[0]!r}; packed weights run on 'cpu'")

    def update_device_map(self, device_map: Any) -> Any:
        return {"": "cpu"} if device_map is not None else None

    def update_attn_implementation(self, config: Any) -> Any:
        """Chooses our attention, unless the caller chose one or the model has a special one."""
        if config._attn_implementation is None and has_plain_attention(config):
            config._attn_implementation = ATTENTION
        return config

    def _convert_model_for_quantization(self, model: PreTrainedModel) -> None:
        """Does nothing. transformers would replace Llama 4's experts by a list of dense layers; we need the experts."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        if not checkpoint_files or not all(str(f).endswith(".safetensors") for f in checkpoint_files):
            raise CheckpointError("weights come from safetensors files alone; pickles are never loaded")
        files = [Path(f) for f in checkpoint_files]
        folder = _folder_of(files, model.name_or_path)
        # A model may be a part of the one that config.json describes.
        config = read_json(folder / "config.json") if (folder / "config.json").exists() else model.config.to_dict()
        config = config | {"quantization_config": self.quantization_config.section}
        self._checkpoint = Checkpoint(folder, config, files, self._activations())
        options = self._options
        if options.ranks is not None:
            _agree_on_model(options, self._checkpoint, model.dtype)
        with torch.device("cpu"):  # the default is that of weights which are not loaded yet
            found = find_packed_modules(
                model,
                self._checkpoint,
                options.scheme,
                options.linears,
                leave_experts=options.leave_experts,
                implementation=getattr(model.config, "_experts_implementation", None),
                ranks=options.ranks,
            )
        for name, packed in found.items():
            marks = marks_of(model.get_submodule(name))
            if marks is None:
                replace_module(model, name, PendingModule())
                model.all_tied_weights_keys.pop(f"{name}.weight", None)
            else:
                # Some classes initialise the experts of a block with the block. All tensors are known to be there.
                model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True
                for pair in list(model.all_tied_weights_keys.items()):
                    if any(one.startswith(f"{name}.") for one in pair):
                        del model.all_tied_weights_keys[pair[0]]
                name = put_packed(model, name, marks, PendingModule())
            self._packed[name] = packed
        self._refuse_incomplete(model)

    def _activations(self) -> str | None:
        """The activations that were asked for: by the caller, else by the environment."""
        if self.quantization_config.section is None:  # a float checkpoint, whose scheme says it
            return None
        asked = self._options.activations or self.quantization_config.activations
        return asked if asked is not None else os.environ.get("CPUMOE_ACTIVATIONS")

    def _refuse_incomplete(self, model: PreTrainedModel) -> None:
        """Makes missing tensors an error: transformers makes them up. Unexpected ones were refused before."""
        stock = model._adjust_missing_and_unexpected_keys
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

        def checked(info: Any) -> None:
            info.unexpected_keys = set()
            stock(info)
            loaded = model.state_dict()
            wrong = [
                f"{name} {list(loaded[name].shape)} for {list(shape)}"
                for name, shape in shapes.items()
                if name in loaded and loaded[name].shape != shape
            ]
            kinds = (("missing", info.missing_keys), ("of another shape", wrong))
            parts = [f"{len(names)} {kind}: {listed(sorted(names))}" for kind, names in kinds if names]
            if parts:
                assert self._checkpoint is not None
                self._checkpoint.close()
                folder = self._checkpoint.folder
                raise CheckpointError(f"{folder}: the checkpoint does not fit the model; tensors " + "; ".join(parts))

        model._adjust_missing_and_unexpected_keys = checked

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        assert self._checkpoint is not None  # it was opened before the weights were loaded
        del model._adjust_missing_and_unexpected_keys
        try:
            self._load_packed(model, self._checkpoint)
        finally:
            self._checkpoint.close()
        kv_cache = self._options.kv_cache or self.quantization_config.kv_cache
        if self._packed:
            model.requires_grad_(False)  # there is no gradient through packed weights
            speed_up(model)
        if self._packed or kv_cache is not None:
            hold_caches(model, kv_cache)
        if not self._packed and self.quantization_config.section is None and self._options.linears is None:
            self.remove_quantization_config(model)  # a float model was asked for
        elif (
            self.quantization_config.section is None or self._options.linears is not None
        ) and not self._options.ranks:
            self.describe(model)
        self._packed, self._checkpoint = {}, None  # lets go of the files, which a copy of the model must not copy

    def describe(self, model: PreTrainedModel) -> None:
        """Makes the configuration that of the model as it is. A float model whose experts are packed has none."""
        section = quantization_section(model, self.quantization_config.section)
        self.quantization_config.section = section
        if section is not None:
            model.config.quantization_config = self.quantization_config
        elif hasattr(model.config, "quantization_config"):
            del model.config.quantization_config

    def _load_packed(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        cache = None
        if self._options.cache is not None:
            experts = FLOAT if self._options.leave_experts else self._options.scheme
            names = {"scheme": experts, "linears": self._options.linears}
            options = {key: None if value is None else str(value) for key, value in names.items()}
            options["activations"] = checkpoint.activations
            if (ranks := self._options.ranks) is not None:
                options["rank"] = repr(ranks.layout)
            cache = PackedCache(self._options.cache, checkpoint, options)
        modules = {} if cache is None else self._restored(cache)
        made: dict[str, Tensor] = {}
        native = True
        for name, packed in tqdm(self._packed.items(), desc="Packing", unit="module", disable=None):
            if self._options.ranks is not None:
                self._options.ranks.check()  # it may take long
            if name not in modules:
                modules[name] = module = packed.load()
                native &= not isinstance(module, Experts) or isinstance(module.backend, NativeBackend)
                made |= {f"{name}.{key}": buffer for key, buffer in module.named_buffers()}
            replace_module(model, name, modules[name])
        checkpoint.refuse_changed()
        if cache is not None and made:
            if not native:
                _log.warning("nothing was written to the packed cache: it is for weights of the native backend")
                return
            try:
                cache.store(made)
            except OSError as problem:
                _log.warning("the packed cache %s could not be written: %s", cache.path, problem)

    def _restored(self, cache: PackedCache) -> dict[str, nn.Module]:
        """All modules from the cache, or none of them if one cannot be made from it."""
        cached = cache.load()
        if cached is None:
            return {}
        expected = {f"{name}.{key}" for name, packed in self._packed.items() for key in packed.tensor_names}
        try:
            if differing := sorted(expected ^ {name for name, t in cached.items() if t.dtype == torch.uint8}):
                raise ValueError(f"{differing[0]} is missing or not expected")
            return {
                name: packed.restore({key: cached[f"{name}.{key}"] for key in packed.tensor_names})
                for name, packed in self._packed.items()
            }
        except ValueError as problem:
            _log.warning("%s is damaged (%s) and will be replaced", cache.path, problem)
            return {}

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        if self._options.ranks is not None:
            raise ValueError("this model is spread over ranks, of which none could save all of it; load it on one rank")
        keep_names_when_saved(model)
        self.describe(model)
        section = self.quantization_config.section
        return state_dict_for_saving(model, None if section is None else QuantizationConfig.parse(section)), {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


register_attention()
