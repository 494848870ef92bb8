"""Steps in one call of the core give what the models' own code gives; what they do not serve goes through that code."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import nullcontext

import pytest
import torch
import transformers
from every_architecture import FAMILIES, family_class, representatives_first, tiny_model, write_family
from native_models import base_of, counted_steps, own_code
from random_layers import relative_error
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import cpumoe
from cpumoe import _core
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.integrations.transformers import native_decoder
from cpumoe.integrations.transformers.adapter import explanation, native_of, native_with_head
from cpumoe.integrations.transformers.facade import explain_step
from cpumoe.integrations.transformers.layout.model_classes import empty_model
from cpumoe.integrations.transformers.preallocated_cache import CacheForm, RoomyLayer, RoomySlidingLayer, make_roomy
from cpumoe.integrations.transformers.recognition.recognize import recognize
from cpumoe.integrations.transformers.recognition.values import Recognized
from cpumoe.ops.decoder_steps import Decoder

#: Families that run in one call, whole models and their text parts; a family that is lost would be noticed here.
NATIVE = {
    *("aria", "aria_text", "deepseek_ocr2", "deepseek_ocr2_text", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe"),
    *(
        "flex_olmo",
        "flint",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe",
        "glm4v_moe_text",
        "gpt_oss",
        "granitemoe",
        "hy_v3",
    ),
    *("mellum", "mimo_v2_flash", "minimax_m2", "mistral4", "mistral4_text", "mixtral", "olmoe", "qwen2_moe"),
    *("qwen3_moe", "qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "qwen3_vl_moe"),
    *("qwen3_vl_moe_text", "solar_open", "kimi_linear", "qwen3_next", "qwen3_next_dense"),
    *("bailing_hybrid", "qwen3_5_moe", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v2_lite", "hunyuan_v1_moe"),
    *("afmoe", "granitemoeshared", "lfm2_moe"),
}
ALONE = [name for name in FAMILIES if name != "mistral_large4_text"]  # which transformers itself cannot load


@pytest.fixture(scope="module")
def loaded(family_folder):
    """Models of families with quantised experts, loaded when they are asked for."""
    models = {}

    def load(name: str, dtype: torch.dtype = torch.float32, linears: str | None = None) -> transformers.PreTrainedModel:
        if (name, dtype, linears) not in models:
            options = {"dtype": dtype, "auto_class": family_class(name), "scheme": "w8a8", "linears": linears}
            models[name, dtype, linears] = cpumoe.load_model(family_folder(name), **options)
        return models[name, dtype, linears]

    return load


def prompt(batch: int = 2, tokens: int = 9, padding: int = 3) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 98, (batch, tokens), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", representatives_first(ALONE))
def test_which_families_run_in_one_call(loaded, name):
    said = explanation(loaded(name))
    assert (said == "every step is one call of the core") == (name in NATIVE), said
    assert "could not be described" not in said


@pytest.mark.parametrize("name", representatives_first(sorted(NATIVE)))
def test_the_configuration_rejects_no_native_decoder(name):
    model = tiny_model(name)
    assert isinstance(recognize(empty_model(model.config, type(model))), Recognized)


#: Sizes of real models, but for the experts' own and the vocabulary.
REAL_SIZES = {
    "qwen3_moe": (4096, 128, {"num_experts_per_tok": 8, "num_attention_heads": 64, "head_dim": 128}),
    "mixtral": (6144, 8, {"num_attention_heads": 48, "head_dim": 128}),
    "deepseek_v2": (5120, 160, {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "kv_lora_rank": 512}),
    "deepseek_v3": (7168, 256, {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "kv_lora_rank": 512}),
    "gpt_oss": (2880, 128, {"num_experts_per_tok": 4, "num_attention_heads": 64, "head_dim": 64}),
    "minimax_m2": (3072, 256, {"num_experts_per_tok": 8}),
    "qwen3_next": (2048, 512, {"num_experts_per_tok": 10, "head_dim": 256}),
    "glm4_moe": (5120, 160, {"num_experts_per_tok": 8, "head_dim": 128}),
    "phimoe": (4096, 16, {}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "qwen3_moe" else pytest.mark.full) for n in REAL_SIZES]
)
def test_real_sizes_are_recognised(name):
    hidden, experts, more = REAL_SIZES[name]
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    sizes = {field: experts for field in names if hasattr(family_class(name).config_class(), field)}
    small = explanation(cpumoe.accelerate(tiny_model(name, dtype=torch.bfloat16), "bf16"))
    large = tiny_model(name, dtype=torch.bfloat16, hidden_size=hidden, initializer_range=0.02, **sizes, **more)
    assert explanation(cpumoe.accelerate(large, "bf16")) == small


@pytest.mark.parametrize("name", ["kimi_linear", "deepseek_v2", "qwen3_next"])
def test_linears_in_int8_do_not_cost_the_native_decoder(name):
    """The order of sums moves an activation here and there by a step, and a row by more than rounding does."""
    model = cpumoe.accelerate(tiny_model(name), "w8a8", linears="w8a8")
    assert explanation(model) == "every step is one call of the core"


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mimo_v2_flash", "jamba", "qwen3_next", "llama4_text"]
)
def test_the_configuration_alone_tells_whether_a_step_is_one_call(tmp_path, name):
    write_family(tmp_path / "model", name)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        said = explain_step(checkpoint).sentence
    assert said.startswith("each in one call" if name in NATIVE else "layer by layer through transformers: ")


@pytest.mark.parametrize("name", representatives_first(sorted(NATIVE)))
def test_hidden_states_equal_those_of_the_models_own_code(loaded, name):
    base = base_of(loaded(name))
    inputs = prompt()
    results = []
    for steps in (False, True):
        cache, mask, hidden = DynamicCache(config=base.config), inputs["attention_mask"], []
        with torch.no_grad(), own_code(base) if not steps else counted_steps(base) as counted:
            for last in (4, 7, 8, 9):  # a prompt in two pieces, then one by one
                first = cache.get_seq_length()
                positions = (mask.cumsum(1) - 1).clamp(min=0)[:, first:last]
                ids = inputs["input_ids"][:, first:last]
                options = {"position_ids": positions, "past_key_values": cache}
                hidden.append(base(input_ids=ids, attention_mask=mask[:, :last], **options).last_hidden_state)
        results.append(torch.cat(hidden, 1)[inputs["attention_mask"].bool()])
        assert not steps or counted == [(2, 4), (2, 3), (2, 1), (2, 1)]
    # Bytes of activations may round to their neighbours.
    assert relative_error(results[1], results[0]) < 3e-3


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "olmoe", "granitemoe"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True, "top_k": 20, "temperature": 0.8},
        {"prompt_lookup_num_tokens": 3},
        {"num_return_sequences": 2, "do_sample": True},
        {"use_cache": False},
        {"repetition_penalty": 1.2},
    ],
    ids=lambda options: ",".join(options) or "greedy",
)
def test_generate_gives_the_same_tokens(loaded, name, options):
    model = loaded(name)
    inputs = prompt(1, 9, 0) if "prompt_lookup_num_tokens" in options else prompt()
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **options}
    tokens = []
    for own in (True, False):
        torch.manual_seed(3)
        with own_code(model) if own else counted_steps(model) as steps:
            tokens.append(model.generate(**inputs, **options))
    assert torch.equal(*tokens)
    assert steps


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "glm4v_moe", "mistral4", "aria"])
def test_text_alone_in_models_for_images(loaded, name):
    model, inputs = loaded(name), prompt(1, 9, 0)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with own_code(model):
        expected = model.generate(**inputs, **options)
    with counted_steps(model) as steps:
        assert torch.equal(model.generate(**inputs, **options), expected)
    assert len(steps) == 6


def test_generate_with_an_assistant_model(loaded, tmp_path):
    model, assistant = loaded("qwen3_moe"), loaded("mixtral")
    inputs, options = prompt(1, 9, 0), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(**inputs, **options)
    with counted_steps(model) as steps, counted_steps(assistant) as assisting:
        assert torch.equal(model.generate(**inputs, **options, assistant_model=assistant), alone)
    assert any(count > 1 for _, count in steps[1:]) and assisting  # several tokens are checked at once


def test_norms_that_stay_in_fp32_in_a_model_in_fp16(loaded):
    model, inputs = loaded("gpt_oss", torch.float16), prompt()
    assert model.model.norm.weight.dtype == torch.float32
    assert native_of(model.model) is not None, explanation(model)
    with torch.no_grad(), own_code(model):
        expected = model(**inputs).logits
    with torch.no_grad(), counted_steps(model) as steps:
        found = model(**inputs).logits
    assert steps and found.dtype == torch.float16
    real = inputs["attention_mask"].bool()
    errors = (found - expected)[real].float().norm(dim=-1) / expected[real].float().norm(dim=-1)
    # Int8 activations round to their neighbours; where experts are nearly tied, rounding may choose others.
    assert errors.median() < 3e-2


def test_options_of_an_attention_that_others_registered_reach_it(loaded):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def biased(*arguments, my_bias=0.0, **options):
        out, weights = sdpa_attention_forward(*arguments, **options)
        return out + my_bias, weights

    model, inputs = loaded("qwen3_moe"), prompt(1, 9, 0)
    AttentionInterface.register("biased", biased)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("biased")
        with torch.no_grad():
            found, plain = model(**inputs, my_bias=1.0).logits, model(**inputs).logits
            with own_code(model):
                expected = model(**inputs, my_bias=1.0).logits
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop("biased")
    assert torch.equal(found, expected)
    assert relative_error(found, plain) > 0.1


@pytest.mark.parametrize("keep", [0, 1])
def test_autocast_to_another_dtype_runs_the_models_own_code(loaded, keep):
    model, inputs = loaded("qwen3_moe"), prompt(1, 9, 0)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(**inputs, logits_to_keep=keep).logits
        with own_code(model):
            expected = model(**inputs, logits_to_keep=keep).logits
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_autocast_to_the_models_dtype_changes_nothing(loaded):
    model, inputs = loaded("qwen3_moe", torch.bfloat16), prompt(1, 9, 0)
    with torch.no_grad():
        expected = model(**inputs, logits_to_keep=1).logits
        with torch.autocast("cpu", dtype=torch.bfloat16), counted_steps(model) as steps:
            assert torch.equal(model(**inputs, logits_to_keep=1).logits, expected)
    assert steps


def test_logits_of_all_tokens_of_some_and_of_one(loaded):
    model, inputs = loaded("qwen3_moe"), prompt(1, 9, 0)
    with torch.no_grad():
        everything = model(**inputs).logits
        assert everything.shape == (1, 9, model.config.vocab_size)
        for keep in (1, 4, 50):
            assert torch.equal(model(**inputs, logits_to_keep=keep).logits, everything[:, -keep:])
        chosen = model(**inputs, logits_to_keep=torch.tensor([2, 5])).logits  # through the model's own code
        assert relative_error(chosen, everything[:, [2, 5]]) < 3e-3


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_any_cut_of_a_prompt_and_any_company_gives_the_same_bits(loaded, name):
    for dtype in (torch.float32, torch.bfloat16):
        model = loaded(name, dtype, "w8a8")  # the head too: with many rows PyTorch computes one in float
        ids = torch.randint(3, 98, (3, 14), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            together = model(input_ids=ids).logits
            alone = torch.cat([model(input_ids=row).logits for row in ids.split(1)])
            cache, parts = DynamicCache(config=model.config), []
            for piece in ids.split((5, 1, 7, 1), 1):
                parts.append(model(input_ids=piece, past_key_values=cache).logits)
        assert torch.equal(together, alone)
        assert torch.equal(together, torch.cat(parts, 1))


def test_the_same_bits_for_any_number_of_threads(loaded):
    model, inputs = loaded("qwen3_moe", torch.bfloat16), prompt()
    results = []
    for threads in (1, 2, 3, 5):
        cpumoe.set_num_threads(threads)
        try:
            results.append(
                model.generate(
                    **inputs,
                    max_new_tokens=4,
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                    pad_token_id=0,
                ).logits
            )
        finally:
            cpumoe.set_num_threads(0)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_same_bits_on_every_instruction_set(loaded, name):
    model, inputs, results = loaded(name, torch.bfloat16, "w8a8"), prompt(), []
    for isa, supported, *_ in _core.instruction_sets():
        if not supported:
            continue
        _core.use_isa(isa)
        try:
            with torch.no_grad():
                cache = DynamicCache(config=model.config)
                first = model(**inputs, past_key_values=cache).logits
                mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
                second = model(input_ids=torch.tensor([[5], [6]]), attention_mask=mask, past_key_values=cache).logits
            results.append(torch.cat((first, second), 1)[:, 3:])
        finally:
            _core.use_isa("")
    assert len(results) > 1
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_embeddings_instead_of_tokens(loaded):
    model, inputs = loaded("qwen3_moe"), prompt()
    with torch.no_grad(), counted_steps(model) as steps:
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        found = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits
        assert torch.equal(found, model(**inputs).logits) and len(steps) == 2


def test_what_is_not_served_takes_the_models_own_code(loaded):
    model, inputs = loaded("qwen3_moe"), prompt()
    four_dimensional = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    holes = inputs["attention_mask"].clone()
    holes[1, 4] = 0
    calls = [
        {**inputs, "output_hidden_states": True},
        {**inputs, "output_router_logits": True},
        {**inputs, "labels": inputs["input_ids"]},
        {**inputs, "return_dict": False},
        {**inputs, "attention_mask": four_dimensional},
        {**inputs, "attention_mask": holes},
        {**inputs, "past_key_values": StaticCache(config=model.config, max_cache_len=16)},
    ]
    for call in calls:
        # Each has a cache of its own, where it has one.
        with torch.no_grad(), counted_steps(model) as steps:
            found = model(**call)
        if "past_key_values" in call:
            call["past_key_values"] = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad(), own_code(model):
            expected = model(**call)
        assert not steps or "labels" in call or "return_dict" in call  # of these the model itself takes care
        for one, two in zip(found[:1], expected[:1], strict=True):
            assert relative_error(one, two) < 3e-3
    hidden = model(**inputs, output_hidden_states=True).hidden_states
    assert len(hidden) == model.config.num_hidden_layers + 1


def test_gradients_training_and_hooks_take_the_models_own_code(loaded):
    model, inputs = loaded("qwen3_moe"), prompt()
    seen = []
    with counted_steps(model) as steps:
        model(**inputs)  # gradients are on
        with torch.no_grad():
            model.train()
            model(**inputs)
            model.eval()
            handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
            model(**inputs)
            handle.remove()
            assert seen and not steps
            model(**inputs)
            assert len(steps) == 1


def test_changed_weights_are_followed(loaded, tmp_path):
    write_family(tmp_path / "model", "qwen3_moe")
    model = cpumoe.load_model(tmp_path / "model", dtype=torch.float32, scheme="w8a8")
    inputs = prompt()

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            found = model(**inputs).logits
            with own_code(model):
                return found, model(**inputs).logits

    before, _ = both()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)  # in its place
    found, expected = both()
    assert relative_error(found, expected) < 3e-3 and relative_error(found, before) > 0.1
    model.model.layers[0].self_attn.q_norm.weight = torch.nn.Parameter(torch.full((16,), 0.3), requires_grad=False)
    found, expected = both()
    assert relative_error(found, expected) < 3e-3
    model.model.layers[1].input_layernorm = torch.nn.LayerNorm(64)
    found, expected = both()  # a module that has no place in a description
    assert torch.equal(found, expected)
    assert "LayerNorm" in explanation(model)


def test_positions_beyond_the_first_tables(loaded, monkeypatch, tmp_path):
    other = loaded("qwen3_moe")
    monkeypatch.setattr(native_decoder, "FIRST_POSITIONS", 8)
    write_family(tmp_path / "model", "qwen3_moe")
    model = cpumoe.load_model(tmp_path / "model", dtype=torch.float32, scheme="w8a8")
    ids = torch.randint(3, 98, (1, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), counted_steps(other) as steps:
        assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits) and steps


# ---- caches --------------------------------------------------------------------------------------------------------


def filled(model: transformers.PreTrainedModel, cache: DynamicCache, tokens: int = 6) -> DynamicCache:
    ids = torch.randint(3, 98, (2, tokens), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_cache_holds_what_transformers_would_hold(loaded, name):
    model = loaded(name)
    for made in (lambda: DynamicCache(config=model.config), DynamicCache):
        ours = filled(model, made())
        with own_code(model):
            theirs = filled(model, made())
        assert ours.get_seq_length() == theirs.get_seq_length() == 6
        for one, two in zip(ours.layers, theirs.layers, strict=True):
            assert isinstance(one, type(two))
            assert one.keys.shape == two.keys.shape
            assert relative_error(one.keys, two.keys) < 3e-3 and relative_error(one.values, two.values) < 3e-3
            assert one.get_mask_sizes(3) == two.get_mask_sizes(3)


@pytest.mark.parametrize("own_first", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_cache_goes_on_in_the_other_way(loaded, name, own_first):
    model, next_ids = loaded(name), torch.tensor([[5, 6], [7, 8]])
    with own_code(model):
        expected_cache = filled(model, DynamicCache(config=model.config))
        with torch.no_grad():
            expected = model(input_ids=next_ids, past_key_values=expected_cache).logits
    if own_first:
        with own_code(model):
            cache = filled(model, DynamicCache(config=model.config))
        with torch.no_grad(), counted_steps(model) as steps:
            found = model(input_ids=next_ids, past_key_values=cache).logits
        assert steps
    else:
        cache = filled(model, DynamicCache(config=model.config))
        with torch.no_grad(), own_code(model):
            found = model(input_ids=next_ids, past_key_values=cache).logits
    assert relative_error(found, expected) < 3e-3
    assert cache.get_seq_length() == 8


def test_caches_that_do_not_fit_are_left_alone_or_refused_by_the_models_own_code(loaded):
    model = loaded("qwen3_moe")
    other = DynamicCache()  # of another model: other heads
    for layer in range(model.config.num_hidden_layers):
        other.update(*(torch.randn(2, 7, 6, 16) for _ in range(2)), layer)
    with counted_steps(model) as steps, torch.no_grad(), pytest.raises((RuntimeError, ValueError)):
        model(input_ids=torch.tensor([[4], [5]]), past_key_values=other)
    cache = filled(model, DynamicCache())  # of another batch
    with counted_steps(model) as more, torch.no_grad(), pytest.raises((RuntimeError, ValueError)):
        model(input_ids=torch.tensor([[4]]), past_key_values=cache)
    assert not steps and not more


@pytest.mark.parametrize("sliding", [False, True])
def test_a_roomy_layer_is_a_layer_of_transformers(sliding):
    """Random updates, crops and rearrangements give the same as transformers' own layer."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        generator.manual_seed(seed)
        stock = DynamicSlidingWindowLayer(sliding_window=6) if sliding else DynamicLayer()
        cache = DynamicCache()
        cache.layers = [DynamicSlidingWindowLayer(sliding_window=6) if sliding else DynamicLayer()]
        assert make_roomy(cache, 0)
        (roomy,) = cache.layers
        assert type(roomy) is (RoomySlidingLayer if sliding else RoomyLayer)
        for _ in range(25):
            what = int(torch.randint(0, 8, (1,), generator=generator))
            held = 0 if not stock.is_initialized else stock.keys.shape[0]
            batch = held or 2
            if what < 5:
                count = int(torch.randint(1, 9, (1,), generator=generator))
                new = [torch.randn((batch, 2, count, depth), generator=generator) for depth in (4, 3)]
                if what < 2:
                    for one, two in zip(stock.update(*new), roomy.update(*new), strict=True):
                        assert torch.equal(one, two)
                else:  # as a step does it
                    stock.update(*new)
                    *buffers, first = roomy.reserve(batch, CacheForm(2, (4, 3), torch.float32, seed % 2 == 0), count)
                    at = roomy.get_seq_length() - first
                    if seed % 2 == 0:  # side by side
                        buffers[0][:, :, at : at + count] = torch.cat(new, -1)
                    for buffer, tensor in zip(buffers, new if seed % 2 else (), strict=False):
                        buffer[:, :, at : at + count] = tensor
                    roomy.advance(count)
            elif what == 5 and held:
                order = torch.randint(0, held, (held,), generator=generator)
                stock.reorder_cache(order)
                roomy.reorder_cache(order)
            elif what == 6 and held and stock.get_seq_length() > 2 and not (sliding and stock.get_seq_length() >= 6):
                stock.crop(-2)
                roomy.crop(-2)
            elif what == 7 and seed % 5 == 0:
                stock.reset()
                roomy.reset()
            assert roomy.get_seq_length() == stock.get_seq_length()
            assert roomy.get_mask_sizes(2) == stock.get_mask_sizes(2)
            if stock.is_initialized:
                assert torch.equal(roomy.keys, stock.keys) and torch.equal(roomy.values, stock.values)


