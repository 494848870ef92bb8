"""Keys and values in int8, on request: near float caches, the same everywhere, and never a silent float cache."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from every_architecture import family_class
from transformers import DynamicCache

import cpumoe
from cpumoe import _core
from cpumoe.integrations.transformers.adapter import native_of, native_with_head
from cpumoe.integrations.transformers.int8_cache import holds_records
from cpumoe.integrations.transformers.paged_decoder import PagedDecoder
from cpumoe.integrations.transformers.preallocated_cache import CacheForm, make_roomy
from cpumoe.ops import cache_record_bytes, from_cache_records, to_cache_records
from cpumoe.ops.decoder import Matrix, Mla
from cpumoe.ops.decoder_steps import Decoder
from cpumoe.steps.engine import StepEngine
from cpumoe.steps.request import Job
from cpumoe.steps.runner import CoreRunner
from cpumoe.steps.sampling import Sampling, Token

#: Grouped heads; latents; windows, sinks and biases; values narrower than keys; norms of whole rows.
FAMILIES = ["qwen3_moe", "deepseek_v3", "gpt_oss", "mimo_v2_flash", "flex_olmo"]
OPTIONS = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def loaded(family_folder):
    """Models of families, loaded when they are asked for; their experts are as they are stored, in fp32."""
    models = {}

    def load(
        name: str, kv_cache: str | None = "int8", dtype: torch.dtype = torch.float32, scheme: str | None = None
    ) -> transformers.PreTrainedModel:
        key = (name, kv_cache, dtype, scheme)
        if key not in models:
            options = {"dtype": dtype, "auto_class": family_class(name), "scheme": scheme, "kv_cache": kv_cache}
            models[key] = cpumoe.load_model(family_folder(name), **options)
        return models[key]

    return load


def native_in(model: torch.nn.Module) -> Any:
    return next(native for module in model.modules() if (native := native_of(module)) is not None)


def tokens(batch: int, count: int, seed: int = 7) -> torch.Tensor:
    return torch.randint(3, 98, (batch, count), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, ids: torch.Tensor, pieces: tuple[int, ...], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Of ids [B, T] in pieces over one cache."""
    cache, found, last = DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        for piece in ids.split(pieces, 1):
            last += piece.shape[1]
            options = {} if mask is None else {"attention_mask": mask[:, :last]}
            found.append(model(input_ids=piece, past_key_values=cache, **options).logits)
    return torch.cat(found, 1)


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).flatten()


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_near_those_of_float_caches(loaded, name):
    ids, pieces = tokens(2, 60), (40, 7, *(1 for _ in range(13)))
    found, expected = (logits_of(loaded(name, kv_cache), ids, pieces) for kv_cache in ("int8", None))
    # Half of the tokens; of others a router may choose another expert.
    errors = row_errors(found, expected)
    assert 1e-4 < errors.median() < 0.04, errors.median()
    assert found.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_attention_is_that_over_floats_which_hold_what_comes_back(loaded, name, dtype):
    """The keys and values of the rows themselves are zeros, which both kinds of caches hold as they are."""
    described = native_in(loaded(name, "int8", dtype)).decoder.model
    mixer = described.layers[0].mixer
    names = ("latent",) if isinstance(mixer, Mla) else ("key", "value")
    mixer = replace(mixer, **{n: Matrix(torch.zeros_like(getattr(mixer, n).weight)) for n in names})
    heads, depths = (
        (1, (mixer.kv_lora_rank + mixer.rope_dim,))
        if isinstance(mixer, Mla)
        else (mixer.kv_heads, (mixer.head_dim, mixer.value_dim))
    )
    decoder = Decoder(replace(described, layers=(replace(described.layers[0], mixer=mixer),)))
    past, count, room = 200, 3, 220
    numbers = [torch.randn(2, heads, room, depth).to(dtype) for depth in depths]
    records = [to_cache_records(part) for part in numbers]
    floats = [from_cache_records(part, depth, dtype) for part, depth in zip(records, depths, strict=True)]
    for threads in (1, 2):
        cpumoe.set_num_threads(threads)
        results = [
            decoder.step(tokens(2, count), [(*held, 0)], past, padding=torch.tensor([5, 0]))
            for held in ([part.clone() for part in records], [part.clone() for part in floats])
        ]
        assert torch.equal(*results) and results[0].isfinite().all()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_same_bits_everywhere(loaded, name):
    """On every instruction set, for any number of threads, cut and company."""
    model, ids = loaded(name, "int8", torch.bfloat16, "w8a8"), tokens(2, 40)
    expected = logits_of(model, ids, (40,))
    for threads in (1, 2, 3):
        cpumoe.set_num_threads(threads)
        assert torch.equal(logits_of(model, ids, (23, 1, 16)), expected)
        assert torch.equal(torch.cat([logits_of(model, row, (39, 1)) for row in ids.split(1)]), expected)
    for isa, supported, *_ in _core.instruction_sets():
        if supported:
            _core.use_isa(isa)
            assert torch.equal(logits_of(model, ids, (39, 1)), expected)


