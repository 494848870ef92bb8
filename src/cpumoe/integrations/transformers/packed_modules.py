"""Finds the modules of a transformers model that become packed, and their weights in the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpumoe.checkpoints.checkpoint import Checkpoint, TensorCheck
from cpumoe.checkpoints.expert_sources import ExpertSource
from cpumoe.checkpoints.held_scales import is_per_tensor
from cpumoe.checkpoints.loading import find_experts, load_experts
from cpumoe.checkpoints.model_layout import LinearPlace
from cpumoe.checkpoints.model_tensors import check_model, quantized_linears
from cpumoe.checkpoints.storage import refuse_stored_input_scales
from cpumoe.checkpoints.tensor_file import DTYPES
from cpumoe.errors import UnsupportedScheme
from cpumoe.integrations.transformers.model_description import describe_model
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


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def find_packed_modules(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    scheme: Scheme | None,
    linears: Scheme | None,
    *,
    leave_experts: bool = False,
    implementation: str | None = None,
) -> dict[str, PackedModule]:
    """Finds the weights of all modules that will be packed, and checks them before any is read.

    Args:
        model: a transformers model on the meta device.
        scheme: the scheme to quantise float experts to; None packs them as they are.
        linears: the scheme to quantise float linears to; None leaves them in float.
        leave_experts: leaves the experts to transformers, which reads them and does not name the tensors it lacks: they
            are checked nevertheless.
        implementation: the ``experts_implementation`` that was asked for; its scheme must be that of quantised experts.

    Returns the replacements by the names of the modules.
    """
    for one in (scheme, linears):
        if one is not None:
            refuse_stored_input_scales(one)
    layout = describe_model(model, checkpoint)
    check = TensorCheck(checkpoint)
    quantized = quantized_linears(checkpoint, layout)
    found: dict[str, PackedModule] = {}
    sources = [find_experts(checkpoint, experts, scheme) for experts in layout.experts]
    refuse_other_scheme({str(s.storage.scheme) for s in sources if s.storage is not None}, implementation)
    packed: dict[object, PackedModule] = {}  # tied experts are packed once
    for source in sources:
        if checkpoint.quantization is not None and source.storage is None:
            _log.info(
                "%s is in float in this quantised checkpoint, and runs so (%s)", source.prefix, source.config.scheme
            )
        if not leave_experts:
            found[source.layout.module] = packed.setdefault(source.layout.stored, _packed_experts(source))
    for name, linear in layout.linears.items():
        if name in quantized:
            found[linear.module] = PackedModule(quantized[name].load, _restored_linear, _LINEAR_TENSORS)
        elif linears is not None and linear.may_be_packed and _fits(linears, linear, name):
            found[linear.module] = _quantized_while_read(checkpoint, name, linear, linears)
    # transformers does not check the shapes and dtypes of the tensors that it loads into a quantised model.
    check_model(layout, sources, quantized, check)
    check.raise_problems()
    return found


def refuse_other_scheme(found: set[str], implementation: str | None) -> None:
    """Refuses an ``experts_implementation`` of another scheme than the experts are quantised to."""
    asked, _, scheme = (implementation or "").partition("-")
    if asked == "cpumoe" and scheme and found and scheme not in found:
        raise UnsupportedScheme(
            f"experts_implementation={implementation!r}, and the experts of this checkpoint are quantised to "
            f"{' and '.join(sorted(found))}; leave experts_implementation out, or quantise the float original: "
            f"cpumoe quantize FLOAT_MODEL DST --scheme {scheme}"
        )


def _packed_experts(source: ExpertSource) -> PackedModule:
    activation = source.config.activation

    def restore(tensors: dict[str, Tensor]) -> nn.Module:
        return Experts.from_packed(**tensors, activation=activation)

    return PackedModule(cache(lambda: load_experts(source)), restore, frozenset({"gate_up_packed", "down_packed"}))


def _restored_linear(tensors: dict[str, Tensor]) -> nn.Module:
    return QuantizedLinear(**tensors)


def _fits(scheme: Scheme, linear: LinearPlace, name: str) -> bool:
    try:
        scheme.check_inputs(linear.columns, name)
    except UnsupportedScheme as problem:
        _log.warning("left in float: %s", problem)
        return False
    return True


def _quantized_while_read(checkpoint: Checkpoint, name: str, linear: LinearPlace, scheme: Scheme) -> PackedModule:
    """The packed replacement of a linear that is float in the files, where it is called ``name``."""
    rows, columns, source = linear.rows, linear.columns, linear.source

    def load() -> nn.Module:
        dtype = DTYPES[checkpoint.info(source).dtype]

        def read_rows(first: int, last: int) -> Tensor:
            part = torch.empty((last - first, columns), dtype=dtype)
            checkpoint.read_into(source, part, first * columns * dtype.itemsize)
            return part

        bias = checkpoint.read(f"{name}.bias") if linear.has_bias else None
        return pack_float_linear(read_rows, rows, columns, scheme, bias)

    return PackedModule(load, _restored_linear, _LINEAR_TENSORS)


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
