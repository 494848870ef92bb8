"""Files of small floats on the native kernels: experts and linears against the plain arithmetic, check and inspect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from float_checkpoints import KINDS, SIZES, expert_weights, scheme_of, write_compressed
from sampling import first_of
from tiny_architectures import write_float
from transformers import AutoModelForCausalLM

import cpumoe
from cpumoe import cli
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.held_scales import held_scheme
from cpumoe.checkpoints.inspection import Survey
from cpumoe.checkpoints.loading import experts_of, load_experts
from cpumoe.checkpoints.model_tensors import quantized_linears
from cpumoe.integrations.transformers.adapter import explanation, native_with_head
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers import reference
from cpumoe.layers.activation_rounding import held_activations
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.layers.scheme import Scheme

KEY = "model.layers.0.self_attn.k_proj"
IDS = torch.arange(1, 9).view(1, 8)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float(tmp_path_factory.mktemp("float") / "float", "qwen3_moe", **SIZES)


#: One of each format and of each kind of scales and activations.
SAMPLED = ["fp8", "fp8-block", "fp8a16-tensor", "mxfp8", "mxfp6-e2m3", "mxfp4", "nvfp4", "w8a8-static", "w4afp8-g128"]
SAMPLED += ["fp8-tensor-dynamic", "w8a8, tensor", "mxfp4afp8-static"]


@pytest.fixture(scope="module", params=first_of(SAMPLED, len(SAMPLED), KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    path = tmp_path_factory.mktemp("written") / kind
    write_compressed(source, path, kind, lambda name: 300.0 if kind == "nvfp4" else 0.05)
    return path


def test_experts_and_linears_agree_with_the_plain_arithmetic(folder: Path, kind: str) -> None:
    x, ids = torch.randn(9, 128), torch.randint(0, 8, (9, 2))
    with Checkpoint.open(folder) as checkpoint:
        for found in experts_of(checkpoint, describe(checkpoint)).values():
            native, plain = (load_experts(found, backend=backend) for backend in ("native", "reference"))
            for mine, theirs in zip(expert_weights(native).values(), expert_weights(plain).values(), strict=True):
                assert torch.equal(mine, theirs)
            truth = plain(x, ids, torch.full((9, 2), 0.5))
            assert float((native(x, ids, torch.full((9, 2), 0.5)) - truth).norm() / truth.norm()) < 2e-2
        source = quantized_linears(checkpoint, describe(checkpoint))[KEY]
        stored = reference.dense(source.stored_weight())
        truth = reference.linear(x, stored, held_activations(source.storage.scheme))
        assert float((source.load()(x) - truth).norm() / truth.norm()) < 1e-3


def test_check_and_inspect_find_nothing_wrong(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(folder)]) == 0, capsys.readouterr().out
    assert cli.main(["inspect", str(folder)]) == 0
    assert f"{scheme_of(kind)}, {KINDS[kind][0]}" in capsys.readouterr().out
    with Checkpoint.open(folder) as checkpoint:
        survey = Survey(checkpoint, describe)
        sizes = [load_experts(source).packed_bytes for source in experts_of(checkpoint, describe(checkpoint)).values()]
    part = next(part for part in survey.parts if part.kind == "experts")
    assert part.memory_bytes == sum(sizes)


def test_a_model_is_loaded_and_saved_as_it_was(folder: Path, kind: str, tmp_path: Path) -> None:
    model = cpumoe.load_model(folder, dtype=torch.float32)
    stored = scheme_of(kind)
    held = str(held_scheme(Scheme.parse(stored)))
    assert {str(m.config.scheme) for m in model.modules() if isinstance(m, Experts)} == {held}
    assert {str(m.scheme) for m in model.modules() if isinstance(m, QuantizedLinear)} == {stored}
    model.save_pretrained(tmp_path / "saved")
    section = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    group = section["config_groups"]["group_0"]
    assert section["format"] == KINDS[kind][0] and len(section["config_groups"]) == 1
    assert [str(scheme) for scheme in parse_quantization(section).schemes] == [stored]
    for said, part in zip(KINDS[kind][1:], (group["weights"], group["input_activations"]), strict=True):
        assert (said is None) == (part is None) and (said or {}).items() <= (part or {}).items()
    QuantizationScheme(**group)  # compressed-tensors understands it
    with torch.no_grad():
        expected = model(IDS).logits
        for again in (
            cpumoe.load_model(tmp_path / "saved", dtype=torch.float32),
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            cpumoe.load_model(folder, dtype=torch.float32, cache=tmp_path / "cache"),
            cpumoe.load_model(folder, dtype=torch.float32, cache=tmp_path / "cache"),
        ):
            assert torch.equal(again(IDS).logits, expected)


@pytest.mark.parametrize("kind", ["fp8-tensor-dynamic", "w4afp8-g128, tensor"])
def test_a_sequence_gets_the_same_bits_in_every_batch(source: Path, tmp_path: Path, kind: str) -> None:
    """Files that say one dynamic scale for all tokens get one per token, and the native decoder."""
    write_compressed(source, tmp_path / "model", kind)
    model = cpumoe.load_model(tmp_path / "model", dtype=torch.float32)
    assert native_with_head(model) is not None, explanation(model)
    others = torch.randint(1, 90, (3, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = model.model(torch.cat((others, IDS))).last_hidden_state  # the head is in float: PyTorch's product
        assert torch.equal(together[3], model.model(IDS).last_hidden_state[0])
        linear = next(m for m in model.modules() if isinstance(m, QuantizedLinear))
        x = torch.randn(5, linear.in_features) * torch.tensor([1.0, 30.0, 0.1, 4.0, 0.5]).view(5, 1)
        assert torch.equal(linear(x)[2], linear(x[2:3])[0])
