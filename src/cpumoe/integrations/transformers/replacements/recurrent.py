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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.integrations.transformers.replacements.replaced_forward import ReplacedForward
from cpumoe.integrations.transformers.replacements.replacement_check import empty_cache, wants_gradient_through

_log = logging.getLogger("cpumoe")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ONE_OR_TWO = ("", "_a", "_b")  # a projection, or the two in its place
_MOST_TAPS = 16  # of a convolution, as the core has it

#: How far the outputs and states of the two forwards may differ, relative to their norm. In 16 bits transformers rounds
#: after every operator, ours does at the end.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def speed_up_linear_attention(model: nn.Module) -> None:
    """Gives the layers with a recurrent state of a loaded model their one-step form, where it agrees with theirs."""
    verdicts: dict[object, bool] = {}
    for name, module in model.named_modules():
        form = state_form(module)
        if form is None or not form.is_here(module) or "forward" in vars(module) or _has_hooks(module):
            continue
        key = (form, form.dtype_in(module), *_code_of(module))
        if key not in verdicts:
            verdicts[key] = _agrees(name, module, form)
        if verdicts[key]:
            module.forward = ReplacedForward(_forward, module, form, form.called)


def _forward(module: Any, form: Form, *arguments: Any, **options: Any) -> Tensor:
    return form.forward(module, *arguments, **options)


def _code_of(module: Any) -> list[object]:
    """What runs in a layer: its class, and the forwards of its parts, which may be replaced in one layer alone."""
    parts = [getattr(module, name, None) for name in ("conv1d", "conv", "norm", "o_norm", "forget_gate")]
    forwards = [vars(part).get("forward", type(part).forward) for part in parts if part is not None]
    return [type(module), *(getattr(forward, "func", forward) for forward in forwards)]


def _has_hooks(module: nn.Module) -> bool:
    """Whether accelerate moves weights in and out around calls: then they may not be here when they are wanted."""
    return any(hasattr(part, "_hf_hook") for part in module.modules())


