"""Checkpoints of every on-disk format as models: loaded, run with other activations, saved and loaded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_architectures import write_float
from word_checkpoints import Rounded, Tensors, gptq_section, gptq_tensors, rounded, write_awq, write_gptq, write_words

import cpumoe
from cpumoe.checkpoints.formats import QUANT_METHODS
from cpumoe.integrations.transformers.loading.module_sources import pack_float_linear
from cpumoe.layers import reference
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.packed_weights import unpack_weight
from cpumoe.layers.scheme import Scheme
from cpumoe.quant_methods import QUANT_METHODS as NAMES

IDS = torch.arange(1, 9).view(1, 8)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float(tmp_path_factory.mktemp("float") / "float", "qwen3_moe")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


def schemes(model: Any) -> set[str]:
    """Of the experts, and of the linears."""
    modules = list(model.modules())
    experts = {str(m.config.scheme) for m in modules if isinstance(m, Experts)}
    return experts | {str(m.scheme) for m in modules if isinstance(m, QuantizedLinear)}


def ordered_gptq(source: Path, folder: Path) -> Path:
    """GPTQ whose inputs are in activation order, another one for each linear."""
    generator = np.random.default_rng(7)

    def store(_: str, tensor: torch.Tensor) -> tuple[Rounded, Tensors]:
        weight, order = rounded(tensor, 4, 32, True), generator.permutation(tensor.shape[1])
        tensors = gptq_tensors(Rounded(weight.codes[:, order], weight.zeros, weight.scales), 4)
        return weight, tensors | {"g_idx": tensors["g_idx"][order]}

    return write_words(source, folder, gptq_section(4, 32, True, desc_act=True), store).folder


def written(kind: str, source: Path, folder: Path) -> Path:
    if kind == "gptq":
        return write_gptq(source, folder).folder
    if kind == "gptq in activation order":
        return ordered_gptq(source, folder)
    if kind == "awq":
        return write_awq(source, folder).folder
    cpumoe.quantize_checkpoint(source, folder, kind)
    return folder


KINDS = ["gptq", "gptq in activation order", "awq", "w4a16-g32", "w4a16-g32-asym", "mxfp4a16", "nvfp4a16", "w8a8-g32"]


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activations", [None, "int8"])
def test_a_model_is_saved_as_it_was_loaded(source: Path, tmp_path: Path, kind: str, activations: str | None) -> None:
    folder = written(kind, source, tmp_path / "model")
    plain = cpumoe.load_model(folder, dtype=torch.float32)
    model = cpumoe.load_model(folder, dtype=torch.float32, activations=activations)
    model.save_pretrained(tmp_path / "saved")
    again = cpumoe.load_model(tmp_path / "saved", dtype=torch.float32)
    assert schemes(again) == schemes(plain)  # activations on request are not part of the weights
    assert torch.equal(logits(again), logits(plain))
    asked = cpumoe.load_model(tmp_path / "saved", dtype=torch.float32, activations=activations)
    assert torch.equal(logits(asked), logits(model))
    if activations is not None and kind != "w8a8-g32":
        assert not torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("kind", ["gptq in activation order", "w4a16-g32-asym"])
def test_other_linears_beside_them(source: Path, tmp_path: Path, kind: str) -> None:
    model = cpumoe.load_model(written(kind, source, tmp_path / "model"), dtype=torch.float32, linears="w8a8")
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(cpumoe.load_model(tmp_path / "saved", dtype=torch.float32)), logits(model))


def test_a_cache_does_not_change_what_is_saved(source: Path, tmp_path: Path) -> None:
    folder = written("gptq", source, tmp_path / "model")
    plain = cpumoe.load_model(folder, dtype=torch.float32)
    for name in ("first", "second"):
        model = cpumoe.load_model(folder, dtype=torch.float32, activations="int8", cache=tmp_path / "cache")
        model.save_pretrained(tmp_path / name)
        assert torch.equal(logits(cpumoe.load_model(tmp_path / name, dtype=torch.float32)), logits(plain))


@pytest.mark.parametrize("method", [name for name, method in NAMES.items() if name != method])
def test_older_names_of_a_method_are_read(source: Path, tmp_path: Path, method: str) -> None:
    """transformers skips the quantisation of what it does not know, and makes the weights up."""
    folder = write_gptq(source, tmp_path / "model").folder
    expected = logits(cpumoe.load_model(folder, dtype=torch.float32))
    config = json.loads((folder / "config.json").read_text())
    section = {"bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq"}
    config["quantization_config"] = {"quant_method": method} | section
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(cpumoe.load_model(folder, dtype=torch.float32)), expected)


def test_transformers_is_told_of_every_method() -> None:
    from transformers.quantizers import auto

    assert set(QUANT_METHODS) == set(NAMES) <= set(auto.AUTO_QUANTIZER_MAPPING)


def test_int8_activations_through_every_door(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    folder = written("w4a16-g32", source, tmp_path / "model")
    expected = logits(cpumoe.load_model(folder, dtype=torch.float32, activations="int8"))
    config = cpumoe.PackedConfig(activations="int8")
    by_option = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    assert torch.equal(logits(by_option), expected)
    monkeypatch.setenv("CPUMOE_ACTIVATIONS", "int8")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)), expected)
    monkeypatch.setenv("CPUMOE_ACTIVATIONS", "int4")
    with pytest.raises(ValueError, match="activations='int4'; 'int8'"):
        cpumoe.load_model(folder, dtype=torch.float32)
    with pytest.raises(ValueError, match="activations='fp8'; 'int8'"):
        cpumoe.load_model(folder, dtype=torch.float32, activations="fp8")
    with pytest.raises(ValueError, match="for a float checkpoint, where the scheme says it"):
        cpumoe.load_model(source, scheme="w4a16-g32", activations="int8")


def test_the_rows_of_a_large_linear_share_their_global_scale() -> None:
    weight = torch.randn((4608, 1024), generator=torch.Generator().manual_seed(3)) * 0.02
    weight[4096:] *= 10
    linear = pack_float_linear(lambda first, last: weight[first:last], 4608, 1024, Scheme.parse("nvfp4a16"), None)
    packed = unpack_weight(linear.weight_packed)[0]
    assert packed.factors is not None and len(packed.factors.unique()) == 1
    assert torch.equal(linear.weight_packed, QuantizedLinear.quantize(weight, "nvfp4a16").weight_packed)
    assert float((reference.dequantize(packed) - weight).norm() / weight.norm()) < 0.12
