"""Attention of one token, routers and norms: the results of what they replace, for every architecture."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import SUPPORTED_ISAS
from hypothesis import given, settings
from hypothesis import strategies as st
from native_models import counted_steps, own_code
from tiny_architectures import ARCHITECTURES, write_float
from tiny_models import ARCHITECTURES as TINY
from tiny_text_model import tiny_model, tiny_tokenizer

import cpumoe
from cpumoe.evaluation.selftest import using_isa
from cpumoe.integrations.transformers.loading import plugin
from cpumoe.integrations.transformers.replacements import attention
from cpumoe.ops import attention as operators

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "vocab_size": 128,
}


@pytest.mark.every(3)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_computes_what_it_did(tmp_path, architecture, monkeypatch):
    folder = write_float(tmp_path / "float", architecture)
    scheme = "bf16"  # activations in int8 would turn the last bit of another sum into a step
    fast = cpumoe.load_model(folder, scheme=scheme, dtype=torch.float32)
    assert fast.config._attn_implementation == ("eager" if architecture == "gpt_oss" else "cpumoe")
    monkeypatch.setattr(plugin, "speed_up", lambda model: None)
    stock_attention = "eager" if architecture == "gpt_oss" else "sdpa"
    stock = cpumoe.load_model(folder, scheme=scheme, dtype=torch.float32, attn_implementation=stock_attention)
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


def tiny(architecture: str, attention: str, **changes: object) -> torch.nn.Module:
    """A model of random weights, the same for every attention."""
    sizes = {**SIZES, **TINY.get(architecture, {}), **changes}
    config = transformers.AutoConfig.for_model(architecture, **sizes)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-2.0, 3.0, parameter.numel()))
    return model


def steps(model: torch.nn.Module, mask: torch.Tensor | None, **cache: object) -> torch.Tensor:
    """Logits of 40 tokens, of two more at once and then of one."""
    torch.manual_seed(6)
    ids = torch.randint(3, 120, (2, 43))
    logits = []
    with torch.no_grad():
        for first, last in ((0, 40), (40, 42), (42, 43)):
            seen = None if mask is None else mask[:, :last]
            out = model(ids[:, first:last], attention_mask=seen, use_cache=True, **cache)
            cache = {"past_key_values": out.past_key_values}
            logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("at_once", [1 << 24, 1000])
def test_gpt_oss_keeps_its_sinks(at_once, monkeypatch):
    monkeypatch.setattr(attention, "_MASK_ELEMENTS", at_once)  # the second: a few queries at a time
    eager, ours = (tiny("gpt_oss", attention) for attention in ("eager", "cpumoe"))
    padded = torch.ones(2, 43, dtype=torch.long)
    padded[0, :9] = 0
    for mask in (None, padded):
        seen = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(steps(ours, mask)[seen], steps(eager, mask)[seen], rtol=1e-4, atol=1e-4)
    static = [transformers.StaticCache(config=ours.config, max_cache_len=64) for _ in range(2)]
    torch.testing.assert_close(
        steps(ours, None, past_key_values=static[0]),
        steps(eager, None, past_key_values=static[1]),
        rtol=1e-4,
        atol=1e-4,
    )
    ids = torch.randint(3, 120, (1, 10))
    gradients = []
    for model in (eager, ours):
        model(ids).logits.logsumexp(-1).sum().backward()
        gradients.append(model.model.layers[0].self_attn.sinks.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)


def some_mask(kind, batch, tokens):
    """An additive mask: of a range for each sequence, of holes, or with numbers of its own."""
    if kind == "none":
        return None
    if kind == "added":
        return torch.randn(batch, tokens)
    hidden = torch.rand(batch, tokens) < 0.3
    if kind == "range":
        first = torch.randint(0, tokens, (batch, 1))
        last = first + torch.randint(1, tokens + 1, (batch, 1))
        places = torch.arange(tokens)
        hidden = (places < first) | (places >= last)
    return torch.zeros(batch, tokens).masked_fill_(hidden, random.choice([-torch.inf, torch.finfo(torch.float16).min]))


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 4),
    tokens=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    level=st.sampled_from([-200.0, -3.0, 0.0, 5.0, 200.0]),
    masked=st.sampled_from(["range", "holes"]),
)
def test_a_sink_takes_its_share_and_gives_nothing(batch, kv_heads, share, tokens, dtype, level, masked):
    query = torch.randn(batch, kv_heads * share, 16).to(dtype)
    keys, values = torch.randn(2, batch, kv_heads, tokens, 16).to(dtype)
    sinks = torch.randn(kv_heads * share) + level
    mask = some_mask(masked, batch, tokens)
    got = torch.ops.cpumoe.decode_attention(query, keys, values, mask, 0.3, sinks)
    wide = keys.double().repeat_interleave(share, 1), values.double().repeat_interleave(share, 1)
    scores = torch.einsum("bhd,bhtd->bht", query.double(), wide[0]) * 0.3 + mask.unsqueeze(1)
    shares = torch.cat((scores, sinks.double().view(1, -1, 1).expand(batch, -1, 1)), -1).softmax(-1)[..., :-1]
    rounding = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(
        got.double(), torch.einsum("bht,bhtd->bhd", shares, wide[1]), rtol=rounding, atol=rounding
    )


def test_soft_capping_is_refused_with_a_cure_and_served_where_there_is_none():
    ids = torch.randint(3, 120, (1, 12))
    for length in (12, 1):  # also for one token, which our kernel would compute
        with pytest.raises(ValueError, match=r"does not serve softcap=50.0, which Gemma2Attention asks for.*'eager'"):
            tiny("gemma2", "cpumoe")(ids[:, :length])
    plain = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    eager, ours = (tiny("gemma2", attention, **plain) for attention in ("eager", "cpumoe"))
    torch.testing.assert_close(steps(ours, None), steps(eager, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3])
def test_options_that_are_not_known_are_refused_by_name(tokens):
    module = torch.nn.Module().eval()
    query, kv = torch.randn(1, 4, tokens, 16), torch.randn(1, 4, 5, 16)
    mask = torch.zeros(1, 1, tokens, 5)
    for options in ({"indices": torch.zeros(1, 4)}, {"output_attentions": True}, {"a_new_one": 0}):
        with pytest.raises(ValueError, match=f"does not serve {next(iter(options))}=.*attn_implementation='eager'"):
            attention.attention_forward(module, query, kv, kv, mask, **options)
    with pytest.raises(ValueError, match="does not serve s_aux with position_bias=a tensor"):
        bias = torch.zeros(1, 4, tokens, 5)
        attention.attention_forward(module, query, kv, kv, mask, s_aux=torch.zeros(4), position_bias=bias)
    expected = attention.attention_forward(module, query, kv, kv, mask)[0]
    harmless = dict.fromkeys(attention.PASSED_OVER, 1) | {"a_new_one": None, "output_attentions": False}
    assert torch.equal(attention.attention_forward(module, query, kv, kv, mask, **harmless)[0], expected)
    bias = torch.randn(1, 4, tokens, 5)
    biased = attention.attention_forward(module, query, kv, kv, mask, position_bias=bias)[0]
    torch.testing.assert_close(biased.transpose(1, 2), F.scaled_dot_product_attention(query, kv, kv, bias))


GENERATION = {
    "stop strings": {"stop_strings": ["dog", "woods"]},
    "token healing": {"token_healing": True},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize("options", GENERATION.values(), ids=GENERATION)
@pytest.mark.parametrize("steps", ["native", "layer by layer"])
def test_generate_with_a_tokenizer_gives_what_it_gives_with_stock_attention(tmp_path, monkeypatch, options, steps):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>", "bos_token": "<s>"})
    tiny_model().save_pretrained(tmp_path)
    if steps == "layer by layer":
        monkeypatch.setenv("CPUMOE_STEPS", "0")
    model = cpumoe.load_model(tmp_path, scheme="bf16", dtype=torch.float32)
    ids = tokenizer("The quick brown fox", return_tensors="pt").input_ids

    def generate() -> list[int]:
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
        return model.generate(ids, tokenizer=tokenizer, **settings, **options)[0].tolist()

    with counted_steps(model) if steps == "native" else nullcontext([(1, 1)]) as calls:
        got = generate()
    assert calls, "the tokenizer made every step run layer by layer"
    model.set_attn_implementation("sdpa")
    with own_code(model):
        assert got == generate()


def test_options_that_no_code_of_the_model_mentions_are_passed_over_and_others_are_refused():
    model, ids = tiny("qwen3_moe", "cpumoe"), torch.randint(3, 120, (1, 5))
    expected = model(ids).logits
    for length in (5, 1):  # one token is for our kernel
        for option in ({"token_type_ids": torch.zeros(1, 5)}, {"tokenizer": object()}, {"a_new_one": 0}):
            assert torch.equal(model(ids[:, :length], **option).logits, model(ids[:, :length]).logits)
        for option in ({"softcap": 30.0}, {"output_attentions": True}):
            with pytest.raises(ValueError, match="does not serve (softcap|output_attentions)="):
                model(ids[:, :length], **option)
    assert not torch.equal(model(ids, s_aux=torch.ones(4)).logits, expected)  # sinks, which this attention has


def test_an_option_that_the_code_of_a_layer_sets_is_refused():
    model = tiny("qwen3_moe", "cpumoe")

    class Layer(type(model.model.layers[0].self_attn)):
        def forward(self, *arguments, **options):
            return super().forward(*arguments, **options, sharpness=torch.ones(4))

    model.model.layers[1].self_attn.__class__ = Layer
    with pytest.raises(ValueError, match=r"does not serve sharpness=a tensor \[4\], which Layer asks for"):
        model(torch.randint(3, 120, (1, 5)))


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 5),
    tokens=st.integers(1, 300),
    depth=st.sampled_from([8, 16, 40, 64, 128]),
    value_depth=st.sampled_from([16, 24, 128]),
    dtype=st.sampled_from(DTYPES),
    masked=st.sampled_from(["none", "range", "holes", "added"]),
)
def test_attention_is_that_of_pytorch(batch, kv_heads, share, tokens, depth, value_depth, dtype, masked):
    query = torch.randn(batch, kv_heads * share, depth).to(dtype)
    keys = torch.randn(batch, kv_heads, tokens, depth).to(dtype)
    values = torch.randn(batch, kv_heads, tokens, value_depth).to(dtype)
    mask = some_mask(masked, batch, tokens)
    if masked == "holes":
        mask[:, 0] = 0.0  # some token must be seen
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


def test_a_cache_with_room_is_attended_where_it_lies(monkeypatch):
    """Keys and values may have any strides; nothing hidden is read, and nothing is copied."""
    room = torch.full((2, 2, 3, 80, 16), torch.nan)
    kv = room[:, :, :, 7:70] = torch.randn(2, 2, 3, 63, 16)
    query, mask = torch.randn(2, 6, 16), torch.zeros(2, 70)
    mask[:, :7] = -torch.inf
    expected = torch.ops.cpumoe.decode_attention(query, *kv.contiguous(), None, 0.2)
    keys, values = room[:, :, :, :70]
    with monkeypatch.context() as patched:
        patched.setattr(
            torch.Tensor, "contiguous", lambda tensor: pytest.fail("a copy") if tensor.dim() > 3 else tensor
        )
        got = torch.ops.cpumoe.decode_attention(query, keys, values, mask, 0.2)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    by_token = torch.randn(1, 9, 2, 16).transpose(1, 2)  # as projections leave them
    torch.testing.assert_close(
        torch.ops.cpumoe.decode_attention(query[:1], by_token, by_token, None, 0.2),
        torch.ops.cpumoe.decode_attention(query[:1], by_token.clone(), by_token.clone(), None, 0.2),
    )


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.bfloat16).min])
def test_a_query_that_sees_nothing_gets_what_eager_attention_gives_it(hidden):
    query, kv = torch.randn(2, 2, 8), torch.randn(2, 2, 5, 8)
    mask = torch.zeros(2, 5)
    mask[0] = hidden
    got = torch.ops.cpumoe.decode_attention(query, kv, kv, mask, 0.2)
    expected = kv[0].mean(1) if hidden != -torch.inf else torch.zeros(2, 8)
    torch.testing.assert_close(got[0], expected)
    torch.testing.assert_close(got[1], torch.ops.cpumoe.decode_attention(query[1:], kv[1:], kv[1:], None, 0.2)[0])


def test_small_numbers_in_a_cache_give_the_same_bits_everywhere():
    """bf16 products take subnormal numbers for 0: keys and values below 2^-60 count as 0, on every CPU."""
    exponents = torch.randint(-100, -52, (2, 1, 2, 200, 24)).float()
    kv = (torch.randn(2, 1, 2, 200, 24) * exponents.exp2()).bfloat16()
    query = (torch.randn(1, 8, 24) * 2.0**-40).bfloat16()
    flushed = torch.where(kv.abs() < 2.0**-60, torch.zeros_like(kv), kv)
    assert 0 < (flushed != kv).sum() < kv.numel()
    expected = None
    for isa in SUPPORTED_ISAS:
        with using_isa(isa):
            got = [torch.ops.cpumoe.decode_attention(query, *held, None, 2.0**104) for held in (kv, flushed)]
        expected = got[0] if expected is None else expected
        assert all(torch.equal(result, expected) for result in got)


def test_the_same_bits_on_every_instruction_set_and_thread_count():
    torch.manual_seed(1)
    query, kv = torch.randn(1, 8, 64).bfloat16(), torch.randn(2, 1, 2, 333, 64).bfloat16()
    x, weight = torch.randn(3, 72).bfloat16(), torch.randn(21, 72).bfloat16()

    def results(isa, threads):
        cpumoe.set_num_threads(threads)
        with using_isa(isa):
            return (
                torch.ops.cpumoe.decode_attention(query, kv[0], kv[1], None, 0.1),
                torch.ops.cpumoe.router_logits(x, weight, None, True),
                torch.ops.cpumoe.rms_norm(x, weight[0], 1e-6, True),
            )

    expected = results("scalar", 1)
    for isa in SUPPORTED_ISAS:
        for threads in (1, 2, 3):
            assert all(torch.equal(a, b) for a, b in zip(results(isa, threads), expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("round_first", [False, True])
def test_norms(dtype, round_first, plus_one):
    x, weight = torch.randn(5, 3, 100).to(dtype), torch.randn(100).to(dtype)
    got = torch.ops.cpumoe.rms_norm(x, weight, 1e-5, round_first, plus_one)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    factor = weight.float() + plus_one
    expected = ((normed.to(dtype).float() if round_first else normed) * factor).to(dtype)
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
        (lambda q, k: torch.ops.cpumoe.rms_norm(q, torch.ones(16).long(), 1e-6, True), "weight is"),
        (lambda q, k: torch.ops.cpumoe.router_logits(q[0], torch.ones(3, 15), None, True), "16 features"),
        (
            lambda q, k: torch.ops.cpumoe.router_logits(q[0], torch.ones(3, 16), torch.ones(2), True),
            r"bias is \[2\]; \[3\]",
        ),
    ],
)
def test_bad_input_is_named(call, problem):
    with pytest.raises(ValueError, match=problem):
        call(torch.randn(1, 4, 16), torch.randn(1, 2, 5, 16))


def test_masks_with_holes_a_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    query, latents, rotated, weight = (
        torch.randn(shape, generator=random) for shape in ((2, 3, 5, 24), (2, 1, 9, 16), (2, 1, 9, 8), (3 * 28, 16))
    )
    mask = torch.zeros(2, 5, 9).masked_fill(torch.rand((2, 5, 9), generator=random) < 0.3, -torch.inf)
    expected = torch.ops.cpumoe.latent_attention(query, latents, rotated, weight, mask, 0.2)
    monkeypatch.setattr(operators, "_SCORES_AT_ONCE", 2 * 2 * 3 * 9)
    found = torch.ops.cpumoe.latent_attention(query, latents, rotated, weight, mask, 0.2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
