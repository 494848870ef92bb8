"""State spaces: what Mamba layers do between their projections, with states that are changed in place; and lightning
attention."""

from __future__ import annotations

from torch import Tensor

from cpumoe import _core
from cpumoe.ops.registration import like_first, register


def _mamba2(
    projected: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor | None,
    mask: Tensor | None,
    groups: int,
    norm_group: int,
    epsilon: float,
    gate_last: bool,
    step_low: float,
    step_high: float,
) -> Tensor:
    projected = projected.contiguous()
    out = projected.new_empty((*projected.shape[:2], state.shape[1] * state.shape[2]))
    _core.mamba2(
        projected,
        conv_state,
        state,
        conv_weight,
        conv_bias,
        dt_bias,
        A_log,
        D,
        norm_weight,
        mask,
        groups,
        norm_group,
        epsilon,
        gate_last,
        step_low,
        step_high,
        out,
    )
    return out


def _mamba2_fake(projected: Tensor, conv_state: Tensor, state: Tensor, *_: object) -> Tensor:
    return projected.new_empty((*projected.shape[:2], state.shape[1] * state.shape[2]))


# Mamba2, all between its two projections: projected [batch, tokens, gate | x | B | C | steps] -> [batch, tokens,
# inner], inner = heads * head_dim. conv_state [batch, inner + 2 * groups * depth, width] of the same dtype holds the
# last inputs of the convolution, state [batch, heads, head_dim, depth] is fp32; both are those before the tokens and
# then those behind them, whatever the cut of the tokens with the same bits. conv_weight [channels, 1, width] with
# conv_bias and silu; dt_bias, A_log, D [heads]; steps within [step_low, step_high]; norm_weight [inner] for a norm of
# every norm_group values times the gate (gate_last: the gate behind the norm), None for the gate alone; mask [batch,
# tokens] fp32, 0 for padding.
mamba2 = register(
    "mamba2(Tensor projected, Tensor(a!) conv_state, Tensor(b!) state, Tensor conv_weight, Tensor? conv_bias, "
    "Tensor dt_bias, Tensor A_log, Tensor D, Tensor? norm_weight, Tensor? mask, int groups, int norm_group, "
    "float epsilon, bool gate_last, float step_low, float step_high) -> Tensor",
    _mamba2,
    _mamba2_fake,
)


def _mamba_convolution(
    projected: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None
) -> Tensor:
    projected = projected.contiguous()
    out = projected.new_empty((*projected.shape[:2], weight.shape[0]))
    _core.mamba_convolution(projected, conv_state, weight, bias, mask, out)
    return out


def _mamba_convolution_fake(projected: Tensor, conv_state: Tensor, weight: Tensor, *_: object) -> Tensor:
    return projected.new_empty((*projected.shape[:2], weight.shape[0]))


# Mamba's convolution with silu of the first `channels` features of projected [batch, tokens, features] -> [batch,
# tokens, channels]; conv_state [batch, channels, width], weight [channels, 1, width] and mask as above.
mamba_convolution = register(
    "mamba_convolution(Tensor projected, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor? mask) -> Tensor",
    _mamba_convolution,
    _mamba_convolution_fake,
)


def _selective_scan(
    x: Tensor,
    steps: Tensor,
    step_bias: Tensor | None,
    parameters: Tensor,
    A_log: Tensor,
    D: Tensor,
    gate: Tensor,
    state: Tensor,
    b_weight: Tensor | None,
    c_weight: Tensor | None,
    epsilon: float,
) -> Tensor:
    x = x.contiguous()
    out = x.new_empty(x.shape)
    _core.selective_scan(
        x,
        steps.contiguous(),
        step_bias,
        parameters.contiguous(),
        A_log,
        D,
        gate.contiguous(),
        state,
        b_weight,
        c_weight,
        epsilon,
        out,
    )
    return out


# Mamba's state space and gate: x and steps (before their bias and softplus) [batch, tokens, channels] -> that shape.
# Rows of parameters end in [B | C] (normed with b_weight and c_weight [depth] if these are given), rows of gate in the
# gate [channels]; A_log [channels, depth], step_bias and D [channels]; state [batch, channels, depth] fp32.
selective_scan = register(
    "selective_scan(Tensor x, Tensor steps, Tensor? step_bias, Tensor parameters, Tensor A_log, Tensor D, Tensor gate, "
    "Tensor(a!) state, Tensor? b_weight, Tensor? c_weight, float epsilon) -> Tensor",
    _selective_scan,
    like_first,
)


def _lightning_attention(qkv: Tensor, slopes: Tensor, heads: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
    qkv = qkv.contiguous()
    out, next_state = _lightning_attention_fake(qkv, slopes, heads, state)
    _core.lightning_attention(qkv, slopes, None if state is None else state.contiguous(), next_state, out)
    return out, next_state


def _lightning_attention_fake(qkv: Tensor, slopes: Tensor, heads: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, tokens, features = qkv.shape
    depth = features // heads // 3
    like = qkv if state is None else state
    return qkv.new_empty((batch, tokens, heads * depth)), like.new_empty((batch, heads, depth, depth))


# Linear attention whose past decays by e^-slope a token: qkv [batch, tokens, heads * (q | k | v)] and slopes [heads]
# fp32 -> [batch, tokens, heads * depth] and the state behind the tokens [batch, heads, depth, depth]. It has the dtype
# of the state before them, or of qkv if there is none; it is rounded to it once a call.
lightning_attention = register(
    "lightning_attention(Tensor qkv, Tensor slopes, int heads, Tensor? state) -> (Tensor, Tensor)",
    _lightning_attention,
    _lightning_attention_fake,
)
