"""Quantised checkpoints in transformers: what ``from_pretrained`` calls, after ``import cpumoe`` or in ``load_model``.

Modules that are quantised in the checkpoint are taken out of the model before transformers loads the rest. Then they
are read expert by expert and put back packed; nothing goes through bf16. Float models are in ``float_models.py``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from cpumoe import settings
from cpumoe.checkpoints.checkpoint import Checkpoint, check_activations, read_json
from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.formats.compressed_tensors import QuantizationConfig
from cpumoe.checkpoints.named_tensors import listed
from cpumoe.checkpoints.packed_cache import PackedCache
from cpumoe.crowding import fewer_threads_when_crowded, make_room
from cpumoe.errors import CheckpointError, NotEnoughMemory, UnsupportedScheme
from cpumoe.integrations.transformers.adapter import explanation
from cpumoe.integrations.transformers.int8_cache import chosen_kv_cache, hold_caches
from cpumoe.integrations.transformers.layout.expert_modules import marks_of
from cpumoe.integrations.transformers.layout.model_classes import has_plain_attention
from cpumoe.integrations.transformers.loading.install import speed_up
from cpumoe.integrations.transformers.loading.load_memory import WeightBytes, refuse_too_large, weight_bytes
from cpumoe.integrations.transformers.loading.module_sources import PackedModule
from cpumoe.integrations.transformers.loading.packed_modules import PendingModule, find_packed_modules, forget_ties
from cpumoe.integrations.transformers.loading.saving import (
    keep_names_when_saved,
    quantization_section,
    state_dict_for_saving,
)
from cpumoe.integrations.transformers.loading.special_experts import put_packed
from cpumoe.integrations.transformers.loading.stock_quantizer import CURE, guarded
from cpumoe.integrations.transformers.loading.unmapped_files import read_unmapped
from cpumoe.integrations.transformers.replacements.attention import ATTENTION, register_attention
from cpumoe.layers.backends import NativeBackend
from cpumoe.layers.experts import Experts
from cpumoe.layers.scheme import FLOAT, Scheme
from cpumoe.ops.cache_records import check_kv_cache
from cpumoe.parallel.ranks import Ranks

_log = logging.getLogger("cpumoe")


@dataclass(frozen=True)
class LoadOptions:
    """What ``load_model`` wants of the quantizer. It cannot be passed on directly: transformers makes the quantizer."""

    scheme: Scheme | None = None
    linears: Scheme | None = None
    cache: Path | None = None
    activations: str | None = None
    kv_cache: str | None = None
    leave_experts: bool = False  # to transformers, if the checkpoint has them in float
    ranks: Ranks | None = None  # that the model is spread over
    reserve_bytes: int | None = None  # memory that has to be left; see load_memory.py
    strict: bool = False  # refuse schemes that are not supported, instead of leaving them to transformers


load_options: ContextVar[LoadOptions] = ContextVar("cpumoe_options", default=LoadOptions())  # noqa: B039  # frozen


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
        if load_options.get().strict:
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


def _agree_on_model(options: LoadOptions, kv_cache: str | None, checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Raise RankError if another rank loads another model, or the same one with another setting that results depend on.

    Settings that change nothing but speed may differ: threads, NUMA, the packed cache.
    """
    assert options.ranks is not None
    headers = [file.header_digest for file in checkpoint.files]
    contents = hashlib.sha256(json.dumps([checkpoint.config, headers], sort_keys=True).encode()).hexdigest()[:16]
    options.ranks.agree("checkpoint", f"{checkpoint.folder.name} ({contents})")
    chosen = {
        "scheme": options.scheme,
        "linears": options.linears,
        "activations": checkpoint.activations,
        "kv_cache": chosen_kv_cache(kv_cache)[1],
        "dtype": model.dtype,
        "attn_implementation": model.config._attn_implementation,
        settings.NATIVE_DECODER.name: int(settings.NATIVE_DECODER.is_on()),
        "transformers": transformers.__version__,
    }
    options.ranks.agree("way of loading", *(f"{name}={value}" for name, value in chosen.items()))


