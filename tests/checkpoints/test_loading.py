"""From files to packed experts: right numbers, every spelling, nothing missing, little memory."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from random_layers import relative_error
from safetensors.torch import load_file, save_file
from sampling import first_of, sampled_product
from tiny_architectures import (
    ARCHITECTURES,
    MIXTRAL_SPELLINGS,
    apart,
    quantized_tensors,
    respelled,
    together,
    write_float,
    write_quantized,
    write_tensors,
)

import cpumoe
from cpumoe import CheckpointError, Scheme, UnsupportedScheme, cli
from cpumoe.checkpoints import formats, loading
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.formats.compressed_storages import storage_for
from cpumoe.checkpoints.linear_sources import LinearSource
from cpumoe.checkpoints.loading import experts_of, load_experts
from cpumoe.checkpoints.named_tensors import TensorCheck
from cpumoe.checkpoints.storage import LinearStorage, Quantization, StoredTensor
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers.packed_weights import unpack_weight
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.reference import dequantize
from cpumoe.layers.rounding import quantize_weight

#: Weight-only schemes, and the form that compressed-tensors has for them.
WEIGHT_ONLY = {
    "w4a16": "pack-quantized",
    "w4a16-g32": "pack-quantized",
    "w8a16": "pack-quantized",
    "w8a16-g32": "pack-quantized",
    "w4a16-asym": "pack-quantized",
    "w4a16-g32-asym": "pack-quantized",
    "mxfp4a16": "mxfp4-pack-quantized",
    "nvfp4a16": "nvfp4-pack-quantized",
}

EXAMPLES = Path(__file__).parents[1] / "data" / "checkpoints"
NAMES = sorted(path.name for path in EXAMPLES.iterdir())


def load(folder: Path, backend: str | None = None, scheme: str | None = None) -> dict[str, cpumoe.Experts]:
    with Checkpoint.open(folder) as checkpoint:
        sources = experts_of(checkpoint, describe(checkpoint), None if scheme is None else Scheme.parse(scheme))
        return {name: load_experts(source, backend) for name, source in sources.items()}


def recorded(folder: Path) -> dict[int, tuple[torch.Tensor, ...]]:
    """Layer -> inputs, ids, weights and outputs of its experts with dequantised weights in fp32."""
    tensors = load_file(folder / "reference.safetensors")
    layers = sorted({int(name.split(".")[1]) for name in tensors})
    parts = ("x", "top_k_index", "top_k_weights", "out")
    return {layer: tuple(tensors[f"experts.{layer}.dequant.{part}"] for part in parts) for layer in layers}


def layer_of(module: str) -> int:
    return int(module.split(".")[2])


def packed_bytes(experts: dict[str, cpumoe.Experts]) -> dict[str, bytes]:
    buffers = {f"{n}.{k}": t for n, e in experts.items() for k, t in e.named_buffers()}
    return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in buffers.items()}


# ---- the example checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_examples_give_what_was_recorded(name):
    experts = load(EXAMPLES / name)
    truth = recorded(EXAMPLES / name)
    assert {layer_of(module) for module in experts} == set(truth)
    for module, layer in experts.items():
        x, ids, weights, out = truth[layer_of(module)]
        exact = layer.reference(x, ids, weights, quantize_activations=False)
        assert relative_error(exact, out) <= 1e-3
        assert relative_error(layer(x, ids, weights), out) <= 0.03
        assert relative_error(layer(x, ids, weights), layer.reference(x, ids, weights)) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_other_backends_read_the_same_weights(name, backend):
    native = load(EXAMPLES / name)
    refused = [
        verdict.obstacle
        for layer in native.values()
        for verdict in cpumoe.explain(layer.config)
        if verdict.backend == backend and verdict.obstacle
    ]
    if refused:
        with pytest.raises(cpumoe.NoBackend, match=f"backend='{backend}' cannot serve this layer"):
            load(EXAMPLES / name, backend)
        return
    truth = recorded(EXAMPLES / name)
    for module, layer in load(EXAMPLES / name, backend).items():
        assert layer.backend.name == backend
        x, ids, weights, out = truth[layer_of(module)]
        assert relative_error(layer(x, ids, weights), out) <= 0.03
        # the rounding of an activation that lies between two integers may differ
        assert relative_error(layer(x, ids, weights), native[module](x, ids, weights)) <= 5e-3


def test_aten_serves_an_example():
    """So that the test above does not pass by refusing everything."""
    assert load(EXAMPLES / "qwen3moe-w4a8-g32-packed", "aten")


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_held_as_they_lie_in_the_file(name):
    """The integers, scales and biases that are packed are those of the file, to the bit."""
    tensors = load_file(EXAMPLES / name / "model.safetensors")
    for module, layer in load(EXAMPLES / name).items():
        folder = module.replace(".mlp.", ".block_sparse_moe.") if "mixtral" in name else module
        held = layer.quantized()
        inner = layer.config.intermediate_size
        for expert in range(layer.config.experts):
            parts = {
                "gate_proj": held.gate_up[expert][:inner],
                "up_proj": held.gate_up[expert][inner:],
                "down_proj": held.down[expert],
            }
            for projection, weight in parts.items():
                values, prefix = weight.values, f"{folder}.{expert}.{projection}"
                assert torch.equal(weight.scales, tensors[f"{prefix}.weight_scale"])
                if f"{prefix}.weight" in tensors:
                    assert torch.equal(values, tensors[f"{prefix}.weight"])
                else:
                    words = tensors[f"{prefix}.weight_packed"].to(torch.int64).unsqueeze(-1)
                    nibbles = ((words >> (torch.arange(8) * 4)) & 15).flatten(-2) - 8
                    assert torch.equal(values.to(torch.int64), nibbles)


# ---- damage --------------------------------------------------------------------------------------------------------


def a_tensor(tensors: dict[str, torch.Tensor], *endings: str) -> str:
    """A tensor in the middle of the experts."""
    names = [n for n in sorted(tensors) if ".experts." in n and n.endswith(endings)]
    return names[len(names) // 2]


def removed(tensors):
    name = a_tensor(tensors, ".weight", ".weight_packed")
    del tensors[name]
    return name


def removed_from_the_first_expert(tensors):
    name = next(n for n in sorted(tensors) if ".experts.0.gate_proj.weight" in n and not n.endswith("_scale"))
    del tensors[name]
    return name


def scale_removed(tensors):
    name = a_tensor(tensors, ".weight_scale")
    del tensors[name]
    return name


def renamed(tensors):
    name = a_tensor(tensors, ".weight", ".weight_packed")
    tensors[name.replace("_proj.", "_projection.")] = tensors.pop(name)
    return name


def cut(tensors):
    name = a_tensor(tensors, ".weight", ".weight_packed")
    tensors[name] = tensors[name][:-1].clone()
    return name


def transposed(tensors):
    name = a_tensor(tensors, "down_proj.weight", "down_proj.weight_packed")
    tensors[name] = tensors[name].T.contiguous()
    return name


def scale_of_another_group_size(tensors):
    name = a_tensor(tensors, ".weight_scale")
    tensors[name] = tensors[name].repeat(1, 2)
    return name


def scale_without_its_last_dimension(tensors):
    name = a_tensor(tensors, ".weight_scale")
    tensors[name] = tensors[name][:, 0].clone()
    return name


def of_another_dtype(tensors):
    name = a_tensor(tensors, ".weight", ".weight_packed")
    tensors[name] = tensors[name].to(torch.int16)
    return name


def in_float(tensors):
    name = a_tensor(tensors, ".weight", ".weight_packed")
    tensors[name] = tensors[name].to(torch.bfloat16)
    return name


def scale_of_another_dtype(tensors):
    name = a_tensor(tensors, ".weight_scale")
    tensors[name] = tensors[name].to(torch.float32)
    return name


def scale_that_is_an_integer(tensors):
    name = a_tensor(tensors, ".weight_scale")
    tensors[name] = tensors[name].to(torch.int32)
    return name


def one_too_many(tensors):
    name = a_tensor(tensors, ".weight", ".weight_packed").rpartition(".")[0] + ".weight_zero_point"
    tensors[name] = torch.zeros(1)
    return name


def an_expert_too_many(tensors):
    of_last = [n for n in tensors if ".experts.7." in n]
    for name in of_last:
        tensors[name.replace(".experts.7.", ".experts.8.")] = tensors[name].clone()
    return sorted(n.replace(".experts.7.", ".experts.8.") for n in of_last)[0]


def a_scale_that_is_nan(tensors):
    name = a_tensor(tensors, ".weight_scale")
    tensors[name][0, 0] = float("nan")
    return name.partition(".experts.")[0] + ".experts"


DAMAGE = (
    removed,
    removed_from_the_first_expert,
    scale_removed,
    renamed,
    cut,
    transposed,
    scale_of_another_group_size,
    scale_without_its_last_dimension,
    of_another_dtype,
    in_float,
    scale_of_another_dtype,
    scale_that_is_an_integer,
    one_too_many,
    an_expert_too_many,
    a_scale_that_is_nan,
)


def damaged(source: Path, folder: Path, damage) -> str:
    """Copies a checkpoint with one thing wrong; returns the name that a refusal must have."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = load_file(source / "model.safetensors")
    name = damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    return name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damaged_examples_are_refused_with_the_name_of_the_tensor(tmp_path, name, damage):
    wrong = damaged(EXAMPLES / name, tmp_path / "model", damage)
    with pytest.raises(CheckpointError) as refusal:
        load(tmp_path / "model")
    assert wrong in str(refusal.value)


