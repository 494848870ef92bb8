"""Latent attention in its absorbed form: what transformers computes, for every family that has it."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from tiny_latents import FAMILIES, tiny_latent_model
from torch import nn
from transformers import DynamicCache, StaticCache

from cpumoe import ops
from cpumoe.integrations.transformers.preallocated_cache import make_roomy
from cpumoe.integrations.transformers.replacements import attention
from cpumoe.integrations.transformers.replacements import mla as latent_attention
from cpumoe.integrations.transformers.replacements.mla import absorb_latents
from cpumoe.layers.linear import QuantizedLinear

attention.register_attention()

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def latent_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(type(module), "expand_kv")]


def run(model: nn.Module, steps: list[torch.Tensor], mask: torch.Tensor | None = None, cache: object = None) -> list:
    """First results of a model for the parts of a text, one after the other."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    seen, results = 0, []
    with torch.no_grad():
        for ids in steps:
            seen += ids.shape[1]
            own = None if mask is None else mask[:, :seen]
            results.append(model(ids, attention_mask=own, past_key_values=cache, use_cache=True)[0])
    return results


def both(family: str, **options: object) -> tuple[nn.Module, nn.Module]:
    stock, fast = tiny_latent_model(family, **options), tiny_latent_model(family, **options)
    absorb_latents(fast)
    assert all("forward" in vars(module) for module in latent_modules(fast))
    return stock, fast


@pytest.fixture
def calls(monkeypatch):
    """How many tokens each call of the operator had."""
    seen = []

    def counted(query, *others):
        seen.append(query.shape[2])
        return ops.latent_attention(query, *others)

    monkeypatch.setattr(latent_attention, "ops", type("Ops", (), {**vars(ops), "latent_attention": counted}))
    return seen


