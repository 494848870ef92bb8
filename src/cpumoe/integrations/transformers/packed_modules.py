"""Finds the modules of a transformers model that become packed, and their weights in the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from cpumoe.checkpoints.architectures import ARCHITECTURES, Architecture, known_architecture, text_config
from cpumoe.checkpoints.checkpoint import LAYER, Checkpoint, TensorCheck
from cpumoe.checkpoints.expert_sources import ExpertSource
from cpumoe.checkpoints.held_scales import is_per_tensor
from cpumoe.checkpoints.layer_names import check_layers_behind, layers_prefix, prediction_layers
from cpumoe.checkpoints.linear_sources import LinearSource, is_tied_away
from cpumoe.checkpoints.loading import check_experts, find_experts, load_experts
from cpumoe.checkpoints.storage import StoredTensor, refuse_stored_input_scales
from cpumoe.checkpoints.tensor_file import DTYPES, FLOAT_DTYPES
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import Scheme

_log = logging.getLogger("cpumoe")

_ELEMENTS_AT_ONCE = 4 << 20  # weights that are quantised together: they go through several fp32 temporaries

_LINEAR_TENSORS = frozenset({"weight_packed"})


@dataclass(frozen=True)
class PackedModule:
    """The packed replacement of one module: how to load it, and how to make it from packed tensors of these names."""

    load: Callable[[], nn.Module]
    restore: Callable[[dict[str, Tensor]], nn.Module]
    tensor_names: frozenset[str]


class PendingModule(nn.Module):
    """Takes the place of a module until its weights are read. transformers finds nothing to load in it."""

    def forward(self, *_: object, **__: object) -> None:
        raise RuntimeError("the weights of this module were not loaded")


@dataclass
class PackedModules:
    """The packed replacements for modules of a model.

    Attributes:
        modules: the replacements, by the name of the module.
        tensors: names of the tensors in the files that they are made of.
        left_out: prefixes of tensors that are in the files and rightly not in the model.
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
    """The row of the table of architectures for a transformers model, or None."""
    return known_architecture(model.config.to_dict())  # type: ignore[union-attr, operator]  # it has a configuration


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def experts_paths(model: nn.Module, architecture: Architecture) -> Iterator[str]:
    """Paths of the modules that hold the routed experts of a layer."""
    for name, _ in model.named_modules():
        if name.endswith("." + architecture.experts_paths[0]):
            yield name


def float_linears(model: nn.Module, architecture: Architecture | None) -> Iterator[tuple[str, nn.Linear]]:
    """The linears that may be quantised: all in the language model except routers."""
    routers = () if architecture is None else architecture.unquantized
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(routers) and "vision" not in name:
            yield name, module


def find_packed_modules(
    model: nn.Module,
    checkpoint: Checkpoint,
    scheme: Scheme | None,
    linears: Scheme | None,
    *,
    leave_experts: bool = False,
) -> PackedModules:
    """Finds the weights of all modules that will be packed, and checks them before any is read.

    Args:
        model: a transformers model on the meta device.
        scheme: the scheme to quantise float experts to; None packs them as they are.
        linears: the scheme to quantise float linears to; None leaves them in float.
        leave_experts: leaves the experts to transformers, which reads them and does not name the tensors it lacks: they
            are checked nevertheless.
    """
    for one in (scheme, linears):
        if one is not None:
            refuse_stored_input_scales(one)
    config = text_config(model.config.to_dict())  # type: ignore[union-attr, operator]  # a transformers model has one
    architecture = known_architecture(config)
    to_disk = _disk_names(model, checkpoint)
    check = TensorCheck(checkpoint)
    found = PackedModules()
    prefixes: list[str] = []
    if architecture is not None:
        facts = architecture.facts(config)
        sources: dict[str, ExpertSource] = {}
        for name in experts_paths(model, architecture):
            source = find_experts(checkpoint, architecture, to_disk(name), facts, scheme)
            if checkpoint.quantization is not None and source.storage is None:
                _log.info("%s is in float in this quantised checkpoint, and runs so (%s)", name, source.config.scheme)
            if leave_experts:
                source.check(check)
                continue
            sources[to_disk(name)] = source
            found.modules[name] = _packed_experts(source)
        check_experts(architecture, sources, check)
    elif (scheme or checkpoint.quantization) and any(n.endswith(".experts") for n, _ in model.named_modules()):
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"model_type {config.get('model_type')!r} is not known; known are {known}")
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, module in float_linears(model, architecture):
        disk = to_disk(name)
        source_of_weight = to_disk(tied.get(f"{name}.weight", f"{name}.weight"))
        packed = _packed_linear(checkpoint, disk, module, linears, source_of_weight, check)
        if packed is not None:
            prefixes.append(f"{disk}.")
            found.modules[name] = packed
    check.nothing_else_under(*prefixes)
    found.tensors = set(check.expected)
    found.left_out = _left_out(model, checkpoint)
    check_layers_behind(checkpoint, check)
    # transformers does not check the shapes and dtypes of the tensors that it loads into a quantised model.
    for name, tensor in model.state_dict().items():
        for disk in _spellings(architecture, to_disk(name)):
            if disk in checkpoint and disk not in found.tensors and tensor.is_floating_point():
                check.expect(disk, StoredTensor(FLOAT_DTYPES, tuple(tensor.shape)))
    check.raise_problems()
    return found


