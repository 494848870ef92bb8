"""Models that are changed after loading: the native decoder follows, or leaves the call to the model's own code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from native_models import counted_steps, own_code
from random_layers import relative_error
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DiffusionGemmaForBlockDiffusion,
    DynamicCache,
)

import cpumoe
from cpumoe.integrations.transformers import adapter
from cpumoe.integrations.transformers.adapter import explanation, native_of
from cpumoe.integrations.transformers.native_decoder import NativeDecoder
from cpumoe.integrations.transformers.replacements.replaced_forward import ReplacedForward
from cpumoe.integrations.transformers.watched_modules import WatchedValues
from cpumoe.layers.experts import Experts

NATIVE = (adapter.forward, adapter.forward_to_logits)

Load = Callable[..., Any]


@pytest.fixture(scope="module")
def load(family_folder: Any) -> Load:
    """Load a model of a family with quantised experts, a new one at each call."""

    def load(name: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        return cpumoe.load_model(family_folder(name), dtype=dtype, scheme="w8a8", **options)

    return load


def logits(model: Any, tokens: int = 1, **options: Any) -> torch.Tensor:
    """Return the logits of a prompt; of one token by default, which is all that a decode step has."""
    ids = torch.randint(3, 98, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, **options).logits
    return found


class Adapted(nn.Module):
    """A linear with an adapter, as LoRA replaces it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.adapter = nn.Linear(linear.in_features, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.adapter(x)


def replace_a_linear(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.v_proj = Adapted(attention.v_proj)


def replace_the_norm(model: Any) -> None:
    norm = copy.deepcopy(model.model.norm)
    norm.weight.data = torch.linspace(-2, 2, len(norm.weight))
    model.model.norm = norm


def replace_the_embedding(model: Any) -> None:
    model.set_input_embeddings(nn.Embedding(*model.get_input_embeddings().weight.shape))


def replace_the_head(model: Any) -> None:
    head = model.get_output_embeddings()
    model.set_output_embeddings(nn.Linear(head.in_features, head.out_features, bias=False))


def replace_a_forward(model: Any) -> None:
    block = model.model.layers[1].mlp
    own = block.forward
    block.forward = lambda x: own(x) * 3


def choose_fewer_experts(model: Any) -> None:
    model.model.layers[0].mlp.gate.top_k = 1


def scale_attention(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 5


def turn_faster(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(7)


def scale_rotary(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 2.5


CHANGES = [
    *(replace_a_linear, replace_the_norm, replace_the_embedding, replace_the_head, replace_a_forward),
    *(choose_fewer_experts, scale_attention, turn_faster, scale_rotary),
]


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_are_followed_in_one_token_calls(load: Load, change: Callable[[Any], None]) -> None:
    model = load()
    cache, before = {}, {}
    for tokens in (1, 6):
        # Attention over one token does not depend on queries and keys: the second one sees a prompt.
        first = model(input_ids=torch.arange(3, 3 + tokens).unsqueeze(0), use_cache=True)
        cache[tokens] = first.past_key_values
        before[tokens] = logits(model, past_key_values=copy.deepcopy(cache[tokens]))
    change(model)
    changed = []
    for tokens, past in cache.items():
        found = logits(model, past_key_values=copy.deepcopy(past))
        with own_code(model):
            expected = logits(model, past_key_values=copy.deepcopy(past))
        assert relative_error(found, expected) < 3e-3
        changed.append(relative_error(found, before[tokens]))
    assert max(changed) > 1e-2


def test_a_head_that_is_no_linear(load: Load) -> None:
    model = load()
    logits(model)
    head, model.lm_head = model.lm_head, nn.Identity()
    assert logits(model).shape[-1] == model.config.hidden_size
    model.lm_head = nn.Sequential(head)
    assert logits(model).shape[-1] == model.config.vocab_size
    assert native_of(model.model) is not None, explanation(model)


def test_a_forward_that_is_put_back(load: Load) -> None:
    """As accelerate's hooks come and go: the native decoder runs again afterwards."""
    model = load()
    before = logits(model)
    replace_a_forward(model)
    assert relative_error(logits(model), before) > 1e-2
    del model.model.layers[1].mlp.forward
    assert torch.equal(logits(model), before)
    with counted_steps(model) as steps:
        assert torch.equal(logits(model), before) and steps


def change_of_a_part(model: Any) -> Callable[[], None]:
    attention = model.model.layers[0].self_attn
    own = attention.v_proj
    attention.v_proj = Adapted(own)

    def put_back() -> None:
        attention.v_proj = own

    return put_back


def change_of_attention(model: Any) -> Callable[[], None]:
    attention = model.model.layers[0].self_attn
    attention.is_causal = False

    def put_back() -> None:
        attention.is_causal = True

    return put_back


def change_of_layers(model: Any) -> Callable[[], None]:
    count = model.config.num_hidden_layers
    model.config.num_hidden_layers = count - 1

    def put_back() -> None:
        model.config.num_hidden_layers = count

    return put_back


TEMPORARY = [change_of_a_part, change_of_attention, change_of_layers]


@pytest.mark.parametrize("change", TEMPORARY)
def test_the_native_decoder_is_back_after_a_change(
    load: Load, change: Callable[[Any], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is built at most once for each change, and ``explanation`` follows without a call of the model."""
    model = load()
    before, native = logits(model, 5), native_of(model.model)
    assert native is not None
    tried: list[int] = []
    build = NativeDecoder._build
    monkeypatch.setattr(NativeDecoder, "_build", lambda *given: (tried.append(1), build(*given))[1])
    for _ in range(2):
        put_back = change(model)
        assert "layer by layer" in explanation(model)
        changed = logits(model, 5)
        assert torch.equal(logits(model, 5), changed) and relative_error(changed, before) > 1e-3
        assert len(tried) == 1 and native_of(model.model) is None and "layer by layer" in explanation(model)
        put_back()
        assert explanation(model) == "every step is one call of the core"
        with counted_steps(model) as steps:
            assert torch.equal(logits(model, 5), before) and steps
        assert len(tried) <= 2
        tried.clear()


def test_counters_in_a_models_own_code_are_no_change(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load()
    before = logits(model)
    attention = model.model.layers[0].self_attn
    own = attention.v_proj

    class Counting(Adapted):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    attention.v_proj = Counting(own)
    attention.v_proj.calls = 0
    tried: list[int] = []
    build = NativeDecoder._build
    monkeypatch.setattr(NativeDecoder, "_build", lambda *given: (tried.append(1), build(*given))[1])
    for _ in range(4):
        logits(model)
    assert attention.v_proj.calls == 4 and len(tried) == 1
    attention.v_proj = own
    assert torch.equal(logits(model), before)


def test_a_copy_of_a_changed_model_has_its_native_decoder_back(load: Load) -> None:
    model = load()
    before = logits(model, 5)
    put_back = change_of_attention(model)
    logits(model, 5)
    copied = copy.deepcopy(model)
    for layer in copied.model.layers:
        layer.self_attn.is_causal = True
    assert explanation(copied) == "every step is one call of the core"
    assert torch.equal(logits(copied, 5), before)
    put_back()


def test_an_explanation_of_a_model_with_hooks(load: Load) -> None:
    model = load()
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "layer by layer: hooks" in explanation(model)
    hook.remove()
    assert explanation(model) == "every step is one call of the core"


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@torch.no_grad()
def test_fewer_layers_in_the_configuration(load: Load, name: str) -> None:
    """transformers leaves out the last layers; a cache without a configuration says nothing about them."""
    model = load(name)
    before = logits(model, 6, past_key_values=DynamicCache())
    model.config.num_hidden_layers = 1
    found = logits(model, 6, past_key_values=DynamicCache())
    with own_code(model):
        expected = logits(model, 6, past_key_values=DynamicCache())
    assert relative_error(found, expected) < 3e-3 and relative_error(found, before) > 1e-2


@pytest.mark.parametrize("when", ["before", "after"])
@torch.no_grad()
def test_tuples_on_request_of_the_configuration(family_folder: Any, when: str) -> None:
    ids = torch.tensor([[5, 6, 7]])
    stock = AutoModelForCausalLM.from_pretrained(family_folder("qwen3_moe"), dtype=torch.float32)
    before = stock(input_ids=ids)
    stock.config.return_dict = False
    expected = stock.model(input_ids=ids)
    assert isinstance(expected, tuple)
    stock.config.return_dict = when == "after"
    model = cpumoe.accelerate(stock, "fp32")
    model.config.return_dict = False
    assert explanation(model) == "every step is one call of the core"
    with counted_steps(model) as steps:
        found = model.model(input_ids=ids)
        assert isinstance(found, tuple) and len(found) == len(expected)
        assert relative_error(found[0], expected[0]) < 1e-4 and found[1].get_seq_length() == 3
        assert isinstance(model.model(input_ids=ids, return_dict=False), tuple)
        assert relative_error(model.model(input_ids=ids, return_dict=True).last_hidden_state, expected[0]) < 1e-4
        # The model with the head unpacks such a tuple as an object in transformers, and fails.
        whole = model(input_ids=ids)
        assert isinstance(whole, tuple) and relative_error(whole[0], before.logits) < 1e-4
        assert relative_error(model(input_ids=ids, return_dict=True).logits, before.logits) < 1e-4
        assert len(steps) == 5


@pytest.mark.parametrize("way", ["hook", "forward"])
def test_code_around_the_base_model(load: Load, way: str) -> None:
    """It is called by the model with the head too."""
    model = load()
    before, seen = logits(model, 5), []
    own = model.model.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        seen.append(way)
        return own(*arguments, **options)

    if way == "hook":
        hook = model.model.register_forward_hook(lambda *_: seen.append(way))
    else:
        model.model.forward = forward
    assert relative_error(logits(model, 5), before) < 1e-5 and len(seen) == 1
    if way == "hook":
        hook.remove()
    else:
        model.model.forward = own
    with counted_steps(model) as steps:
        assert torch.equal(logits(model, 5), before) and len(steps) == 1 and len(seen) == 1


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_autocast(load: Load, name: str, tokens: int) -> None:
    """As transformers: products of linears in bf16, and so logits in bf16."""
    model = load(name)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(model, tokens)
        with class_code(model):
            expected = logits(model, tokens)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert relative_error(found.float(), expected.float()) < 0.1  # routers compute in fp32 here


def test_another_dtype(load: Load) -> None:
    model = load()
    logits(model)
    model.to(torch.bfloat16)
    found = logits(model)
    with own_code(model):
        expected = logits(model)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, expected) < 3e-2


def test_more_tokens(load: Load) -> None:
    model = load()
    size = model.config.vocab_size
    logits(model)
    model.resize_token_embeddings(size + 8)
    with torch.no_grad():
        found = model(input_ids=torch.tensor([[size + 5]])).logits
    assert found.shape[-1] == size + 8


def test_more_tokens_with_a_packed_head(load: Load) -> None:
    """It is refused before anything changes."""
    model = load(linears="w8a8")
    size = model.config.vocab_size
    before = logits(model)
    with pytest.raises(ValueError, match="packed for 128 tokens"):
        model.resize_token_embeddings(size + 8)
    assert torch.equal(logits(model), before)
    assert model.resize_token_embeddings(size).num_embeddings == size
    assert model.resize_token_embeddings(pad_to_multiple_of=64).num_embeddings == size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("part", ["bias", "sinks"])
def test_values_that_the_decoder_holds_in_fp32(load: Load, part: str, dtype: torch.dtype) -> None:
    model = load("gpt_oss", dtype)
    before = logits(model)
    state = {name: torch.full_like(t, 2.0) for name, t in model.state_dict().items() if part in name.split(".")[-1]}
    assert state and model.load_state_dict(state, strict=False).unexpected_keys == []
    found = logits(model)
    with own_code(model):
        expected = logits(model)
    change = relative_error(before, expected)
    assert change > 1e-2 and relative_error(found, expected) < (0.3 if dtype == torch.bfloat16 else 3e-3) * change


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("part", ["norm.weight", "layernorm.weight", "bias", "sinks", "inv_freq"])
def test_values_that_are_written_through_data(load: Load, part: str, dtype: torch.dtype) -> None:
    """Such a write changes no version of a tensor."""
    model = load("gpt_oss", dtype)
    before = logits(model, 6)
    tensors = [t for name, t in [*model.named_parameters(), *model.named_buffers()] if name.endswith(part)]
    assert tensors
    for tensor in tensors:
        version = tensor._version
        tensor.data.mul_(3).add_(0.5)
        assert tensor._version == version
    found = logits(model, 6)
    assert relative_error(found.float(), before.float()) > 1e-2
    if dtype == torch.float32:  # in 16 bits experts of nearly the same score may change places
        with own_code(model):
            assert relative_error(found, logits(model, 6)) < 3e-3
    native = native_of(model.model)
    assert native is not None
    native.build_again(model)
    with counted_steps(model) as steps:
        assert torch.equal(logits(model, 6), found) and steps


def test_tensors_of_inference_mode_have_no_version(load: Load) -> None:
    with torch.inference_mode():
        model = load("gpt_oss", torch.bfloat16)
    assert model.model.norm.weight.is_inference()
    with torch.inference_mode():
        before = logits(model, 6)
        state = {
            n: torch.full_like(t, 2.0) for n, t in model.state_dict().items() if n.endswith(("norm.weight", "bias"))
        }
        assert state and model.load_state_dict(state, strict=False).unexpected_keys == []
        found = logits(model, 6)
        with own_code(model):
            expected = logits(model, 6)
    change = relative_error(before.float(), expected.float())
    assert change > 1e-2 and relative_error(found.float(), expected.float()) < 0.3 * change


def test_watched_values_of_every_layout() -> None:
    """Also those without elements, without dimensions, and with gaps between them."""
    held = torch.arange(12.0).view(3, 4)
    tensors = [held[:, 1], torch.tensor(3.0), torch.empty(0), held[0], torch.tensor([1.0]).expand(5)]
    values = WatchedValues(tensors)
    assert not values.have_changed()
    for index, other in ((1, 1.0), (5, 5.0)):
        held.view(-1)[index] = -1
        assert values.have_changed()
        held.view(-1)[index] = other
        assert not values.have_changed()
    tensors[1].fill_(4)
    assert values.have_changed()


def test_corrections_of_routers(load: Load) -> None:
    model = load("deepseek_v3")
    before = logits(model)
    names = [name for name in model.state_dict() if name.endswith("e_score_correction_bias")]
    assert names
    state = model.state_dict()
    model.load_state_dict({name: torch.linspace(9, -9, state[name].numel()) for name in names}, strict=False)
    found = logits(model)
    with own_code(model):
        expected = logits(model)
    assert relative_error(found, expected) < 3e-3 and relative_error(found, before) > 1e-3


def test_more_tokens_in_a_model_with_tied_experts(family_folder: Any) -> None:
    """Experts of an encoder that are those of the decoder are packed once, and transformers does not look for them."""
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(family_folder("diffusion_gemma"), dtype=torch.float32)
    cpumoe.accelerate(model, "w8a8")
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    names = [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, Experts)]
    assert len(names) == 2 * len(experts)
    size = model.get_input_embeddings().num_embeddings
    assert model.resize_token_embeddings(size + 8).num_embeddings == size + 8


def test_more_tokens_in_a_model_with_a_packed_head_inside(family_folder: Any) -> None:
    """The outer model's method calls that of the inner one, after it has changed the embedding."""
    folder = family_folder("qwen3_vl_moe")
    model = cpumoe.load_model(
        folder, dtype=torch.float32, scheme="w8a8", linears="w8a8", auto_class=AutoModelForImageTextToText
    )
    sizes = [tuple(tensor.shape) for tensor in model.state_dict().values()]
    with pytest.raises(ValueError, match="is packed for"):
        model.resize_token_embeddings(model.get_input_embeddings().num_embeddings + 8)
    assert [tuple(tensor.shape) for tensor in model.state_dict().values()] == sizes


# ---- layer by layer: parts whose forward was replaced by one operator -----------------------------------------------


@contextmanager
def class_code(model: Any) -> Iterator[None]:
    """Let every module run the forward of its class, except for those that were given another one as a part."""
    replaced = {
        module: forward
        for module in model.modules()
        if (forward := vars(module).get("forward")) is not None
        and (isinstance(forward, ReplacedForward) or getattr(forward, "func", None) in NATIVE)
    }
    for module in replaced:
        del module.forward
    try:
        yield
    finally:
        for module, forward in replaced.items():
            module.forward = forward


def set_all(attribute: str, value: Any) -> Callable[[Any], None]:
    """Return a change that sets an attribute of every module that has it."""

    def change(model: Any) -> None:
        kind = type(value)
        found = [module for module in model.modules() if isinstance(vars(module).get(attribute), kind)]
        assert found, attribute
        for module in found:
            setattr(module, attribute, value)

    change.__name__ = f"{attribute}={value}"
    return change


def hook_a_part(name: str) -> Callable[[Any], None]:
    """Return a change that triples the first result of the modules of a name, in a hook."""

    def change(model: Any) -> None:
        found = [module for path, module in model.named_modules() if path.endswith("." + name)]
        assert found, name
        for module in found:
            module.register_forward_hook(
                lambda _, arguments, out: (out[0] * 3, *out[1:]) if isinstance(out, tuple) else out * 3
            )

    change.__name__ = f"hook of {name}"
    return change


REPLACED = [
    ("qwen3_moe", set_all("variance_epsilon", 5.0)),
    ("qwen3_moe", set_all("top_k", 1)),
    ("qwen3_moe", set_all("norm_topk_prob", True)),
    ("deepseek_v3", set_all("variance_epsilon", 5.0)),
    ("deepseek_v3", set_all("routed_scaling_factor", 9.0)),
    ("deepseek_v3", set_all("top_k", 1)),
    ("deepseek_v3", hook_a_part("kv_a_layernorm")),
    ("qwen3_next", set_all("variance_epsilon", 5.0)),
    ("qwen3_next", hook_a_part("linear_attn.norm")),
    ("qwen3_next", hook_a_part("linear_attn.out_proj")),
    ("granitemoehybrid", set_all("activation", "tanh")),
    ("granitemoehybrid", hook_a_part("mamba.in_proj")),
    ("minimax", hook_a_part("self_attn.norm")),
    ("llama4_text", set_all("top_k", 2)),
    ("llama4_text", hook_a_part("router")),
    ("jetmoe", set_all("top_k", 1)),
]


@pytest.mark.parametrize(("name", "change"), REPLACED)
@torch.no_grad()
def test_changes_are_followed_layer_by_layer(load: Load, name: str, change: Callable[[Any], None]) -> None:
    """Calls that ask for hidden states are for the model's own code, in which some forwards are replaced by ours."""
    model = load(name)
    options = {"output_hidden_states": True}
    cache = model(input_ids=torch.arange(3, 9).unsqueeze(0), use_cache=True, **options).past_key_values
    before = logits(model, past_key_values=copy.deepcopy(cache), **options)
    change(model)
    found = logits(model, past_key_values=copy.deepcopy(cache), **options)
    with class_code(model):
        expected = logits(model, past_key_values=copy.deepcopy(cache), **options)
    assert relative_error(found, expected) < 3e-3 and relative_error(found, before) > 1e-2


# ---- attention that is more than causal attention over one sequence --------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(load: Load, name: str) -> None:
    """Positions that start again, without a mask and a cache, are those of several sequences in one row."""
    model = load(name)
    ids = torch.randint(3, 98, (1, 12), generator=torch.Generator().manual_seed(3))
    positions = torch.tensor([[*range(5), *range(7)]])
    found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    with own_code(model):
        expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert relative_error(found, expected) < 3e-3
    if name not in ("gpt_oss", "qwen3_next"):  # transformers itself does not keep them apart in all of these layers
        alone = model(input_ids=ids[:, 5:], use_cache=False).logits
        assert relative_error(found[:, 5:], alone) < 3e-3


@pytest.mark.parametrize("options", [{"cu_seq_lens_q": torch.tensor([0, 5, 12])}, {"seq_idx": torch.zeros(1, 12)}])
def test_borders_of_packed_sequences_take_the_models_own_code(load: Load, options: dict[str, Any]) -> None:
    model = load()
    with counted_steps(model) as steps:
        logits(model, 12, **options)
    assert not steps


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("way", ["argument", "config", "module"])
@torch.no_grad()
def test_attention_that_is_not_causal(load: Load, name: str, way: str) -> None:
    stock = AutoModelForCausalLM.from_pretrained(
        load(name).config.name_or_path, dtype=torch.float32, quantization_config=None
    )
    before = logits(stock, 9)
    options = {"is_causal": False} if way == "argument" else {}
    if way == "config":
        stock.config.is_causal = False
    elif way == "module":
        for layer in stock.model.layers:
            layer.self_attn.is_causal = False
    expected = logits(stock, 9, **options)
    model = cpumoe.accelerate(stock, "fp32")
    assert relative_error(logits(model, 9, **options), expected) < 1e-5 and relative_error(expected, before) > 1e-2


def test_attention_of_the_users_own(load: Load) -> None:
    model = load()
    seen = []

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen.append(module)
        return query.transpose(1, 2), None

    AttentionInterface.register("of_a_test", attend)
    try:
        before = logits(model, 5)
        model.set_attn_implementation("of_a_test")
        found = logits(model, 5)
        assert len(seen) == len(model.model.layers) and relative_error(found, before) > 1e-2
    finally:
        AttentionInterface._global_mapping.pop("of_a_test")


def test_negative_positions_of_padding(load: Load) -> None:
    model = load()
    ids = torch.randint(3, 98, (2, 9), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad(), counted_steps(model) as steps:
        found = model(input_ids=ids, attention_mask=mask, position_ids=mask.cumsum(-1) - 1).logits
        expected = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    assert len(steps) == 2 and torch.equal(found[mask.bool()], expected[mask.bool()])


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_one_model_in_several_threads(load: Load) -> None:
    model = load()
    prompts = [torch.randint(3, 98, (1, count), generator=torch.Generator().manual_seed(count)) for count in (1, 5, 33)]

    def generate(ids: torch.Tensor) -> list[int]:
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        tokens: list[int] = found[0].tolist()
        return tokens

    expected = [generate(ids) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(generate, prompts * 8))
    assert found == expected * 8


def test_a_thread_that_needs_longer_tables(load: Load) -> None:
    """The decoder is built again while other threads use the one before."""
    model = load()

    def ask(last: int) -> torch.Tensor:
        positions = torch.arange(last - 5, last + 1).unsqueeze(0)
        return logits(model, 6, position_ids=positions, attention_mask=torch.ones(1, 6, dtype=torch.long))

    lasts = [5, 200, 5000, 5, 9000, 77, 20000, 5]
    expected = {last: ask(last) for last in sorted(set(lasts))}
    model = load()
    with ThreadPoolExecutor(4) as pool:
        for last, found in zip(lasts * 4, pool.map(ask, lasts * 4), strict=True):
            assert torch.equal(found, expected[last])


def test_a_thread_that_changes_the_model(load: Load) -> None:
    """Every answer is that of the model before or after, whichever code gives it."""
    model = load()
    answers = [logits(model)]
    gate = model.model.layers[0].mlp.gate
    gate.top_k = 1
    answers.append(logits(model))

    def change(_: int) -> None:
        gate.top_k = 3 - gate.top_k

    with ThreadPoolExecutor(4) as pool:
        for index in range(40):
            asked = [pool.submit(logits, model) for _ in range(3)]
            pool.submit(change, index).result()
            errors = [[relative_error(future.result(), answer) for answer in answers] for future in asked]
            assert max(map(min, errors)) < 1e-5
