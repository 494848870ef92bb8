"""Layers with a recurrent state in one step: what transformers computes, for every family that has them."""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.recognition.mixers.delta_net import DeltaForm
from cpumoe.integrations.transformers.recognition.mixers.short_conv import ConvolutionForm
from cpumoe.integrations.transformers.replacements.recurrent import speed_up_linear_attention

_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "vocab_size": 96,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_INDEXED = {
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
}
_LATENT = {
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

#: module and class names of the config and the model, and what differs from the common sizes.
FAMILIES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", _LINEAR),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _LINEAR),
    "qwen4_exp": ("qwen4_exp", "Qwen4ExpTextConfig", "Qwen4ExpTextModel", {**_LINEAR, **_INDEXED}),
    "kimi_linear": (
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {**_LATENT, "linear_head_dim": 24, "linear_num_heads": 3},
    ),
    "bailing_hybrid": ("bailing_hybrid", "BailingHybridConfig", "BailingHybridForCausalLM", _LATENT),
    "bailing_hybrid, no bound": (
        "bailing_hybrid",
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {**_LATENT, "kda_safe_gate": False},
    ),
    "glm5_next": (
        "glm5_next",
        "Glm5NextTextConfig",
        "Glm5NextTextModel",
        {**_LATENT, "q_lora_rank": 32, "qk_rope_head_dim": 0, "linear_head_dim": 24, "linear_num_heads": 3},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "num_dense_layers": 1},
    ),
}


def tiny(family: str, **changes: object) -> nn.Module:
    module, config_class, model_class, sizes = FAMILIES[family]
    path = f"transformers.models.{module}"
    config = getattr(importlib.import_module(f"{path}.configuration_{module}"), config_class)(
        **{**_COMMON, **sizes, **changes}
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(3)
    model: nn.Module = getattr(importlib.import_module(f"{path}.modeling_{module}"), model_class)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:  # weights of one would hide where they belong
                parameter.uniform_(0.5, 1.5)
    return model


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def replaced(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if "forward" in vars(m)]


def run(model: Any, padded: bool) -> Tensor:
    """Logits, or hidden states: a prompt, several tokens more, and four one by one."""
    torch.manual_seed(11)
    ids = torch.randint(1, 90, (2, 84))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    outs, cache, first = [], None, 0
    with torch.no_grad():
        for last in (70, 80, 81, 82, 83, 84):
            out = model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache, use_cache=True)
            cache, first = out.past_key_values, last
            outs.append(out[0])
    whole = torch.cat(outs, 1)
    return whole[mask.bool()]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_what_it_did(family: str, padded: bool) -> None:
    stock = tiny(family)
    fast = copy.deepcopy(stock)
    speed_up_linear_attention(fast)
    assert len(replaced(fast)) == 2
    assert relative(run(fast, padded), run(stock, padded)) < 1e-4


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "kimi_linear", "bailing_hybrid", "lfm2_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_in_16_bits(family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    speed_up_linear_attention(model)
    layers = replaced(model)
    assert len(layers) == 2
    x = torch.randn(2, 9, 48).to(dtype)
    with torch.no_grad():
        got, expected = layers[0](x), type(layers[0]).forward(layers[0], x)
    assert got.dtype == dtype
    assert relative(got, expected) < (0.02 if dtype == torch.bfloat16 else 0.004)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "kimi_linear", "bailing_hybrid", "lfm2_moe"])
def test_one_token_in_16_bits(family: str) -> None:
    model = tiny(family).to(torch.bfloat16)
    speed_up_linear_attention(model)
    layer: Any = replaced(model)[0]
    caches = linear_cache(layer), linear_cache(layer)
    with torch.no_grad():
        for tokens in (4, 1, 1):
            x = torch.randn(1, tokens, 48).bfloat16()
            got, expected = layer(x, caches[0]), type(layer).forward(layer, x, caches[1])
            assert got.shape == expected.shape
            assert relative(got, expected) < 0.03
        seen: list[nn.Module] = []
        for child in layer.modules():
            if isinstance(child, nn.Linear):
                child.register_forward_hook(lambda module, *_: seen.append(module))
        layer(x, caches[0])
    assert len(seen) == sum(isinstance(child, nn.Linear) for child in layer.modules())


def linear_cache(layer: Any) -> Any:
    from transformers.cache_utils import Cache, LinearAttentionLayer

    return Cache(layers=[LinearAttentionLayer() for _ in range(layer.layer_idx + 1)])


def states(cache: Any, layer: Any) -> list[Tensor]:
    held = cache.layers[layer.layer_idx]
    return [s for s in (held.conv_states[0], held.recurrent_states[0]) if s is not None]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "kimi_linear", "bailing_hybrid", "lfm2_moe"])
