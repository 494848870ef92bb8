"""Routers and norms of every family in one step: found by what they compute, and left alone where they differ."""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
import transformers
from every_architecture import FAMILIES, representatives_first, tiny_model
from random_layers import relative_error
from torch import nn

import cpumoe
from cpumoe.integrations.transformers.recognition import check, norms, routers
from cpumoe.integrations.transformers.recognition.probe import probing
from cpumoe.integrations.transformers.replacements.norms import rms_norm
from cpumoe.layers.experts import Experts

#: Families whose routers keep their own code: called with more than tokens and a correction (deepseek_v4's hash layer,
#: lfm2_moe), weights of another kind (inkling, phimoe, openai_privacy_filter), no module of their own (afmoe, gemma4,
#: hunyuan_v1_moe, muse_spark, zaya), or experts of another kind (dbrx, jetmoe, llama4, longcat_flash).
OWN_ROUTERS = [
    "dbrx",
    "deepseek_v4",
    "diffusion_gemma",
    "gemma4",
    "inkling",
    "jetmoe",
    "llama4",
    "longcat_flash",
    "muse_spark",
    "openai_privacy_filter",
    "phimoe",
    "zaya",
]


def routers_of(model: nn.Module) -> list[nn.Module]:
    blocks = [b for b in model.modules() if any(isinstance(child, Experts) for child in b.children())]
    return [child for block in blocks for child in block.children() if routers.is_router(child)]


