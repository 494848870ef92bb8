"""Quantising to small floats and to schemes with stored scales of activations: what is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from float_checkpoints import SIZES, expert_weights, loaded, scheme_of
from safetensors.torch import load_file
from tiny_architectures import write_float
from tiny_models import write_tiny_tokenizer

import cpumoe
from cpumoe import Scheme, UnsupportedScheme
from cpumoe.checkpoints.formats.compressed_storages import formats_of
from cpumoe.checkpoints.held_scales import held_scheme
from cpumoe.cli import main
from cpumoe.layers.activation_rounding import input_scale_for, needs_input_scales
from cpumoe.layers.reference import dequantize
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import INTEGERS, SCHEMES, WHOLE_FLOATS
from cpumoe.quantization.gptq import takes_statistics

WRITTEN = [
    name
    for name in SCHEMES
    if (s := Scheme.parse(name)).requested is None and formats_of(s) and not needs_input_scales(s)
]
CALIBRATED = [name for name in SCHEMES if needs_input_scales(s := Scheme.parse(name)) and formats_of(s)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float") / "model"
    size = write_tiny_tokenizer(folder)
    return write_float(folder, "qwen3_moe", vocab_size=size, **SIZES)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The experts that a token does not choose cost it nothing. " * 60)
    return path


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [name for name in WRITTEN if Scheme.parse(name).weights.element not in INTEGERS])
def test_every_scheme_of_floats_is_written_and_read_again(source: Path, tmp_path: Path, name: str) -> None:
    cpumoe.quantize_checkpoint(source, tmp_path / "q", name)
    experts = loaded(tmp_path / "q")
    scheme = Scheme.parse(name)
    assert experts.config.scheme == held_scheme(Scheme.parse(scheme_of(name)))
    floats = load_file(source / "model.safetensors")
    prefix = "model.layers.0.mlp.experts"
    for expert in range(experts.config.local_experts):
        gate, up, down = (floats[f"{prefix}.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        found = experts.quantized(expert, 1)[0]
        assert torch.equal(dequantize(found.gate_up), dequantize(quantize_weight(torch.cat((gate, up)), scheme)))
        assert torch.equal(dequantize(found.down), dequantize(quantize_weight(down, scheme)))


@pytest.mark.parametrize("name", [*WRITTEN, *CALIBRATED])
def test_compressed_tensors_understands_what_is_written(name: str) -> None:
    from compressed_tensors.quantization import QuantizationConfig as Theirs

    from cpumoe.checkpoints.formats import parse_quantization
    from cpumoe.checkpoints.formats.compressed_storages import storage_for
    from cpumoe.checkpoints.formats.compressed_tensors import write_config

    storage = storage_for(Scheme.parse(name))
    section = json.loads(json.dumps(write_config({"Linear": storage}, ["lm_head"])))
    theirs = Theirs.model_validate(section).config_groups["group_0"]
    assert theirs.weights.num_bits == storage.scheme.weights.bits and theirs.format == storage.format
    assert (theirs.input_activations is None) == (storage.scheme.activations is None)
    found = parse_quantization(section).storage_of("x")
    assert found == storage or str(found.scheme) == scheme_of(name) != name
    assert write_config({"Linear": found}, ["lm_head"]) == section


@pytest.mark.parametrize("name", ["fp8", "fp8-block", "fp8a16", "mxfp8", "mxfp6-e2m3", "mxfp4", "w8a16-asym"])
def test_compressed_tensors_reads_the_same_weights(source: Path, tmp_path: Path, name: str) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig as Theirs

    cpumoe.quantize_checkpoint(source, tmp_path / "q", name)
    section = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    scheme = Theirs.model_validate(section).config_groups["group_0"]
    tensors = {k: t for path in (tmp_path / "q").glob("*.safetensors") for k, t in load_file(path).items()}
    compressor = BaseCompressor.get_value_from_registry(section["format"])
    for module, weight in expert_weights(loaded(tmp_path / "q")).items():
        state = {k.removeprefix(f"{module}."): t for k, t in tensors.items() if k.startswith(f"{module}.")}
        assert torch.allclose(compressor.decompress(state, scheme)["weight"].float(), weight, rtol=1e-6), module


# ---- stored scales of activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "instead"), [("nvfp4", "nvfp4a16"), ("fp8-tensor", "fp8"), ("w8a8-static", "w8a8")])
def test_without_a_text_they_are_refused_with_what_does_without(
    source: Path, tmp_path: Path, name: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for linears in (None, name):
        scheme = name if linears is None else "w4a8-g32"
        with pytest.raises(
            UnsupportedScheme, match=rf"{name} has a stored scale .*--calibration.* {instead} is accept"
        ):
            cpumoe.quantize_checkpoint(source, tmp_path / "q", scheme, linears=linears)
    assert main(["quantize", str(source), str(tmp_path / "q"), "--scheme", name]) != 0
    assert f"without one {instead} is accepted" in capsys.readouterr().err
    for options in ({"scheme": name}, {"scheme": "w4a8-g32", "linears": name}):
        with pytest.raises(UnsupportedScheme, match="has a stored scale of the activations"):
            cpumoe.load_model(source, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", CALIBRATED)
def test_with_a_text_they_are_the_largest_magnitudes_seen(source: Path, tmp_path: Path, text: Path, name: str) -> None:
    report = cpumoe.quantize_checkpoint(
        source, tmp_path / "q", name, calibration=text, calibration_samples=4, calibration_length=64
    )
    if not takes_statistics(Scheme.parse(name)):
        assert report.calibrated == report.matrices and not report.uncovered
    largest = _largest_inputs(source, text)
    scheme = Scheme.parse(name)
    tensors = {k: t for path in (tmp_path / "q").glob("*.safetensors") for k, t in load_file(path).items()}
    suffix = "input_global_scale" if name == "nvfp4" else "input_scale"
    first = "model.layers.0.self_attn.q_proj"
    assert torch.allclose(tensors[f"{first}.{suffix}"], input_scale_for(largest[first], scheme), rtol=1e-5)
    part = loaded(tmp_path / "q").quantized()
    assert part.gate_up.input_scales.shape == (8, 1) and len(part.gate_up.input_scales.unique()) == 1
    # The attention before them is quantised, so that it is nearly what the float model has.
    seen = input_scale_for(largest["model.layers.0.mlp.experts"], scheme)
    assert torch.allclose(part.gate_up.input_scales[0], seen, rtol=0.2)
    assert len(part.down.input_scales.unique()) > 1 and bool((part.down.input_scales > 0).all())


def _largest_inputs(source: Path, text: Path) -> dict[str, torch.Tensor]:
    """The largest magnitude of the inputs of each module of the first layer, from the float model itself."""
    from transformers import AutoModelForCausalLM

    from cpumoe.checkpoints.checkpoint import Checkpoint
    from cpumoe.integrations.transformers.calibration.calibration import calibration_ids

    with Checkpoint.open(source) as checkpoint:
        ids = calibration_ids(checkpoint, text, 4, 64)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager")
    found: dict[str, torch.Tensor] = {}
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts"):
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: found.update({name: inputs[0].abs().amax()})
        )
    with torch.no_grad():
        model(ids)
    return found


def test_an_expert_without_tokens_gets_scales_too(source: Path, tmp_path: Path, text: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("The experts that a token")
    cpumoe.quantize_checkpoint(source, tmp_path / "q", "nvfp4", calibration=short, calibration_length=4)
    for layer in range(2):
        part = loaded(tmp_path / "q", layer).quantized()
        for scales in (part.gate_up.input_scales, part.down.input_scales):
            assert bool((torch.isfinite(scales) & (scales > 0)).all())
            assert float(scales.max()) < 1e6  # not what stands for an input of zeros


# ---- what has no file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE_FLOATS)
def test_floats_are_refused_as_a_scheme_to_quantise_to(source: Path, tmp_path: Path, name: str) -> None:
    for options in ({"scheme": name}, {"scheme": "w4a8-g32", "linears": name}):
        with pytest.raises(UnsupportedScheme, match=f"scheme {name} quantises nothing"):
            cpumoe.quantize_checkpoint(source, tmp_path / "q", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["mxfp6-e3m2", "mxfp6-e3m2a16"])
def test_a_scheme_without_a_format_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedScheme, match=f"{name}: compressed-tensors has no format for fp6-e3m2 weights"):
        cpumoe.quantize_checkpoint(source, tmp_path / "q", name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "mxfp6-e2m3", "fp8-block"])
def test_a_text_has_no_effect_on_floats_that_are_scaled_as_they_are_seen(
    source: Path, tmp_path: Path, text: Path, name: str
) -> None:
    with pytest.raises(UnsupportedScheme, match=f"calibration has no effect on {name}; it is for symmetric integers"):
        cpumoe.quantize_checkpoint(source, tmp_path / "q", name, calibration=text)
