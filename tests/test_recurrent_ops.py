"""The gated delta rule and short convolutions against transformers' own functions, and how they refuse bad input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from cpumoe import _core, ops


@dataclass(frozen=True)
class Layer:
    """Random projections and parameters of a layer with 2 heads of keys and 6 of values, q, k and v apart."""

    of_channels: bool
    batch: int = 2
    tokens: int = 70
    dtype: torch.dtype = torch.float32
    key_heads: int = 2
    heads: int = 6
    key_depth: int = 24
    value_depth: int = 40
    taps: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_depth + self.heads * self.value_depth

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)

        def some(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(self.dtype)

        def rows(width: int) -> Tensor:
            return some(self.batch, self.tokens, width)

        per_head = self.key_depth if self.of_channels else 1
        return {
            "q": rows(self.key_heads * self.key_depth),
            "k": rows(self.key_heads * self.key_depth),
            "v": rows(self.heads * self.value_depth),
            "z": rows(self.heads * self.value_depth),
            "b": rows(self.heads),
            "a": rows(self.heads * per_head),
            "key_heads": self.key_heads,
            "log_rates": some(self.heads),
            "decay_bias": some(self.heads * per_head),
            "decay_bound": 0.0,
            "conv_weight": some(self.channels, 1, self.taps),
            "conv_bias": some(self.channels),
            "conv_state": some(self.batch, self.channels, self.taps),
            "state": some(self.batch, self.heads, self.key_depth, self.value_depth).float(),
            "norm_weight": some(self.value_depth),
            "norm_epsilon": 1e-5,
            "sigmoid_gate": False,
        }


def expected(layer: Layer, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The result and both states, by transformers' functions."""
    mixed = torch.cat((given["q"], given["k"], given["v"]), -1).transpose(1, 2)
    mixed = torch.cat((given["conv_state"], mixed), -1)
    conv_state = mixed[:, :, -layer.taps :]
    mixed = qwen.causal_conv1d_fn(mixed, given["conv_weight"].squeeze(1), given["conv_bias"], "silu")
    mixed = mixed[:, :, -layer.tokens :].transpose(1, 2)
    keys = layer.key_heads * layer.key_depth
    q, k, v = torch.split(mixed, [keys, keys, layer.heads * layer.value_depth], -1)
    share = layer.heads // layer.key_heads
    q, k = (t.unflatten(-1, (-1, layer.key_depth)).repeat_interleave(share, 2) for t in (q, k))
    v = v.unflatten(-1, (-1, layer.value_depth))
    a = given["a"] + given["decay_bias"]
    rates = given["log_rates"].exp()
    if layer.of_channels:
        a, rates, rule = a.unflatten(-1, (layer.heads, -1)), rates[:, None], kimi.chunk_kimi_delta_attention
    else:
        rule = qwen.torch_chunk_gated_delta_rule
    bound = given["decay_bound"]
    g = -rates * F.softplus(a) if bound == 0 else bound * torch.sigmoid(rates * a)
    options = {"initial_state": given["state"], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    recalled, state = rule(q, k, v, g=g, beta=given["b"].sigmoid(), **options)
    x = recalled * torch.rsqrt(recalled.pow(2).mean(-1, keepdim=True) + given["norm_epsilon"]) * given["norm_weight"]
    z = given["z"].unflatten(-1, (layer.heads, -1))
    out = x * (z.sigmoid() if given["sigmoid_gate"] else F.silu(z))
    return out.flatten(2), conv_state, state


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}


@pytest.mark.parametrize("bound", [0.0, -5.0])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("of_channels", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 70, 200])
def test_what_transformers_computes(tokens: int, of_channels: bool, sigmoid: bool, bound: float) -> None:
    layer = Layer(of_channels, tokens=tokens)
    given = {**layer.arguments(), "sigmoid_gate": sigmoid, "decay_bound": bound}
    want, conv_state, state = expected(layer, copied(given))
    got = ops.gated_delta_rule(*given.values())
    assert relative(got, want) < 1e-5
    assert relative(given["state"], state) < 1e-5
    assert torch.equal(given["conv_state"], conv_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_at_the_end_only(dtype: torch.dtype) -> None:
    layer = Layer(False, dtype=dtype)
    given = layer.arguments()
    wide = {name: value.float() if isinstance(value, Tensor) else value for name, value in given.items()}
    want, _, state = expected(layer, wide)
    got = ops.gated_delta_rule(*given.values())
    assert got.dtype == dtype
    assert relative(got, want) < (3e-3 if dtype == torch.bfloat16 else 4e-4)
    assert relative(given["state"], state) < 1e-5


def joined(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "q": torch.cat((given["q"], given["k"], given["v"]), -1), "k": None, "v": None}


def grouped(layer: Layer, given: dict[str, Any]) -> dict[str, Any]:
    parts = [given[name].unflatten(-1, (layer.key_heads, -1)) for name in ("q", "k", "v", "z")]
    gates = [given[name].unflatten(-1, (layer.key_heads, -1)) for name in ("b", "a")]
    q, b = torch.cat(parts, -1).flatten(2), torch.cat(gates, -1).flatten(2)
    return {**given, "q": q, "b": b, "k": None, "v": None, "z": None, "a": None}


def test_arrangements_of_projections_have_the_same_bits() -> None:
    layer = Layer(False)
    given = layer.arguments()
    variants = [copied(given), joined(copied(given)), grouped(layer, copied(given))]
    outs = [ops.gated_delta_rule(*variant.values()) for variant in variants]
    for out, variant in zip(outs[1:], variants[1:], strict=True):
        assert torch.equal(out, outs[0])
        assert torch.equal(variant["state"], variants[0]["state"])


@pytest.mark.parametrize("of_channels", [False, True])
def test_threads_and_batches_do_not_change_bits(of_channels: bool) -> None:
    given = Layer(of_channels, batch=3, tokens=150).arguments()
    whole = copied(given)
    want = ops.gated_delta_rule(*whole.values())
    try:
        for threads in (1, 3):
            _core.set_thread_count(threads)
            again = copied(given)
            assert torch.equal(ops.gated_delta_rule(*again.values()), want)
            assert torch.equal(again["state"], whole["state"])
    finally:
        _core.set_thread_count(0)
    of_sequence = ("q", "k", "v", "z", "b", "a", "conv_state", "state")
    for i in range(3):
        one = {name: value[i : i + 1].clone() if name in of_sequence else value for name, value in given.items()}
        assert torch.equal(ops.gated_delta_rule(*one.values()), want[i : i + 1])


def test_strong_decays_forget_all_and_leave_no_subnormal_numbers() -> None:
    given = Layer(False, tokens=3).arguments()
    given["a"] = torch.full_like(given["a"], 400.0)
    ops.gated_delta_rule(*given.values())
    assert given["state"].isfinite().all()
    tiny = torch.finfo(torch.float32).tiny
    assert not ((given["state"].abs() > 0) & (given["state"].abs() < tiny)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "taps"), [(48, 3), (130, 4), (5, 1)])