class PackedQuantizer(HfQuantizer):  # type: ignore[misc]  # untyped base
    """Takes the modules that become packed out of a model, and puts them back with their weights."""

    quantization_config: PackedConfig

    def __init__(self, quantization_config: PackedConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._options = load_options.get()
        self._packed: dict[str, PackedModule] = {}
        self._checkpoint: Checkpoint | None = None
        self._cache: PackedCache | None = None
        self._weights = WeightBytes()

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
        read_unmapped(self._checkpoint.files)
        options = self._options
        if options.ranks is not None:
            _agree_on_model(options, self._kv_cache(), self._checkpoint, model)
        with torch.device("cpu"):  # the default is that of weights which are not loaded yet
            if use := self._checkpoint.kv_cache_use(chosen_kv_cache(self._kv_cache())[1]):
                _log.warning("%s: %s", folder, use)
            layout, found = find_packed_modules(
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
                model.set_submodule(name, PendingModule())
            else:
                # Some classes initialise the experts of a block with the block. All tensors are known to be there.
                model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True
                name = put_packed(model, name, marks, PendingModule())
            self._packed[name] = packed
        forget_ties(model)
        self._cache = self._packed_cache(self._checkpoint)
        is_cached = self._cache is not None and self._cache.is_current()
        self._weights = weight_bytes(model, self._checkpoint, layout, self._packed.values(), is_cached=is_cached)
        try:
            refuse_too_large(folder, self._weights, options.reserve_bytes, options.ranks)
        except NotEnoughMemory:
            self._checkpoint.close()
            raise
        self._refuse_incomplete(model)

    def _activations(self) -> str | None:
        """The activations that were asked for: by the caller, else by the environment."""
        if self.quantization_config.section is None:  # a float checkpoint, whose scheme says it
            return None
        asked = self._options.activations or self.quantization_config.activations
        return asked if asked is not None else settings.ACTIVATIONS.get()

    def _kv_cache(self) -> str | None:
        """The dtype of the KV cache that the caller asked for."""
        return self._options.kv_cache or self.quantization_config.kv_cache

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
        kv_cache = self._kv_cache()
        if self._packed:
            model.requires_grad_(False)  # there is no gradient through packed weights
            speed_up(model)
        if self._packed or kv_cache is not None:
            hold_caches(model, kv_cache)
        if self._options.ranks is not None:  # steps of another form exchange other messages
            self._options.ranks.agree("form of steps", explanation(model).partition(":")[0])
        if not self._packed and self.quantization_config.section is None and self._options.linears is None:
            self.remove_quantization_config(model)  # a float model was asked for
        elif (
            self.quantization_config.section is None or self._options.linears is not None
        ) and not self._options.ranks:
            try:
                self.describe(model)
            except UnsupportedScheme as problem:  # no file can hold it, but it runs
                if not self._packed:
                    raise
                _log.warning("this model cannot be saved: %s", problem)
        self._packed, self._checkpoint, self._cache = (
            {},
            None,
            None,
        )  # lets go of the files, which a copy of the model must not copy

    def describe(self, model: PreTrainedModel) -> None:
        """Makes the configuration that of the model as it is. A float model whose experts are packed has none."""
        section = quantization_section(model, self.quantization_config.section)
        self.quantization_config.section = section
        if section is not None:
            model.config.quantization_config = self.quantization_config
        elif hasattr(model.config, "quantization_config"):
            del model.config.quantization_config

    def _packed_cache(self, checkpoint: Checkpoint) -> PackedCache | None:
        """The cache of packed weights that was asked for."""
        if self._options.cache is None:
            return None
        experts = FLOAT if self._options.leave_experts else self._options.scheme
        names = {"scheme": experts, "linears": self._options.linears}
        options = {key: None if value is None else str(value) for key, value in names.items()}
        options["activations"] = checkpoint.activations
        if self._options.ranks is not None:
            options["rank"] = repr(self._options.ranks.layout)
        return PackedCache(self._options.cache, checkpoint, options)

    def _load_packed(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        cache = self._cache
        modules = {} if cache is None else self._restored(cache)
        ranks = self._options.ranks or Ranks.alone()
        # What a damaged cache has is packed anew instead of mapped. All ranks check, because they share memory.
        is_damaged = not modules and self._weights.cached > 0
        if any(damaged for (damaged,) in ranks.gather_numbers([int(is_damaged)])):
            again = WeightBytes(self._weights.packed if is_damaged else 0)
            refuse_too_large(checkpoint.folder, again, self._options.reserve_bytes, self._options.ranks)
        made: dict[str, Tensor] = {}
        native = True
        with ranks.long_work(), fewer_threads_when_crowded():
            for name, packed in tqdm(self._packed.items(), desc="Packing", unit="module", disable=None):
                ranks.check()
                make_room()
                if name not in modules:
                    modules[name] = module = packed.load()
                    native &= not isinstance(module, Experts) or isinstance(module.backend, NativeBackend)
                    made |= {f"{name}.{key}": buffer for key, buffer in module.named_buffers()}
                model.set_submodule(name, modules[name])
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