def test_copies_of_a_cache_go_their_own_ways(loaded):
    import copy

    model = loaded("qwen3_moe")
    cache = filled(model, DynamicCache(config=model.config))
    before = copy.deepcopy(cache)
    with torch.no_grad():
        one = model(input_ids=torch.tensor([[4], [5]]), past_key_values=cache).logits
        two = model(input_ids=torch.tensor([[4], [5]]), past_key_values=before).logits
    assert torch.equal(one, two) and before.layers[0].keys.data_ptr() != cache.layers[0].keys.data_ptr()


# ---- what is not described ------------------------------------------------------------------------------------------


def test_a_model_that_its_weights_know_is_collected(tmp_path):
    """Objects of the core take part in garbage collection: a cycle through one of them would stay for ever."""
    source = write_family(tmp_path / "m", "qwen3_moe")
    model = cpumoe.load_model(source, scheme="w4a8-g32", dtype=torch.float32)
    model(torch.tensor([[1, 2, 3]]))
    decoder = native_of(model.model).decoder
    weight = decoder.model.embedding
    assert isinstance(decoder, Decoder)
    weight.user = model
    gone = weakref.ref(decoder)
    del model, decoder, weight
    gc.collect()
    assert gone() is None


def test_a_description_that_computes_something_else_is_noticed(loaded, monkeypatch, tmp_path):
    """Every number of a description matters to the check."""
    from dataclasses import replace

    from cpumoe.integrations.transformers.recognition import check as decoder_check

    original = decoder_check.recognize_decoder
    changes = {
        "scale": lambda a: replace(a, scale=a.scale * 1.5),
        "window": lambda a: replace(a, window=2),
        "rope": lambda a: replace(a, rope=replace(a.rope, table=-1)),
        "norm": lambda a: replace(a, query_norm=None),
    }
    write_family(tmp_path / "model", "qwen3_moe")
    for change in changes.values():

        def recognized(base, variants, change=change):
            model = original(base, variants)
            return replace(model, layers=tuple(replace(layer, mixer=change(layer.mixer)) for layer in model.layers))

        monkeypatch.setattr(decoder_check, "recognize_decoder", recognized)
        model = cpumoe.load_model(tmp_path / "model", dtype=torch.float32, scheme="w8a8")
        assert "gives other numbers" in explanation(model)