@pytest.mark.parametrize("shape", [[64, 129], [128, 64], [0, 0], [-1, 128], [64]])
def test_a_stored_shape_that_lies_is_refused_with_its_name(tmp_path, shape):
    def lie(tensors):
        name = a_tensor(tensors, "gate_proj.weight_shape")
        tensors[name] = torch.tensor(shape)
        return name

    wrong = damaged(EXAMPLES / "qwen3moe-w4a8-g32-packed", tmp_path / "model", lie)
    with pytest.raises(CheckpointError) as refusal:
        load(tmp_path / "model")
    assert wrong in str(refusal.value)


def test_values_beyond_four_bits_are_refused_with_their_layer(tmp_path):
    def too_large(tensors):
        name = a_tensor(tensors, "gate_proj.weight")
        tensors[name][3, 5] = 100
        return name.partition(".experts.")[0] + ".experts"

    wrong = damaged(EXAMPLES / "deepseekv3-w4a8-g32", tmp_path / "model", too_large)
    with pytest.raises(CheckpointError, match="value 100 at .* is not an int4 value") as refusal:
        load(tmp_path / "model")
    assert wrong in str(refusal.value)


def test_a_bias_is_needed_and_has_the_dtype_of_the_others(tmp_path):
    """Biases of two dtypes were once read with the dtype of the first: wrong numbers, and no word of it."""

    def without(tensors):
        name = a_tensor(tensors, ".bias")
        del tensors[name]
        return name

    def of_another_dtype(tensors):
        name = a_tensor(tensors, ".bias")
        tensors[name] = tensors[name].to(torch.float32)
        return name

    for index, damage in enumerate((without, of_another_dtype)):
        wrong = damaged(EXAMPLES / "gptoss-w4a8-g32", tmp_path / str(index), damage)
        with pytest.raises(CheckpointError) as refusal:
            load(tmp_path / str(index))
        assert wrong in str(refusal.value)


