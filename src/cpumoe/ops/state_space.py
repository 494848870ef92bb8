"""State spaces: what Mamba layers do between their projections, with states that are changed in place; and lightning
attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cpumoe import _core
from cpumoe.ops.registration import like_first, register_into


def _mamba2_out(projected: Tensor, conv_state: Tensor, state: Tensor, *_: object) -> Tensor:
    return projected.new_empty((*projected.shape[:2], state.shape[1] * state.shape[2]))


def _mamba2(out: Tensor, projected: Tensor, *others: Any) -> None:
    _core.mamba2(projected.contiguous(), *(*others, out))


# Mamba2, all between its two projections: projected [batch, tokens, gate | x | B | C | steps] -> [batch, tokens,
# inner], inner = heads * head_dim. conv_state [batch, inner + 2 * groups * depth, width] of the same dtype holds the
# last inputs of the convolution, state [batch, heads, head_dim, depth] is fp32; both are those before the tokens and
# then those behind them, whatever the cut of the tokens with the same bits. conv_weight [channels, 1, width] with
# conv_bias and silu; dt_bias, A_log, D [heads]; steps within [step_low, step_high]; norm_weight [inner] for a norm of
# every norm_group values times the gate (gate_last: the gate behind the norm), None for the gate alone; mask [batch,
# tokens] fp32, 0 for padding.
mamba2 = register_into(
    "mamba2(Tensor projected, Tensor(a!) conv_state, Tensor(b!) state, Tensor conv_weight, Tensor? conv_bias, "
    "Tensor dt_bias, Tensor A_log, Tensor D, Tensor? norm_weight, Tensor? mask, int groups, int norm_group, "
    "float epsilon, bool gate_last, float step_low, float step_high) -> Tensor",
    _mamba2_out,
    _mamba2,
)


def _mamba_convolution_out(projected: Tensor, conv_state: Tensor, weight: Tensor, *_: object) -> Tensor:
    return projected.new_empty((*projected.shape[:2], weight.shape[0]))


def _mamba_convolution(out: Tensor, projected: Tensor, *others: Any) -> None:
    _core.mamba_convolution(projected.contiguous(), *(*others, out))


# Mamba's convolution with silu of the first `channels` features of projected [batch, tokens, features] -> [batch,
# tokens, channels]; conv_state [batch, channels, width], weight [channels, 1, width] and mask as above.
mamba_convolution = register_into(
    "mamba_convolution(Tensor projected, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor? mask) -> Tensor",
    _mamba_convolution_out,
    _mamba_convolution,
)


def _selective_scan(
    out: Tensor,
    x: Tensor,
    steps: Tensor,
    step_bias: Tensor | None,
    parameters: Tensor,
    A_log: Tensor,
    D: Tensor,
    gate: Tensor,
    *others: Any,
) -> None:
    x, steps, parameters, gate = (tensor.contiguous() for tensor in (x, steps, parameters, gate))
    _core.selective_scan(x, steps, step_bias, parameters, A_log, D, gate, *(*others, out))


# Mamba's state space and gate: x and steps (before their bias and softplus) [batch, tokens, channels] -> that shape.
# Rows of parameters end in [B | C] (normed with b_weight and c_weight [depth] if these are given), rows of gate in the
# gate [channels]; A_log [channels, depth], step_bias and D [channels]; state [batch, channels, depth] fp32.
selective_scan = register_into(
    "selective_scan(Tensor x, Tensor steps, Tensor? step_bias, Tensor parameters, Tensor A_log, Tensor D, Tensor gate, "
    "Tensor(a!) state, Tensor? b_weight, Tensor? c_weight, float epsilon) -> Tensor",
    like_first,
    _selective_scan,
)


def _lightning_attention_out(qkv: Tensor, slopes: Tensor, heads: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, tokens, features = qkv.shape
    depth = features // heads // 3
    like = qkv if state is None else state
    return qkv.new_empty((batch, tokens, heads * depth)), like.new_empty((batch, heads, depth, depth))


def _lightning_attention(
    outs: tuple[Tensor, Tensor], qkv: Tensor, slopes: Tensor, heads: int, state: Tensor | None
) -> None:
    out, next_state = outs
    _core.lightning_attention(qkv.contiguous(), slopes, None if state is None else state.contiguous(), next_state, out)


# Linear attention whose past decays by e^-slope a token: qkv [batch, tokens, heads * (q | k | v)] and slopes [heads]
# fp32 -> [batch, tokens, heads * depth] and the state behind the tokens [batch, heads, depth, depth]. It has the dtype
# of the state before them, or of qkv if there is none; it is rounded to it once a call.
lightning_attention = register_into(
    "lightning_attention(Tensor qkv, Tensor slopes, int heads, Tensor? state) -> (Tensor, Tensor)",
    _lightning_attention_out,
    _lightning_attention,
)
