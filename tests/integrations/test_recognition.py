"""Recognised decoders: values that are the same before and after loading, and whatever was installed before."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_architecture import representatives_first, tiny_model
from native_models import base_of, counted_steps
from torch import nn

import cpumoe
from cpumoe.generation.engine import start_engine
from cpumoe.integrations.transformers.adapter import explanation, native_with_head
from cpumoe.integrations.transformers.layout.model_classes import empty_model
from cpumoe.integrations.transformers.loading import install
from cpumoe.integrations.transformers.native_decoder import attached_to
from cpumoe.integrations.transformers.recognition import norms
from cpumoe.integrations.transformers.recognition.probe import probing
from cpumoe.integrations.transformers.recognition.recognize import recognize
from cpumoe.integrations.transformers.recognition.shown import as_values
from cpumoe.integrations.transformers.recognition.values import Recognized, Unrecognized
from cpumoe.integrations.transformers.replacements.norms import speed_up_norms
from cpumoe.steps.engine import StepEngine

#: A family for each kind of mixer, router and block.
_FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2_moe", "kimi_linear", "ernie4_5_moe", "afmoe"]


@pytest.mark.parametrize("name", representatives_first(_FAMILIES))
def test_a_model_is_recognised_alike_on_meta_in_float_and_packed(name: str) -> None:
    model = tiny_model(name)
    on_meta = recognize(empty_model(model.config, type(model)))
    assert isinstance(on_meta, Recognized)
    assert recognize(model) == on_meta
    cpumoe.accelerate(model, "w8a8")
    assert recognize(model) == on_meta
    assert pickle.loads(pickle.dumps(on_meta)) == on_meta
    assert json.loads(json.dumps(as_values(on_meta.decoder)))["layers"][0]["mixer"]["kind"] in repr(on_meta)


def _state(model: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """Return all attributes, tensors, children and hooks of all modules, by identity."""
    own = []
    for name, module in model.named_modules():
        held = {
            f"{kind}.{key}": value
            for kind in ("_parameters", "_buffers", "_modules")
            for key, value in vars(module)[kind].items()
        }
        hooks = {key: len(value) for key, value in vars(module).items() if "_hooks" in key}
        others = {key: id(value) for key, value in vars(module).items() if not isinstance(value, dict)}
        own.append((name, {key: id(value) for key, value in held.items()} | hooks | others))
    return own


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_next", "jamba"])
def test_recognition_changes_nothing(name: str) -> None:
    model = tiny_model(name)
    before, random = _state(model), torch.random.get_rng_state()
    values = [tensor.clone() for tensor in model.parameters()]
    recognize(model)
    assert _state(model) == before and torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(*pair) for pair in zip(values, model.parameters(), strict=True))


def test_what_is_not_recognised_says_why() -> None:
    found = recognize(tiny_model("jamba"))
    assert isinstance(found, Unrecognized) and found.reason == str(found) != "" and found.module == "model"
    assert recognize(tiny_model("jamba")) == found == pickle.loads(pickle.dumps(found))


def test_a_part_of_another_kind_is_a_reason() -> None:
    model = tiny_model("qwen3_moe")
    attention = model.model.layers[0].self_attn
    attention.q_proj = nn.Sequential(attention.q_proj)
    assert recognize(model) == Unrecognized("model", "q_proj is a Sequential")


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_any_order_of_installation_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native decoder, and the model's own code with fused operators."""
    orders: list[tuple[Callable[[nn.Module], None], ...]] = [install.INSTALLED, install.INSTALLED[::-1]]
    orders.append((*install.INSTALLED[3:], *install.INSTALLED[:3]))
    found = []
    for order in orders:
        monkeypatch.setattr(install, "INSTALLED", order)
        model = cpumoe.accelerate(tiny_model(name), "w8a8")
        record = attached_to(base_of(model))
        assert record is not None and record.reason is None
        prompt = torch.randint(3, 98, (2, 9), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            logits = model(prompt).logits, model(prompt, output_hidden_states=True).logits
        found.append((record.recognized, logits))
    for recognized, logits in found[1:]:
        assert recognized == found[0][0]
        assert all(torch.equal(*pair) for pair in zip(logits, found[0][1], strict=True))


@pytest.mark.parametrize("name", ["qwen3_moe", "jamba"])
def test_a_model_has_one_record_that_copies_and_pickles_keep(name: str) -> None:
    model = cpumoe.accelerate(tiny_model(name), "w8a8")
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        record = attached_to(each)
        assert record is not None and record is attached_to(each.model)
        assert (record.native is None) == (record.recognized is None) == (record.reason is not None)
    assert (record.reason is None) == (name == "qwen3_moe")


def test_the_callers_modes_do_not_matter() -> None:
    model = tiny_model("qwen3_moe")
    with torch.autocast("cpu", torch.bfloat16):
        with torch.device("meta"):
            found = recognize(model)
        cpumoe.accelerate(model, "w8a8")
    assert isinstance(found, Recognized), found
    assert explanation(model) == "every step is one call of the core"
    model.model.layers[0].self_attn.scaling *= 1.1
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(torch.tensor([[5, 6]]))
    assert explanation(model) == "every step is one call of the core"


def test_random_numbers_of_other_threads_are_their_own() -> None:
    model = tiny_model("qwen3_moe")
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    with probing():
        recognize(model)
        found = torch.rand(4)  # as another thread draws them meanwhile
    assert torch.equal(found, expected)


class _Signed(nn.Module):
    """A norm with a private setting."""

    def __init__(self, plus_one: bool) -> None:
        super().__init__()
        self.weight, self.eps, self._plus_one = nn.Parameter(torch.ones(16)), 1e-6, plus_one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.weight + self._plus_one)


