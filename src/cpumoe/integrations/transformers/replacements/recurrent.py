"""Layers with a recurrent state in one step: gated delta nets, Kimi delta attention and short convolutions.

transformers computes what lies between the projections of such a layer with dozens of PyTorch operators. Here it is
one, for one token and for many. A layer is recognised by its parts and their sizes, not by its name, and the new
forward is compared once with the code that it replaces, for each class and configuration; where they differ the
original stays.
The caches keep their meaning: either forward can go on from what the other has left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.integrations.transformers.recognition.mixers.delta_net import DeltaForm
from cpumoe.integrations.transformers.recognition.mixers.kinds import state_form
from cpumoe.integrations.transformers.recognition.mixers.short_conv import ConvolutionForm
from cpumoe.integrations.transformers.replacements.replaced_forward import ReplacedForward
from cpumoe.integrations.transformers.replacements.replacement_check import empty_cache, wants_gradient_through
from cpumoe.integrations.transformers.step_caches import states_in
from cpumoe.ops.decoder_steps import CachePart

_log = logging.getLogger("cpumoe")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ONE_OR_TWO = ("", "_a", "_b")  # a projection, or the two in its place

#: How far the outputs and states of the two forwards may differ, relative to their norm. In 16 bits transformers rounds
#: after every operator, ours does at the end.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def speed_up_linear_attention(model: nn.Module) -> None:
    """Gives the layers with a recurrent state of a loaded model their one-step form, where it agrees with theirs."""
    verdicts: dict[object, bool] = {}
    for name, module in model.named_modules():
        form = state_form(module)
        if (
            form is None
            or type(form) not in _FORWARDS
            or not _weight_in(module).is_cpu
            or "forward" in vars(module)
            or _has_hooks(module)
        ):
            continue
        key = (form, _weight_in(module).dtype, *_code_of(module))
        if key not in verdicts:
            verdicts[key] = _agrees(name, module, form)
        if verdicts[key]:
            forward, called = _FORWARDS[type(form)]
            module.forward = ReplacedForward(forward, module, form, called)


def _weight_in(module: Any) -> Tensor:
    """Return the weight of a layer's convolution."""
    weight: Tensor = (module.conv1d if hasattr(module, "conv1d") else module.conv).weight
    return weight


def _code_of(module: Any) -> list[object]:
    """What runs in a layer: its class, and the forwards of its parts, which may be replaced in one layer alone."""
    parts = [getattr(module, name, None) for name in ("conv1d", "conv", "norm", "o_norm", "forget_gate")]
    forwards = [vars(part).get("forward", type(part).forward) for part in parts if part is not None]
    return [type(module), *(getattr(forward, "func", forward) for forward in forwards)]


def _has_hooks(module: nn.Module) -> bool:
    """Whether accelerate moves weights in and out around calls: then they may not be here when they are wanted."""
    return any(hasattr(part, "_hf_hook") for part in module.modules())


Form = DeltaForm | ConvolutionForm
Projected = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor | None]


def _grouped(module: Any, x: Tensor) -> Projected:
    return _project(module.in_proj_qkvz, x), None, None, None, _project(module.in_proj_ba, x), None


def _joined(module: Any, x: Tensor) -> Projected:
    qkv, z = _project(module.in_proj_qkv, x), _project(module.in_proj_z, x)
    return qkv, None, None, z, _project(module.in_proj_b, x), _project(module.in_proj_a, x)


def _apart(module: Any, x: Tensor) -> Projected:
    q, k, v, b = (_project(linear, x) for linear in (module.q_proj, module.k_proj, module.v_proj, module.b_proj))
    return q, k, v, _one_or_two(module, "g", x), b, _one_or_two(module.forget_gate, "f", x)


def _one_or_two(module: Any, letter: str, x: Tensor) -> Tensor:
    """A projection, or two with few features in between."""
    whole = getattr(module, f"{letter}_proj", None)
    if whole is not None:
        return _project(whole, x)
    return _project(getattr(module, f"{letter}_b_proj"), _project(getattr(module, f"{letter}_a_proj"), x))


def _project(linear: Any, x: Tensor) -> Tensor:
    """``linear(x)``, x [B, T, in]. Our operator multiplies one token in 16 bits at twice PyTorch's rate."""
    if x.shape[0] * x.shape[1] == 1 and x.dtype != torch.float32 and _is_plain_linear(linear, x.dtype):
        bias = None if linear.bias is None else linear.bias.to(torch.float32)
        return ops.token_linear(x, linear.weight, bias)
    projected: Tensor = linear(x)
    return projected


def _is_plain_linear(linear: Any, dtype: torch.dtype) -> bool:
    """Whether nothing but the product would happen in a call."""
    if type(linear) is not nn.Linear or linear.weight.dtype != dtype or "forward" in vars(linear):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    return not (linear._forward_hooks or linear._forward_pre_hooks) and linear.weight.is_contiguous()


#: What gives q, k, v, z (the gate), b and a, as ops.gated_delta_rule takes them.
_PROJECTIONS: dict[str, Callable[[Any, Tensor], Projected]] = {"grouped": _grouped, "joined": _joined, "apart": _apart}


