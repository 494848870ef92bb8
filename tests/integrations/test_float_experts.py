"""Experts that a checkpoint has in float: packed as they are, beside quantised ones too, and saved as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from float_checkpoints import KINDS, compressed, save_tensors, section_of, write_checkpoint
from safetensors.torch import load_file
from tiny_architectures import ARCHITECTURES, write_float
from torch import Tensor
from transformers import AutoModelForCausalLM

import cpumoe
from cpumoe import UnsupportedScheme, cli
from cpumoe.layers.experts import Experts

IDS = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@pytest.fixture(autouse=True)
def plain_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded and saved is of interest here, on the backend whose numbers are those of PyTorch."""
    monkeypatch.setenv("CPUMOE_BACKEND", "reference")
    monkeypatch.delenv("CPUMOE_SCHEME", raising=False)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS).logits.float()
    return result


def stock(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def schemes(model: Any) -> list[str]:
    return [str(m.config.scheme) for m in model.modules() if isinstance(m, Experts)]


@pytest.mark.every(3)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", NAMES)
def test_a_float_checkpoint_runs_as_it_is_stored(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    source = write_float(tmp_path / "float", architecture, dtype=dtype)
    model = cpumoe.load_model(source, dtype=torch.float32)
    assert set(schemes(model)) == {NAMES[dtype]}
    torch.testing.assert_close(logits(model), logits(stock(source)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_is_saved_as_a_float_checkpoint(tmp_path: Path, architecture: str) -> None:
    source = write_float(tmp_path / "float", architecture, dtype=torch.bfloat16)
    model = cpumoe.load_model(source, dtype=torch.bfloat16)
    for name in ("once", "twice"):
        model.save_pretrained(tmp_path / name)
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())
        assert torch.equal(logits(stock(tmp_path / name)), logits(stock(source)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compute_what_pytorch_does(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPUMOE_BACKEND", "native")
    source = write_float(tmp_path / "float", architecture)
    model = cpumoe.load_model(source, dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(stock(source)), rtol=1e-3, atol=1e-3)


def test_check_knows_that_the_smallest_numbers_are_packed_as_zero(tmp_path: Path) -> None:
    source = write_float(tmp_path / "float", "qwen3_moe", dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.experts.3.down_proj.weight"][0, :3] = torch.tensor([2.0**-51, -1e-30, 2.0**-50])
    save_tensors(source, tensors)
    assert cli.main(["check", str(source), "--scheme", "bf16"]) == 0


def test_schemes_that_no_file_can_hold_run_and_cannot_be_saved(tmp_path: Path) -> None:
    model = cpumoe.load_model(write_float(tmp_path / "float", "mixtral"), scheme="mxfp4a6-e3m2")
    assert bool(logits(model).isfinite().all())
    with pytest.raises(UnsupportedScheme, match="compressed-tensors has no format for fp6-e3m2 activations"):
        model.save_pretrained(tmp_path / "saved")


def test_scheme_float_leaves_them_to_transformers(tmp_path: Path) -> None:
    source = write_float(tmp_path / "float", "qwen3_moe")
    model = cpumoe.load_model(source, scheme="float", dtype=torch.float32)
    assert not schemes(model) and torch.equal(logits(model), logits(stock(source)))


def test_another_float_may_be_asked_for(tmp_path: Path) -> None:
    source = write_float(tmp_path / "float", "qwen3_moe")
    model = cpumoe.load_model(source, scheme="bf16", dtype=torch.float32)
    assert set(schemes(model)) == {"bf16"}
    torch.testing.assert_close(logits(model), logits(stock(source)), rtol=0.05, atol=0.05)


def _mixed(source: Path, folder: Path, kind: str) -> tuple[Path, Path]:
    """A checkpoint with the experts of the second layer quantised and all else in float; its twin in float."""
    form, weights, inputs = KINDS[kind]
    truth: dict[str, Tensor] = {}

    def store(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if "layers.1.mlp.experts" not in name:
            return None
        stored, truth[name] = compressed(tensor, form, weights)
        return stored, truth[name]

    section = section_of(form, weights, inputs, ["lm_head", "re:.*mlp[.]gate$", "re:.*self_attn", "re:.*layers[.]0[.]"])
    write_checkpoint(source, folder / "mixed", section, store)
    shutil.copytree(source, folder / "twin")
    tensors = load_file(source / "model.safetensors") | {f"{name}.weight": weight for name, weight in truth.items()}
    save_tensors(folder / "twin", tensors)
    return folder / "mixed", folder / "twin"


@pytest.mark.parametrize("kind", ["fp8a16", "mxfp8a16", "mxfp6-e2m3a16", "w8a16-asym"])
def test_float_layers_beside_quantised_ones(tmp_path: Path, kind: str) -> None:
    source = write_float(tmp_path / "float", "qwen3_moe")
    folder, twin = _mixed(source, tmp_path, kind)
    model = cpumoe.load_model(folder, dtype=torch.float32)
    assert schemes(model) == ["fp32", kind]
    torch.testing.assert_close(logits(model), logits(stock(twin)), rtol=1e-3, atol=1e-3)
    model.save_pretrained(tmp_path / "saved")
    again = cpumoe.load_model(tmp_path / "saved", dtype=torch.float32)
    assert schemes(again) == ["fp32", kind] and torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "mxfp4", "nvfp4a16", "bf16"])
def test_a_model_is_packed_in_place_and_saved(tmp_path: Path, scheme: str) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
    model = stock(write_float(tmp_path / "float", "qwen3_moe", dtype=torch.bfloat16, **sizes))
    cpumoe.accelerate(model, scheme)
    assert set(schemes(model)) == {scheme}
    model.save_pretrained(tmp_path / "saved")
    again = cpumoe.load_model(tmp_path / "saved", dtype=torch.float32)
    assert set(schemes(again)) == {scheme} and torch.equal(logits(again), logits(model))