def test_a_head_that_is_more_than_a_linear_is_left_to_the_model(loaded, tmp_path):
    assert native_with_head(loaded("qwen3_moe")) is not None
    write_family(tmp_path / "model", "granitemoe", logits_scaling=3.0)
    model, inputs = cpumoe.load_model(tmp_path / "model", dtype=torch.float32, scheme="w8a8"), prompt()
    assert native_of(model.model) is not None and native_with_head(model) is None  # it divides its logits
    with torch.no_grad():
        found = model(**inputs).logits
        with own_code(model):
            assert relative_error(found, model(**inputs).logits) < 3e-3


@pytest.mark.parametrize("name", representatives_first(sorted(NATIVE)))
def test_either_code_goes_on_from_what_the_other_has_left(loaded, name):
    """A step, a call that asks for hidden states, and a step again, over one cache."""
    base = base_of(loaded(name))
    inputs = prompt()["input_ids"]
    results = []
    for steps in (False, True):
        cache, hidden = DynamicCache(config=base.config), []
        with torch.no_grad(), own_code(base) if not steps else nullcontext():
            for first, last, more in ((0, 5, False), (5, 7, True), (7, 8, False), (8, 9, True)):
                out = base(input_ids=inputs[:, first:last], past_key_values=cache, output_hidden_states=more)
                hidden.append(out.last_hidden_state)
        results.append(torch.cat(hidden, 1))
    # Bytes of activations may round to their neighbours, and a token may get another expert.
    errors = (results[1] - results[0]).norm(dim=-1) / results[0].norm(dim=-1)
    assert (errors[:, 5:] < 3e-3).float().mean() >= 0.7


