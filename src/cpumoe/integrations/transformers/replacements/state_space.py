"""Mamba and Mamba2 layers (Granite 4, Nemotron 3, Jamba and others) with one operator between their projections.

transformers' own form takes some thirty PyTorch operators for one token; for a prompt it fills tensors of hundreds of
megabytes (Mamba2) or loops over the tokens in Python (Mamba). The layers are known by the attributes they have,
whatever their class is called. What is put in place has to compute what the replaced code computes
(`replacement_check.py`), or the replaced code stays.

One thing is different on purpose: several tokens behind a cache. Mamba's own form (not Mamba2's) then forgets its state
and starts from zero, so that a prompt in two parts gives another answer than at once; here the state is carried on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.integrations.transformers.replacements.replacement_check import (
    FEATURES,
    empty_cache,
    is_near,
    left_padding,
    replace_forwards,
    twin_of,
    wants_gradient_through,
)

_NO_LIMIT = (0.0, float("inf"))


@dataclass(frozen=True)
class Mamba2Layer:
    """The facts of a Mamba2 layer, all that its one-step form must know besides its tensors."""

    heads: int
    head_dim: int
    groups: int
    depth: int
    width: int
    step_limits: tuple[float, float]
    norm_group: int
    gate_last: bool
    epsilon: float

    @property
    def convolved(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.depth

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.head_dim, self.depth

    def takes(self, hidden_states: Tensor, module: Any) -> bool:
        """Whether the operator takes the dtypes that there are."""
        return True

    def projections(self) -> dict[str, tuple[int, int]]:
        inner = self.heads * self.head_dim
        return {"in_proj": (FEATURES, inner + self.convolved + self.heads), "out_proj": (inner, FEATURES)}


@dataclass(frozen=True)
class MambaLayer:
    """The facts of a Mamba layer. ``epsilon`` is that of the norms of steps, B and C, None where there are none."""

    channels: int
    depth: int
    width: int
    step_rank: int
    epsilon: float | None

    @property
    def convolved(self) -> int:
        return self.channels

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.channels, self.depth

    def takes(self, hidden_states: Tensor, module: Any) -> bool:
        """Whether the operator takes the dtypes that there are."""
        norms = (module.b_layernorm, module.c_layernorm) if self.epsilon is not None else ()
        return all(norm.weight.dtype == hidden_states.dtype for norm in norms)

    def projections(self) -> dict[str, tuple[int, int]]:
        return {
            "in_proj": (FEATURES, 2 * self.channels),
            "x_proj": (self.channels, self.step_rank + 2 * self.depth),
            "dt_proj": (self.step_rank, self.channels),
            "out_proj": (self.channels, FEATURES),
        }


Layer = Mamba2Layer | MambaLayer


def speed_up_state_spaces(model: nn.Module) -> None:
    """Gives the Mamba and Mamba2 layers of a model their one-step form, where it computes what they compute."""
    replace_forwards(model, describe, mixer_forward, _difference, frozenset(("in_proj", "x_proj", "out_proj")))


def describe(module: nn.Module) -> Layer | None:
    """What a module is as a state space; None if it is none, or one that is built in another way."""
    convolution = getattr(module, "conv1d", None)
    if not isinstance(convolution, nn.Conv1d) or getattr(module, "activation", None) not in ("silu", "swish"):
        return None
    channels, of_each, width = convolution.weight.shape
    causal = convolution.padding == (width - 1,) and convolution.stride == (1,) and convolution.dilation == (1,)
    rates, skip = getattr(module, "A_log", None), getattr(module, "D", None)
    if of_each != 1 or not causal or not isinstance(rates, Tensor) or not isinstance(skip, Tensor):
        return None
    projections = (getattr(module, name, None) for name in ("in_proj", "out_proj"))
    if not all(isinstance(projection, nn.Module) for projection in projections):
        return None
    if hasattr(module, "mup_vector"):  # Falcon-H1 scales what it projects
        return None
    return _describe_mamba2(module, channels, width) if rates.dim() == 1 else _describe_mamba(module, channels, width)


def _describe_mamba2(module: Any, channels: int, width: int) -> Mamba2Layer | None:
    names = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "time_step_limit", "norm", "dt_bias", "layer_idx")
    if not all(hasattr(module, name) for name in names):
        return None
    inner = module.num_heads * module.head_dim
    norm = module.norm
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.shape != (inner,) or epsilon is None:
        return None
    group = getattr(norm, "group_size", inner // getattr(norm, "n_groups", 1))
    layer = Mamba2Layer(
        heads=module.num_heads,
        head_dim=module.head_dim,
        groups=module.n_groups,
        depth=module.ssm_state_size,
        width=width,
        step_limits=(float(module.time_step_limit[0]), float(module.time_step_limit[1])),
        norm_group=group,
        gate_last=bool(getattr(norm, "norm_before_gate", False)),
        epsilon=float(epsilon),
    )
    of_heads = all(tensor.shape == (layer.heads,) for tensor in (module.A_log, module.D, module.dt_bias))
    fits = layer.convolved == channels and layer.heads % layer.groups == 0 and inner % group == 0
    return layer if of_heads and fits else None


def _describe_mamba(module: Any, channels: int, width: int) -> MambaLayer | None:
    names = ("x_proj", "dt_proj", "time_step_rank", "layer_idx")
    if not all(hasattr(module, name) for name in names) or module.A_log.dim() != 2:
        return None
    depth = module.A_log.shape[1]
    norms = [getattr(module, f"{name}_layernorm", None) for name in ("dt", "b", "c")]
    epsilon = None
    if any(norm is not None for norm in norms):
        sizes = (module.time_step_rank, depth, depth)
        for norm, size in zip(norms, sizes, strict=True):
            weight = getattr(norm, "weight", None)
            if not isinstance(weight, Tensor) or weight.shape != (size,):
                return None
        epsilons = {getattr(norm, "variance_epsilon", None) for norm in norms}
        epsilon = epsilons.pop()
        if epsilons or epsilon is None:
            return None
    fits = module.A_log.shape[0] == channels and module.D.shape == (channels,)
    return MambaLayer(channels, depth, width, module.time_step_rank, epsilon) if fits else None


def _is_served(module: Any, hidden_states: Tensor, cache: Any, mask: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether a call is for the one-step form: no gradients, no training, on the CPU, nothing that it does not know."""
    if module.training or not hidden_states.is_cpu or not module.conv1d.weight.is_cpu:
        return False
    if options.get("seq_idx") is not None or options.get("cu_seqlens") is not None:
        return False
    if mask is not None and mask.shape != hidden_states.shape[:2]:
        return False
    if cache is not None and cache.is_recording_past(module.layer_idx):
        return False
    return not wants_gradient_through(module, hidden_states)