def test_padding(loaded):
    model, ids = loaded("qwen3_moe"), tokens(1, 20)
    padded = torch.nn.functional.pad(ids, (4, 0))
    mask = (torch.arange(24) >= 4).long().unsqueeze(0)
    assert row_errors(logits_of(model, padded, (23, 1), mask)[:, 4:], logits_of(model, ids, (19, 1))).median() < 0.05


def test_bytes_of_a_token(loaded):
    for name, dtype in (("qwen3_moe", torch.bfloat16), ("deepseek_v3", torch.float32)):
        native = native_in(loaded(name, "int8", dtype))
        mixers = [layer.mixer for layer in native.decoder.model.layers]
        expected = sum(
            cache_record_bytes(m.kv_lora_rank + m.rope_dim)
            if isinstance(m, Mla)
            else m.kv_heads * (cache_record_bytes(m.head_dim) + cache_record_bytes(m.value_dim))
            for m in mixers
        )
        assert native.token_bytes == expected < native_in(loaded(name, None, dtype)).token_bytes
        pages = native.new_pages(3, 16, 1)
        assert sum(tensor.nbytes for parts in pages for tensor in parts) == 48 * expected


# ---- generating ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
        {"use_cache": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_generate(loaded, name, options):
    model, ids = loaded(name), tokens(1, 9)
    greedy = model.generate(ids, **OPTIONS)
    found = model.generate(ids, **{**OPTIONS, **options})
    assert found.shape[1] == 19
    if "num_beams" not in options and "do_sample" not in options:
        assert torch.equal(found, greedy)


def test_beams_are_those_of_the_sequences_by_themselves(loaded):
    """Reordered and repeated caches hold the records that they held."""
    model, ids = loaded("qwen3_moe", "int8", torch.bfloat16, "w8a8"), tokens(2, 9)
    options = {"output_scores": True, "return_dict_in_generate": True, "eos_token_id": None}
    found = model.generate(ids, **OPTIONS, **options, num_beams=3, num_return_sequences=3)
    assert found.sequences.shape == (6, 19)
    for sequence, score in zip(found.sequences, found.sequences_scores, strict=True):
        with torch.no_grad():
            logits = model(input_ids=sequence[None, :-1]).logits[0, 8:].float()
        chosen = logits.log_softmax(-1).gather(1, sequence[9:, None]).mean()
        assert abs(chosen - score) < 1e-5


def test_an_assistant(loaded):
    model, assistant, ids = loaded("qwen3_moe"), loaded("gpt_oss"), tokens(1, 9)
    alone = model.generate(ids, **OPTIONS)
    assert torch.equal(model.generate(ids, **OPTIONS, assistant_model=assistant), alone)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_an_ordinary_call_in_the_middle(loaded, name):
    """It sees floats, and what it leaves becomes records; the others stay what they were."""
    ids, results = tokens(2, 30), []

    for kv_cache in ("int8", None):
        model = loaded(name, kv_cache)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids[:, :20], past_key_values=cache)
            first = [layer._held()[0] for layer in cache.layers]
            before = [layer._room.held(place, 20) for layer, place in zip(cache.layers, first, strict=True)]
            before = [part.clone() for pair in before for part in pair]
            middle = model(input_ids=ids[:, 20:22], past_key_values=cache, output_hidden_states=True)
            assert all(layer._room.form.records == (kv_cache == "int8") for layer in cache.layers)
            after = [layer._room.held(place, 20) for layer, place in zip(cache.layers, first, strict=True)]
            assert all(map(torch.equal, before, [part for pair in after for part in pair]))
            last = model(input_ids=ids[:, 22:], past_key_values=cache).logits
        assert len(middle.hidden_states) == model.config.num_hidden_layers + 1
        results.append(torch.cat((middle.logits, last), 1))
    assert row_errors(*results).median() < 0.04