def replaced(modules: list[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if "forward" in vars(module)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", representatives_first(FAMILIES))
def test_routers_have_their_one_step_form(name, dtype):
    model = cpumoe.accelerate(tiny_model(name, dtype=dtype), "bf16")
    found = routers_of(model)
    if name.removesuffix("_text") in OWN_ROUTERS:
        assert not replaced(found[:1])
        return
    assert found and replaced(found) == found
    for router in found:
        weight = routers.linear_of(router).weight
        x = torch.randn(1, 5, weight.shape[1]).to(dtype)
        x = x if name == "afmoe" else x[0]
        takes_more = len(inspect.signature(type(router).forward).parameters) > 2
        more = (torch.randn(weight.shape[0]) * 0.3,) if takes_more else ()  # what is added for the choice
        with torch.no_grad():
            ours, theirs = router(x, *more), type(router).forward(router, x, *more)
        assert relative_error(ours[0], theirs[0]) < (1e-5 if dtype == torch.float32 else 1e-2)
        if dtype == torch.float32:  # in 16 bits two experts may have the same score
            assert torch.equal(ours[2].sort().values.long(), theirs[2].sort().values)
            assert relative_error(ours[1].sort().values, theirs[1].sort().values) < 1e-5


class Doubled(nn.Module):
    """A router that gives twice the weights of another one."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.weight, self.top_k, self._router = router.weight, router.top_k, [router]

    def forward(self, hidden_states):
        logits, weights, ids = type(self._router[0]).forward(self._router[0], hidden_states)
        return logits, weights * 2, ids


def test_a_router_that_does_something_else_keeps_its_code(caplog):
    model = tiny_model("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.gate = Doubled(layer.mlp.gate)
    assert routers.find_form(model.model.layers[0].mlp.gate) is None
    with caplog.at_level("INFO", logger="cpumoe"):
        cpumoe.accelerate(model, "w8a8")
    assert not replaced(routers_of(model))
    assert "mlp.gate (Doubled) keeps its own code" in caplog.text


def test_gradients_go_through_the_routers_own_code():
    model = cpumoe.accelerate(tiny_model("deepseek_v3"), "w8a8")
    router = routers_of(model)[0]
    x = torch.randn(3, router.weight.shape[1], requires_grad=True)
    router(x)[1].sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "rounds_first", "plus_one"),
    [("qwen3_moe", True, False), ("gpt_oss", False, False), ("qwen3_next", False, True), ("glm4_moe", True, False)],
)
def test_norms_are_known_by_what_they_compute(name, rounds_first, plus_one, dtype):
    module = tiny_model(name, dtype=dtype).model.norm
    form = norms.find_form(module)
    assert form is not None and form.plus_one == plus_one
    assert dtype == torch.float32 or form.round_first == rounds_first
    x = torch.randn(2, 3, len(module.weight)).to(dtype)
    with torch.no_grad():
        assert relative_error(rms_norm(module, form, x).float(), module(x).float()) < 1e-3


@pytest.mark.parametrize(("name", "keeps_dtype"), [("gpt_oss", True), ("qwen3_moe", False)])
def test_norms_whose_weights_alone_are_in_fp32(name, keeps_dtype):
    module = tiny_model(name).model.norm
    form = norms.find_form(module)
    assert form is not None and form.keeps_dtype == keeps_dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(2, 3, len(module.weight)).to(dtype)
        with torch.no_grad():
            found, expected = rms_norm(module, form, x), module(x)
        assert found.dtype == expected.dtype
        assert relative_error(found.float(), expected.float()) < 1e-3


def test_a_weight_of_one_value_is_spread_over_rows():
    module = tiny_model("qwen3_moe").model.norm
    module.weight = nn.Parameter(torch.tensor([0.7]), requires_grad=False)
    form, x = norms.find_form(module), torch.randn(3, 5)
    assert form is not None
    assert torch.equal(rms_norm(module, form, x), module(x))


class Squared(nn.Module):
    """A norm that squares its weight."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self._norm = norm.weight, norm.variance_epsilon, [norm]

    def forward(self, x):
        return type(self._norm[0]).forward(self._norm[0], x) * self.weight


def test_norms_that_do_something_else_keep_their_code():
    norm = tiny_model("qwen3_moe").model.norm
    assert norms.find_form(norm) is not None
    assert norms.find_form(Squared(norm)) is None
    assert norms.find_form(nn.LayerNorm(64)) is None
    assert norms.find_form(nn.Linear(8, 8)) is None


def test_models_with_one_step_forms_can_be_copied():
    model = cpumoe.accelerate(tiny_model("qwen3_next"), "w8a8")
    ids = torch.randint(3, 98, (1, 5))
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)


def test_more_experts_than_the_chosen_groups_have():
    """transformers goes on with experts of other groups: its own code stays, and the model is accelerated."""
    config = transformers.DeepseekV3Config(
        **{"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2},
        **{"vocab_size": 99, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 0},
        **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "qk_nope_head_dim": 16},
        **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 8},
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    ids = torch.randint(0, 99, (2, 7))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        cpumoe.accelerate(model, "w8a8")
        assert relative_error(model(input_ids=ids).logits, expected) < 1e-2
    assert model.is_quantized


#: Models whose routers do not use the groups that their configurations have.
UNUSED_GROUPS = [
    ("deepseek_v2", {"topk_method": "greedy", "n_group": 3}),
    ("deepseek_v2", {"topk_method": "greedy", "n_group": 5, "topk_group": 6}),
    ("unlimited_ocr", {"n_group": 3}),
    ("unlimited_ocr_text", {"n_group": 3}),
]


@pytest.mark.parametrize(("name", "settings"), UNUSED_GROUPS)
@torch.no_grad()
def test_groups_that_do_not_divide_the_experts(name, settings):
    model = tiny_model(name, **settings)
    ids = torch.randint(3, 98, (2, 7))
    expected = model(input_ids=ids)[0]
    cpumoe.accelerate(model, "fp32")
    assert model.is_quantized and relative_error(model(input_ids=ids)[0], expected) < 1e-4


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_groups_that_the_routers_own_code_cannot_form(name):
    """The model is accelerated, and raises what it raised before."""
    model = tiny_model(name, n_group=3)
    cpumoe.accelerate(model, "fp32")
    assert model.is_quantized and not replaced(routers_of(model))
    with torch.no_grad(), pytest.raises(RuntimeError, match="is invalid for input of size"):
        model(input_ids=torch.randint(3, 98, (1, 5)))


def test_forms_that_our_operator_rejects_are_passed_over(monkeypatch):
    router = tiny_model("qwen3_moe").model.layers[0].mlp.gate
    assert routers.find_form(router) is not None

    def reject(*_):
        raise ValueError("num_expert_group=3 does not divide 8 experts")

    monkeypatch.setattr(routers, "route", reject)
    assert routers.find_form(router) is None


def test_norms_that_our_operator_rejects_keep_their_code(monkeypatch):
    norm = tiny_model("qwen3_moe").model.norm

    def reject(*_):
        raise ValueError("epsilon=-1.0; 0 or more is accepted")

    monkeypatch.setattr(norms.ops, "rms_norm", reject)
    assert norms.find_form(norm) is None


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_the_check_at_load_gives_noise_to_routers_alone(name, monkeypatch):
    """Experts compute the chunks of the cases once; the noisy inputs go as far as the chosen ids."""
    model, computed, routed = tiny_model(name), [], []
    router = type(model.model.layers[-1].mlp.gate)
    own_forward, experts_forward = router.forward, Experts.forward
    counting = functools.wraps(own_forward)(lambda *a, **o: (routed.append(1), own_forward(*a, **o))[1])
    monkeypatch.setattr(router, "forward", counting)
    with probing():  # remembers the forms of norms and routers
        cpumoe.accelerate(model, "w8a8")
        monkeypatch.setattr(Experts, "forward", lambda *a, **o: (computed.append(1), experts_forward(*a, **o))[1])
        routed.clear()
        check.find_variant(model.model, len(model.model.layers) - 1)
    chunks = len(check._CUTS)
    assert len(routed) == chunks * (1 + check._DRAWS) and len(computed) == chunks
