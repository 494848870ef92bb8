"""Calibration of many families: the model that it runs, layer by layer, is the one on disk."""

from __future__ import annotations

import pytest
import torch
from every_architecture import FAMILIES, family_class, tiny_config, write_family
from torch import Tensor

import cpumoe
from cpumoe.checkpoints.checkpoint import LAYER
from cpumoe.integrations.transformers.calibration import calibration
from cpumoe.integrations.transformers.facade import describe
from cpumoe.integrations.transformers.layout.expert_modules import expert_modules
from cpumoe.layers import reference
from cpumoe.layers.scheme import Scheme
from cpumoe.quantization.checkpoint_quantizer import quantize_folder
from cpumoe.quantization.layer_writer import LayerWriter

#: Two parts of 8 sequences, so that what layers hand on to one another is cut.
IDS = torch.randint(3, 90, (16, 12), generator=torch.Generator().manual_seed(3))

#: One of each kind: buffers that are stored, tuples between layers, states shared by layers, hybrids, wrappers, blocks
#: that route by themselves, experts of images.
KINDS = {
    "deepseek_v3": {},
    "deepseek_v4": {},
    "ernie4_5_vl_moe": {},
    "gemma4_text": {"num_kv_shared_layers": 1},
    "glm_moe_dsa": {},
    "jetmoe": {},
    "llama4": {},
    "mistral_large4": {},
    "muse_spark": {},
    "nemotron_h": {},
    "qwen3_5_moe": {},
    "qwen3_next": {},
    "zaya": {},
}


class RandomText:
    """Stands for a text that a tokenizer has read."""

    def ids(self, _) -> Tensor:
        return IDS

    def quantize_layers(self, *arguments) -> None:
        calibration.run_calibrated(*arguments)


@pytest.fixture
def nothing_is_rounded(monkeypatch):
    """Files get rounded weights as ever, and the calibration runs with those of the float model."""
    exact: dict[int, Tensor] = {}
    quantized = LayerWriter._quantized

    def remembered(self, weight, *more):
        found = quantized(self, weight, *more)
        exact[id(found.values)] = weight.to(torch.float32).clone()
        return found

    monkeypatch.setattr(LayerWriter, "_quantized", remembered)
    monkeypatch.setattr(reference, "dequantize", lambda weight: exact[id(weight.values)])


def layer_outputs(folder, name) -> list[Tensor]:
    """What the layers with experts, and those before them, give in transformers, [samples, length, ...]."""
    model = family_class(name).from_pretrained(folder, dtype=torch.float32).eval()
    first = next(path for path, _ in expert_modules(model))
    layers = model.get_submodule(LAYER.match(first)[1].rstrip("."))
    outputs: list[Tensor] = []
    for layer in layers:
        layer.register_forward_hook(lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return outputs


def quantize(folder, destination) -> None:
    scheme = Scheme.parse("w8a8")
    quantize_folder(folder, destination, scheme, scheme, "pack-quantized", RandomText(), describe)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", KINDS)
def test_calibration_runs_the_model_that_is_on_disk(tmp_path, monkeypatch, nothing_is_rounded, name):
    assert name in FAMILIES and tiny_config(name, **KINDS[name]) is not None
    folder = write_family(tmp_path / "float", name, **KINDS[name])
    found: list[Tensor] = []
    written = calibration._Run._write_state

    def remembered(self, index, result, options):
        found.append(result[0] if isinstance(result, tuple) else result)
        written(self, index, result, options)

    monkeypatch.setattr(calibration._Run, "_write_state", remembered)
    quantize(folder, tmp_path / "q")
    expected = layer_outputs(folder, name)
    assert len(found) == len(expected) > 1
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["glm_moe_dsa", "gemma4_text", "qwen3_next", "zaya"])
def test_a_run_that_was_stopped_goes_on_with_what_layers_hand_on(tmp_path, monkeypatch, name):
    folder = write_family(tmp_path / "float", name, **KINDS[name])
    quantize(folder, tmp_path / "whole")
    state = calibration._Run._write_state

    def stopped(self, index, *more):
        if index == 2:
            raise KeyboardInterrupt
        state(self, index, *more)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(calibration._Run, "_write_state", stopped)
        quantize(folder, tmp_path / "q")
    quantize(folder, tmp_path / "q")
    one, other = (cpumoe.load_model(tmp_path / f, auto_class=family_class(name)) for f in ("whole", "q"))
    for (key, ours), theirs in zip(other.state_dict().items(), one.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), key
