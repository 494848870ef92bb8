"""Describes a transformers model and where a checkpoint has its tensors, from the model itself and names in the files.

No table of models is asked: experts are found by their class's marks, names by transformers' own renamings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from cpumoe.checkpoints.checkpoint import LAYER, Checkpoint
from cpumoe.checkpoints.formats import QUANTIZED_SUFFIXES
from cpumoe.checkpoints.layer_names import prediction_layers
from cpumoe.checkpoints.model_layout import ExpertsLayout, ExpertsShape, LinearPlace, ModelLayout, TensorPlace
from cpumoe.checkpoints.storage import StoredTensor
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.integrations.transformers.layout.disk_names import DiskNames
from cpumoe.integrations.transformers.layout.expert_modules import (
    ExpertsModule,
    Role,
    describe_experts,
    expert_modules,
    experts_per_token,
)
from cpumoe.integrations.transformers.layout.expert_places import ExpertPlaces
from cpumoe.integrations.transformers.layout.model_classes import config_of, empty_model

#: Far above any model: without it a config.json that lies makes us list all its experts first.
_MOST_EXPERTS = 1 << 18

#: Suffixes of tensors that have all experts of a layer in one, behind the name of the parameter.
_FUSED_SUFFIX = re.compile(r"_(blocks|scales)$")


def describe_model(model: PreTrainedModel, checkpoint: Checkpoint) -> ModelLayout:
    """What a model has and where the files of a checkpoint have it. Its weights may be on the meta device.

    Raises UnsupportedScheme for experts that are not served, CheckpointError for files in which nothing fits.
    """
    modules = {name: describe_experts(module) for name, module in expert_modules(model)}
    if (count := sum(kind.shape.expert_count for kind in modules.values())) > _MOST_EXPERTS:
        raise CheckpointError(f"config.json announces {count} experts; up to {_MOST_EXPERTS} are accepted")
    suffixes = _quantized_suffixes(checkpoint)
    in_float = {name: _float_name(name, suffixes) for name in checkpoint.names}
    shapes = {name: checkpoint.info(name).shape for name, same in in_float.items() if name == same}
    names = DiskNames(model, set(in_float.values()))
    places = ExpertPlaces(names, shapes, modules)
    experts = tuple(
        places.layout(name, experts_per_token(model, name, kind.shape.expert_count)) for name, kind in modules.items()
    )
    linears, tensors = _other_places(model, names, modules)
    placed: dict[str, str] = {}  # tensor, as if it were in float -> the module whose it is
    for layout in experts:
        for tensor in _tensors_of(layout):
            placed.setdefault(tensor, layout.module)
    homeless = {*names.unplaced, *_of_other_experts(names, modules)} - placed.keys()
    homeless -= {f"{name}.bias" for name in linears}  # a tool may have added zeros: the check of the linear tells
    unknown = [name for name, same in in_float.items() if same in homeless]
    known_scales = _kv_cache_scales(checkpoint)
    scales = {name: known_scales[name] for name in unknown if name in known_scales}
    left_out = {*_left_out(model, checkpoint, names, in_float, unknown), *_of_identities(names, modules, placed)}
    left_out |= scales.keys()
    text = model.config.get_text_config()
    return ModelLayout(
        text.model_type,
        getattr(text, "num_hidden_layers", None),
        getattr(text, "hidden_size", None),
        experts,
        linears,
        tensors,
        frozenset(_routers(linears, tensors, modules)),
        frozenset(left_out),
        tuple(name for name in unknown if name not in left_out),
        {name: placed[same] for name, same in in_float.items() if same in placed},
        scales,
    )


def describe_checkpoint(checkpoint: Checkpoint) -> ModelLayout:
    """What the model of a checkpoint has, and where: that of the class that ``load_model`` takes."""
    with _naming_folder(checkpoint):
        return describe_model(_model_of(checkpoint), checkpoint)


def shapes_of_experts(checkpoint: Checkpoint) -> frozenset[ExpertsShape]:
    """The shapes of the experts that the model of a checkpoint has."""
    with _naming_folder(checkpoint):
        return frozenset(describe_experts(module).shape for _, module in expert_modules(_model_of(checkpoint)))


def _model_of(checkpoint: Checkpoint) -> PreTrainedModel:
    checkpoint.check_config()
    return empty_model(config_of(checkpoint.config))


@contextmanager
def _naming_folder(checkpoint: Checkpoint) -> Iterator[None]:
    """Adds the folder to what is wrong with a checkpoint."""
    try:
        yield
    except CheckpointError as problem:
        text = str(problem)
        raise CheckpointError(text if str(checkpoint.folder) in text else f"{checkpoint.folder}: {text}") from None


def _routers(
    linears: Mapping[str, LinearPlace], tensors: Mapping[str, TensorPlace], modules: Mapping[str, ExpertsModule]
) -> Iterator[str]:
    """Names in the files of what chooses or weighs experts."""
    blocks = [(name.rpartition(".")[0], kind.shape.expert_count) for name, kind in modules.items()]

    def is_beside(target: str, shape: tuple[int, ...]) -> bool:
        return any(_is_routing(target, shape, block, count) for block, count in blocks)

    for name, linear in linears.items():
        if is_beside(f"{linear.module}.weight", (linear.rows, linear.columns)):
            yield f"{name}.weight"
            yield f"{name}.bias"
    for name, tensor in tensors.items():
        if is_beside(tensor.target, tensor.shape or ()):
            yield name


_ROUTER = re.compile(r"(\w+_)?(gate|router)")


def _is_routing(target: str, shape: tuple[int, ...], block: str, expert_count: int) -> bool:
    """Whether a tensor beside experts chooses or weighs them: a number for each, or a matrix with a row for each.

    A matrix with one row weighs shared experts. Shared experts may have as many rows as there are experts, so that what
    is a router is told by a part of its name too.
    """
    if not target.startswith(f"{block}."):
        return False
    if len(shape) == 1:
        return shape[0] == expert_count
    parts = target.removeprefix(f"{block}.").split(".")
    return len(shape) == 2 and shape[0] in (1, expert_count) and any(map(_ROUTER.fullmatch, parts))


def _quantized_suffixes(checkpoint: Checkpoint) -> frozenset[str]:
    """Suffixes of the tensors that quantised linears have, where this checkpoint's are of a kind that is served."""
    with suppress(UnsupportedScheme, CheckpointError):
        if (quantization := checkpoint.quantization) is not None:
            return QUANTIZED_SUFFIXES | quantization.suffixes
    return QUANTIZED_SUFFIXES


