"""Schemes that are not served: transformers' own reader gets them after ``import cpumoe``, if it reads them right."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from tiny_architectures import (
    apart,
    is_quantized,
    packed_words,
    quantization_section,
    respelled,
    together,
    write_float,
    write_tensors,
)
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


def write_encoded(source, folder, encode, change, spelling=None):
    """Writes the linears of ``source`` as ``encode`` stores them, and ``FOLDER-float`` with what they stand for.

    ``encode(weight)`` gives the tensors by the ends of their names and the weight in float; ``change(group)`` makes a
    configuration group of int4 weights in groups of 32 one of these.
    """
    config = json.loads((source / "config.json").read_text())
    stored, dequantized = {}, {}
    for name, tensor in apart(load_file(source / "model.safetensors"), config["model_type"]).items():
        stored[name] = dequantized[name] = tensor
        if is_quantized(name, tensor):
            parts, dequantized[name] = encode(stored.pop(name))
            stored |= {f"{name.removesuffix('weight')}{part}": t.contiguous() for part, t in parts.items()}
    if spelling is not None:
        stored = respelled(stored, spelling)
    routers = [name.removesuffix(".weight") for name in stored if name.endswith((".gate.weight", ".router.weight"))]
    twin = folder.with_name(f"{folder.name}-float")
    for target, tensors in ((folder, stored), (twin, together(dequantized, config["model_type"]))):
        target.mkdir()
        (target / "config.json").write_text(json.dumps(config))
        write_tensors(target, tensors)
    section = quantization_section("w4a16-g32", "pack-quantized", ["lm_head", *routers])
    change(section["config_groups"]["group_0"])
    section["format"] = section["config_groups"]["group_0"]["format"]
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return folder


# ---- 2-bit weights, which nobody serves but transformers -----------------------------------------------------------


def int2(weight):
    grouped = weight.view(len(weight), -1, 32)
    scale = grouped.abs().amax(-1) / 1.5
    values = (grouped / scale.unsqueeze(-1)).round().clamp(-2, 1)
    tensors = {
        "weight_packed": packed_words(values.flatten(1).to(torch.int8), 2),
        "weight_scale": scale,  # fp32: transformers multiplies in the dtype of the scales
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, (values * scale.unsqueeze(-1)).flatten(1)


def two_bits(group):
    group["weights"]["num_bits"] = 2


@pytest.mark.parametrize(
    "architecture,spelling", [("mixtral", "block_sparse_moe"), ("mixtral", "mlp"), ("gpt_oss", None)]
)
def test_experts_that_transformers_would_make_up_are_refused(tmp_path, architecture, spelling):
    source = write_float(tmp_path / "float", architecture)
    folder = write_encoded(source, tmp_path / "q", int2, two_bits, spelling)
    with pytest.raises(UnsupportedScheme, match=rf"experts\.gate_up_proj.*no use for .*experts\.0\..*{CURE}"):
        load(folder)
    with pytest.raises(UnsupportedScheme, match="2-bit int per group of 32, activations left in float is not served"):
        cpumoe.load_model(folder)


@pytest.mark.parametrize("architecture,spelling", [("mixtral", "w123"), ("qwen3_moe", None)])
def test_what_transformers_reads_right_is_handed_on_with_a_warning(tmp_path, caplog, architecture, spelling):
    folder = write_encoded(write_float(tmp_path / "float", architecture), tmp_path / "q", int2, two_bits, spelling)
    with caplog.at_level(logging.WARNING, "cpumoe"):
        model = load(folder)
    assert "cpumoe does not read this checkpoint" in caplog.text and "cpumoe quantize FLOAT_MODEL" in caplog.text
    torch.testing.assert_close(logits(model), logits(load(tmp_path / "q-float")), rtol=1e-3, atol=1e-3)
    assert "_adjust_missing_and_unexpected_keys" not in vars(model), "what watched the loading is gone"


# ---- NVFP4 ---------------------------------------------------------------------------------------------------------

_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nvfp4a16(weight):
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


def nvfp4(weight):
    """With activations in NVFP4 too."""
    tensors, dequantized = nvfp4a16(weight)
    return tensors | {"input_global_scale": torch.tensor([448 * 6 / 8.0])}, dequantized


def nvfp4a16_group(group):
    group["format"] = "nvfp4-pack-quantized"
    four_bits = {"type": "float", "num_bits": 4, "group_size": 16, "strategy": "tensor_group"}
    group["weights"] |= four_bits | {"scale_dtype": "torch.float8_e4m3fn"}


def nvfp4_group(group):
    nvfp4a16_group(group)
    group["input_activations"] = group["weights"] | {"dynamic": "local", "observer": "static_minmax"}


def test_nvfp4_experts_are_refused_where_transformers_would_drop_their_scales(tmp_path):
    """They are read by us, unless something else in the checkpoint is not."""
    folder = write_encoded(write_float(tmp_path / "float", "qwen3_moe"), tmp_path / "q", nvfp4, nvfp4_group)
    config = json.loads((folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = groups["group_0"] | {"targets": ["re:.*elsewhere$"], "format": "pack-quantized"}
    groups["group_1"] |= {"weights": {"num_bits": 2, "type": "int", "group_size": 32}, "input_activations": None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedScheme, match=rf"without their global scales \(model.*experts\.0.*{CURE}"):
        load(folder, torch.bfloat16)
    with pytest.raises(UnsupportedScheme, match="2-bit int per"):
        cpumoe.load_model(folder)


def test_weight_only_nvfp4_experts_are_read_by_us(tmp_path):
    folder = write_encoded(write_float(tmp_path / "float", "qwen3_moe"), tmp_path / "q", nvfp4a16, nvfp4a16_group)
    expected = logits(load(tmp_path / "q-float"))
    for model in (load(folder), cpumoe.load_model(folder, dtype=torch.float32)):
        assert str(model.model.layers[0].mlp.experts.config.scheme) == "nvfp4a16"
        per_token = (logits(model) - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(per_token.median()) <= 1e-3


@pytest.mark.parametrize(
    ("encode", "change", "tolerance"), [(nvfp4a16, nvfp4a16_group, 0.02), (nvfp4, nvfp4_group, 0.3)]
)
def test_nvfp4_linears_are_read_right(tmp_path, encode, change, tolerance):
    """Activations in 4 bits cost what they cost."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("qwen3", **sizes, num_key_value_heads=2, head_dim=16, vocab_size=128)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "float")
    folder = write_encoded(tmp_path / "float", tmp_path / "q", encode, change)
    model, expected = load(folder, torch.bfloat16), logits(load(tmp_path / "q-float", torch.bfloat16))
    assert isinstance(model.model.layers[0].self_attn.q_proj, cpumoe.QuantizedLinear)
    assert float((logits(model) - expected).norm() / expected.norm()) <= tolerance