@pytest.mark.every(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_it_did(family, calls):
    stock, fast = both(family)
    calls.clear()
    text = torch.randint(3, 120, (2, 60), generator=torch.Generator().manual_seed(1))
    steps = [text[:, :40], text[:, 40:52], *text[:, 52:].split(1, 1)]
    for padding in (0, 5):
        mask = torch.ones(2, 60, dtype=torch.long)
        mask[0, :padding] = 0
        seen = 0
        for got, expected in zip(run(fast, steps, mask), run(stock, steps, mask), strict=True):
            looked_at = mask[:, seen : seen + got.shape[1]].bool()
            torch.testing.assert_close(got[looked_at], expected[looked_at], **CLOSE)
            seen += got.shape[1]
    assert set(calls) == {1, 12}  # the 40 tokens at once are many


@pytest.mark.parametrize("attention", ["eager", "sdpa", "cpumoe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_attention_and_dtype(attention, dtype):
    stock = tiny_latent_model("deepseek_v3", attention="sdpa", dtype=dtype, num_hidden_layers=1)
    fast = tiny_latent_model("deepseek_v3", attention=attention, dtype=dtype, num_hidden_layers=1)
    absorb_latents(fast)
    text = torch.randint(3, 120, (2, 40))
    steps = [text[:, :10], text[:, 10:15], text[:, 15:16]]
    limit = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    for got, expected in zip(run(fast, steps), run(stock, steps), strict=True):
        assert (got - expected).float().norm() <= limit * expected.float().norm()


def test_sparse_attention_looks_at_what_the_indexer_chose(calls):
    stock, fast = both("deepseek_v32", attention="cpumoe")
    stock.set_attn_implementation("sdpa")
    text = torch.randint(3, 120, (1, 30))
    results = zip(run(fast, [text[:, :20], text[:, 20:21]]), run(stock, [text[:, :20], text[:, 20:21]]), strict=True)
    for got, expected in results:
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("family", ["deepseek_v3", "hy_v4"])
def test_generation_with_beams(family):
    stock, fast = both(family)
    ids = torch.randint(3, 120, (2, 7))
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fast.generate(ids, **options), stock.generate(ids, **options))


def test_a_static_cache():
    stock, fast = both("deepseek_v3")
    text = torch.randint(3, 120, (2, 12))
    steps = [text[:, :8], *text[:, 8:].split(1, 1)]
    results = [run(model, steps, cache=StaticCache(config=model.config, max_cache_len=20)) for model in (fast, stock)]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_either_form_goes_on_with_the_cache_of_the_other():
    stock, fast = both("glm4_moe_lite")
    text = torch.randint(3, 120, (2, 20))
    expected = run(stock, [text[:, :9], *text[:, 9:].split(1, 1)])
    cache, seen, got = DynamicCache(config=stock.config), 0, []
    with torch.no_grad():
        for model, new in ((fast, 9), (stock, 1), (fast, 1), (fast, 1), (stock, 1), (fast, 1)):
            got.append(model(text[:, seen : seen + new], past_key_values=cache)[0])
            seen += new
            assert cache.get_seq_length() == seen
    for ours, theirs in zip(got, expected, strict=False):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_a_cropped_cache():
    stock, fast = both("deepseek_v2")
    text = torch.randint(3, 120, (2, 20))

    def after_cropping(model):
        cache = DynamicCache(config=model.config)
        run(model, [text[:, :9], text[:, 9:10], text[:, 10:11]], cache=cache)
        cache.crop(-2)
        return run(model, [text[:, 15:16], text[:, 16:17]], cache=cache)

    for got, expected in zip(after_cropping(fast), after_cropping(stock), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_a_packed_weight(calls):
    stock, fast = tiny_latent_model("deepseek_v3"), tiny_latent_model("deepseek_v3")
    for model in (stock, fast):
        for module in latent_modules(model):
            module.kv_b_proj = QuantizedLinear.quantize(module.kv_b_proj.weight.detach(), "fp32")
    absorb_latents(fast)
    text = torch.randint(3, 120, (2, 20))
    steps = [text[:, :9], text[:, 9:10]]
    for got, expected in zip(run(fast, steps), run(stock, steps), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)
    assert 1 in calls


def test_copies_and_pickles_compute_the_same():
    _, fast = both("deepseek_v3", num_hidden_layers=2)
    ids = torch.randint(3, 120, (1, 6))
    (expected,) = run(fast, [ids])
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        module = latent_modules(other)[0]
        assert module.forward.args[0].module is module
        assert torch.equal(run(other, [ids])[0], expected)


def test_gradients_training_and_watchers_get_the_original(calls):
    _, fast = both("deepseek_v3")
    ids = torch.randint(3, 120, (1, 6))
    calls.clear()
    fast(ids)[0].sum().backward()
    assert latent_modules(fast)[0].kv_b_proj.weight.grad is not None
    with torch.no_grad():
        fast.train()(ids)
        fast.eval()
        seen = []
        for module in latent_modules(fast):
            module.kv_b_proj.register_forward_hook(lambda *others: seen.append(others))
        fast(ids)
    assert len(seen) == 3
    assert not calls


def test_weights_of_the_attention_can_be_had():
    stock, fast = both("deepseek_v3", attention="eager")
    ids = torch.randint(3, 120, (1, 6))
    with torch.no_grad():
        got, expected = (model(ids, output_attentions=True).attentions for model in (fast, stock))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.fixture
def attention_class():
    return type(latent_modules(tiny_latent_model("deepseek_v3"))[0])


@pytest.mark.parametrize("change", ["values", "keys", "argument"])
def test_changed_code_stays_and_the_log_says_so(attention_class, change, monkeypatch, caplog):
    expand, forward = attention_class.expand_kv, attention_class.forward

    def other_values(self, latents, rotated):
        keys, values = expand(self, latents, rotated)
        return (keys, values * 1.5) if change == "values" else (keys.roll(1, -1), values)

    def one_more(self, hidden_states, something, *others, **options):
        return forward(self, hidden_states, *others, **options)

    if change == "argument":
        monkeypatch.setattr(attention_class, "forward", one_more)
    else:
        monkeypatch.setattr(attention_class, "expand_kv", other_values)
    model = tiny_latent_model("deepseek_v3")
    with caplog.at_level(logging.WARNING, "cpumoe"):
        absorb_latents(model)
    assert not any("forward" in vars(module) for module in latent_modules(model))
    assert "model.layers.0.self_attn keeps the latent attention of transformers" in caplog.text


def test_a_module_with_a_method_of_its_own_is_left_alone():
    model = tiny_latent_model("deepseek_v3")
    first, second, _ = latent_modules(model)
    first.expand_kv = lambda latents, rotated: None
    second.kv_b_proj.bias = nn.Parameter(torch.zeros(second.kv_b_proj.out_features))
    absorb_latents(model)
    assert ["forward" in vars(module) for module in latent_modules(model)] == [False, False, True]


def plain(query, latents, rotated, weight, mask, scale, sinks):
    """The definition in fp32."""
    heads, nope = query.shape[1], query.shape[3] - rotated.shape[3]
    made = F.linear(latents[:, 0].float(), weight.float()).unflatten(-1, (heads, -1)).transpose(1, 2)
    keys = torch.cat((made[..., :nope], rotated.float().expand(-1, heads, -1, -1)), -1)
    scores = query.float() @ keys.transpose(2, 3) * scale
    if mask is not None:
        scores = scores + mask[:, None]
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return (weights @ made[..., nope:]).transpose(1, 2)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "heads", "queries", "tokens", "rank", "rotary", "nope", "width"),
    [(1, 20, 1, 300, 64, 16, 24, 32), (2, 3, 5, 7, 33, 0, 5, 11), (3, 5, 2, 65, 40, 8, 17, 9)],
)
def test_the_operator(dtype, batch, heads, queries, tokens, rank, rotary, nope, width):
    query = torch.randn(batch, heads, queries, nope + rotary).to(dtype)
    latents = torch.randn(batch, 1, tokens + 3, rank).to(dtype)[:, :, :tokens]  # a cache with room
    rotated = torch.randn(batch, 1, tokens, rotary).to(dtype)
    weight = (torch.randn(heads * (nope + width), rank) * rank**-0.5).to(dtype)
    holes = torch.zeros(batch, queries, tokens).masked_fill_(torch.rand(batch, queries, tokens) < 0.3, -torch.inf)
    holes[:, :, 0] = 0
    causal = torch.full((batch, queries, tokens), -torch.inf).triu_(tokens - queries + 1)
    causal[0, :, : tokens // 9] = -torch.inf  # padding
    sinks = torch.randn(heads)
    for mask, own_sinks in ((None, None), (causal, None), (causal, sinks), (holes, None), (holes, sinks)):
        arguments = (query, latents, rotated, weight, mask, 0.2, own_sinks)
        got, expected = ops.latent_attention(*arguments), plain(*arguments)
        limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
        torch.testing.assert_close(got.float(), expected, rtol=limit, atol=limit)
        torch.library.opcheck(torch.ops.cpumoe.latent_attention.default, arguments)
    for mask in (causal, holes):
        unseen = mask.clone()
        unseen[0, 0] = -torch.inf
        out = ops.latent_attention(query, latents, rotated, weight, unseen, 0.2)
        assert not out[0, 0].any()
        assert not out.isnan().any()


def test_latents_side_by_side_give_the_bits_of_latents_apart():
    """A cache of both in one place, and one of each: whole tensors are copied for neither."""
    both = torch.randn(2, 1, 200, 48).bfloat16()
    query, weight = torch.randn(2, 4, 3, 24).bfloat16(), torch.randn(4 * 36, 40).bfloat16()
    views = both[..., :40], both[..., 40:]
    apart = [view.clone(memory_format=torch.contiguous_format) for view in views]
    expected = ops.latent_attention(query, *apart, weight, None, 0.2)
    assert torch.equal(ops.latent_attention(query, *views, weight, None, 0.2), expected)
    assert torch.equal(ops.latent_attention(query[:, :, 1:2], *views, weight, None, 0.2), expected[:, 1:2])
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(ops.latent_attention(turned, *apart, weight, None, 0.2), expected)


def test_the_operator_names_what_it_refuses():
    query, latents, rotated = torch.randn(1, 2, 1, 6), torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 2)
    weight = torch.randn(2 * 9, 8)
    with pytest.raises(ValueError, match=r"weight is \[18, 7\]; \[18, 8\] is accepted"):
        ops.latent_attention(query, latents, rotated, weight[:, :7], None, 1.0)
    with pytest.raises(ValueError, match=r"rotated is \[1, 1, 3, 2\]; \[1, 1, 4, ..\] is accepted"):
        ops.latent_attention(query, latents, rotated[:, :, :3], weight, None, 1.0)
    with pytest.raises(ValueError, match="latents is bfloat16; that of query, float32, is accepted"):
        ops.latent_attention(query, latents.bfloat16(), rotated, weight, None, 1.0)
    with pytest.raises(ValueError, match=r"mask is \[1, 2, 4\]; \[1, 1, 4\] is accepted"):
        ops.latent_attention(query, latents, rotated, weight, torch.zeros(1, 2, 4), 1.0)
    with pytest.raises(ValueError, match="latents has no tokens"):
        ops.latent_attention(query, latents[:, :, :0], rotated[:, :, :0], weight, None, 1.0)


def grown(cache: object, count: int, batch: int = 2) -> None:
    for _ in range(count):
        cache.update(torch.randn(batch, 1, 1, 4), torch.randn(batch, 1, 1, 2), 0)


def test_a_cache_grows_in_its_place():
    cache = DynamicCache()
    cache.update(torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 2), 0)
    assert make_roomy(cache, 0)
    layer = cache.layers[0]
    grown(cache, 2)
    address, before = layer.keys.data_ptr(), layer.keys.clone()
    grown(cache, 30)
    assert layer.keys.data_ptr() == address
    assert torch.equal(layer.keys[:, :, :7], before)
    assert cache.get_seq_length() == 37
    grown(cache, 100)  # beyond the room
    assert torch.equal(layer.keys[:, :, :7], before)
    assert layer.keys.shape == (2, 1, 137, 4)
    assert layer.values.shape == (2, 1, 137, 2)


def test_nothing_that_someone_may_hold_is_overwritten():
    cache = DynamicCache()
    cache.update(torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 2), 0)
    make_roomy(cache, 0)
    grown(cache, 3)
    held, layer = cache.layers[0].keys, cache.layers[0]
    expected, other = held.clone(), copy.copy(layer)
    cache.crop(-2)
    grown(cache, 2)
    assert torch.equal(held, expected)
    again = DynamicCache()
    again.layers = [other]
    assert torch.equal(again.layers[0].keys, expected)
    grown(again, 2)
    mine = other.keys.clone()
    cache.batch_select_indices(torch.tensor([1, 0]))
    grown(cache, 4)
    assert torch.equal(other.keys, mine)
    twin = copy.deepcopy(cache)
    before = cache.layers[0].keys.clone()
    grown(twin, 3)
    assert torch.equal(cache.layers[0].keys, before)
