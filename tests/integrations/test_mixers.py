"""Mamba, Mamba2 and lightning attention in one step: the results of what is replaced, for every family with them."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
from itertools import pairwise

import pytest
import torch
import transformers
from tiny_mixers import LIGHTNING, MAMBA2, MIXERS, tiny_model
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from cpumoe.integrations.transformers.loading.install import speed_up
from cpumoe.integrations.transformers.replacements import lightning as lightning_attention
from cpumoe.integrations.transformers.replacements import replacement_check, state_space
from cpumoe.integrations.transformers.replacements.replaced_forward import ReplacedForward


def replaced(model: torch.nn.Module) -> list[str]:
    """Names of the layers that have the one-step form."""
    ours = (state_space.mixer_forward, lightning_attention.lightning_forward)
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    return [name for name, f in forwards.items() if isinstance(f, ReplacedForward) and f.function in ours]


def cache_of(out: object) -> dict[str, object]:
    name = "past_key_values" if getattr(out, "past_key_values", None) is not None else "cache_params"
    return {name: getattr(out, name)}


def steps(model: torch.nn.Module, mask: torch.Tensor | None, cuts: list[int]) -> torch.Tensor:
    """Logits of tokens that come in parts, which end at ``cuts``."""
    torch.manual_seed(6)
    ids = torch.randint(3, 120, (2, cuts[-1]))
    logits, cache, first = [], {}, 0
    with torch.no_grad():
        for last in cuts:
            seen = None if mask is None else mask[:, :last]
            out = model(ids[:, first:last], attention_mask=seen, use_cache=True, **cache)
            cache = cache_of(out)
            logits.append(out.logits)
            first = last
    return torch.cat(logits, 1)


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert (got - expected).float().norm() <= tolerance * expected.float().norm()


@pytest.mark.parametrize("architecture", MIXERS)
def test_a_model_computes_what_it_did(architecture, caplog):
    stock, fast = tiny_model(architecture), tiny_model(architecture)
    speed_up(fast)
    assert len(replaced(fast)) >= 2 and not caplog.records
    padded = torch.ones(2, 25, dtype=torch.long)
    padded[0, :5] = 0
    # Behind a cache Mamba's own form forgets its state when several tokens follow, and MiniMax has the wrong mask.
    several = [22] if architecture in MAMBA2 else []
    for mask in (None, padded):
        cuts = [19, *several, *range((several or [19])[0] + 1, 26)]
        got, expected = steps(fast, mask, cuts), steps(stock, mask, cuts)
        seen = slice(None) if mask is None else mask.bool()
        assert_near(got[seen], expected[seen])


@pytest.mark.parametrize("architecture", MIXERS)
@torch.no_grad()
def test_tokens_may_come_in_parts(architecture):
    fast = tiny_model(architecture)
    speed_up(fast)
    layer = fast.get_submodule(replaced(fast)[0])
    x = torch.randn(2, 25, 64)

    def run(cuts: list[int]) -> torch.Tensor:
        if architecture in LIGHTNING:
            cache = MiniMaxCache()
            options = {"past_key_values": cache, "position_embeddings": None, "attention_mask": None}
            return torch.cat([layer(x[:, a:b], **options)[0] for a, b in pairwise(cuts)], 1)
        cache = Cache(layers=[LinearAttentionLayer()])
        return torch.cat([layer(x[:, a:b], cache_params=cache) for a, b in pairwise(cuts)], 1)

    at_once = run([0, 25])
    if architecture in ("nemotron_h", "zamba2"):  # the steps of one token have no limits, as in transformers
        every_cut = ([0, 3, 12, 25], [0, 23, 25])
    else:
        every_cut = ([0, 1, 2, 25], [0, 3, 12, 25], [0, 24, 25])
    for cuts in every_cut:
        assert_near(run(cuts), at_once, 1e-6)  # the projections round with the number of their rows


@pytest.mark.parametrize("architecture", MIXERS)
def test_either_form_goes_on_from_the_cache_of_the_other(architecture):
    stock, fast = tiny_model(architecture), tiny_model(architecture)
    speed_up(fast)
    ids = torch.randint(3, 120, (2, 14))
    answers = []
    for first, second in ((stock, stock), (stock, fast), (fast, stock)):
        with torch.no_grad():
            cache = cache_of(first(ids[:, :13], use_cache=True))
            answers.append(second(ids[:, 13:], use_cache=True, **cache).logits)
    assert_near(answers[1], answers[0])
    assert_near(answers[2], answers[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["granitemoehybrid", "nemotron_h", "jamba", "minimax"])
def test_sixteen_bits(architecture, dtype):
    """Ours rounds less often: it must be as near to fp32 as transformers is, layer by layer."""
    exact = tiny_model(architecture)
    half = copy.deepcopy(exact).to(dtype)
    fast = copy.deepcopy(half)
    speed_up(fast)
    torch.manual_seed(1)
    x = torch.randn(2, 20, 64)
    for name in replaced(fast):
        outs = []
        for model, inputs in ((exact, x), (half, x.to(dtype)), (fast, x.to(dtype))):
            extra = {"position_embeddings": None, "attention_mask": None} if architecture == "minimax" else {}
            with torch.no_grad():
                out = model.get_submodule(name)(inputs, **extra)
            outs.append((out[0] if isinstance(out, tuple) else out).float())
        truth, theirs, ours = outs
        assert (ours - truth).norm() <= 1.2 * (theirs - truth).norm() + 1e-3 * truth.norm()


def test_generate_gives_the_same_tokens():
    for architecture in ("granitemoehybrid", "nemotron_h", "jamba"):
        stock, fast = tiny_model(architecture), tiny_model(architecture)
        speed_up(fast)
        ids = torch.randint(3, 120, (2, 9))
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        assert torch.equal(fast.generate(ids, **options), stock.generate(ids, **options))
        options["num_beams"] = 2  # reorders the states
        assert torch.equal(fast.generate(ids, **options), stock.generate(ids, **options))


def test_copies_and_pickles_keep_it():
    fast = tiny_model("granitemoehybrid")
    speed_up(fast)
    expected = steps(fast, None, [7, 8])
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        layer = other.get_submodule(replaced(other)[0])
        assert layer.forward.module is layer
        assert torch.equal(steps(other, None, [7, 8]), expected)


@pytest.mark.parametrize("architecture", ["granitemoehybrid", "jamba", "minimax"])
def test_gradients_are_those_of_the_original(architecture):
    gradients = []
    for fast in (False, True):
        model = tiny_model(architecture)
        if fast:
            speed_up(model)
        model(torch.randint(3, 120, (1, 10), generator=torch.Generator().manual_seed(3))).logits.sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def changed(module: torch.nn.Module, name: str, body: object) -> None:
    """Makes the module's class another one, with one method replaced."""
    module.__class__ = type(f"Changed{type(module).__name__}", (type(module),), {name: body})