def _spellings(architecture: Architecture | None, name: str) -> list[str]:
    """The names that files may have for a tensor of transformers: the router is renamed together with its experts."""
    if architecture is None:
        return [name]
    first, *others = (path.rpartition(".")[0] for path in architecture.experts_paths)
    return [name, *(name.replace(f".{first}.", f".{other}.", 1) for other in others if f".{first}." in name)]


def _left_out(model: nn.Module, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Prefixes of tensors that the model does not have: for images, and of layers that predict further tokens."""
    layers = layers_prefix(checkpoint)
    parts = list(prediction_layers(checkpoint))
    in_model = {name.partition(".")[0] for name, _ in model.named_modules()}
    if layers.partition(".")[0] not in in_model:  # the model is only the language model of a larger one
        on_disk = {name.partition(".")[0] for name in checkpoint.names}
        parts += [f"{part}." for part in on_disk - in_model - {layers.partition(".")[0]}]
    return tuple(parts)


def _disk_names(model: nn.Module, checkpoint: Checkpoint) -> Callable[[str], str]:
    """A function from names in the model to names in the files, which differ if the files hold a larger model."""
    in_model = next((m[1] for name, _ in model.named_modules() if (m := LAYER.match(name))), "")
    on_disk = layers_prefix(checkpoint)
    wrapper = on_disk.removesuffix(in_model) if on_disk.endswith(in_model) else ""

    def to_disk(name: str) -> str:
        if name.startswith(in_model):
            return on_disk + name.removeprefix(in_model)
        return wrapper + name

    return to_disk


def _packed_experts(source: ExpertSource) -> PackedModule:
    activation = source.config.activation

    def restore(tensors: dict[str, Tensor]) -> nn.Module:
        return Experts.from_packed(**tensors, activation=activation)

    return PackedModule(lambda: load_experts(source), restore, frozenset({"gate_up_packed", "down_packed"}))


def _packed_linear(
    checkpoint: Checkpoint,
    disk: str,
    module: nn.Linear,
    linears: Scheme | None,
    source_of_weight: str,
    check: TensorCheck,
) -> PackedModule | None:
    """The packed replacement of a linear whose name in the files is ``disk``; None if it stays in float."""
    rows, columns, has_bias = module.out_features, module.in_features, module.bias is not None

    def restore(tensors: dict[str, Tensor]) -> nn.Module:
        return QuantizedLinear(**tensors)

    storage = checkpoint.storage_of(disk)
    tied = source_of_weight != f"{disk}.weight"
    if storage is not None and not (tied and is_tied_away(checkpoint, disk, storage)):
        source = LinearSource(checkpoint, disk, rows, columns, storage, has_bias)
        source.check(check)
        return PackedModule(source.load, restore, _LINEAR_TENSORS)
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
        return pack_float_linear(read_rows, rows, columns, linears, bias)

    return PackedModule(load, restore, _LINEAR_TENSORS)


def pack_float_linear(
    weight_rows: Callable[[int, int], Tensor], rows: int, columns: int, scheme: Scheme, bias: Tensor | None
) -> QuantizedLinear:
    """Quantises and packs a float weight a few rows at a time, so that even a head needs little more than its result.

    ``weight_rows(first, last)`` returns [last - first, columns].
    """
    block = scheme.weights.group.rows or 1
    step = max(1, _ELEMENTS_AT_ONCE // columns // block) * block
    pieces = [(first, min(first + step, rows)) for first in range(0, rows, step)]
    largest = None
    if scheme.weights.scale == "e4m3" or is_per_tensor(scheme):  # all rows share a scale
        largest = torch.stack([weight_rows(*piece).abs().amax().to(torch.float32) for piece in pieces]).amax()
    parts = [quantize_weight(weight_rows(*piece), scheme, largest_magnitude=largest) for piece in pieces]
    joined = QuantizedWeight.joined(parts)
    if is_per_tensor(scheme):
        joined = replace(joined, scales=parts[0].scales)
    return QuantizedLinear.from_weight(replace(joined, bias=bias), scheme)