def test_experts_under_two_spellings_are_refused(tmp_path):
    def both(tensors):
        for name in [n for n in tensors if ".block_sparse_moe.experts." in n]:
            tensors[name.replace("block_sparse_moe", "mlp")] = tensors[name].clone()
        return "experts.0"

    wrong = damaged(EXAMPLES / "mixtral-w4a8-channel", tmp_path / "model", both)
    with pytest.raises(CheckpointError, match="unexpected") as refusal:
        load(tmp_path / "model")
    assert wrong in str(refusal.value)


def test_a_layer_too_many_in_the_configuration_is_refused_with_what_it_lacks(tmp_path):
    shutil.copytree(EXAMPLES / "qwen3moe-w8a8-int8", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="48 missing: model.layers.2.mlp.experts.0.gate_proj.weight"):
        load(tmp_path / "model")


def test_all_that_is_wrong_is_in_one_message(tmp_path):
    def several(tensors):
        names = [n for n in sorted(tensors) if ".experts." in n and n.endswith("weight_scale")]
        del tensors[names[0]]
        tensors[names[1]] = tensors[names[1]][:1].clone()
        tensors[f"{names[2]}_too"] = torch.zeros(1)
        return [*names[:2], f"{names[2]}_too"]

    wrong = damaged(EXAMPLES / "qwen3moe-w8a8-int8", tmp_path / "model", several)
    with pytest.raises(CheckpointError, match="1 missing: .*1 of another kind: .*1 unexpected: ") as refusal:
        load(tmp_path / "model")
    assert all(name in str(refusal.value) for name in wrong)


def test_experts_of_one_layer_with_two_schemes_are_refused(tmp_path):
    shutil.copytree(EXAMPLES / "qwen3moe-w8a8-int8", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"]["ignore"].append("model.layers.1.mlp.experts.3.up_proj")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="model.layers.1.mlp.experts.3.up_proj float.*one scheme is served"):
        load(tmp_path / "model")


# ---- spellings, forms, sizes ---------------------------------------------------------------------------------------


def test_all_spellings_of_mixtral_give_the_same_bits(tmp_path):
    source = write_float(tmp_path / "float", "mixtral")
    found = {}
    for spelling in MIXTRAL_SPELLINGS:
        for form in ("int-quantized", "pack-quantized"):
            folder = tmp_path / f"{spelling}-{form}"
            write_quantized(source, folder, "w4a8-g32", form, spelling=spelling, shards=1 if form[0] == "i" else 3)
            found[spelling, form] = packed_bytes(load(folder))
    first, *others = found.values()
    assert len(first) == 4  # two layers with two matrices
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("scheme", "architecture"),
    sampled_product(["w4a8-g32", "w8a8", "w8a8-g32", *WEIGHT_ONLY], ["gpt_oss", "llama4_text", "qwen3_moe", "mixtral"]),
)
def test_float_experts_give_the_same_bits_fused_and_one_by_one(tmp_path, architecture, scheme):
    """Fused as transformers writes them, one by one as other tools do, and quantised before as here."""
    fused = write_float(tmp_path / "fused", architecture)
    single = tmp_path / "single"
    shutil.copytree(fused, single)
    tensors = apart(load_file(fused / "model.safetensors"), architecture)
    write_tensors(single, respelled(tensors, "mlp") if architecture == "mixtral" else tensors, shards=2)
    expected = packed_bytes(load(fused, scheme=scheme))
    assert expected and packed_bytes(load(single, scheme=scheme)) == expected
    if scheme != "nvfp4a16":  # whose linears have a global scale each when they are quantised one by one
        form = WEIGHT_ONLY.get(scheme, "int-quantized")
        quantized = write_quantized(fused, tmp_path / "quantized", scheme, form, scale_dtype=None)
        assert packed_bytes(load(quantized)) == expected