class _Mode:
    def __init__(self, plus_one: bool) -> None:
        self.plus_one = plus_one


class _Held(_Signed):
    """A norm with its setting in an object."""

    def __init__(self, plus_one: bool) -> None:
        super().__init__(False)
        self.mode = _Mode(plus_one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.weight + self.mode.plus_one)


@pytest.mark.parametrize("kind", [_Signed, _Held])
def test_norms_with_settings_that_are_not_public_numbers(kind: type[_Signed]) -> None:
    """Modules of one block do not live as long as it: their addresses may come again."""
    with probing():
        forms = [norms.find_form(kind(number % 2 == 1)) for number in range(20)]
    assert [form is not None and form.plus_one for form in forms] == [number % 2 == 1 for number in range(20)]


def test_a_module_around_a_model_is_recognised() -> None:
    wrapped = nn.Module()
    wrapped.model = tiny_model("qwen3_moe").model
    found = recognize(wrapped)
    assert isinstance(found, Recognized) and found.base == "model" and found.head is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_meta_is_recognised_in_its_dtype(dtype: torch.dtype) -> None:
    """Whether a router rounds its logits depends on it."""
    model = cpumoe.accelerate(tiny_model("qwen3_moe", dtype=dtype), "w8a8")
    record = attached_to(model)
    on_meta = recognize(empty_model(model.config, type(model), dtype=dtype))
    assert record is not None and on_meta == record.recognized


@pytest.mark.parametrize("attach", [False, True])
def test_a_base_model_of_another_model_keeps_the_head_apart(attach: bool) -> None:
    """``attach``: the second model is accelerated with the base model of the first in it."""
    first, second = tiny_model("qwen3_moe"), tiny_model("qwen3_moe", seed=1)
    cpumoe.accelerate(first, "w8a8")
    if attach:
        second.model = first.model
        cpumoe.accelerate(second, linears="w8a8")
    else:
        cpumoe.accelerate(second, "w8a8")
        first.model = second.model
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = first.lm_head(first.model(ids).last_hidden_state)
        found = first(ids).logits
    assert (found - expected).norm() < 1e-4 * expected.norm()
    assert "that of another model" in explanation(first) and native_with_head(first) is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_packed_expansion_that_was_written_to(mode: Callable[[], Any]) -> None:
    ids = torch.tensor([[5, 6, 7]])
    with mode():
        first, second = (
            cpumoe.accelerate(tiny_model("deepseek_v3", seed=seed), "w8a8", linears="w8a8") for seed in (0, 1)
        )
        first(ids)
        first.load_state_dict(second.state_dict())
        for options in ({}, {"output_hidden_states": True}):
            assert torch.equal(first(ids, **options).logits, second(ids, **options).logits)


def test_a_copy_has_its_native_decoder_in_autocast_and_in_an_engine() -> None:
    model = cpumoe.accelerate(tiny_model("qwen3_moe", dtype=torch.bfloat16), "w8a8")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model(ids).logits
        copied = copy.deepcopy(model)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(copied(ids).logits, expected)
            with counted_steps(copied) as steps:
                assert torch.equal(copied(ids).logits, expected) and steps
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with start_engine(each, 10**9, one_request=True) as started:
            assert isinstance(started.engine, StepEngine)


class _Scaled(nn.Module):
    """A norm with a factor in a buffer, which counts its calls in another."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6
        self.register_buffer("factor", torch.tensor(factor))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight * self.factor


def test_norms_with_buffers_keep_their_code() -> None:
    model = nn.Sequential(_Scaled(1.0), _Scaled(2.0))
    speed_up_norms(model)
    assert not any("forward" in vars(module) for module in model)
    assert all(module.calls == 0 for module in model)


@pytest.mark.parametrize("wrap", [lambda base: nn.Sequential(base), lambda base: tiny_model("qwen3_moe").model])
def test_another_base_model_runs_its_own_code(wrap: Callable[[Any], Any]) -> None:
    """A base model that was put in after loading has no record; the model around it goes through it."""
    model = cpumoe.accelerate(tiny_model("qwen3_moe"), "w8a8")
    ids, own = torch.randint(3, 98, (1, 5)), model.model
    with torch.no_grad():
        before = model(ids).logits
        model.model = wrap(own)
        if isinstance(model.model, nn.Sequential):
            with pytest.raises(TypeError, match="input_ids|keyword"):  # what its own code says of such a base model
                model(ids)
        else:
            assert model(ids).logits.shape == before.shape
        model.model = own
        assert torch.equal(model(ids).logits, before)