@pytest.mark.parametrize("architecture", ["granitemoehybrid", "nemotron_h", "jamba", "minimax"])
def test_a_layer_that_computes_something_else_is_left_alone(architecture, caplog):
    model = tiny_model(architecture)
    speed_up(model)
    first, *others = replaced(model)
    model = tiny_model(architecture)
    layer = model.get_submodule(first)
    own = type(layer).forward

    def slightly_more(self, hidden_states, *arguments, **options):
        out = own(self, hidden_states, *arguments, **options)
        return (out[0] * 1.01, *out[1:]) if isinstance(out, tuple) else out * 1.01

    changed(layer, "forward", slightly_more)
    with caplog.at_level(logging.WARNING, "cpumoe"):
        speed_up(model)
    assert replaced(model) == others
    assert first in caplog.text and "its output is another" in caplog.text


def test_a_layer_with_another_norm_is_left_alone(caplog):
    model = tiny_model("granitemoehybrid")
    layer = model.model.layers[0].mamba
    changed(layer, "unused", None)  # a class of its own, so that it is looked at

    def ungated(self, hidden_states, gate=None):
        return self.weight * hidden_states

    changed(layer.norm, "forward", ungated)
    speed_up(model)
    assert replaced(model) == ["model.layers.2.mamba"]


def test_what_somebody_else_replaced_stays():
    model = tiny_model("granitemoehybrid")
    layer = model.model.layers[0].mamba
    layer.forward = functools.partial(type(layer).forward, layer)
    speed_up(model)
    assert replaced(model) == ["model.layers.2.mamba"]


def test_a_layer_that_cannot_be_compared_stays(caplog, monkeypatch):
    monkeypatch.setattr(replacement_check, "_answers", {})
    monkeypatch.setattr(state_space, "empty_cache", lambda index: 1 / 0)
    model = tiny_model("nemotron_h")
    speed_up(model)
    assert not replaced(model) and "ZeroDivisionError" in caplog.text


def test_the_check_leaves_the_random_numbers_and_the_log_level(monkeypatch):
    monkeypatch.setattr(replacement_check, "_answers", {})
    model = tiny_model("nemotron_h")
    state, level = torch.get_rng_state(), logging.getLogger("transformers").level
    speed_up(model)
    assert torch.equal(torch.get_rng_state(), state) and logging.getLogger("transformers").level == level


def test_packed_sequences_are_refused_as_before():
    model = tiny_model("granitemoehybrid")
    speed_up(model)
    layer = model.model.layers[0].mamba
    with pytest.raises(ValueError, match="packed sequences"), torch.no_grad():
        layer(torch.randn(1, 4, 64), seq_idx=torch.zeros(1, 4, dtype=torch.int32))


def test_a_cache_that_records_the_past_has_the_original():
    stock, fast = tiny_model("granitemoehybrid"), tiny_model("granitemoehybrid")
    speed_up(fast)
    x = torch.randn(1, 6, 64)
    outs = []
    for model in (stock, fast):
        cache = transformers.DynamicCache(config=model.config)
        cache.layers[0].activate_past_recording()
        with torch.no_grad():
            outs.append(model.model.layers[0].mamba(x, cache_params=cache))
        assert cache.get_conv_state(0).shape[-1] == 6
    assert torch.equal(*outs)


def test_other_models_are_not_touched():
    config = transformers.AutoConfig.for_model(
        "falcon_h1",
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=16,
        vocab_size=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()  # scales what it projects
    state_space.speed_up_state_spaces(model)
    assert not replaced(model)
