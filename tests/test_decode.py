"""Attention of one token, routers and norms: the results of what they replace, for every architecture."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_architectures import ARCHITECTURES, write_float

import cpumoe
from cpumoe.plugins import transformers as plugin

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_computes_what_it_did(tmp_path, architecture, monkeypatch):
    folder = write_float(tmp_path / "float", architecture)
    fast = cpumoe.load_model(folder, scheme="w4a8-g32", dtype=torch.float32)
    assert fast.config._attn_implementation == ("eager" if architecture == "gpt_oss" else "cpumoe")
    monkeypatch.setattr(plugin, "speed_up", lambda model: None)
    stock_attention = "eager" if architecture == "gpt_oss" else "sdpa"
    stock = cpumoe.load_model(folder, scheme="w4a8-g32", dtype=torch.float32, attn_implementation=stock_attention)
    ids, token = torch.randint(3, 120, (2, 12)), torch.randint(3, 120, (2, 1))
    padded = torch.ones(2, 13, dtype=torch.long)
    padded[0, :4] = 0

    def run(model, mask):
        with torch.no_grad():
            first = model(ids, attention_mask=None if mask is None else mask[:, :-1], use_cache=True)
            second = model(token, attention_mask=mask, past_key_values=first.past_key_values)
        return torch.cat((first.logits, second.logits), 1)

    for mask in (None, padded):
        got, expected = run(fast, mask), run(stock, mask)
        seen = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(got[seen], expected[seen], rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 5),
    tokens=st.integers(1, 300),
    depth=st.sampled_from([8, 16, 40, 64, 128]),
    value_depth=st.sampled_from([16, 24, 128]),
    dtype=st.sampled_from(DTYPES),
    masked=st.booleans(),
)
def test_attention_is_that_of_pytorch(batch, kv_heads, share, tokens, depth, value_depth, dtype, masked):
    query = torch.randn(batch, kv_heads * share, depth).to(dtype)
    keys = torch.randn(batch, kv_heads, tokens, depth).to(dtype)
    values = torch.randn(batch, kv_heads, tokens, value_depth).to(dtype)
    mask = torch.zeros(batch, tokens).masked_fill_(torch.rand(batch, tokens) < 0.3, -torch.inf) if masked else None
    if mask is not None:
        mask[:, 0] = 0.0  # someone must be seen
    got = torch.ops.cpumoe.decode_attention(query, keys, values, mask, 0.2)
    expected = F.scaled_dot_product_attention(
        query.float().unsqueeze(2),
        keys.float().repeat_interleave(share, 1),
        values.float().repeat_interleave(share, 1),
        None if mask is None else mask[:, None, None],
        scale=0.2,
    ).squeeze(2)
    rounding = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got.float(), expected, rtol=rounding, atol=rounding)


def test_the_same_bits_on_every_instruction_set_and_thread_count(isa):
    torch.manual_seed(1)
    query, kv = torch.randn(1, 8, 64).bfloat16(), torch.randn(2, 1, 2, 333, 64).bfloat16()
    x, weight = torch.randn(3, 72).bfloat16(), torch.randn(21, 72).bfloat16()
    results = []
    for threads in (1, 2, 3):
        cpumoe.set_num_threads(threads)
        results.append(
            (
                torch.ops.cpumoe.decode_attention(query, kv[0], kv[1], None, 0.1),
                torch.ops.cpumoe.router_logits(x, weight, None, True),
                torch.ops.cpumoe.rms_norm(x, weight[0], 1e-6, True),
            )
        )
    cpumoe._core.use_isa("scalar")
    cpumoe.set_num_threads(1)
    expected = (
        torch.ops.cpumoe.decode_attention(query, kv[0], kv[1], None, 0.1),
        torch.ops.cpumoe.router_logits(x, weight, None, True),
        torch.ops.cpumoe.rms_norm(x, weight[0], 1e-6, True),
    )
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("round_first", [False, True])
def test_norms(dtype, round_first):
    x, weight = torch.randn(5, 3, 100).to(dtype), torch.randn(100).to(dtype)
    got = torch.ops.cpumoe.rms_norm(x, weight, 1e-5, round_first)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = weight * normed.to(dtype) if round_first else (weight.float() * normed).to(dtype)
    torch.testing.assert_close(got, expected)


def test_many_rows_of_norms_use_all_threads_and_stay_the_same():
    x, weight = torch.randn(400, 256), torch.randn(256)
    whole = torch.ops.cpumoe.rms_norm(x, weight, 1e-6, False)
    rows = torch.cat([torch.ops.cpumoe.rms_norm(x[i : i + 1], weight, 1e-6, False) for i in range(400)])
    assert torch.equal(whole, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_router_logits(dtype):
    x, weight, bias = torch.randn(4, 96).to(dtype), torch.randn(13, 96).to(dtype), torch.randn(13)
    wide = torch.ops.cpumoe.router_logits(x, weight, bias, True)
    torch.testing.assert_close(wide, x.float() @ weight.float().T + bias, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.ops.cpumoe.router_logits(x, weight, bias, False), wide.to(dtype))


def test_operators_are_complete():
    query, kv = torch.randn(1, 4, 16), torch.randn(1, 2, 5, 16)
    checks = [
        (torch.ops.cpumoe.decode_attention.default, (query, kv, kv, torch.zeros(1, 5), 0.5)),
        (torch.ops.cpumoe.router_logits.default, (torch.randn(2, 16), torch.randn(3, 16), torch.randn(3), False)),
        (torch.ops.cpumoe.rms_norm.default, (torch.randn(2, 16), torch.randn(16), 1e-6, True)),
    ]
    for operator, arguments in checks:
        torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize(
    "call,problem",
    [
        (lambda q, k: torch.ops.cpumoe.decode_attention(q, k[:, :, :, :8], k, None, 1.0), "keys are"),
        (lambda q, k: torch.ops.cpumoe.decode_attention(q, k, k[:, :, :3], None, 1.0), "values are"),
        (lambda q, k: torch.ops.cpumoe.decode_attention(q, k.double(), k, None, 1.0), "keys"),
        (lambda q, k: torch.ops.cpumoe.decode_attention(q[:, :3], k, k, None, 1.0), "a multiple"),
        (lambda q, k: torch.ops.cpumoe.decode_attention(q, k[:, :, :0], k[:, :, :0], None, 1.0), "no tokens"),
        (lambda q, k: torch.ops.cpumoe.decode_attention(q, k, k, torch.zeros(1, 4), 1.0), "mask is"),
        (lambda q, k: torch.ops.cpumoe.rms_norm(q, torch.ones(15), 1e-6, True), "weight has 15"),
        (lambda q, k: torch.ops.cpumoe.rms_norm(q, torch.ones(16).bfloat16(), 1e-6, True), "dtype"),
        (lambda q, k: torch.ops.cpumoe.router_logits(q[0], torch.ones(3, 15), None, True), "16 features"),
        (lambda q, k: torch.ops.cpumoe.router_logits(q[0], torch.ones(3, 16), torch.ones(2), True), "bias has 2"),
    ],
)
def test_bad_input_is_named(call, problem):
    with pytest.raises(ValueError, match=problem):
        call(torch.randn(1, 4, 16), torch.randn(1, 2, 5, 16))