# ---- recognising ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeltaForm:
    """A gated delta net (a decay for each head) or Kimi delta attention (one for each channel)."""

    projections: str  # a key of _PROJECTIONS
    key_heads: int
    heads: int
    key_depth: int
    value_depth: int
    taps: int
    norm: str
    out: str
    sigmoid_gate: bool
    decay_bound: float

    @property
    def called(self) -> frozenset[str]:
        """Names of the modules in a layer that ``forward`` calls."""
        linears = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        apart = ("q_proj", "k_proj", "v_proj", "b_proj", *(f"g{part}_proj" for part in _ONE_OR_TWO))
        return frozenset((*linears, *apart, *(f"forget_gate.f{part}_proj" for part in _ONE_OR_TWO), self.out))

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_depth + self.heads * self.value_depth

    def dtype_in(self, module: Any) -> torch.dtype:
        dtype: torch.dtype = module.conv1d.weight.dtype
        return dtype

    def is_here(self, module: Any) -> bool:
        """Whether its weights are on the CPU."""
        return bool(module.conv1d.weight.is_cpu)

    def width_in(self, module: Any) -> int:
        first = {"grouped": "in_proj_qkvz", "joined": "in_proj_qkv"}.get(self.projections, "q_proj")
        return int(getattr(module, first).in_features)

    def forward(
        self,
        module: Any,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """[B, T, H] -> [B, T, H]; the states in the cache are moved on."""
        if _is_served(module, hidden_states, cache_params, attention_mask, options):
            x = hidden_states if attention_mask is None else _masked(hidden_states, attention_mask)
            q, k, v, z, b, a = _PROJECTIONS[self.projections](module, x)
            states = self.states(cache_params, module.layer_idx, q.shape[0], q.dtype)
            if states is not None:
                decay, norm = getattr(module, "forget_gate", module), getattr(module, self.norm)
                recalled = ops.gated_delta_rule(
                    q,
                    k,
                    v,
                    z,
                    b,
                    a,
                    self.key_heads,
                    _flat(decay.A_log),
                    _flat(decay.dt_bias),
                    self.decay_bound,
                    module.conv1d.weight,
                    module.conv1d.bias,
                    *states,
                    norm.weight,
                    norm.variance_epsilon,
                    self.sigmoid_gate,
                )
                return _project(getattr(module, self.out), recalled)
        original: Tensor = type(module).forward(module, hidden_states, cache_params, attention_mask, **options)
        return original

    def states(self, cache: Any, layer: int, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Of the convolution and of the delta rule, to be changed in place; None: not as this form has them."""
        sizes = (batch, self.heads, self.key_depth, self.value_depth)
        conv_state = _conv_state(cache, layer, batch, dtype, self.channels, self.taps)
        if conv_state is None:
            return None
        if cache is None:
            return conv_state, torch.zeros(sizes)
        state = cache.get_recurrent_state(layer, state_idx=0)
        if state is None:
            state = cache.update_recurrent_state(torch.zeros(sizes), layer)
        return (conv_state, state) if _is_plain(state, sizes, torch.float32) else None


@dataclass(frozen=True)
class ConvolutionForm:
    """C * convolution(B * x), with B, C and x from one projection."""

    channels: int
    taps: int

    called = frozenset(("in_proj", "out_proj"))  # by ``forward``

    def dtype_in(self, module: Any) -> torch.dtype:
        dtype: torch.dtype = module.conv.weight.dtype
        return dtype

    def is_here(self, module: Any) -> bool:
        """Whether its weights are on the CPU."""
        return bool(module.conv.weight.is_cpu)

    def width_in(self, module: Any) -> int:
        return int(module.in_proj.in_features)

    def states(self, cache: Any, layer: int, batch: int, dtype: torch.dtype) -> tuple[Tensor] | None:
        """That of the convolution, to be changed in place; None: not as this form has it."""
        state = _conv_state(cache, layer, batch, dtype, self.channels, self.taps)
        return None if state is None else (state,)

    def forward(
        self,
        module: Any,
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
            states = self.states(past_key_values, module.layer_idx, batch, dtype)
            if states is not None:
                convolved = ops.short_convolution(projected, module.conv.weight, module.conv.bias, *states)
                return _project(module.out_proj, convolved)
        original: Tensor = type(module).forward(module, hidden_states, past_key_values, attention_mask, **options)
        return original


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

_GATES = {"silu": False, "swish": False, "sigmoid": True}


def delta_form(module: Any) -> DeltaForm | None:
    """What a module is, if it looks like a layer with the delta rule."""
    conv: Any = getattr(module, "conv1d", None)
    decay: Any = getattr(module, "forget_gate", module)
    norm = "norm" if hasattr(module, "norm") else "o_norm"
    rates: Any = getattr(decay, "A_log", None)
    bias: Any = getattr(decay, "dt_bias", None)
    weight: Any = getattr(getattr(module, norm, None), "weight", None)
    depth = getattr(module, "head_k_dim", getattr(module, "head_dim", None))
    has_tensors = all(isinstance(tensor, Tensor) for tensor in (rates, bias, weight))
    if not (_is_depthwise(conv) and has_tensors and isinstance(depth, int)):
        return None
    gate = _GATES.get(getattr(getattr(module, norm), "activation", ""))
    silu = getattr(module, "activation", None) in ("silu", "swish")
    heads, value_depth = rates.numel(), weight.numel()
    key_heads = (conv.in_channels - heads * value_depth) // (2 * depth)
    projections = next((p for p, found in _found(module).items() if found), None)
    if gate is None or not silu or key_heads < 1 or heads % key_heads or projections is None:
        return None
    form = DeltaForm(
        projections=projections,
        key_heads=key_heads,
        heads=heads,
        key_depth=depth,
        value_depth=value_depth,
        taps=conv.kernel_size[0],
        norm=norm,
        out="out_proj" if hasattr(module, "out_proj") else "o_proj",
        sigmoid_gate=gate,
        decay_bound=_bound(decay),
    )
    per_head = depth if projections == "apart" else 1
    fits = form.channels == conv.in_channels and bias.numel() == heads * per_head and form.decay_bound <= 0
    return form if fits and hasattr(module, form.out) and hasattr(module, "layer_idx") else None


def _found(module: Any) -> dict[str, bool]:
    """The arrangements of projections, and whether a module has all parts of them."""
    names = {
        "grouped": ("in_proj_qkvz", "in_proj_ba"),
        "joined": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        "apart": ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate"),
    }
    found = {key: all(hasattr(module, name) for name in parts) for key, parts in names.items()}
    gated = hasattr(module, "g_proj") or (hasattr(module, "g_a_proj") and hasattr(module, "g_b_proj"))
    return {**found, "apart": found["apart"] and gated}


def _bound(decay: Any) -> float:
    """The lower bound of the decay's logarithm, or 0 for none."""
    if getattr(decay, "safe_gate", False):
        return float(decay.lower_bound)
    bound = getattr(decay, "safe_gate_lower_bound", None)
    return 0.0 if bound is None else float(bound)


def state_form(module: Any) -> Form | None:
    """What a module is, if it looks like a layer with a recurrent state."""
    return delta_form(module) or _convolution_form(module)


def _convolution_form(module: Any) -> ConvolutionForm | None:
    conv: Any = getattr(module, "conv", None)
    projection = getattr(module, "in_proj", None)
    if not _is_depthwise(conv) or not hasattr(module, "out_proj") or not hasattr(module, "layer_idx"):
        return None
    if getattr(projection, "out_features", None) != 3 * conv.in_channels:
        return None
    return ConvolutionForm(conv.in_channels, conv.kernel_size[0])


def _is_depthwise(conv: Any) -> bool:
    """Whether it is a causal convolution of each channel by itself."""
    if not isinstance(conv, nn.Conv1d) or conv.groups != conv.in_channels or conv.in_channels != conv.out_channels:
        return False
    taps = conv.kernel_size[0]
    plain = conv.stride == (1,) and conv.dilation == (1,) and conv.padding == (taps - 1,) and taps <= _MOST_TAPS
    return plain and conv.weight.dtype in _DTYPES


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


def _conv_state(cache: Any, layer: int, batch: int, dtype: torch.dtype, channels: int, taps: int) -> Tensor | None:
    """The last inputs [B, channels, taps] of a convolution, zeros before the first token."""
    sizes = (batch, channels, taps)
    if cache is None:
        return torch.zeros(sizes, dtype=dtype)
    state = cache.get_conv_state(layer, state_idx=0)
    if state is None:
        cache.update_conv_state(torch.zeros(sizes, dtype=dtype), layer, conv_kernel_size=taps)
        state = cache.get_conv_state(layer, state_idx=0)
    return state if _is_plain(state, sizes, dtype) else None


def _is_plain(state: Tensor | None, sizes: tuple[int, ...], dtype: torch.dtype) -> bool:
    if state is None or state.shape != sizes or state.dtype != dtype:
        return False
    return state.device.type == "cpu" and state.is_contiguous()


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
    if difference <= _TOLERANCE[form.dtype_in(module)]:
        return True
    text = "%s (%s) keeps its own forward: the one-step form differs from it by %.2g of its results"
    _log.warning(text, name, type(module).__name__, difference)
    return False


def _differences(module: Any, form: Form) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    differences = []

    def compare(tokens: int, caches: tuple[Any, Any], mask: Tensor | None = None) -> None:
        shape = (1, tokens, form.width_in(module))
        x = torch.randn(shape, generator=generator).to(form.dtype_in(module))
        outs = (type(module).forward(module, x, caches[0], mask), form.forward(module, x, caches[1], mask))
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