def _kv_cache_scales(checkpoint: Checkpoint) -> Mapping[str, StoredTensor]:
    """The scales of a quantised KV cache, where this checkpoint is of a kind that is served."""
    with suppress(UnsupportedScheme, CheckpointError):
        return checkpoint.kv_cache_scales
    return {}


def _float_name(name: str, suffixes: frozenset[str]) -> str:
    """The name that a tensor of a quantised linear or of quantised experts stands for: that of the weight in float."""
    module, _, suffix = name.rpartition(".")
    if suffix not in suffixes:
        return name
    return _FUSED_SUFFIX.sub("", name) if _FUSED_SUFFIX.search(suffix) else f"{module}.weight"


def _of_identities(names: DiskNames, modules: Mapping[str, ExpertsModule], placed: Container[str]) -> Iterator[str]:
    """Weights that files may have for experts which are the token itself."""
    for name, kind in modules.items():
        if kind.marks.role is Role.WITH_IDENTITIES:
            yield from (n for p in kind.parameters for n in names.sources_of(f"{name}.{p}") if n not in placed)


def _of_other_experts(names: DiskNames, modules: Mapping[str, ExpertsModule]) -> Iterator[str]:
    """Tensors that transformers would merge into experts, of which some may be too many or there twice."""
    for name, kind in modules.items():
        if kind.marks.role is not Role.WITH_IDENTITIES:  # files may have weights for these, which no one reads
            for parameter in kind.parameters:
                yield from names.sources_of(f"{name}.{parameter}")


def _tensors_of(layout: ExpertsLayout) -> Iterator[str]:
    """Names that the tensors of experts may have in the files, as if they were in float."""
    if layout.fused is not None:
        for matrix in (layout.fused.gate_up, layout.fused.down):
            yield from (*matrix.tensors, *matrix.biases)
        return
    for linears in layout.linears:
        for linear in linears:
            yield f"{linear}.weight"
            yield f"{linear}.bias"  # zeros that a tool adds, or one that the check refuses


# ---- linears and other tensors -------------------------------------------------------------------------------------


def _other_places(
    model: PreTrainedModel, names: DiskNames, modules: Mapping[str, ExpertsModule]
) -> tuple[dict[str, LinearPlace], dict[str, TensorPlace]]:
    """Linears and other tensors of a model, by their names in the files."""
    tied = getattr(model, "all_tied_weights_keys", {})
    of_experts = {f"{name}.{parameter}" for name, kind in modules.items() for parameter in kind.parameters}
    guess = _Guess(names)
    linears: dict[str, LinearPlace] = {}
    done: set[str] = set()
    counts = {name: kind.shape.expert_count for name, kind in modules.items()}
    packable = set(packable_linears(model, counts))
    for name, module in linear_modules(model):
        target = f"{name}.weight"
        if target in names.made:
            continue  # transformers makes it with a converter: it stays in float
        disk = names.direct[target].removesuffix(".weight") if target in names.direct else guess.name(name)
        is_tied = target in tied and target not in names.direct
        source = _stored_name(names, guess, tied[target]) if is_tied else f"{disk}.weight"
        has_bias = module.bias is not None
        linears[disk] = LinearPlace(
            name, module.out_features, module.in_features, has_bias, source, is_tied, name in packable
        )
        done |= {target, f"{name}.bias"}
    tensors: dict[str, TensorPlace] = {}
    optional = _pattern(model._keys_to_ignore_on_load_missing)
    for target, tensor in model.state_dict().items():
        if target in done or target in of_experts:
            continue
        is_float = tensor.is_floating_point()
        if target in names.made:
            tensors |= {source: TensorPlace(target, None, is_float) for source in names.sources_of(target)}
        elif target in names.direct:
            tensors[names.direct[target]] = TensorPlace(target, names.shape_of(target), is_float)
        elif target not in tied and not (optional and optional.search(target)):
            tensors[guess.name(target)] = TensorPlace(target, names.shape_of(target), is_float)
    return linears, tensors