def _states(module: Any, cache: Any) -> tuple[Tensor | None, Tensor | None]:
    if cache is None:
        return None, None
    return cache.get_conv_state(module.layer_idx), cache.get_recurrent_state(module.layer_idx)


def _can_continue(conv_state: Tensor | None, state: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the operators can take cached states as they are; both are missing behind an empty cache."""
    if conv_state is None or state is None:
        return conv_state is state
    contiguous = conv_state.is_contiguous() and state.is_contiguous()
    return contiguous and conv_state.dtype == dtype and state.dtype == torch.float32 and conv_state.is_cpu


def _without_padding(hidden_states: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if mask is None:
        return hidden_states, None
    return (hidden_states * mask[:, :, None]).to(hidden_states.dtype), mask.to(torch.float32).contiguous()


@dataclass
class _Run:
    """A call that the operators take: what in_proj gives, and the states, which are changed where they are."""

    projected: Tensor  # [B, T, ...]
    mask: Tensor | None  # [B, T] fp32
    conv_state: Tensor
    state: Tensor
    is_first: bool  # nothing was in the cache


def mixer_forward(
    module: Any,
    layer: Layer,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """[B, T, H] -> [B, T, H] through a Mamba or Mamba2 layer; the states in the cache go on by T tokens."""
    run = None
    if _is_served(module, hidden_states, cache_params, attention_mask, options) and layer.takes(hidden_states, module):
        run = _begin(module, layer, hidden_states, cache_params, attention_mask)
    if run is None:
        return _original(module, hidden_states, cache_params, attention_mask, options)
    mixed = (
        _mixed_by_mamba2(module, layer, run) if isinstance(layer, Mamba2Layer) else _mixed_by_mamba(module, layer, run)
    )
    if run.is_first and cache_params is not None:  # later states are changed where they are
        cache_params.update_conv_state(run.conv_state, module.layer_idx, conv_kernel_size=layer.width)
        cache_params.update_recurrent_state(run.state, module.layer_idx)
    out: Tensor = module.out_proj(mixed)
    return out


def _begin(module: Any, layer: Layer, hidden_states: Tensor, cache: Any, mask: Tensor | None) -> _Run | None:
    """The first projection and the states; None if the cache has them in a form that the operators do not take."""
    conv_state, state = _states(module, cache)
    real, mask = _without_padding(hidden_states, mask)
    projected = module.in_proj(real)
    if not _can_continue(conv_state, state, projected.dtype):
        return None
    is_first = conv_state is None or state is None
    if conv_state is None or state is None:
        conv_state = projected.new_zeros((len(projected), layer.convolved, layer.width))
        state = torch.zeros((len(projected), *layer.state_shape), dtype=torch.float32)
    return _Run(projected, mask, conv_state, state, is_first)


def _mixed_by_mamba2(module: Any, layer: Mamba2Layer, run: _Run) -> Tensor:
    # transformers limits the steps of a prompt and not those of one token behind it.
    low, high = _NO_LIMIT if not run.is_first and run.projected.shape[1] == 1 else layer.step_limits
    return ops.mamba2(
        run.projected,
        run.conv_state,
        run.state,
        module.conv1d.weight,
        module.conv1d.bias,
        module.dt_bias,
        module.A_log,
        module.D,
        module.norm.weight,
        run.mask,
        layer.groups,
        layer.norm_group,
        layer.epsilon,
        layer.gate_last,
        low,
        high,
    )


def _mixed_by_mamba(module: Any, layer: MambaLayer, run: _Run) -> Tensor:
    x = ops.mamba_convolution(run.projected, run.conv_state, module.conv1d.weight, module.conv1d.bias, run.mask)
    parameters = module.x_proj(x)
    steps = parameters[..., : layer.step_rank]
    b_weight = c_weight = None
    if layer.epsilon is not None:
        b_weight, c_weight = module.b_layernorm.weight, module.c_layernorm.weight
        steps = ops.rms_norm(steps, module.dt_layernorm.weight, layer.epsilon, True)
    step_bias = None
    if type(module.dt_proj) is nn.Linear:  # its bias is added in fp32, as transformers does
        step_bias = module.dt_proj.bias
        steps = F.linear(steps, module.dt_proj.weight)
    else:
        steps = module.dt_proj(steps)
    return ops.selective_scan(
        x,
        steps,
        step_bias,
        parameters,
        module.A_log,
        module.D,
        run.projected,
        run.state,
        b_weight,
        c_weight,
        0.0 if layer.epsilon is None else layer.epsilon,
    )


def _original(module: Any, hidden_states: Tensor, cache: Any, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    out: Tensor = type(module).forward(module, hidden_states, cache_params=cache, attention_mask=mask, **options)
    return out


#: Tokens of the calls one after the other, behind an empty cache; the first call of each has padding on its left.
_CALLS: Sequence[Sequence[int]] = ((6, 1, 3, 1), (2, 1))


def _difference(module: nn.Module, layer: Layer) -> str:
    """What the one-step form does differently from the layer's own code; empty if nothing."""
    # Few tokens in a chunk, so that the prompt has more than one.
    twin = twin_of(module, layer.projections(), **({"chunk_size": 4} if hasattr(module, "chunk_size") else {}))
    for calls in _CALLS:
        ours, theirs = empty_cache(twin.layer_idx), empty_cache(twin.layer_idx)
        for index, tokens in enumerate(calls):
            x = torch.randn(2, tokens, FEATURES)
            mask = left_padding(tokens) if index == 0 else None
            got = mixer_forward(twin, layer, x, ours, mask)
            one_by_one = index > 0 and isinstance(layer, MambaLayer)  # else it would forget its state
            parts = x.split(1, 1) if one_by_one else (x,)
            expected = torch.cat([_original(twin, part, theirs, mask, {}) for part in parts], 1)
            what = f"for {tokens} tokens behind {sum(calls[:index])}"
            if not is_near(got, expected):
                return f"its output is another {what}"
            for one, other in zip(_states(twin, ours), _states(twin, theirs), strict=True):
                if one is None or other is None or not is_near(one, other):
                    return f"its state is another {what}"
    x = torch.randn(2, 5, FEATURES)
    same = is_near(mixer_forward(twin, layer, x), _original(twin, x, None, None, {}))
    return "" if same else "its output is another without a cache"