def test_the_writer_of_these_tests_is_its_own_inverse(tmp_path):
    for architecture in ARCHITECTURES:
        tensors = load_file(write_float(tmp_path / architecture, architecture) / "model.safetensors")
        back = together(apart(tensors, architecture), architecture)
        assert set(back) == set(tensors) and all(torch.equal(back[name], tensors[name]) for name in tensors)


FLOAT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_float_experts_are_as_they_are_without_a_scheme(tmp_path, monkeypatch, dtype):
    monkeypatch.setenv("CPUMOE_BACKEND", "reference")
    folder = write_float(tmp_path / "model", "qwen3_moe", dtype=dtype)
    stored = load_file(folder / "model.safetensors")
    for name, experts in load(folder).items():
        assert str(experts.config.scheme) == FLOAT_NAMES[dtype]
        part = experts.quantized()
        for expert in range(part.count):
            gate_up = torch.cat([stored[f"{name}.{expert}.{half}_proj.weight"] for half in ("gate", "up")])
            assert torch.equal(part.gate_up.values[expert], gate_up)
            assert torch.equal(part.down.values[expert], stored[f"{name}.{expert}.down_proj.weight"])


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype", "extra"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_damaged_float_experts_are_refused_with_the_name_of_the_tensor(tmp_path, architecture, damage):
    folder = write_float(tmp_path / "model", architecture)
    tensors = load_file(folder / "model.safetensors")
    name = [n for n in sorted(tensors) if ".experts." in n and "bias" not in n][1]
    if damage == "missing":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = tensors[name][..., 1:].clone()
    elif damage == "dtype":
        tensors[name] = tensors[name].to(torch.int8)
    else:
        name += "_scale"
        tensors[name] = torch.ones(1)
    write_tensors(folder, tensors)
    with pytest.raises(CheckpointError) as refusal:
        load(folder, scheme="w4a8-g32")
    assert name in str(refusal.value)


def test_float_weights_that_are_not_finite_are_refused_with_their_layer(tmp_path):
    folder = write_float(tmp_path / "model", "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][0, 0] = float("inf")
    write_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match="model.layers.1.mlp.experts.*NaN or infinity"):
        load(folder, scheme="w4a8-g32")


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("scheme", "form"),
    [
        *(
            (s, f)
            for s in ("w4a8", "w4a8-g32", "w4a8-g96", "w8a8", "w8a8-g96")
            for f in ("int-quantized", "pack-quantized")
        ),
        *(("w4a16-g96", "pack-quantized"), ("w8a16-g96", "pack-quantized"), ("w4a16-g96-asym", "pack-quantized")),
        *WEIGHT_ONLY.items(),
    ],
)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_odd_sizes_and_every_dtype_of_scales(tmp_path, scheme, form, scale_dtype):
    sizes = {"hidden_size": 96, "head_dim": 24, "moe_intermediate_size": 288, "num_experts": 3, "num_hidden_layers": 1}
    source = write_float(tmp_path / "float", "qwen3_moe", **sizes)
    folder = write_quantized(source, tmp_path / "model", scheme, form, scale_dtype=scale_dtype)
    tensors = apart(load_file(source / "model.safetensors"), "qwen3_moe")
    _, dequantized = quantized_tensors(tensors, scheme, form, scale_dtype)
    (module, layer), *others = load(folder).items()
    assert not others
    assert str(layer.config.scheme) == scheme
    held = layer.quantized()
    for expert in range(3):
        parts = (*dequantize(held.gate_up[expert]).chunk(2), dequantize(held.down[expert]))
        for projection, weight in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
            expected = dequantized[f"{module}.{expert}.{projection}.weight"]
            if scheme == "nvfp4a16":  # dividing by the global scale is not multiplying with its inverse
                torch.testing.assert_close(weight, expected, rtol=2e-7, atol=0)
            else:
                assert torch.equal(weight, expected)
    x, ids, weights = torch.randn(5, 96), torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    exact = layer.reference(x, ids, weights, quantize_activations=False)
    assert relative_error(layer(x, ids, weights), exact) <= (1e-3 if "a16" in scheme else 0.03)


