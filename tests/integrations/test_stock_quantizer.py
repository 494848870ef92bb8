"""Schemes that are not served: transformers' own reader gets them after ``import cpumoe``, if it reads them right."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from tiny_architectures import apart, is_quantized, quantization_section, write_float, write_quantized, write_tensors
from transformers import AutoConfig, AutoModelForCausalLM

import cpumoe
from cpumoe import UnsupportedScheme

IDS = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
CURE = r"cpumoe quantize FLOAT_MODEL DST --scheme w4a8-g128$"


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def changed_section(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def w4a16(section):
    section["config_groups"]["group_0"]["input_activations"] = None


# ---- experts that transformers makes up ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture,spelling", [("mixtral", "block_sparse_moe"), ("mixtral", "mlp"), ("gpt_oss", None)]
)
def test_experts_that_transformers_would_make_up_are_refused(tmp_path, architecture, spelling):
    source = write_float(tmp_path / "float", architecture)
    folder = write_quantized(source, tmp_path / "q", "w4a8-g32", "pack-quantized", spelling=spelling)
    changed_section(folder, w4a16)
    with pytest.raises(UnsupportedScheme, match=rf"experts\.gate_up_proj.*no use for .*experts\.0\..*{CURE}"):
        load(folder)
    with pytest.raises(UnsupportedScheme, match="activations left in float is not served"):
        cpumoe.load_model(folder)


@pytest.mark.parametrize("architecture,spelling", [("mixtral", "w123"), ("qwen3_moe", None)])
def test_what_transformers_reads_right_is_handed_on_with_a_warning(tmp_path, caplog, architecture, spelling):
    source = write_float(tmp_path / "float", architecture)
    options = {"spelling": spelling, "scale_dtype": None}  # fp32: transformers multiplies in the dtype of the scales
    folder = write_quantized(source, tmp_path / "q", "w4a8-g32", "pack-quantized", **options)
    changed_section(folder, w4a16)
    with caplog.at_level(logging.WARNING, "cpumoe"):
        model = load(folder)
    assert "cpumoe does not read this checkpoint" in caplog.text and "cpumoe quantize FLOAT_MODEL" in caplog.text
    torch.testing.assert_close(logits(model), logits(load(tmp_path / "q-float")), rtol=1e-3, atol=1e-3)
    assert "_adjust_missing_and_unexpected_keys" not in vars(model), "what watched the loading is gone"


# ---- NVFP4 ---------------------------------------------------------------------------------------------------------

_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nvfp4(weight):
    """[rows, columns] -> the tensors of NVFP4 by the ends of their names, and the weight that they stand for."""
    rows, columns = weight.shape
    global_scale = 448 * 6 / weight.abs().max()
    grouped = weight.view(rows, -1, 16)
    scale = (grouped.abs().amax(-1) / 6 * global_scale).to(torch.float8_e4m3fn)
    step = scale.float() / global_scale
    magnitude = (grouped.abs() / step.unsqueeze(-1)).view(rows, columns)
    code = (magnitude.unsqueeze(-1) - _FP4).abs().argmin(-1)
    values = _FP4[code] * weight.sign()
    nibbles = (code + 8 * (weight < 0)).to(torch.uint8)
    tensors = {
        "weight_packed": nibbles[:, 0::2] | nibbles[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_global_scale": global_scale.reshape(1),
    }
    return tensors, (values.view(rows, -1, 16) * step.unsqueeze(-1)).view(rows, columns)


def nvfp4_section(section):
    section["format"] = section["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"
    w4a16(section)
    section["config_groups"]["group_0"]["weights"] |= {
        "type": "float",
        "group_size": 16,
        "strategy": "tensor_group",
        "scale_dtype": "torch.float8_e4m3fn",
    }


def write_nvfp4(source, folder):
    """Writes ``folder`` in NVFP4, and beside it ``FOLDER-float`` with the weights that it stands for."""
    config = json.loads((source / "config.json").read_text())
    stored, dequantized = {}, {}
    for name, tensor in apart(load_file(source / "model.safetensors"), config["model_type"]).items():
        stored[name] = dequantized[name] = tensor
        if is_quantized(name, tensor):
            parts, dequantized[name] = nvfp4(stored.pop(name))
            stored |= {f"{name.removesuffix('weight')}{part}": t.contiguous() for part, t in parts.items()}
    routers = [name.removesuffix(".weight") for name in stored if name.endswith("mlp.gate.weight")]
    for target, tensors in ((folder, stored), (folder.with_name(f"{folder.name}-float"), dequantized)):
        target.mkdir()
        (target / "config.json").write_text(json.dumps(config))
        write_tensors(target, tensors)
    config["quantization_config"] = quantization_section("w4a8-g32", "pack-quantized", ["lm_head", *routers])
    nvfp4_section(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_nvfp4_experts_are_refused(tmp_path):
    source = write_float(tmp_path / "float", "qwen3_moe")
    folder = write_nvfp4(source, tmp_path / "q")
    with pytest.raises(UnsupportedScheme, match=rf"without their global scales \(model.*experts\.0.*{CURE}"):
        load(folder, torch.bfloat16)
    with pytest.raises(UnsupportedScheme, match="nvfp4-pack-quantized"):
        cpumoe.load_model(folder)


def test_nvfp4_linears_are_read_right_and_handed_on(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("qwen3", **sizes, num_key_value_heads=2, head_dim=16, vocab_size=128)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "float")
    folder = write_nvfp4(tmp_path / "float", tmp_path / "q")
    theirs, expected = load(folder, torch.bfloat16), load(tmp_path / "q-float", torch.bfloat16)
    torch.testing.assert_close(logits(theirs), logits(expected), rtol=0.05, atol=0.05)