def test_a_cache_of_floats_becomes_records(loaded):
    model, floats, ids = loaded("qwen3_moe"), loaded("qwen3_moe", None), tokens(2, 30)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        floats(input_ids=ids[:, :20], past_key_values=cache)
        keys = cache.layers[0].keys.clone()
        found = model(input_ids=ids[:, 20:], past_key_values=cache).logits
        assert torch.equal(
            cache.layers[0].keys[:, :, :20], from_cache_records(to_cache_records(keys), 16, torch.float32)
        )
        assert cache.layers[0]._room.whole[0].dtype == torch.int8
        floats(input_ids=ids[:, :1], past_key_values=cache)  # and back
        assert cache.layers[0]._room.whole[0].dtype == torch.float32
    assert row_errors(found, logits_of(model, ids, (20, 10))[:, 20:]).median() < 0.03


@pytest.mark.parametrize("joined", [False, True])
def test_rooms_hold_records_through_all_that_happens_to_a_layer(joined):
    """Against one that holds what comes back, token by token."""
    form = CacheForm(2, (5, 66), torch.bfloat16, joined=joined, records=True)
    cache = DynamicCache()
    cache.layers = [transformers.cache_utils.DynamicLayer()]
    assert make_roomy(cache, 0)
    (layer,) = cache.layers
    shown: list[torch.Tensor] = [torch.empty(3, 2, 0, 5).bfloat16(), torch.empty(3, 2, 0, 66).bfloat16()]

    def come_back(new: list[torch.Tensor]) -> list[torch.Tensor]:
        if not joined:
            return [from_cache_records(to_cache_records(part), part.shape[-1], torch.bfloat16) for part in new]
        both = from_cache_records(to_cache_records(torch.cat(new, -1)), 71, torch.bfloat16)
        return [both[..., :5], both[..., 5:]]

    def append(count: int, batch: int) -> None:
        new = [torch.randn(batch, 2, count, depth).bfloat16() for depth in (5, 66)]
        layer.reserve(batch, form, 0)
        found = layer.update(*new)
        for index, part in enumerate(come_back(new)):
            shown[index] = torch.cat((shown[index], part), 2)
            assert torch.equal(found[index], shown[index])

    append(3, 3)
    append(200, 3)  # which needs new room
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    shown = [part[torch.tensor([2, 0, 0])] for part in shown]
    append(1, 3)
    layer.crop(-5)
    shown = [part[:, :, :-5] for part in shown]
    append(2, 3)
    layer.batch_select_indices(torch.tensor([True, False, True]))
    shown = [part[[0, 2]] for part in shown]
    layer.batch_repeat_interleave(2)
    shown = [part.repeat_interleave(2, 0) for part in shown]
    append(4, 4)
    assert layer._room.whole[0].dtype == torch.int8
    twin = copy.copy(layer)
    append(1, 4)
    assert torch.equal(twin.keys, shown[0][:, :, :-1]) and torch.equal(layer.values, shown[1])
    layer.keys = layer.keys[:, :, :7]  # as other code may leave it
    layer.values = layer.values[:, :, :7]
    shown = [part[:, :, :7] for part in shown]
    append(1, 4)  # what was records gives the same ones
    assert layer.get_seq_length() == 8


def test_a_server_with_records_in_pages_answers_as_generate_does(loaded):
    for name in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        model = loaded(name, "int8", torch.float32, "w8a8")
        native = native_with_head(model)
        engine = StepEngine(CoreRunner(PagedDecoder(model, native), 32, 16, 256), 32, 16, 64)
        assert engine.start() is None
        try:
            prompts = [tokens(1, count, count)[0].tolist() for count in (5, 40, 17)]
            answers: list[list[Any]] = [[] for _ in prompts]
            for prompt, items in zip(prompts, answers, strict=True):
                engine.add(Job(prompt, 8, frozenset(), Sampling(), items.append))
            end = time.monotonic() + 60
            while not all(items and not isinstance(items[-1], Token) for items in answers):
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            assert engine.stop()
        assert all(part.dtype == torch.int8 for parts in engine._runner._caches for part in parts)
        for prompt, items in zip(prompts, answers, strict=True):
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
            assert [item.id for item in items[:-1]] == expected[0, len(prompt) :].tolist()