@pytest.mark.every(2)
@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@pytest.mark.parametrize("architecture", ["gpt_oss", "deepseek_v3"])
def test_weight_only_checkpoints_agree_with_their_files(tmp_path, capsys, architecture, scheme):
    """By another reading of them, and by other arithmetic, on every instruction set."""
    source = write_float(tmp_path / "float", architecture)
    folder = write_quantized(source, tmp_path / "model", scheme, WEIGHT_ONLY[scheme], shards=2)
    assert cli.main(["check", str(folder)]) == 0, capsys.readouterr().out


def a_weight_only_model(folder: Path, scheme: str) -> Path:
    source = write_float(folder.with_name("float"), "qwen3_moe")
    return write_quantized(source, folder, scheme, WEIGHT_ONLY[scheme])


_EXPERT = "model.layers.1.mlp.experts.3.up_proj"
_LAYER = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("scheme", "part", "change", "said"),
    [
        *(
            ("w4a16-g32-asym", "weight_zero_point", change, f"{_EXPERT}.weight_zero_point")
            for change in (
                lambda t: None,
                lambda t: t[1:],
                lambda t: t.repeat(1, 2),
                lambda t: t[0],
                lambda t: t.T,
                lambda t: t.to(torch.int8),
                lambda t: t.float(),
                lambda t: t[:0],
            )
        ),
        (
            "w4a16-g32",
            "weight_zero_point",
            lambda t: torch.zeros(4, 2).int(),
            f"unexpected: {_EXPERT}.weight_zero_point",
        ),
        ("mxfp4a16", "weight_global_scale", lambda t: torch.ones(1), f"unexpected: {_EXPERT}.weight_global_scale"),
        (
            "w4a16-g32",
            "weight_g_idx",
            lambda t: torch.zeros(64).int(),
            f"{_EXPERT}.weight_g_idx has 64 inputs in group 0",
        ),
        ("nvfp4a16", "input_global_scale", lambda t: torch.ones(1), f"unexpected: {_EXPERT}.input_global_scale"),
        *(
            ("nvfp4a16", "weight_global_scale", change, f"{_EXPERT}.weight_global_scale")
            for change in (
                lambda t: None,
                lambda t: t.repeat(2),
                lambda t: t[:0],
                lambda t: t.double(),
                lambda t: t.bfloat16(),
            )
        ),
        *(
            ("nvfp4a16", "weight_global_scale", lambda t, x=bad: t * x, _LAYER)
            for bad in (0.0, -1.0, torch.nan, torch.inf)
        ),
        *(
            (scheme, "weight_scale", change, f"{_EXPERT}.weight_scale")
            for scheme in ("nvfp4a16", "mxfp4a16")
            for change in (lambda t: None, lambda t: t[1:], lambda t: t[:, :1].float(), lambda t: t.view(torch.int8))
        ),
        ("nvfp4a16", "weight_scale", lambda t: t.view(torch.uint8), f"{_EXPERT}.weight_scale"),
        ("mxfp4a16", "weight_scale", lambda t: t.view(torch.float8_e4m3fn), f"{_EXPERT}.weight_scale"),
        ("mxfp4a16", "weight_scale", lambda t: torch.full_like(t, 255), f"{_EXPERT}.weight_scale"),
        ("nvfp4a16", "weight_scale", lambda t: torch.full_like(t, torch.nan), f"{_EXPERT}.weight_scale"),
        ("nvfp4a16", "weight_scale", lambda t: (-t.float()).to(t.dtype), f"{_EXPERT}.weight_scale"),
        ("w8a16-g32", "weight_scale", lambda t: torch.full_like(t, torch.inf), f"{_EXPERT}.weight_scale"),
        *(
            (scheme, "weight_packed", change, f"{_EXPERT}.weight_packed")
            for scheme in ("w4a16-asym", "w8a16", "mxfp4a16", "nvfp4a16")
            for change in (
                lambda t: None,
                lambda t: t[:, 1:],
                lambda t: t.view(len(t) // 2, -1),
                lambda t: t.to(torch.int16),
            )
        ),
    ],
)
def test_damaged_weight_only_checkpoints_are_refused_by_name(tmp_path, scheme, part, change, said):
    folder = a_weight_only_model(tmp_path / "model", scheme)
    tensors = load_file(folder / "model.safetensors")
    load(folder)
    name = f"{_EXPERT}.{part}"
    new = change(tensors.pop(name, None))
    write_tensors(folder, tensors if new is None else tensors | {name: new.contiguous()})
    with pytest.raises(CheckpointError) as refusal:
        load(folder)
    assert said in str(refusal.value)


