"""Models that are changed after loading: the native decoder follows, or leaves the call to the model's own code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from native_models import counted_steps, own_code
from random_layers import relative_error
from torch import nn

import cpumoe

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
    model.lm_head = nn.Identity()
    assert logits(model).shape[-1] == model.config.hidden_size


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


@pytest.mark.parametrize("way", ["argument", "config"])
def test_attention_that_is_not_causal(load: Load, way: str) -> None:
    model = load()
    before = logits(model, 9)
    options = {"is_causal": False} if way == "argument" else {}
    if way == "config":
        model.config.is_causal = False
    found = logits(model, 9, **options)
    with own_code(model):
        expected = logits(model, 9, **options)
    assert torch.equal(found, expected) and relative_error(found, before) > 1e-2


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