def linear_modules(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Linears that are nothing else: subclasses that compute something of their own are left alone."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            yield name, module


def packable_linears(model: PreTrainedModel, experts: Mapping[str, int]) -> Iterator[str]:
    """Linears of the language model that may be packed: no routers, and none whose weight is taken without a call.

    ``experts``: modules with experts, and how many each has. Without any, all linears belong to the language model but
    those with "vision" in their names.
    """
    layers = tuple({match[1] for name in experts if (match := LAYER.match(name))})
    blocks = [(name.rpartition(".")[0], count) for name, count in experts.items()]
    head = model.get_output_embeddings()
    for name, module in linear_modules(model):
        parent, _, attribute = name.rpartition(".")
        is_inside = module is head or (name.startswith(layers) if layers else "vision" not in name)
        if not is_inside or any(_is_routing(name, tuple(module.weight.shape), *block) for block in blocks):
            continue
        if not _takes_weight(cast("Any", type(model.get_submodule(parent))), attribute):
            yield name


@cache
def _takes_weight(owner: Any, attribute: str) -> bool:
    """Whether the code of a module takes the weight of one of its linears: its dtype, or all of it without a call.

    Code for GPUs takes the weights of linears that it also has calls of.
    """
    try:
        source = inspect.getsource(owner)
    except (OSError, TypeError):
        return False
    name = rf"\bself\.{re.escape(attribute)}"
    is_called = re.search(rf"{name}\(", source) is not None
    return re.search(rf"{name}\.weight\." if is_called else rf"{name}\.weight\b", source) is not None


def _stored_name(names: DiskNames, guess: _Guess, target: str) -> str:
    return names.direct[target] if target in names.direct else guess.name(target)


class _Guess:
    """What files would call a tensor of the model that they do not have, after the model of those that they have."""

    def __init__(self, names: DiskNames) -> None:
        self._pairs: dict[str, str] = {}  # what layers start with in the model -> in the files
        for target, disk in names.direct.items():
            in_model, in_files = LAYER.match(target), LAYER.match(disk)
            if in_model and in_files and in_model[2] == in_files[2]:
                self._pairs.setdefault(in_model[1], in_files[1])

    def name(self, target: str) -> str:
        for in_model, in_files in self._pairs.items():
            if target.startswith(in_model):
                return in_files + target.removeprefix(in_model)
            root = _root(in_model)
            if root and target.startswith(root):
                return _root(in_files) + target.removeprefix(root)
        wrapper = next((f.removesuffix(m) for m, f in self._pairs.items() if f.endswith(m)), "")
        return wrapper + target


# ---- what is rightly not loaded --------------------------------------------------------------------------------------


def _left_out(
    model: PreTrainedModel, checkpoint: Checkpoint, names: DiskNames, in_float: Mapping[str, str], unknown: list[str]
) -> Iterator[str]:
    """Tensors that the model does not have and need not have.

    Those are what transformers passes over by name, further parts of a model of which this is the language model, and
    layers that predict further tokens. A layer behind the last one is none of these, whatever transformers makes of its
    number.
    """
    passed_over = _pattern(model._keys_to_ignore_on_load_unexpected)
    predicting = prediction_layers(checkpoint)
    layer_count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    root, is_part = _root_in_files(names), checkpoint.config.get("model_type") != model.config.model_type
    for name in unknown:
        renamed = names.unplaced.get(in_float[name], name)
        layer = LAYER.match(name)
        behind = layer is not None and isinstance(layer_count, int) and int(layer[2]) >= layer_count
        if name.startswith(predicting) or re.search(r"rotary_emb\.inv_freq$|(^|\.)position_ids$", name):
            yield name
        elif behind and layer is not None and _root(layer[1]) == root:
            continue
        elif (passed_over is not None and passed_over.search(renamed)) or (
            is_part and not name.startswith((root, f"{root.removesuffix('model.')}lm_head."))
        ):
            yield name


def _root_in_files(names: DiskNames) -> str:
    """What the names of the language model start with in the files, up to its layers."""
    for target, disk in names.direct.items():
        if LAYER.match(target) and (match := LAYER.match(disk)):
            return _root(match[1])
    return ""


def _root(layers: str) -> str:
    """What the names of a model start with, of which ``layers`` is what those of its layers start with."""
    return layers.rstrip(".").rpartition(".")[0] + "." if "." in layers.rstrip(".") else ""


def _pattern(patterns: Iterable[str] | None) -> re.Pattern[str] | None:
    return re.compile("|".join(f"({p})" for p in patterns)) if patterns else None
