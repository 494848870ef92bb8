"""Float models of transformers: quantises their experts and linears in place, or through ``experts_implementation``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from cpumoe import ops
from cpumoe.checkpoints.architectures import ARCHITECTURES, Architecture, ExpertsFacts, known_architecture, text_config
from cpumoe.checkpoints.checkpoint import naming
from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.storage import refuse_stored_input_scales
from cpumoe.errors import UnsupportedScheme
from cpumoe.integrations.transformers.decode import speed_up
from cpumoe.integrations.transformers.llama4 import adapt_llama4
from cpumoe.integrations.transformers.packed_modules import (
    experts_paths,
    float_linears,
    model_architecture,
    pack_float_linear,
    replace_module,
)
from cpumoe.integrations.transformers.plugin import DEFAULT_SCHEME, PackedConfig, PackedQuantizer
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.experts import Experts
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.layers.rounding import quantize_weight, scale_dtype_of
from cpumoe.layers.scheme import Scheme

_log = logging.getLogger("cpumoe")


def accelerate(
    model: PreTrainedModel, scheme: Scheme | str = DEFAULT_SCHEME, *, linears: Scheme | str | None = None
) -> PreTrainedModel:
    """Quantises the experts of a float model in place, layer by layer, freeing the float weights as it goes.

    Args:
        model: a transformers model of a known architecture.
        scheme: the scheme to quantise the experts to.
        linears: the scheme to quantise the other linears to; None leaves them in float.

    Returns:
        The same model. ``save_pretrained`` writes it as a compressed-tensors checkpoint.
    """
    scheme, packed_linears = Scheme.parse(scheme), None if linears is None else Scheme.parse(linears)
    for one in (scheme, packed_linears):
        if one is not None:
            refuse_stored_input_scales(one)
    architecture = model_architecture(model)
    if architecture is None:
        raise _not_known(model.config.get_text_config().model_type)
    names = [n for n in experts_paths(model, architecture) if not isinstance(model.get_submodule(n), Experts)]
    if not names and packed_linears is None:
        raise ValueError("this model has no float experts to accelerate; linears='w8a8' quantises its other linears")
    facts = architecture.facts(text_config(model.config.to_dict()))
    quantized = False
    try:
        for name in tqdm(names, desc="Quantising", unit="layer", disable=None):
            with naming(name):
                module = model.get_submodule(name)
                experts = pack_float_experts(module, architecture, scheme, facts)
            replace_module(model, name, experts)
            quantized = True
        if packed_linears is not None:
            _accelerate_linears(model, architecture, packed_linears)
            quantized = True
    finally:  # a model that was quantised in part must describe itself too, or it would be saved wrongly
        if quantized:
            _finish_acceleration(model)
    return model


def _not_known(model_type: object) -> UnsupportedScheme:
    known = ", ".join(ARCHITECTURES)
    return UnsupportedScheme(
        f"model_type {model_type!r} is not known; known are {known}. Run its experts with "
        "experts_implementation='eager'; a model without experts has its linears quantised by "
        "cpumoe.load_model(path, scheme='float', linears='w8a8')"
    )


def _accelerate_linears(model: PreTrainedModel, architecture: Architecture, scheme: Scheme) -> None:
    for name, linear in list(float_linears(model, architecture)):
        if not scheme.fits(linear.in_features):
            _log.warning("left in float: %s has %d inputs", name, linear.in_features)
            continue
        bias = None if linear.bias is None else linear.bias.detach()
        rows = partial(_rows, linear.weight.detach())
        with naming(name):
            packed = pack_float_linear(rows, linear.out_features, linear.in_features, scheme, bias)
        replace_module(model, name, packed)
        model.all_tied_weights_keys.pop(f"{name}.weight", None)


def _finish_acceleration(model: PreTrainedModel) -> None:
    adapt_llama4(model)
    model.requires_grad_(False)  # there is no gradient through packed weights
    speed_up(model)
    config = PackedConfig()
    model.hf_quantizer = PackedQuantizer(config, pre_quantized=True)
    model.hf_quantizer.describe(model)
    model.is_quantized = True
    model.quantization_method = config.quant_method


def _rows(weight: Tensor, first: int, last: int) -> Tensor:
    return weight[first:last]


def pack_float_experts(module: nn.Module, architecture: Architecture, scheme: Scheme, facts: ExpertsFacts) -> Experts:
    """Packs the ``gate_up_proj`` and ``down_proj`` of one layer's float experts, a few experts at a time."""
    refuse_stored_input_scales(scheme)
    fused = architecture.fused
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()  # type: ignore[operator]
    layer = MoEConfig(
        scheme,
        facts.expert_count,
        facts.hidden_size,
        facts.intermediate_size,
        facts.activation,
        has_bias=architecture.has_bias,
        scale_dtype=scale_dtype_of(gate_up.dtype),
    )

    def chunks() -> Iterator[QuantizedExperts]:
        step = max(1, (64 << 20) // (gate_up[0].numel() * 16))
        for first in range(0, facts.expert_count, step):
            chunk = slice(first, first + step)
            rows, columns = gate_up[chunk], down[chunk]
            if fused is not None:
                rows, columns = rows.transpose(1, 2), columns.transpose(1, 2)
            biases = (None, None)
            if architecture.has_bias:
                biases = module.gate_up_proj_bias.detach()[chunk], module.down_proj_bias.detach()[chunk]  # type: ignore
            yield QuantizedExperts(
                replace(quantize_weight(rows, scheme, "gate_up"), bias=biases[0]),
                replace(quantize_weight(columns, scheme, "down"), bias=biases[1]),
                interleaved=fused is not None and fused.interleaved,
            )

    return Experts.from_chunks(chunks(), layer)


def experts_forward(
    module: nn.Module, scheme: str | None, hidden_states: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """transformers' experts interface: [tokens, H], [tokens, K], [tokens, K] -> [tokens, H].

    The packed copy is made at the first call, and made again when the float weights have changed since then. A change
    through ``parameter.data`` is not noticed.
    """
    if module.training:
        raise RuntimeError(
            "experts_implementation='cpumoe' is for inference, and this model is in training mode; call model.eval(), "
            "or train with model.set_experts_implementation('eager')"
        )
    wanted = scheme or os.environ.get("CPUMOE_SCHEME", DEFAULT_SCHEME)
    # Tensors that were made in inference mode do not count their changes.
    versions = ((p.data_ptr(), 0 if p.is_inference() else p._version) for p in module.parameters())
    state = (wanted, *versions)
    state_and_packed = module.__dict__.get("_cpumoe_packed")
    if state_and_packed is None or state_and_packed[0] != state:
        config = text_config(module.config.to_dict())  # type: ignore[union-attr, operator]
        architecture = known_architecture(config)
        if architecture is None:
            raise _not_known(config.get("model_type"))
        packed = pack_float_experts(module, architecture, Scheme.parse(wanted), architecture.facts(config))
        state_and_packed = (state, packed)
        _warn_that_floats_stay(wanted)
        # In __dict__ it is no submodule, so state_dict stays the one of the float model.
        module.__dict__["_cpumoe_packed"] = state_and_packed
    packed = state_and_packed[1]
    with torch.no_grad():
        out: Tensor = packed(hidden_states, ids, weights)
    if ops.wants_gradient(hidden_states, weights):  # many call a model without no_grad and want no gradient
        out = _RefusedGradient.apply(out, hidden_states, weights)  # type: ignore[no-untyped-call]
    return out


class _RefusedGradient(torch.autograd.Function):
    """Returns a result unchanged; raises if its gradient is asked for."""

    @staticmethod
    def forward(_: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "there is no gradient through packed experts: experts_implementation='cpumoe' is for inference; train with "
            "another, such as 'eager'"
        )


@cache
def _warn_that_floats_stay(scheme: str) -> None:
    """Warns once that float weights stay in memory: for state_dict, save_pretrained and other implementations."""
    _log.warning(
        "experts_implementation='cpumoe' packs experts to %s and keeps their float weights in memory as well, for "
        "save_pretrained and for other implementations; cpumoe.accelerate(model, %r) frees them, and "
        "cpumoe.load_model(path, scheme=%r) does not load them at all",
        scheme,
        scheme,
        scheme,
    )


def check_experts_implementation(model: PreTrainedModel, requested: str) -> None:
    """Refuses a scheme that the experts of a quantised checkpoint do not have; warns if the request has no effect."""
    config = getattr(model.config, "quantization_config", None)
    if isinstance(config, PackedConfig):
        if config.section is not None and (scheme := requested.partition("-")[2]):
            _refuse_other_scheme(model, config.section, scheme, requested)
    elif not model._can_set_experts_implementation():
        _log.warning(
            "experts_implementation=%r has no effect on %s: transformers does not ask for it there; "
            "cpumoe.accelerate(model) does the job",
            requested,
            type(model).__name__,
        )


def _refuse_other_scheme(model: PreTrainedModel, section: dict[str, Any], scheme: str, requested: str) -> None:
    config = text_config(model.config.to_dict())
    architecture = known_architecture(config)
    if architecture is None:
        return
    quantization = parse_quantization(section)
    gate_names = (
        f"model.layers.{layer}.{experts_path}.0.{names.gate}"
        for layer in architecture.facts(config).layers
        for experts_path in architecture.experts_paths
        for names in architecture.projections
    )
    found = {str(storage.scheme) for name in gate_names if (storage := quantization.storage_of(name)) is not None}
    if found and scheme not in found:
        raise UnsupportedScheme(
            f"experts_implementation={requested!r}, and the experts of this checkpoint are quantised to "
            f"{' and '.join(sorted(found))}; leave experts_implementation out, or quantise the float original: "
            f"cpumoe quantize FLOAT_MODEL DST --scheme {scheme}"
        )
