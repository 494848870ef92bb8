"""What docs/peft.md says of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from native_models import counted_steps
from tiny_models import write_tiny_model

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from transformers import AutoModelForCausalLM

import cpumoe
from cpumoe.integrations.transformers.adapter import explanation

SCHEME = "w4a8-g32"
IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the query and value projections with random weights."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    path = tmp_path_factory.mktemp("adapter")
    peft.get_peft_model(model, config).save_pretrained(path)
    return path


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


def test_adapters_on_float_linears(folder: Path, adapter: Path, tmp_path: Path) -> None:
    model = cpumoe.load_model(folder, scheme=SCHEME, dtype=torch.float32)
    plain = logits(model)
    adapted = peft.PeftModel.from_pretrained(model, adapter)
    result = logits(adapted)
    assert (result - plain).norm() / plain.norm() > 0.05
    with adapted.disable_adapter():
        torch.testing.assert_close(logits(adapted), plain, rtol=1e-3, atol=1e-3)
    assert adapted.generate(IDS, max_new_tokens=4).shape == (1, 7)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged), result, rtol=1e-3, atol=1e-3)
    merged.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(cpumoe.load_model(tmp_path, dtype=torch.float32)), result, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["unload", "merge_and_unload"])
def test_the_native_decoder_is_back_without_the_adapter(folder: Path, adapter: Path, way: str) -> None:
    model = cpumoe.load_model(folder, scheme=SCHEME, dtype=torch.float32)
    plain = logits(model)
    adapted = peft.PeftModel.from_pretrained(model, adapter)
    expected = logits(adapted) if way == "merge_and_unload" else plain
    logits(adapted)
    assert "layer by layer" in explanation(model)
    model = getattr(adapted, way)()
    assert explanation(model) == "every step is one call of the core"
    with counted_steps(model) as steps:
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)
    assert steps


def test_experts_packed_under_an_adapter(folder: Path, adapter: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, adapter)
    cpumoe.accelerate(adapted.base_model.model, SCHEME)
    loaded = cpumoe.load_model(folder, scheme=SCHEME, dtype=torch.float32)
    expected = logits(peft.PeftModel.from_pretrained(loaded, adapter))
    torch.testing.assert_close(logits(adapted), expected, rtol=1e-3, atol=1e-3)


def test_merged_before_quantising(folder: Path, adapter: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(tmp_path / "merged")
    cpumoe.quantize_checkpoint(tmp_path / "merged", tmp_path / "packed", SCHEME)
    assert logits(cpumoe.load_model(tmp_path / "packed")).isfinite().all()


def test_what_is_refused(folder: Path) -> None:
    packed = cpumoe.load_model(folder, scheme=SCHEME, linears="w8a8")
    with pytest.raises(ValueError, match="Target module QuantizedLinear.*is not supported"):
        peft.get_peft_model(packed, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="target_parameters"):
        peft.get_peft_model(packed, peft.LoraConfig(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]))
    training = peft.get_peft_model(cpumoe.load_model(folder, scheme=SCHEME), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(RuntimeError, match="packed weights and their routing are for inference"):
        training(IDS, labels=IDS).loss.backward()
