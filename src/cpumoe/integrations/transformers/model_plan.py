"""Which modules of a transformers model become packed, and where their weights are in the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from cpumoe.checkpoints.architectures import ARCHITECTURES, Architecture, ExpertsFacts, known_architecture, text_config
from cpumoe.checkpoints.checkpoint import LAYER, Checkpoint, TensorCheck
from cpumoe.checkpoints.expert_sources import ExpertSource
from cpumoe.checkpoints.layer_names import check_layers_behind, layers_prefix, prediction_layers
from cpumoe.checkpoints.linear_sources import LinearSource, is_tied_away
from cpumoe.checkpoints.loading import FITS_ALL_SIZES, check_experts, find_experts, load_experts
from cpumoe.checkpoints.storage import StoredTensor
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import Scheme

_log = logging.getLogger("cpumoe")

_ELEMENTS_AT_ONCE = 4 << 20  # quantised at once: each goes through fp32 with several temporaries


@dataclass(frozen=True)
class PackedModule:
    """One module to be replaced: how to load it, and how to make it again from its packed tensors."""

    load: Callable[[], nn.Module]
    restore: Callable[[dict[str, Tensor]], nn.Module]


class Pending(nn.Module):
    """Stands for a module whose weights are still on disk; transformers has nothing to load or initialise in it."""

    def forward(self, *_: object, **__: object) -> None:
        raise RuntimeError("the weights of this module were not loaded")


@dataclass
class ModelPlan:
    """What to do with a model: module name -> its packed replacement, and the names of files' tensors used for that.

    ``left_out``: what the names of those tensors start with that are rightly in the files and not in the model.
    """

    modules: dict[str, PackedModule] = field(default_factory=dict)
    tensors: set[str] = field(default_factory=set)
    left_out: tuple[str, ...] = ()

    def accounts_for(self, tensor: str) -> bool:
        """Whether a tensor that transformers did not expect belongs to a packed module, or may be left out."""
        parts = tensor.split(".")
        inside = any(".".join(parts[:end]) in self.modules for end in range(1, len(parts)))
        return inside or tensor in self.tensors or tensor.startswith(self.left_out)


def model_architecture(model: nn.Module) -> Architecture | None:
    """The row of the table for a transformers model."""
    return known_architecture(model.config.to_dict())  # type: ignore[union-attr, operator]  # it has a configuration


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def expert_modules(model: nn.Module, architecture: Architecture) -> Iterator[str]:
    """Names of the modules that hold the routed experts of a layer."""
    for name, _ in model.named_modules():
        if name.endswith("." + architecture.experts_paths[0]):
            yield name


def float_linears(model: nn.Module, architecture: Architecture | None) -> Iterator[tuple[str, nn.Linear]]:
    """The linears that may be quantised: routers are not among them, nor anything outside the language model."""
    routers = () if architecture is None else architecture.unquantized
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(routers) and "vision" not in name:
            yield name, module


def plan_model(model: nn.Module, checkpoint: Checkpoint, scheme: Scheme | None, linears: Scheme | None) -> ModelPlan:
    """Finds the weights of all modules that will be packed, and checks them before any is read.

    Args:
        model: on the meta device.
        scheme: what to quantise float experts to; None leaves them.
        linears: what to quantise float linears to; None leaves them.
    """
    config = text_config(model.config.to_dict())  # type: ignore[union-attr, operator]  # a transformers model has one
    architecture = known_architecture(config)
    to_disk = _disk_names(model, checkpoint)
    check = TensorCheck(checkpoint)
    plan = ModelPlan()
    prefixes: list[str] = []
    if architecture is not None:
        facts = architecture.facts(config)
        sources: dict[str, ExpertSource] = {}
        for name in expert_modules(model, architecture):
            source = find_experts(checkpoint, architecture, to_disk(name), facts, scheme)
            if source is None:
                if checkpoint.quantization is not None:
                    _log.warning("%s is in float in this quantised checkpoint, and stays so", name)
                _check_float_experts(check, checkpoint, architecture, to_disk(name), facts)
            else:
                sources[to_disk(name)] = source
                plan.modules[name] = _experts(source)
        check_experts(architecture, sources, check)
    elif (scheme or checkpoint.quantization) and any(n.endswith(".experts") for n, _ in model.named_modules()):
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"model_type {config.get('model_type')!r} is not known; known are {known}")
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, module in float_linears(model, architecture):
        disk = to_disk(name)
        source_of_weight = to_disk(tied.get(f"{name}.weight", f"{name}.weight"))
        packed = _linear(checkpoint, disk, module, linears, source_of_weight, check)
        if packed is not None:
            prefixes.append(f"{disk}.")
            plan.modules[name] = packed
    check.nothing_else_under(*prefixes)
    plan.tensors = set(check.expected)
    plan.left_out = _left_out(model, checkpoint)
    check_layers_behind(checkpoint, check)
    # transformers does not look at the shapes and dtypes of what it loads into a quantised model.
    for name, tensor in model.state_dict().items():
        for disk in _spellings(architecture, to_disk(name)):
            if disk in checkpoint and disk not in plan.tensors and tensor.is_floating_point():
                check.expect(disk, StoredTensor(FLOAT_DTYPES, tuple(tensor.shape)))
    check.raise_problems()
    return plan


def _spellings(architecture: Architecture | None, name: str) -> list[str]:
    """A name of transformers as files may have it: what is beside the experts, their router, is renamed with them."""
    if architecture is None:
        return [name]
    first, *others = (path.rpartition(".")[0] for path in architecture.experts_paths)
    return [name, *(name.replace(f".{first}.", f".{other}.", 1) for other in others if f".{first}." in name)]


def _check_float_experts(
    check: TensorCheck, checkpoint: Checkpoint, architecture: Architecture, module: str, facts: ExpertsFacts
) -> None:
    """Experts that stay in float are read by transformers, which does not name what it lacks."""
    source = find_experts(checkpoint, architecture, module, facts, FITS_ALL_SIZES)
    assert source is not None  # there is a scheme
    source.check(check)


def _left_out(model: nn.Module, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Parts of the files that the model does not have: images, and layers that predict further tokens."""
    layers = layers_prefix(checkpoint)
    parts = list(prediction_layers(checkpoint))
    in_model = {name.partition(".")[0] for name, _ in model.named_modules()}
    if layers.partition(".")[0] not in in_model:  # the language model alone, out of a larger one
        on_disk = {name.partition(".")[0] for name in checkpoint.names}
        parts += [f"{part}." for part in on_disk - in_model - {layers.partition(".")[0]}]
    return tuple(parts)


