"""The operators of state spaces: threads, parts and instruction sets change no bit; what is refused; how they trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpumoe
from cpumoe import _core, ops


def mamba2_arguments(
    batch: int = 2,
    tokens: int = 5,
    heads: int = 4,
    head_dim: int = 8,
    groups: int = 2,
    depth: int = 16,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(of)

    inner = heads * head_dim
    convolved = inner + 2 * groups * depth
    return [
        random(batch, tokens, inner + convolved + heads),
        random(batch, convolved, width),
        random(batch, heads, head_dim, depth, of=torch.float32),
        random(convolved, 1, width),
        random(convolved),
        random(heads, of=torch.float32),
        random(heads, of=torch.float32),
        random(heads),
        random(inner),
        None,
        groups,
        inner // groups,
        1e-5,
        False,
        0.0,
        float("inf"),
    ]


def selective_arguments(batch: int = 2, tokens: int = 5, channels: int = 20, depth: int = 16) -> list[Any]:
    return [
        torch.randn(batch, tokens, channels),
        torch.randn(batch, tokens, channels),
        torch.randn(channels),
        torch.randn(batch, tokens, 3 + 2 * depth),
        torch.randn(channels, depth),
        torch.randn(channels),
        torch.randn(batch, tokens, 2 * channels),
        torch.randn(batch, channels, depth),
        torch.randn(depth),
        torch.randn(depth),
        1e-6,
    ]


def run_mamba2(arguments: list[Any]) -> tuple[torch.Tensor, ...]:
    """The result and the states behind it; the arguments stay as they are."""
    conv_state, state = arguments[1].clone(), arguments[2].clone()
    out = ops.mamba2(arguments[0], conv_state, state, *arguments[3:])
    return out, conv_state, state


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 140),
    heads=st.sampled_from([2, 4]),
    head_dim=st.integers(1, 40),
    depth=st.integers(1, 40),
    width=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_no_bit_depends_on_threads_parts_or_instructions(batch, tokens, heads, head_dim, depth, width, dtype, data):
    arguments = mamba2_arguments(batch, tokens, heads, head_dim, 2, depth, width, dtype)
    expected = run_mamba2(arguments)
    cut = data.draw(st.integers(1, tokens))
    conv_state, state = arguments[1].clone(), arguments[2].clone()
    parts = [
        ops.mamba2(part, conv_state, state, *arguments[3:])
        for part in (arguments[0][:, :cut], arguments[0][:, cut:])
        if part.shape[1]
    ]
    assert same((torch.cat(parts, 1), conv_state, state), expected)
    isas = [name for name, supported, *_ in _core.instruction_sets() if supported]
    found = cpumoe.get_num_threads()
    try:
        cpumoe.set_num_threads(data.draw(st.integers(1, 3)))
        _core.use_isa(data.draw(st.sampled_from(isas)))
        assert same(run_mamba2(arguments), expected)
    finally:
        _core.use_isa("")
        cpumoe.set_num_threads(found)


def test_mamba2_is_what_its_formula_says():
    arguments = mamba2_arguments(batch=1, tokens=9)
    projected, conv_state, state, weight, bias, dt_bias, a_log, skip, norm, *_ = (
        a.double() if isinstance(a, torch.Tensor) else a for a in arguments
    )
    heads, head_dim, groups, depth, inner = 4, 8, 2, 16, 32
    gate, xbc, raw = projected.split([inner, inner + 2 * groups * depth, heads], -1)
    inputs = torch.cat((conv_state[..., 1:], xbc.transpose(1, 2)), -1)
    xbc = torch.nn.functional.silu(torch.nn.functional.conv1d(inputs, weight, bias, groups=weight.shape[0]))
    rows = []
    for t in range(9):
        x, b, c = xbc[0, :, t].split([inner, groups * depth, groups * depth])
        step = torch.nn.functional.softplus(raw[0, t] + dt_bias)
        b, c = (v.view(groups, depth).repeat_interleave(heads // groups, 0) for v in (b, c))
        x = x.view(heads, head_dim)
        decay = torch.exp(-torch.exp(a_log) * step)
        state = state * decay[:, None, None] + step[:, None, None] * x[..., None] * b[:, None]
        rows.append(((state[0] * c[:, None]).sum(-1) + skip[:, None] * x).flatten())
    y = torch.stack(rows) * torch.nn.functional.silu(gate[0])
    y = y.view(9, groups, -1)
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(9, inner) * norm
    out, _, last = run_mamba2(arguments)
    torch.testing.assert_close(out[0].double(), y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last.double(), state, rtol=1e-4, atol=1e-5)


def test_steps_have_limits():
    arguments = mamba2_arguments()
    arguments[5].fill_(-40.0)  # all steps near 0: the state stays
    _, _, state = run_mamba2(arguments)
    torch.testing.assert_close(state, arguments[2])
    arguments[-2] = 0.5
    assert not torch.allclose(run_mamba2(arguments)[2], arguments[2])


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.randn(2, 5, 7), "projected has 7 features"),
        (1, torch.zeros(2, 96, 3), r"conv_state is \[2, 96, 3\]; \[2, 96, 4\] is accepted"),
        (1, torch.zeros(2, 96, 4, dtype=torch.bfloat16), "conv_state is .*; that of projected"),
        (2, torch.zeros(2, 4, 8, 16, dtype=torch.bfloat16), "state is .*; float32 is accepted"),
        (5, torch.zeros(3), r"dt_bias is \[3\]; \[4\] is accepted"),
        (9, torch.zeros(2, 4), r"mask is \[2, 4\]; \[2, 5\] is accepted"),
        (10, 0, "groups=0"),
        (11, 3, "norm_group=3 for 32 values"),
    ],
)
def test_mamba2_refuses(index, value, message):
    arguments = mamba2_arguments()
    arguments[index] = value
    with pytest.raises(ValueError, match=message):
        ops.mamba2(*arguments)


def test_the_others_refuse():
    arguments = selective_arguments()
    arguments[7] = torch.zeros(2, 20, 15)
    with pytest.raises(ValueError, match=r"state is \[2, 20, 15\]; \[2, 20, 16\] is accepted"):
        ops.selective_scan(*arguments)
    with pytest.raises(ValueError, match="projected has 5 features for 8 channels"):
        ops.mamba_convolution(torch.randn(1, 2, 5), torch.zeros(1, 8, 4), torch.randn(8, 1, 4), None, None)
    with pytest.raises(ValueError, match="17 taps"):
        ops.mamba_convolution(torch.randn(1, 2, 8), torch.zeros(1, 8, 17), torch.randn(8, 1, 17), None, None)
    with pytest.raises(ValueError, match=r"slopes is \[3\]; \[2\] is accepted"):
        ops.lightning_attention(torch.randn(1, 2, 24), torch.rand(3), 2, None)


def test_nothing_at_all():
    for batch, tokens in ((0, 3), (2, 0)):
        arguments = mamba2_arguments(batch, tokens)
        out, conv_state, state = run_mamba2(arguments)
        assert out.shape == (batch, tokens, 32)
        assert same((conv_state, state), (arguments[1], arguments[2]))
        assert ops.selective_scan(*selective_arguments(batch, tokens)).shape == (batch, tokens, 20)
    out, state = ops.lightning_attention(torch.randn(1, 0, 24), torch.rand(2), 2, torch.ones(1, 2, 4, 4))
    assert out.shape == (1, 0, 8) and torch.equal(state, torch.ones(1, 2, 4, 4))


def test_a_nan_stays_in_its_sequence():
    arguments = mamba2_arguments(batch=2)
    expected = run_mamba2(arguments)[0][1]
    arguments[0][0, 2, 3] = torch.nan
    out = run_mamba2(arguments)[0]
    assert out[0].isnan().any() and torch.equal(out[1], expected)


def test_opcheck():
    torch.library.opcheck(torch.ops.cpumoe.mamba2.default, tuple(mamba2_arguments()))
    convolution = (torch.randn(2, 5, 20), torch.randn(2, 10, 4), torch.randn(10, 1, 4), torch.randn(10), None)
    torch.library.opcheck(torch.ops.cpumoe.mamba_convolution.default, convolution)
    torch.library.opcheck(torch.ops.cpumoe.selective_scan.default, tuple(selective_arguments()))
    lightning = (torch.randn(2, 5, 24), torch.rand(2), 2, torch.randn(2, 2, 4, 4))
    torch.library.opcheck(torch.ops.cpumoe.lightning_attention.default, lightning)