@pytest.mark.parametrize("sizes", [{"hidden_size": 80}, {"moe_intermediate_size": 48}])
def test_sizes_that_are_not_served_are_refused_with_the_number(tmp_path, sizes):
    source = write_float(tmp_path / "float", "qwen3_moe", **sizes)
    folder = write_quantized(source, tmp_path / "model", "w8a8", "int-quantized")
    with pytest.raises(CheckpointError, match=f"{next(iter(sizes.values()))}; a positive multiple of 32 is accepted"):
        load(folder)


def test_a_group_size_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(UnsupportedScheme, match="group_size=128 does not divide in_features=64; use 32, 64"):
        load(write_float(tmp_path / "model", "qwen3_moe"), scheme="w4a8-g128")


@pytest.mark.parametrize("columns", [32, 33, 36, 37, 127, 128])
@pytest.mark.parametrize(
    ("scheme", "form"),
    [
        *((scheme, form) for scheme in ("w4a8", "w8a8") for form in ("int-quantized", "pack-quantized")),
        *((scheme, "pack-quantized") for scheme in ("w4a16", "w8a16", "w4a16-asym")),
    ],
)
def test_a_linear_of_any_width(tmp_path, columns, scheme, form):
    weight, bias = torch.randn(17, columns), torch.randn(17)
    stored, _ = quantized_tensors({"proj.weight": weight}, scheme, form)
    write_tensors(tmp_path, stored | {"proj.bias": bias})
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint.open(tmp_path) as checkpoint:
        source = LinearSource(checkpoint, "proj", 17, columns, storage_for(Scheme.parse(scheme), form), True)
        check = TensorCheck(checkpoint)
        source.check(check)
        check.nothing_else_but(())
        check.raise_problems()
        linear = source.load()
    held, expected = unpack_weight(linear.weight_packed)[0], quantize_weight(weight, Scheme.parse(scheme))
    assert torch.equal(held.values, expected.values) and torch.equal(held.bias, bias)
    assert torch.equal(held.scales, expected.scales.bfloat16())
    assert (held.zero_points is None) == (expected.zero_points is None)
    assert held.zero_points is None or torch.equal(held.zero_points, expected.zero_points)


@pytest.mark.parametrize(("rows", "slices"), [(28, (2, 4)), (60, (2, 3, 5)), (48, (2, 3, 6)), (20, (5,))])
def test_parts_of_a_linear_are_rows_of_the_whole(tmp_path, rows, slices):
    """Zero points of eight rows share a word, which no two slices may have."""
    stored, _ = quantized_tensors({"proj.weight": torch.randn(rows, 64)}, "w4a16-g32-asym", "pack-quantized")
    write_tensors(tmp_path, stored)
    (tmp_path / "config.json").write_text("{}")
    storage = storage_for(Scheme.parse("w4a16-g32-asym"), "pack-quantized")
    with Checkpoint.open(tmp_path) as checkpoint:
        source = LinearSource(checkpoint, "proj", rows, 64, storage, False)
        whole = source.read()
        for count in slices:
            each = rows // count
            assert source.divides(count) == (each % 8 == 0)
            if not source.divides(count):
                with pytest.raises(UnsupportedScheme, match=f"does not divide into {count} slices"):
                    source.load(count, 1)
                continue
            for index in range(count):
                part, expected = source.read(count, index), slice(index * each, (index + 1) * each)
                assert torch.equal(part.values, whole.values[expected])
                assert torch.equal(part.zero_points, whole.zero_points[expected])


# ---- storages of any kind ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sideways(LinearStorage):
    """Columns before rows, as GPTQ and AWQ have them, and one more scale for the whole linear, as NVFP4 has it."""

    scale_suffix: ClassVar[str] = "scales"

    def tensors(self, rows, columns):
        return {
            "sideways": StoredTensor(("I8",), (columns, rows), by_rows=False),
            "scales": StoredTensor(("F32",), (rows, 1)),
            "whole_scale": StoredTensor(("F32",), (1,), by_rows=False),
            "rows": StoredTensor(("I64",), (1,), by_rows=False, values=(rows,)),
        }

    def size(self, found, read):
        columns, rows = found["sideways"].shape
        return rows, columns

    def scale_dtype(self, dtypes):
        return torch.float32

    def decode(self, tensors, rows, columns):
        values = tensors["sideways"].transpose(-1, -2).flatten(-3, -2).contiguous()  # [..., n, columns, rows] before
        scales = tensors["scales"] * tensors["whole_scale"].repeat_interleave(rows, -2)
        return QuantizedWeight("int8", values, scales)

    def decode_plainly(self, tensors):
        return QuantizedWeight("int8", tensors["sideways"].T, tensors["scales"] * tensors["whole_scale"])

    def encode(self, weight):
        values, scales = weight.values, weight.scales
        whole = torch.tensor([2.0 ** float(values[0, 0])])
        rows = torch.tensor([len(values)])
        return {"sideways": values.T.contiguous(), "scales": scales / whole, "whole_scale": whole, "rows": rows}