def _delta_forward(
    module: Any,
    form: DeltaForm,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """[B, T, H] -> [B, T, H]; the states in the cache are moved on."""
    if _is_served(module, hidden_states, cache_params, attention_mask, options):
        x = hidden_states if attention_mask is None else _masked(hidden_states, attention_mask)
        q, k, v, z, b, a = _PROJECTIONS[form.projections](module, x)
        states = states_in(cache_params, module.layer_idx, q.shape[0], _delta_states(form, q.dtype))
        if states is not None:
            conv_state, state = states
            decay, norm = getattr(module, "forget_gate", module), getattr(module, form.norm)
            recalled = ops.gated_delta_rule(
                q,
                k,
                v,
                z,
                b,
                a,
                form.key_heads,
                _flat(decay.A_log),
                _flat(decay.dt_bias),
                form.decay_bound,
                module.conv1d.weight,
                module.conv1d.bias,
                conv_state,
                state,
                norm.weight,
                norm.variance_epsilon,
                form.sigmoid_gate,
            )
            return _project(getattr(module, form.out), recalled)
    original: Tensor = type(module).forward(module, hidden_states, cache_params, attention_mask, **options)
    return original


def _convolution_forward(
    module: Any,
    form: ConvolutionForm,
    hidden_states: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """[B, T, H] -> [B, T, H]; the state in the cache is moved on."""
    if _is_served(module, hidden_states, past_key_values, attention_mask, options):
        x = hidden_states if attention_mask is None else _masked(hidden_states, attention_mask)
        projected = _project(module.in_proj, x)
        batch, dtype = projected.shape[0], projected.dtype
        states = states_in(past_key_values, module.layer_idx, batch, [_conv_state(form.channels, form.taps, dtype)])
        if states is not None:
            convolved = ops.short_convolution(projected, module.conv.weight, module.conv.bias, *states)
            return _project(module.out_proj, convolved)
    original: Tensor = type(module).forward(module, hidden_states, past_key_values, attention_mask, **options)
    return original


def _delta_states(form: DeltaForm, dtype: torch.dtype) -> tuple[CachePart, CachePart]:
    sizes = (form.heads, form.key_depth, form.value_depth)
    return _conv_state(form.channels, form.taps, dtype), CachePart("state", False, sizes, torch.float32, False)


def _conv_state(channels: int, taps: int, dtype: torch.dtype) -> CachePart:
    return CachePart("conv_state", False, (channels, taps), dtype, False)


_LINEARS = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "o_proj")
_APART = ("q_proj", "k_proj", "v_proj", "b_proj", *(f"g{part}_proj" for part in _ONE_OR_TWO))

#: The forward of each form, and the names of the modules in a layer that it calls.
_FORWARDS: dict[type, tuple[Callable[..., Tensor], frozenset[str]]] = {
    DeltaForm: (
        _delta_forward,
        frozenset((*_LINEARS, *_APART, *(f"forget_gate.f{part}_proj" for part in _ONE_OR_TWO))),
    ),
    ConvolutionForm: (_convolution_forward, frozenset(("in_proj", "out_proj"))),
}


# ---- what both forms ask --------------------------------------------------------------------------------------------


def _is_served(
    module: nn.Module, hidden_states: Tensor, cache: Any, mask: Tensor | None, options: dict[str, Any]
) -> bool:
    """Whether our operators compute this call: no gradients, no packed sequences, a cache as transformers has it."""
    if hidden_states.device.type != "cpu" or hidden_states.dtype not in _DTYPES or module.training:
        return False
    if wants_gradient_through(module, hidden_states):
        return False
    if options.get("cu_seq_lens_q") is not None or options.get("seq_idx") is not None:
        return False
    if mask is not None and mask.shape != hidden_states.shape[:2]:
        return False
    return cache is None or (hasattr(cache, "get_conv_state") and not cache.is_recording_past(module.layer_idx))


def _masked(hidden_states: Tensor, mask: Tensor) -> Tensor:
    return (hidden_states * mask[:, :, None]).to(hidden_states.dtype)


def _flat(parameter: Tensor) -> Tensor:
    return parameter if parameter.dim() == 1 else parameter.reshape(-1)


# ---- the check ------------------------------------------------------------------------------------------------------


def _agrees(name: str, module: Any, form: Form) -> bool:
    """Compares the two forwards of one layer on a few random tokens, without a cache and with one that fills."""
    training = module.training
    module.eval()  # so that the new forward does not hand over to the original one
    try:
        difference = max(_differences(module, form))
    except Exception as error:  # whatever a layer does that only looks like one of ours: its own code stays
        _log.warning("%s (%s) keeps its own forward: %s", name, type(module).__name__, error)
        return False
    finally:
        module.train(training)
    if difference <= _TOLERANCE[_weight_in(module).dtype]:
        return True
    text = "%s (%s) keeps its own forward: the one-step form differs from it by %.2g of its results"
    _log.warning(text, name, type(module).__name__, difference)
    return False


def _differences(module: Any, form: Form) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    differences = []
    forward = _FORWARDS[type(form)][0]
    names = ("in_proj_qkvz", "in_proj_qkv", "q_proj", "in_proj")
    width = next(getattr(module, name) for name in names if hasattr(module, name)).in_features

    def compare(tokens: int, caches: tuple[Any, Any], mask: Tensor | None = None) -> None:
        x = torch.randn((1, tokens, width), generator=generator).to(_weight_in(module).dtype)
        outs = (type(module).forward(module, x, caches[0], mask), forward(module, form, x, caches[1], mask))
        pairs = [outs]
        if caches[0] is not None:
            layers = [cache.layers[module.layer_idx] for cache in caches]
            pairs.append(tuple(layer.conv_states[0] for layer in layers))
            if isinstance(form, DeltaForm):
                pairs.append(tuple(layer.recurrent_states[0] for layer in layers))
        for old, new in pairs:
            difference = (new.double() - old.double()).norm() / old.double().norm().clamp(min=1e-30)
            differences.append(float(difference.nan_to_num(torch.inf)))

    with torch.no_grad():
        compare(3, (None, None))
        filling = empty_cache(module.layer_idx), empty_cache(module.layer_idx)
        compare(6, filling, torch.tensor([[0, 0, 1, 1, 1, 1]]))
        for tokens in (3, 1, 1):
            compare(tokens, filling)
    return differences