def test_short_convolutions(channels: int, taps: int, dtype: torch.dtype) -> None:
    projected, weight = torch.randn(2, 9, 3 * channels).to(dtype), torch.randn(channels, 1, taps).to(dtype)
    bias, state = torch.randn(channels).to(dtype), torch.randn(2, channels, taps).to(dtype)
    gate, out_gate, x = projected.chunk(3, -1)
    inputs = torch.cat((state, (gate * x).transpose(1, 2)), -1)
    convolved = qwen.causal_conv1d_fn(inputs.float(), weight.squeeze(1).float(), bias.float())[:, :, -9:]
    want = out_gate.float() * convolved.transpose(1, 2)
    first = ops.short_convolution(projected[:, :8], weight, bias, state)
    last = ops.short_convolution(projected[:, 8:], weight, bias, state)
    assert relative(torch.cat((first, last), 1), want) < (1e-6 if dtype == torch.float32 else 3e-3)
    assert torch.equal(state, inputs[:, :, -taps:])


def test_opcheck() -> None:
    layer = Layer(False, tokens=3)
    given = layer.arguments()
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    for variant in (given, grouped(layer, given)):
        torch.library.opcheck(torch.ops.cpumoe.gated_delta_rule.default, tuple(variant.values()), test_utils=utils)
    arguments = (torch.randn(1, 4, 24), torch.randn(8, 1, 3), None, torch.zeros(1, 8, 3))
    torch.library.opcheck(torch.ops.cpumoe.short_convolution.default, arguments, test_utils=utils)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_of_one_token(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(1, 1, 50).to(dtype), torch.randn(70, 50).to(dtype), torch.randn(70)
    got = ops.token_linear(x, weight, bias)
    assert got.shape == (1, 1, 70) and got.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}[dtype]
    assert relative(got, F.linear(x.double(), weight.double(), bias.double())) < tolerance
    torch.library.opcheck(torch.ops.cpumoe.token_linear.default, (x, weight, None))
    with pytest.raises(ValueError, match="50"):
        ops.token_linear(torch.randn(2, 50).to(dtype), weight, None)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "key_heads": ({"key_heads": 4}, "key_heads=4 for a state of 6 heads; a divisor"),
    "k": ({"k": torch.zeros(2, 5, 47)}, r"k is \[2, 5, 47\]; \[2, 5, 48\] is accepted"),
    "a": ({"a": torch.zeros(2, 5, 7)}, r"a is \[2, 5, 7\]"),
    "v": ({"v": None}, "k is given without v"),
    "state": ({"state": torch.zeros(2, 6, 24, 40, dtype=torch.float64)}, "state is float64; float32"),
    "conv_state": ({"conv_state": torch.zeros(2, 336, 3)}, r"conv_state is \[2, 336, 3\]; \[2, 336, 4\]"),
    "conv_state type": ({"conv_state": torch.zeros(2, 336, 4).half()}, "conv_state is float16; that of q"),
    "conv_weight": ({"conv_weight": torch.zeros(335, 1, 4)}, r"conv_weight is \[335, 1, 4\]; \[336, 1, taps\]"),
    "taps": (
        {"conv_weight": torch.zeros(336, 1, 17), "conv_state": torch.zeros(2, 336, 17)},
        "conv_weight has 17 taps; 1 to 16",
    ),
    "decay_bias": ({"decay_bias": torch.zeros(7)}, r"decay_bias is \[7\]; \[6\]"),
    "decay_bound": ({"decay_bound": 1.0}, "decay_bound=1; a number below 0"),
    "norm_weight": ({"norm_weight": torch.zeros(41)}, r"norm_weight is \[41\]; \[40\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_named(name: str) -> None:
    changes, message = WRONG[name]
    given = {**replace(Layer(False), tokens=5).arguments(), **changes}
    with pytest.raises((ValueError, TypeError), match=message):
        ops.gated_delta_rule(*given.values())


def test_a_batch_of_any_size_without_channels_takes_no_memory() -> None:
    """Tensors without elements may claim 2^40 sequences."""
    batch = 1 << 40
    projected, state = torch.empty(batch, 1, 0), torch.empty(batch, 0, 4)
    assert ops.short_convolution(projected, torch.empty(0, 1, 4), None, state).shape == (batch, 1, 0)
    assert ops.mamba_convolution(projected, state, torch.empty(0, 1, 4), None, None).shape == (batch, 1, 0)
