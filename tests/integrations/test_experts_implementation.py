"""``experts_implementation="cpumoe-..."``: what contradicts a checkpoint is refused, what it costs is told."""

from __future__ import annotations

import logging

import pytest
import torch
from tiny_architectures import ARCHITECTURES, write_float
from transformers import AutoModelForCausalLM

import cpumoe
from cpumoe import UnsupportedScheme
from cpumoe.integrations.transformers.loading import float_models

IDS = torch.arange(9).unsqueeze(0)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_another_scheme_than_the_checkpoint_has_is_refused(tmp_path, architecture):
    cpumoe.quantize_checkpoint(
        write_float(tmp_path / "float", architecture), tmp_path / "q", "w4a8-g32", linears="w8a8"
    )
    for accepted in ("cpumoe", "cpumoe-w4a8-g32", None):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "q", experts_implementation=accepted)
        assert torch.isfinite(model(IDS).logits).all()
    # w8a8 is in the file too, but not for the experts
    cure = "experts of this checkpoint are quantised to w4a8-g32; leave experts_implementation out, .*--scheme w8a8$"
    with pytest.raises(UnsupportedScheme, match=cure):
        AutoModelForCausalLM.from_pretrained(tmp_path / "q", experts_implementation="cpumoe-w8a8")
    with pytest.raises(UnsupportedScheme, match=cure):
        model.set_experts_implementation("cpumoe-w8a8")
    assert torch.isfinite(model(IDS).logits).all()


def test_an_accelerated_model_has_its_scheme(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_float(tmp_path / "float", "qwen3_moe"))
    cpumoe.accelerate(model, "w4a8-g32")
    model.set_experts_implementation("cpumoe")
    with pytest.raises(UnsupportedScheme, match="quantised to w4a8-g32"):
        model.set_experts_implementation("cpumoe-w8a8")


def test_that_float_weights_stay_in_memory_is_told_once_with_the_way_that_frees_them(tmp_path, caplog):
    float_models._warn_that_floats_stay.cache_clear()
    folder = write_float(tmp_path / "float", "qwen3_moe")
    with caplog.at_level(logging.WARNING, "cpumoe"):
        model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="cpumoe-w8a8")
        for _ in range(2):
            model(IDS)
    (told,) = (record.getMessage() for record in caplog.records)
    assert "keeps their float weights in memory" in told
    # what they are kept for
    model.save_pretrained(tmp_path / "again")
    model.set_experts_implementation("eager")
    eager = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    assert torch.equal(model(IDS).logits, eager(IDS).logits)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", experts_implementation="eager")
    assert torch.equal(again(IDS).logits, eager(IDS).logits)
    # the ways that it names
    assert "cpumoe.accelerate(model, 'w8a8')" in told and "cpumoe.load_model(path, scheme='w8a8')" in told
    floats = model.model.layers[0].mlp.experts.gate_up_proj.shape
    for freed in (cpumoe.accelerate(model, "w8a8"), cpumoe.load_model(folder, scheme="w8a8")):
        tensors = [*freed.parameters(), *freed.buffers()]
        assert not any(t.shape == floats and t.is_floating_point() for t in tensors)


def test_refusals_end_with_a_cure(tmp_path):
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes, head_dim=16, vocab_size=128))
    with pytest.raises(ValueError, match="no float experts.*linears='w8a8'"):
        cpumoe.accelerate(dense)
    dense.save_pretrained(tmp_path / "dense")
    packed = cpumoe.load_model(tmp_path / "dense", scheme="float", linears="w8a8")  # the cure
    assert isinstance(packed.model.layers[0].mlp.up_proj, cpumoe.QuantizedLinear)
    model = AutoModelForCausalLM.from_pretrained(write_float(tmp_path / "float", "qwen3_moe"))
    cpumoe.accelerate(model, "w4a8-g32")
    with pytest.raises(ValueError, match="no float experts.*linears='w8a8'"):
        cpumoe.accelerate(model, "w4a8-g32")
