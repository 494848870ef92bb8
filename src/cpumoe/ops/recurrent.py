"""Layers with a recurrent state, between their projections: the gated delta rule and short convolutions.

Both operators move the states that they are given on, in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cpumoe import _core
from cpumoe.ops.registration import aligned, register_into


def _gated_delta_rule_out(q: Tensor, *others: Any) -> Tensor:
    state = others[12]
    return q.new_empty((q.shape[0], q.shape[1], state.shape[1] * state.shape[3]))


def _gated_delta_rule(
    out: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    z: Tensor | None,
    b: Tensor,
    a: Tensor | None,
    *others: Any,
) -> None:
    k, v, z, a = (None if tensor is None else aligned(tensor) for tensor in (k, v, z, a))
    _core.gated_delta_rule(aligned(q), k, v, z, aligned(b), a, *(*others, out))


# All of a gated delta net, or of Kimi delta attention, between its projections: causal convolution and silu of q, k and
# v; q and k to length 1, q divided by sqrt(dk); the gated delta rule token after token; norm and gate.
#
# state fp32 [B, heads, dk, dv] and conv_state [B, channels, taps], with channels = 2 key_heads dk + heads dv, are moved
# on in place; zeros are the state before the first token. The projections [B, T, ..], all of one dtype, are one of
# - q, k [key_heads dk], v, z (the gate) [heads dv], b [heads], a [heads] or, for a decay of each channel, [heads dk];
# - the same with q, k and v side by side in q, and k and v None;
# - all in q and b, where k, v, z and a are None: for each head of keys q, k, and v and z of the heads that share it; b
#   and a likewise.
# beta = sigmoid(b). The decay is exp(-exp(log_rates) softplus(a + decay_bias)), or with a bound below 0 exp(decay_bound
# sigmoid(exp(log_rates) (a + decay_bias))); log_rates [heads], decay_bias [heads] or [heads dk]. conv_weight [channels,
# 1, taps], conv_bias [channels]; norm_weight [dv]. The gate is sigmoid(z), or z sigmoid(z). Result: [B, T, heads dv].
gated_delta_rule = register_into(
    "gated_delta_rule(Tensor q, Tensor? k, Tensor? v, Tensor? z, Tensor b, Tensor? a, int key_heads, Tensor log_rates, "
    "Tensor decay_bias, float decay_bound, Tensor conv_weight, Tensor? conv_bias, Tensor(c!) conv_state, "
    "Tensor(s!) state, Tensor norm_weight, float norm_epsilon, bool sigmoid_gate) -> Tensor",
    _gated_delta_rule_out,
    _gated_delta_rule,
)


def _short_convolution_out(projected: Tensor, *_: object) -> Tensor:
    return projected.new_empty((*projected.shape[:2], projected.shape[2] // 3))


def _short_convolution(
    out: Tensor, projected: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, conv_state: Tensor
) -> None:
    _core.short_convolution(aligned(projected), conv_weight, conv_bias, conv_state, out)


# projected [B, T, 3 channels] holds B, C and x: C * convolution(B * x) [B, T, channels], causal and of each channel by
# itself. conv_weight [channels, 1, taps], conv_bias [channels]; conv_state [B, channels, taps], the last values of B *
# x, is moved on in place.
short_convolution = register_into(
    "short_convolution(Tensor projected, Tensor conv_weight, Tensor? conv_bias, Tensor(c!) conv_state) -> Tensor",
    _short_convolution_out,
    _short_convolution,
)