class AllSideways(Quantization):
    suffixes = frozenset(("sideways", "scales", "whole_scale", "rows"))
    schemes = (Scheme.parse("w8a8"),)

    @classmethod
    def parse(cls, section):
        return cls()

    def storage_of(self, module):
        return None if module == "lm_head" else Sideways(self.schemes[0], "sideways")


def test_a_storage_with_other_tensors_needs_nothing_but_its_row(monkeypatch, tmp_path):
    """Reading, checking and comparing with the reference ask the storage for all they need."""
    source = EXAMPLES / "qwen3moe-w8a8-int8"
    stored, sideways = load_file(source / "model.safetensors"), Sideways(Scheme.parse("w8a8"), "sideways")
    for name in [n.removesuffix(".weight_scale") for n in stored if n.endswith(".weight_scale")]:
        weight = QuantizedWeight("int8", stored.pop(f"{name}.weight"), stored.pop(f"{name}.weight_scale").float())
        encoded = sideways.encode(weight)
        stored |= {f"{name}.{suffix}": tensor for suffix, tensor in encoded.items()}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": "sideways"}}
    write_tensors(tmp_path, stored)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedScheme, match="quant_method 'sideways' is not served; .*'compressed-tensors'"):
        load(tmp_path)
    monkeypatch.setitem(formats.QUANT_METHODS, "sideways", AllSideways)
    expected, found = load(source), load(tmp_path)
    for name, experts in found.items():
        ours, theirs = experts.quantized(0, 8), expected[name].quantized(0, 8)
        for mine, other in ((ours.gate_up, theirs.gate_up), (ours.down, theirs.down)):
            assert torch.equal(mine.values, other.values) and torch.equal(mine.scales, other.scales.float())
    assert cli.main(["check", str(tmp_path)]) == 0
    stored["model.layers.1.mlp.experts.3.up_proj.rows"] += 1
    write_tensors(tmp_path, stored)
    with pytest.raises(CheckpointError, match=r"experts.3.up_proj.rows is \[65\]; \[64\] is accepted"):
        load(tmp_path)


# ---- a few experts at a time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gptoss-w4a8-g32", "qwen3moe-w4a8-g32-packed"])
@pytest.mark.parametrize("chunk_bytes", [1, 40_000, 100_000])
def test_reading_in_pieces_gives_the_same_bits(monkeypatch, name, chunk_bytes):
    whole = packed_bytes(load(EXAMPLES / name))
    monkeypatch.setattr(loading, "_CHUNK_BYTES", chunk_bytes)
    assert packed_bytes(load(EXAMPLES / name)) == whole


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "mxfp4a16", "nvfp4a16"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_parts_of_weights_are_read_in_pieces_too(monkeypatch, tmp_path, scheme, backend):
    folder = a_weight_only_model(tmp_path / "model", scheme)
    whole = packed_bytes(load(folder, backend))
    monkeypatch.setattr(loading, "_CHUNK_BYTES", 1)
    assert packed_bytes(load(folder, backend)) == whole


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_backends_that_do_not_pack_keep_what_was_read(monkeypatch, backend):
    """The reader uses its memory again; a backend that kept views of it would see the last experts everywhere."""
    name = "qwen3moe-w4a8-g32-packed"
    whole = packed_bytes(load(EXAMPLES / name, backend))
    monkeypatch.setattr(loading, "_CHUNK_BYTES", 1)
    assert packed_bytes(load(EXAMPLES / name, backend)) == whole


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_quantising_in_pieces_gives_the_same_bits(monkeypatch, tmp_path, architecture):
    folder = write_float(tmp_path / "model", architecture)
    whole = packed_bytes(load(folder, scheme="w4a8-g32"))
    monkeypatch.setattr(loading, "_CHUNK_BYTES", 1)
    assert packed_bytes(load(folder, scheme="w4a8-g32")) == whole


def test_a_file_cut_while_its_experts_are_read_is_noticed(monkeypatch, tmp_path):
    shutil.copytree(EXAMPLES / "qwen3moe-w8a8-int8", tmp_path / "model")
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        sources = experts_of(checkpoint, describe(checkpoint))
        os.truncate(tmp_path / "model" / "model.safetensors", 200_000)
        with pytest.raises(CheckpointError, match="ended while .*experts.* was read"):
            for source in sources.values():
                load_experts(source)


