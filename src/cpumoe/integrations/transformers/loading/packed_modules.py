"""Finds the modules of a transformers model that become packed, and their weights in the checkpoint."""

from __future__ import annotations

import logging
import re
from itertools import chain

from torch import nn
from transformers import PreTrainedModel

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.loading import find_experts
from cpumoe.checkpoints.model_layout import LinearPlace, ModelLayout
from cpumoe.checkpoints.model_tensors import check_model, quantized_linears
from cpumoe.checkpoints.named_tensors import TensorCheck
from cpumoe.checkpoints.storage import refuse_stored_input_scales
from cpumoe.errors import UnsupportedScheme
from cpumoe.integrations.transformers.layout.model_description import describe_model
from cpumoe.integrations.transformers.loading.module_sources import (
    FloatLinear,
    PackedModule,
    packed_experts,
    quantized_linear,
    split_linear,
    spread_experts,
    stored_linear,
)
from cpumoe.layers.scheme import Scheme
from cpumoe.parallel.ranks import Ranks

_log = logging.getLogger("cpumoe")


class PendingModule(nn.Module):
    """Takes the place of a module until its weights are read. transformers finds nothing to load in it."""

    def forward(self, *_: object, **__: object) -> None:
        raise RuntimeError("the weights of this module were not loaded")


def forget_ties(model: PreTrainedModel) -> None:
    """Drop the ties between weights of which one is packed: transformers would look for its name."""
    for module in model.modules():
        ties = module._tied_weights_keys if isinstance(module, PreTrainedModel) else None
        if not isinstance(ties, dict):
            continue
        tensors = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        names = [name for name, _ in tensors]
        kept = {
            target: source
            for target, source in ties.items()
            if all(any(re.match(pattern, name) for name in names) for pattern in (target, source))
        }
        if len(kept) < len(ties):
            module._tied_weights_keys = kept
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def find_packed_modules(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    scheme: Scheme | None,
    linears: Scheme | None,
    *,
    leave_experts: bool = False,
    implementation: str | None = None,
    ranks: Ranks | None = None,
) -> tuple[ModelLayout, dict[str, PackedModule]]:
    """Finds the weights of all modules that will be packed, and checks them before any is read.

    Args:
        model: a transformers model on the meta device.
        scheme: the scheme to quantise float experts to; None packs them as they are.
        linears: the scheme to quantise float linears to; None leaves them in float.
        leave_experts: leaves the experts to transformers, which reads them and does not name the tensors it lacks: they
            are checked nevertheless.
        implementation: the ``experts_implementation`` that was asked for; its scheme must be that of quantised experts.
        ranks: that the model is spread over. Experts and linears are read as this rank holds them.

    Returns what the model has and where, and the replacements by the names of the modules.
    """
    refuse_stored_input_scales(scheme, linears)
    layout = describe_model(model, checkpoint)
    check = TensorCheck(checkpoint)
    quantized = quantized_linears(checkpoint, layout)
    sources = [find_experts(checkpoint, experts, scheme) for experts in layout.experts]
    refuse_other_scheme({str(s.storage.scheme) for s in sources if s.storage is not None}, implementation)
    # transformers does not check the shapes and dtypes of the tensors that it loads into a quantised model.
    check_model(layout, sources, quantized, check)
    check.raise_problems()
    found: dict[str, PackedModule] = {}
    packed: dict[object, PackedModule] = {}  # tied experts are packed once
    for source in sources:
        if checkpoint.quantization is not None and source.storage is None:
            _log.info(
                "%s is in float in this quantised checkpoint, and runs so (%s)", source.prefix, source.config.scheme
            )
        if not leave_experts:
            made = packed_experts(source) if ranks is None else spread_experts(checkpoint, source, scheme, ranks)
            found[source.layout.module] = packed.setdefault(source.layout.stored, made)
    for name, linear in layout.linears.items():
        wanted = linears if linears is not None and linear.may_be_packed and _fits(linears, linear, name) else None
        floats = FloatLinear(checkpoint, name, linear)
        split = None
        if ranks is not None:
            dtype = model.get_submodule(linear.module).weight.dtype
            split = split_linear(quantized.get(name), floats, wanted, dtype, ranks)
        if split is not None:
            found[linear.module] = split
        elif name in quantized:
            found[linear.module] = stored_linear(quantized[name])
        elif wanted is not None:
            found[linear.module] = quantized_linear(floats, wanted)
    return layout, found


def refuse_other_scheme(found: set[str], implementation: str | None) -> None:
    """Refuses an ``experts_implementation`` of another scheme than the experts are quantised to."""
    asked, _, scheme = (implementation or "").partition("-")
    if asked == "cpumoe" and scheme and found and scheme not in found:
        raise UnsupportedScheme(
            f"experts_implementation={implementation!r}, and the experts of this checkpoint are quantised to "
            f"{' and '.join(sorted(found))}; leave experts_implementation out, or quantise the float original: "
            f"cpumoe quantize FLOAT_MODEL DST --scheme {scheme}"
        )


def _fits(scheme: Scheme, linear: LinearPlace, name: str) -> bool:
    try:
        scheme.check_inputs(linear.columns, name)
    except UnsupportedScheme as problem:
        _log.warning("left in float: %s", problem)
        return False
    return True