# ---- how it is asked for -------------------------------------------------------------------------------------------


def test_the_ways_to_ask(loaded, monkeypatch, tmp_path):
    ids = tokens(1, 12)
    expected = logits_of(loaded("qwen3_moe", "int8", torch.float32, "w8a8"), ids, (11, 1))
    floats = loaded("qwen3_moe", None, torch.float32, "w8a8")
    assert not holds_records(floats)
    floats.save_pretrained(tmp_path / "packed")  # which says nothing of caches
    config = cpumoe.PackedConfig(kv_cache="int8")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", dtype=torch.float32, quantization_config=config
    )
    assert holds_records(model) and torch.equal(logits_of(model, ids, (11, 1)), expected)
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(twin, ids, (11, 1)), expected) and holds_records(twin)
    assert not holds_records(cpumoe.load_model(tmp_path / "packed", dtype=torch.float32))
    monkeypatch.setenv("CPUMOE_KV_CACHE", "int8")
    model = cpumoe.load_model(tmp_path / "packed", dtype=torch.float32)
    assert torch.equal(logits_of(model, ids, (11, 1)), expected)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_norm.weight = torch.nn.Parameter(torch.full((16,), 0.3), requires_grad=False)
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=cache)  # described anew
    assert cache.layers[0]._room.whole[0].dtype == torch.int8
    monkeypatch.setenv("CPUMOE_KV_CACHE", "fp8")
    with pytest.raises(ValueError, match="CPUMOE_KV_CACHE='fp8'; 'int8'"):
        cpumoe.load_model(tmp_path / "packed", dtype=torch.float32)


def test_what_is_refused(loaded, family_folder, monkeypatch):
    folder = family_folder("qwen3_moe")
    loaded("qwen3_moe")
    for value in ("int4", "", "INT8", 8):
        with pytest.raises(ValueError, match="kv_cache="):
            cpumoe.load_model(folder, kv_cache=value)
        with pytest.raises(ValueError, match="kv_cache="):
            cpumoe.PackedConfig(kv_cache=value)
    with pytest.raises(ValueError, match="one call of the core; .* no decoder with packed experts"):
        cpumoe.load_model(folder, kv_cache="int8", scheme="float")
    monkeypatch.setenv("CPUMOE_STEPS", "0")
    with pytest.raises(ValueError, match="one call of the core; .*CPUMOE_STEPS=0"):
        cpumoe.load_model(folder, kv_cache="int8")
    monkeypatch.delenv("CPUMOE_STEPS")
    with pytest.raises(ValueError, match="layer by layer: "):
        cpumoe.load_model(family_folder("jamba"), kv_cache="int8", dtype=torch.float32)


def test_a_model_that_becomes_another_one_is_refused(loaded, tmp_path):
    model = copy.deepcopy(loaded("qwen3_moe"))
    model.model.layers[1].input_layernorm = torch.nn.LayerNorm(64)
    with torch.no_grad(), pytest.raises(ValueError, match="keys and values in int8 .*LayerNorm"):
        model(input_ids=tokens(1, 4))


def test_caches_that_do_not_belong_together_are_refused_by_name(loaded):
    native = native_in(loaded("qwen3_moe"))
    step = native.decoder.step

    def caches(keys: torch.Tensor, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        return [(keys.clone(), values.clone(), 0) for _ in native._last.caches.forms]

    records, floats = torch.zeros(1, 2, 8, 20, dtype=torch.int8), torch.zeros(1, 2, 8, 16)
    assert step(tokens(1, 2), caches(records, records), 0).isfinite().all()
    for keys, values, message in [
        (records, floats, "values is float32, unlike the keys"),
        (floats, records, "values is int8, unlike the keys"),
        (records[..., :16].contiguous(), records, r"keys is \[1, 2, 8, 16\]; \[1, 2, 8, 20\] is accepted"),
        (records, records[:, :1].contiguous(), r"values is \[1, 1, 8, 20\]"),
        (records.byte(), records.byte(), "keys is uint8"),
        (floats.half(), floats.half(), "keys is float16, unlike the hidden states; their dtype, or int8"),
    ]:
        with pytest.raises(ValueError, match=message):
            step(tokens(1, 2), caches(keys, values), 0)