_MEASURE = """
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
import torch
import cpumoe
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.loading import experts_of, load_experts
from cpumoe.integrations.transformers.facade import describe

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

scheme = cpumoe.Scheme.parse(sys.argv[2]) if len(sys.argv) > 2 else None
torch.set_num_threads(2)
torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # the libraries have their threads and buffers
cpumoe.Experts.quantize(torch.randn(2, 64, 64), torch.randn(2, 64, 32), "w8a8")
with Checkpoint.open(sys.argv[1]) as checkpoint:
    layout = describe(checkpoint)
    before = status("VmRSS")
    held = [load_experts(source) for source in experts_of(checkpoint, layout, scheme).values()]
print(status("VmHWM") - before, sum(e.packed_bytes for e in held), len(held))
"""


def peak_of_loading(folder: Path, *scheme: str) -> tuple[int, int, int]:
    """Bytes that memory grew by at most while loading, bytes of the packed weights, layers."""
    done = subprocess.run([sys.executable, "-c", _MEASURE, folder, *scheme], capture_output=True, text=True, check=True)
    peak, packed, layers = map(int, done.stdout.split())
    return peak, packed, layers


def write_large(folder: Path, form: str | None, layers: int, experts: int) -> Path:
    """A checkpoint of zeros that takes little room: all but the scales are holes in the files. None is float."""
    hidden, inner = 1024, 512
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "num_experts": experts,
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "num_experts_per_tok": 8,
    }
    if form:
        quantized = json.loads((EXAMPLES / "qwen3moe-w4a8-g32-packed" / "config.json").read_text())
        config["quantization_config"] = quantized["quantization_config"]
        config["quantization_config"]["config_groups"]["group_0"]["format"] = form
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    weight_map = {}
    for layer in range(layers):
        tensors: dict[str, tuple[str, int, tuple[int, ...]]] = {}  # dtype, bytes of an element, shape
        contents = {}
        for expert in range(experts):
            for projection, (rows, columns) in shapes.items():
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
                if form is None:
                    tensors[f"{name}.weight"] = ("BF16", 2, (rows, columns))
                    continue
                tensors[f"{name}.weight_scale"] = ("BF16", 2, (rows, columns // 32))
                contents[f"{name}.weight_scale"] = b"\x80\x3f" * (rows * columns // 32)  # ones
                if form == "int-quantized":
                    tensors[f"{name}.weight"] = ("I8", 1, (rows, columns))
                else:
                    tensors[f"{name}.weight_packed"] = ("I32", 4, (rows, columns // 8))
                    tensors[f"{name}.weight_shape"] = ("I64", 8, (2,))
                    contents[f"{name}.weight_shape"] = struct.pack("<qq", rows, columns)
        header, offset = {}, 0
        for name, (dtype, size, shape) in tensors.items():
            end = offset + size * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        file = folder / f"model-{layer}.safetensors"
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + offset)
            for name, content in contents.items():
                out.seek(8 + len(text) + header[name]["data_offsets"][0])
                out.write(content)
        weight_map |= dict.fromkeys(tensors, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.full
@pytest.mark.parametrize(("form", "layers"), first_of([("pack-quantized", 6), ("int-quantized", 3)], 1))
def test_loading_needs_the_packed_weights_and_one_layer(tmp_path, form, layers):
    """A layer here is little larger than what is read at once, 64 MB while 64 MB are packed; real ones are larger."""
    folder = write_large(tmp_path / "model", form, layers, 384 // layers)
    one_layer = (folder / "model-0.safetensors").stat().st_size
    peak, packed, _ = peak_of_loading(folder)
    assert packed > 300e6
    assert peak <= 1.1 * (packed + one_layer)


@pytest.mark.full
def test_quantising_on_load_needs_the_packed_weights_and_one_float_layer(tmp_path):
    folder = write_large(tmp_path / "model", None, 2, 64)
    one_layer = (folder / "model-0.safetensors").stat().st_size
    peak, packed, _ = peak_of_loading(folder, "w4a8-g128")
    assert peak <= 1.1 * (packed + one_layer)


@pytest.mark.parametrize("lie", [{"num_experts": 10**6}, {"num_experts": 10**9}, {"num_hidden_layers": 10**6}])
def test_a_configuration_that_announces_far_more_than_there_is_is_refused(tmp_path, lie):
    folder = write_float(tmp_path / "float", "qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    config.pop("num_local_experts", None)
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": 8} | lie))
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError, match="config.json"):
        experts_of(checkpoint, describe(checkpoint))
    with pytest.raises(CheckpointError, match="config.json"):
        cpumoe.load_model(folder, scheme="w4a8-g32")
