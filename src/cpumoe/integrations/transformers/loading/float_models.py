"""Float models of transformers: quantises their experts and linears in place, or through ``experts_implementation``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from cpumoe import ops, settings
from cpumoe.checkpoints.named_tensors import naming
from cpumoe.checkpoints.storage import refuse_stored_input_scales
from cpumoe.integrations.transformers.int8_cache import hold_caches, refuse_caches_early
from cpumoe.integrations.transformers.layout.expert_modules import ExpertsModule, describe_experts, expert_modules
from cpumoe.integrations.transformers.layout.model_description import packable_linears
from cpumoe.integrations.transformers.loading.install import speed_up
from cpumoe.integrations.transformers.loading.module_sources import pack_float_linear
from cpumoe.integrations.transformers.loading.packed_modules import forget_ties, refuse_other_scheme
from cpumoe.integrations.transformers.loading.plugin import PackedConfig, PackedQuantizer
from cpumoe.integrations.transformers.loading.special_experts import experts_name, put_packed, wrapped
from cpumoe.layers.backends import select_backend
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.experts import Experts
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.layers.rounding import check_floats, quantize_weight, scale_dtype_of
from cpumoe.layers.scheme import DEFAULT_SCHEME, FLOAT, Scheme, named_scheme

_log = logging.getLogger("cpumoe")


def accelerate(
    model: PreTrainedModel, scheme: Scheme | str | None = None, *, linears: Scheme | str | None = None
) -> PreTrainedModel:
    """Quantises the experts of a float model in place, layer by layer, freeing the float weights as it goes.

    Args:
        model: a transformers model.
        scheme: the scheme to quantise the experts to. The default is the value of ``CPUMOE_SCHEME``, and without one
            ``w4a8-g128``.
        linears: the scheme to quantise the other linears to; None leaves them in float.

    Returns:
        The same model. ``save_pretrained`` writes it as a compressed-tensors checkpoint.

    Raises ValueError for weights that cannot be quantised, for bad values in the environment, and if the environment
    asks for an int8 KV cache that the model cannot have. The model is unchanged then; if only its packed experts show
    that, the message says that they are packed.
    """
    kinds = {name: describe_experts(module) for name, module in expert_modules(model)}
    # Without experts there is nothing that CPUMOE_SCHEME could be for.
    scheme = Scheme.parse(_scheme_to_pack(scheme) if kinds or scheme is not None else DEFAULT_SCHEME)
    packed_linears = None if linears is None else Scheme.parse(linears)
    refuse_stored_input_scales(scheme, packed_linears)
    if not kinds and packed_linears is None:
        raise ValueError("this model has no float experts to accelerate; linears='w8a8' quantises its other linears")
    chosen = [] if packed_linears is None else list(_fitting_linears(model, packed_linears))
    for name, kind in kinds.items():
        _refuse_experts(name, model.get_submodule(name), kind, scheme)
    for name in chosen:
        with naming(name):
            check_floats(_linear_of(model, name).weight, "weight")
    refuse_caches_early(model)
    tensors = {name: _tensors_of(model.get_submodule(name), kind) for name, kind in kinds.items()}
    packed: dict[tuple[int, ...], Experts] = {}  # tied experts are packed once
    quantized = False
    try:
        for name, kind in tqdm(kinds.items(), desc="Quantising", unit="layer", disable=None):
            if tensors[name] not in packed:
                with naming(name):
                    packed[tensors[name]] = pack_float_experts(model.get_submodule(name), kind, scheme)
            put_packed(model, name, kind.marks, packed[tensors[name]])
            quantized = True
        if packed_linears is not None:
            _accelerate_linears(model, chosen, packed_linears)
            quantized = True
    finally:  # a model that was quantised in part must describe itself too, or it would be saved wrongly
        if quantized:
            _finish_acceleration(model)
    return model


def _scheme_to_pack(scheme: Scheme | str | None) -> Scheme | str:
    """Return the scheme of experts that are packed in any case. Raise ValueError if the environment leaves them."""
    named = named_scheme(scheme, DEFAULT_SCHEME)
    if scheme is None and named == FLOAT:
        raise ValueError(
            f"{settings.SCHEME.name}={FLOAT} leaves experts to transformers, and here they are packed; name a scheme, "
            f"or unset {settings.SCHEME.name}"
        )
    return named


def _tensors_of(module: nn.Module, kind: ExpertsModule) -> tuple[int, ...]:
    """Return a value that only tied experts have in common, for as long as all are there."""
    return tuple(id(module.get_parameter(name)) for name in kind.parameters)


def _shapes(model: PreTrainedModel) -> dict[str, int]:
    """The modules with experts, packed ones too, and how many each has."""
    found = {name: describe_experts(module).shape.expert_count for name, module in expert_modules(model)}
    packed = {experts_name(n): m.config.experts for n, m in model.named_modules() if isinstance(m, Experts)}
    return found | packed


def _linear_of(model: PreTrainedModel, name: str) -> nn.Linear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)  # they were found as such
    return linear


def _fitting_linears(model: PreTrainedModel, scheme: Scheme) -> Iterator[str]:
    """Yield the linears that the scheme fits."""
    for name in packable_linears(model, _shapes(model)):
        inputs = _linear_of(model, name).in_features
        if scheme.fits(inputs):
            yield name
        else:
            _log.warning("left in float: %s has %d inputs", name, inputs)


def _refuse_experts(name: str, module: nn.Module, kind: ExpertsModule, scheme: Scheme) -> None:
    """Raise the error of packing these experts if they cannot be packed."""
    with naming(name):
        matrices = kind.matrices(module)
        select_backend(_config_of(kind, scheme, matrices[0].dtype))
        for matrix, called in zip(matrices, ("gate_up", "down"), strict=True):
            check_floats(matrix, called)


def _accelerate_linears(model: PreTrainedModel, names: list[str], scheme: Scheme) -> None:
    for name in names:
        linear = _linear_of(model, name)
        bias = None if linear.bias is None else linear.bias.detach()
        rows = partial(_rows, linear.weight.detach())
        with naming(name):
            packed = pack_float_linear(rows, linear.out_features, linear.in_features, scheme, bias)
        model.set_submodule(name, packed)


def _finish_acceleration(model: PreTrainedModel) -> None:
    forget_ties(model)
    model.requires_grad_(False)  # there is no gradient through packed weights
    config = PackedConfig()
    model.hf_quantizer = PackedQuantizer(config, pre_quantized=True)
    model.hf_quantizer.describe(model)
    model.is_quantized = True
    model.quantization_method = config.quant_method
    speed_up(model)  # after the model describes what it is: it can be saved whatever happens here
    try:
        hold_caches(model, None)
    except ValueError as problem:
        raise ValueError(f"{problem}. The model is packed and runs with a KV cache in its own dtype") from None


def _rows(weight: Tensor, first: int, last: int) -> Tensor:
    return weight[first:last]


def pack_float_experts(module: nn.Module, kind: ExpertsModule, scheme: Scheme) -> Experts:
    """Packs the weights of one layer's float experts, a few experts at a time."""
    refuse_stored_input_scales(scheme)
    shape, (gate_up, down), biases = kind.shape, kind.matrices(module), kind.biases(module)

    def chunks() -> Iterator[QuantizedExperts]:
        step = max(1, (64 << 20) // (gate_up[0].numel() * 16))
        for first in range(0, shape.expert_count, step):
            chunk = slice(first, first + step)
            gate_up_bias, down_bias = (None if bias is None else bias[chunk] for bias in biases)
            yield QuantizedExperts(
                replace(quantize_weight(gate_up[chunk], scheme, "gate_up"), bias=gate_up_bias),
                replace(quantize_weight(down[chunk], scheme, "down"), bias=down_bias),
                interleaved=kind.interleaved,
            )

    return Experts.from_chunks(chunks(), _config_of(kind, scheme, gate_up.dtype))


def _config_of(kind: ExpertsModule, scheme: Scheme, dtype: torch.dtype) -> MoEConfig:
    """Return what float experts of a dtype become."""
    shape, scale_dtype = kind.shape, scale_dtype_of(dtype)
    sizes = (shape.expert_count, shape.hidden_size, shape.intermediate_size)
    return MoEConfig(scheme, *sizes, shape.activation, has_bias=shape.has_bias, scale_dtype=scale_dtype)


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
    wanted = _scheme_to_pack(scheme)
    # Tensors that were made in inference mode do not count their changes.
    versions = ((p.data_ptr(), 0 if p.is_inference() else p._version) for p in module.parameters())
    state = (wanted, *versions)
    state_and_packed = module.__dict__.get("_cpumoe_packed")
    if state_and_packed is None or state_and_packed[0] != state:
        kind = describe_experts(module)
        packed = wrapped(kind.marks, module, pack_float_experts(module, kind, Scheme.parse(wanted)))
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
    """Refuses another scheme than packed experts have, and warns if the request has no effect.

    A model that is being made has no experts yet: those of a checkpoint are looked at when they are found.
    """
    modules = getattr(model, "_modules", None)
    packed = [m for m in model.modules() if isinstance(m, Experts)] if modules else []
    refuse_other_scheme({str(experts.config.scheme) for experts in packed}, requested)
    quantized = isinstance(getattr(model.config, "quantization_config", None), PackedConfig)
    if not quantized and not model._can_set_experts_implementation():
        _log.warning(
            "experts_implementation=%r has no effect on %s: transformers does not ask for it there; "
            "cpumoe.accelerate(model) does the job",
            requested,
            type(model).__name__,
        )