def _disk_names(model: nn.Module, checkpoint: Checkpoint) -> Callable[[str], str]:
    """From names in the model to names in the files: they differ where the language model is part of a larger one."""
    in_model = next((m[1] for name, _ in model.named_modules() if (m := LAYER.match(name))), "")
    on_disk = layers_prefix(checkpoint)
    wrapper = on_disk.removesuffix(in_model) if on_disk.endswith(in_model) else ""

    def to_disk(name: str) -> str:
        if name.startswith(in_model):
            return on_disk + name.removeprefix(in_model)
        return wrapper + name

    return to_disk


def _experts(source: ExpertSource) -> PackedModule:
    activation = source.config.activation

    def restore(tensors: dict[str, Tensor]) -> nn.Module:
        return Experts.from_packed(**tensors, activation=activation)

    return PackedModule(lambda: load_experts(source), restore)


def _linear(
    checkpoint: Checkpoint,
    disk: str,
    module: nn.Linear,
    linears: Scheme | None,
    source_of_weight: str,
    check: TensorCheck,
) -> PackedModule | None:
    rows, columns, has_bias = module.out_features, module.in_features, module.bias is not None

    def restore(tensors: dict[str, Tensor]) -> nn.Module:
        return QuantizedLinear(**tensors)

    storage = None if checkpoint.quantization is None else checkpoint.quantization.storage_of(disk)
    tied = source_of_weight != f"{disk}.weight"
    if storage is not None and not (tied and is_tied_away(checkpoint, disk, storage)):
        source = LinearSource(checkpoint, disk, rows, columns, storage, has_bias)
        source.check(check)
        return PackedModule(source.load, restore)
    if linears is None:
        return None
    try:
        linears.check_inputs(columns, disk)
    except UnsupportedScheme as problem:
        _log.warning("left in float: %s", problem)
        return None
    check.expect(source_of_weight, StoredTensor(FLOAT_DTYPES, (rows, columns)))
    if has_bias:
        check.expect(f"{disk}.bias", StoredTensor(FLOAT_DTYPES, (rows,)))

    def load() -> nn.Module:
        dtype = DTYPES[checkpoint.info(source_of_weight).dtype]

        def read_rows(first: int, last: int) -> Tensor:
            part = torch.empty((last - first, columns), dtype=dtype)
            checkpoint.read_into(source_of_weight, part, first * columns * dtype.itemsize)
            return part

        bias = checkpoint.read(f"{disk}.bias") if has_bias else None
        return quantize_linear(read_rows, rows, columns, linears, bias)

    return PackedModule(load, restore)


def quantize_linear(
    weight_rows: Callable[[int, int], Tensor], rows: int, columns: int, scheme: Scheme, bias: Tensor | None
) -> QuantizedLinear:
    """Quantises a float weight some rows at a time: a vocabulary's head needs little memory beside what it becomes.

    ``weight_rows(first, last)`` gives [last - first, columns].
    """
    values = torch.empty((rows, columns), dtype=torch.int8)
    scales: list[Tensor] = []
    step = max(1, _ELEMENTS_AT_ONCE // columns)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        values[first:last], scale = quantize_weight(weight_rows(first, last), scheme)
        scales.append(scale)
    return QuantizedLinear.from_quantized(values, torch.cat(scales), scheme, bias)