# ---- what the check at load must see -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mistral4", "mistral4_text", "deepseek_v3"])
def test_positions_beyond_the_original_context(loaded, name):
    """Mistral 4 scales queries by their position there; YaRN's angles go on."""
    model = loaded(name)
    ids = torch.randint(3, 98, (1, 300), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), counted_steps(model) as steps:
        found = model(input_ids=ids).logits
    with torch.no_grad(), own_code(model):
        expected = model(input_ids=ids).logits
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert steps and errors.median() < 1e-3 and errors.quantile(0.9) < 2e-2  # the rest: other experts by rounding


def test_a_sliding_window_that_the_model_ignores(tmp_path):
    """The configuration has an integer, transformers computes full attention with a cache of the window's length."""
    write_family(tmp_path, "qwen3_omni_moe_text")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"sliding_window": 8, "use_sliding_window": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"dtype": torch.float32, "scheme": "w8a8", "auto_class": family_class("qwen3_omni_moe_text")}
    model = cpumoe.load_model(tmp_path, **options)
    ids = torch.randint(3, 98, (1, 40), generator=torch.Generator().manual_seed(2))
    assert "gives other numbers" in explanation(model)
    with torch.no_grad():
        found = model(input_ids=ids).last_hidden_state
        model.config.sliding_window = None
        assert relative_error(found, model(input_ids=ids).last_hidden_state) < 3e-3


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "minimax"])
def test_hidden_states_and_router_logits_come_once(family_folder, name):
    """Also where the configuration asks for them, while the check at load runs copies of the layers."""
    options = {"output_hidden_states": True, "output_router_logits": True}
    model = cpumoe.load_model(family_folder(name), dtype=torch.float32, scheme="w8a8", **options)
    with torch.no_grad():
        found = model(input_ids=torch.arange(3, 12).unsqueeze(0))
    layers = model.config.num_hidden_layers
    assert len(found.hidden_states) == layers + 1
    if name != "deepseek_v3":  # whose router logits transformers does not collect
        assert len(found.router_logits) == layers


def test_the_log_has_each_reason_for_the_models_own_code_once(caplog):
    model, ids = cpumoe.accelerate(tiny_model("qwen3_moe"), "w8a8"), prompt()["input_ids"]
    with torch.no_grad(), caplog.at_level("INFO", "cpumoe"):
        for _ in range(2):
            model(ids)
            model(ids, output_hidden_states=True)
            model(ids, attention_mask=torch.ones_like(ids).scatter(1, torch.tensor([[3]]), 0))
    told = [record.getMessage() for record in caplog.records if "runs its own code" in record.getMessage()]
    assert [sum(reason in line for line in told) for reason in ("output_hidden_states=True", "padding")] == [1, 1]
    assert len(told) == 3  # the head, of so many tokens, is PyTorch's