def test_either_forward_goes_on_from_the_other(family: str) -> None:
    model = tiny(family)
    speed_up_linear_attention(model)
    layer: Any = replaced(model)[1]
    original = type(layer).forward
    torch.manual_seed(0)
    x = torch.randn(2, 12, 48)
    with torch.no_grad():
        expected = original(layer, x, linear_cache(layer))
        for forwards in (
            [layer, lambda *a: original(layer, *a)] * 4,
            [lambda *a: original(layer, *a), layer] * 4,
        ):
            cache, outs = linear_cache(layer), []
            for forward, (first, last) in zip(forwards, ((0, 2), (2, 7), (7, 8), (8, 9), (9, 12)), strict=False):
                outs.append(forward(x[:, first:last], cache))
            assert relative(torch.cat(outs, 1), expected) < 1e-5
        reset = linear_cache(layer)
        layer(x, reset)
        reset.layers[layer.layer_idx].reset()
        assert relative(layer(x, reset), expected) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "lfm2_moe"])
def test_a_text_in_pieces_has_the_same_bits(family: str) -> None:
    model = tiny(family)
    speed_up_linear_attention(model)
    layer: Any = replaced(model)[0]
    # What projections give may depend on the number of tokens; what comes between them may not.
    for name, child in layer.named_children():
        if "proj" in name:
            child.forward = EachToken(type(child).forward, child)
    for child in getattr(layer, "forget_gate", nn.Module()).children():
        child.forward = EachToken(type(child).forward, child)
    x = torch.randn(2, 150, 48)
    with torch.no_grad():
        whole_cache, cache = linear_cache(layer), linear_cache(layer)
        whole = layer(x, whole_cache)
        cuts = [0, 1, 2, 5, 70, 149, 150]
        parts = [layer(x[:, first:last], cache) for first, last in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert all(torch.equal(a, b) for a, b in zip(states(cache, layer), states(whole_cache, layer), strict=True))


class EachToken:
    """A linear that is given one token at a time."""

    def __init__(self, forward: Any, module: nn.Module) -> None:
        self.forward, self.module = forward, module

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self.forward(self.module, x[:, t : t + 1]) for t in range(x.shape[1])], 1)


def changed(layer: Any, how: str) -> None:
    if how == "norm":
        layer.norm.forward = lambda x, gate: x * gate
    elif how == "decay":
        layer.dt_bias = nn.Parameter(layer.dt_bias.detach().clone())
        type(layer).forward = doubled(type(layer).forward)
    elif how == "activation":
        layer.activation = "gelu"


def doubled(forward: Any) -> Any:
    return lambda self, *arguments, **options: 2 * forward(self, *arguments, **options)


@pytest.mark.parametrize("how", ["norm", "decay", "activation"])
def test_a_layer_that_computes_something_else_is_left_alone(how: str, monkeypatch: Any, caplog: Any) -> None:
    model = tiny("qwen3_next")
    layer_class = type(replaced_candidates(model)[0])
    monkeypatch.setattr(layer_class, "forward", layer_class.forward)  # so that it is put back
    for layer in replaced_candidates(model):
        changed(layer, how)
        break
    with caplog.at_level(logging.WARNING, "cpumoe"):
        speed_up_linear_attention(model)
    assert "forward" not in vars(replaced_candidates(model)[0])
    if how != "activation":  # another activation is seen before anything is computed
        assert "layers.0.linear_attn" in caplog.text
        assert "keeps its own forward" in caplog.text


def replaced_candidates(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "conv1d")]


def test_training_gradients_and_recorded_pasts_take_the_original_code() -> None:
    model = tiny("qwen3_next")
    speed_up_linear_attention(model)
    layer: Any = replaced(model)[0]
    x = torch.randn(1, 5, 48)
    layer(x).sum().backward()
    assert layer.conv1d.weight.grad is not None
    cache = linear_cache(layer)
    cache.layers[layer.layer_idx].activate_past_recording()
    with torch.no_grad():
        layer(x, cache)
    assert cache.layers[layer.layer_idx].conv_states[0].shape[-1] == 5


def test_a_model_can_be_copied_and_pickled() -> None:
    model = tiny("kimi_linear")
    speed_up_linear_attention(model)
    expected = run(model, False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        layer = replaced(other)[0]
        assert vars(layer)["forward"].module is layer
        assert torch.equal(run(other, False), expected)


def test_other_modules_are_not_touched() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Conv1d(4, 4, 3, groups=4, padding=2), nn.LayerNorm(4)])
    speed_up_linear_attention(model)
    assert not replaced(model)


def test_forms_can_be_compared() -> None:
    assert ConvolutionForm(4, 3) == ConvolutionForm(4, 3) != ConvolutionForm(4, 4)
    assert DeltaForm.__hash__ is not None
