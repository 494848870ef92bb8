"""``quant_method: fp8`` and the files of ModelOpt and Quark: configurations, and tensors as these tools write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from float_checkpoints import (
    FP4,
    FP6,
    MX,
    SIZES,
    Config,
    Tensors,
    checked,
    compressed,
    expert_weights,
    loaded,
    save_tensors,
    write_checkpoint,
)
from safetensors.torch import load_file
from tiny_architectures import write_float
from torch import Tensor

import cpumoe
from cpumoe import CheckpointError, UnsupportedScheme
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.loading import experts_of
from cpumoe.checkpoints.model_tensors import quantized_linears
from cpumoe.integrations.transformers.facade import describe

UP = "model.layers.1.mlp.experts.3.up_proj"
KEY = "model.layers.0.self_attn.k_proj"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

BLOCK: Config = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
}
STATIC: Config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float(tmp_path_factory.mktemp("float") / "float", "qwen3_moe", **SIZES)


def block_fp8(weight: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensors, Tensor]:
    """Blocks of 128x128, the last of which may be smaller, with the scale that multiplies."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128), dtype=dtype)
    stored, truth = torch.empty_like(weight), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / scales[i, j].float()).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            truth[part] = stored[part] * scales[i, j].float()
    return {"weight": stored.to(torch.float8_e4m3fn), "weight_scale_inv": scales}, truth


def tensor_fp8(weight: Tensor, scale_name: str, input_name: str | None) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / 448
    stored = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    inputs = {} if input_name is None else {input_name: torch.tensor(0.03)}
    return {"weight": stored, scale_name: scale, **inputs}, stored.float() * scale


def modelopt_nvfp4(weight: Tensor, has_inputs: bool = True) -> tuple[Tensors, Tensor]:
    """As ModelOpt exports it: a weight is e2m1 * e4m3 * fp32."""
    whole = weight.abs().max() / (448 * 6)
    grouped = weight.unflatten(-1, (-1, 16))
    scales = (grouped.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    scaled = grouped / (scales.float() * whole).unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    truth = E2M1[codes] * scaled.sign() * scales.float().unsqueeze(-1) * whole
    codes = (codes + 8 * (scaled < 0)).flatten(-2)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    inputs = {"input_scale": torch.tensor(0.25)} if has_inputs else {}
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole, **inputs}, truth.flatten(-2)


MODELOPT: Config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {}}


def quark(weight: Any, inputs: Config | None, **fields: Any) -> Config:
    """A configuration as Quark writes it."""
    spec = {"is_dynamic": False, "symmetric": True, "ch_axis": None, "group_size": None, "scale_format": None}
    parts = {
        "weight": spec | weight if isinstance(weight, dict) else weight,
        "input_tensors": None if inputs is None else spec | inputs,
    }
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "algo_config": None,
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": {**parts, "bias": None, "output_tensors": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["*lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
        **fields,
    }


INT8_TENSOR, INT8_ROW = {"dtype": "int8", "qscheme": "per_tensor"}, {"dtype": "int8", "qscheme": "per_channel"}
INT4 = {"dtype": "int4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1}
UINT4 = INT4 | {"dtype": "uint4", "symmetric": False}
ORDER = {"export": {"kv_cache_group": [], "pack_method": "order", "weight_format": "real_quantized"}}
PER_TENSOR, PER_ROW = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "fp8_e4m3", "qscheme": "per_channel"}
DYNAMIC = {"is_dynamic": True}
GROUPS = {"qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}


def quark_kv_cache(weight: Config, inputs: Config) -> Config:
    """What Quark adds for a KV cache in fp8: the projections' configurations, once more by themselves."""
    linear = quark(weight, inputs)["global_quant_config"] | {"output_tensors": PER_TENSOR}
    cached = {"*k_proj": linear, "*v_proj": linear}
    return {
        "export": {"kv_cache_group": list(cached), "pack_method": "reorder", "weight_format": "real_quantized"},
        "kv_cache_quant_config": cached,
        "layer_quant_config": {**cached, "*q_proj": linear},
    }


def quark_mx(weight: Tensor, bits: int, has_inputs: bool = False) -> tuple[Tensors, Tensor]:
    """Codes of e2m1 or e2m3 and E8M0 scales, in the same bytes as compressed-tensors has them."""
    stored, truth = compressed(weight, f"mxfp{bits}-pack-quantized", (FP4 if bits == 4 else FP6) | MX)
    inputs = {"input_scale": torch.tensor(0.03)} if has_inputs else {}
    return {"weight": stored["weight_packed"], "weight_scale": stored["weight_scale"], **inputs}, truth


def quark_rows(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax(1) / 448
    stored = (weight / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale[:, None]


def quark_int8(weight: Tensor, by_rows: bool, has_inputs: bool = False) -> tuple[Tensors, Tensor]:
    """A byte each; zero points of symmetric weights and inputs are there, and 0."""
    scale = (weight.abs().amax(1) if by_rows else weight.abs().max()) / 127
    stored = (weight / scale.unsqueeze(-1)).round().to(torch.int8)
    zeros = {"weight_zero_point": torch.zeros(scale.shape, dtype=torch.int8)}
    if has_inputs:
        zeros |= {"input_scale": torch.tensor(0.03), "input_zero_point": torch.tensor(0, dtype=torch.int8)}
    return {"weight": stored, "weight_scale": scale, **zeros}, stored.float() * scale.unsqueeze(-1)


def quark_words(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """[groups or inputs, outputs] -> int32 words of eight outputs, bit by bit as Quark's packing is described."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for place, output in enumerate(order):
        words |= (values[:, output::8].to(torch.int64) & 0xF) << (4 * place)
    return words.to(torch.int32)  # which wraps


def quark_int4(weight: Tensor, asymmetric: bool = False, pack_method: str = "reorder") -> tuple[Tensors, Tensor]:
    """int4 in two's complement, or uint4 with zero points, in groups of 32 inputs; inputs come before outputs."""
    grouped = weight.unflatten(1, (-1, 32))  # [out, groups, 32]
    if asymmetric:
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        scale = (high - low) / 15
        zero = (-low / scale).round().clamp(0, 15)
        values = (grouped / scale + zero).round().clamp(0, 15)
    else:
        scale = grouped.abs().amax(-1, keepdim=True) / 7
        zero = torch.zeros_like(scale)
        values = (grouped / scale).round().clamp(-8, 7)
        values[0, 0, 0] = -8
    order = (0, 2, 4, 6, 1, 3, 5, 7) if pack_method == "reorder" else (0, 1, 2, 3, 4, 5, 6, 7)
    tensors = {
        "weight": quark_words(values.flatten(1).T, order),
        "weight_scale": scale.squeeze(-1).T.contiguous(),
        "weight_zero_point": quark_words(zero.squeeze(-1).T, order),
    }
    return tensors, ((values - zero) * scale).flatten(1)


def without_zeros(stored: tuple[Tensors, Tensor]) -> tuple[Tensors, Tensor]:
    tensors, truth = stored
    return {suffix: tensor for suffix, tensor in tensors.items() if "zero_point" not in suffix}, truth


Store = Callable[[Tensor], tuple[Tensors, Tensor]]
WRITTEN: dict[str, tuple[Config, Store, str, str]] = {
    "blocks": (BLOCK, block_fp8, "fp8-block", "fp8-block"),
    "blocks, bf16 scales": (BLOCK, lambda w: block_fp8(w, torch.bfloat16), "fp8-block", "fp8-block"),
    "blocks, no list": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        block_fp8,
        "fp8-block",
        "fp8-block",
    ),
    "AutoFP8, static": (
        STATIC,
        lambda w: tensor_fp8(w, "weight_scale", "input_scale"),
        "fp8-tensor",
        "fp8-static",
    ),
    "transformers, static": (
        STATIC | {"weight_block_size": None},
        lambda w: tensor_fp8(w, "weight_scale_inv", "activation_scale"),
        "fp8-tensor",
        "fp8-static",
    ),
    "AutoFP8, dynamic": (
        STATIC | {"activation_scheme": "dynamic"},
        lambda w: tensor_fp8(w, "weight_scale", None),
        "fp8-tensor-token",
        "fp8",
    ),
    "ModelOpt NVFP4": (MODELOPT, modelopt_nvfp4, "nvfp4", "nvfp4"),
    "ModelOpt NVFP4, weights alone": (MODELOPT, lambda w: modelopt_nvfp4(w, False), "nvfp4a16", "nvfp4a16"),
    "ModelOpt FP8": (
        MODELOPT | {"quant_algo": "FP8"},
        lambda w: tensor_fp8(w, "weight_scale", "input_scale"),
        "fp8-tensor",
        "fp8-static",
    ),
    "ModelOpt FP8, no scales of inputs": (
        MODELOPT | {"quant_algo": "FP8"},
        lambda w: tensor_fp8(w, "weight_scale", None),
        "fp8-tensor-token",
        "fp8",
    ),
    "Quark FP8, static": (
        quark(PER_TENSOR, PER_TENSOR),
        lambda w: tensor_fp8(w, "weight_scale", "input_scale"),
        "fp8-tensor",
        "fp8-static",
    ),
    "Quark FP8, dynamic": (
        quark(PER_TENSOR, PER_TENSOR | DYNAMIC),
        lambda w: tensor_fp8(w, "weight_scale", None),
        "fp8-tensor-token",
        "fp8",
    ),
    "Quark FP8, rows": (quark(PER_ROW | {"ch_axis": 0}, PER_ROW | DYNAMIC), quark_rows, "fp8", "fp8"),
    "Quark MXFP4": (
        quark(GROUPS | {"dtype": "fp4"}, GROUPS | {"dtype": "fp4"} | DYNAMIC),
        lambda w: quark_mx(w, 4),
        "mxfp4",
        "mxfp4",
    ),
    "Quark MXFP4, e3m2 activations": (
        quark(GROUPS | {"dtype": "fp4"}, GROUPS | {"dtype": "fp6_e3m2"} | DYNAMIC),
        lambda w: quark_mx(w, 4),
        "mxfp4a6-e3m2",
        "mxfp4a6-e3m2",
    ),
    "Quark MXFP4, fp8 activations": (
        quark(GROUPS | {"dtype": "fp4"}, PER_TENSOR),
        lambda w: quark_mx(w, 4, True),
        "mxfp4afp8-static",
        "mxfp4afp8-static",
    ),
    "Quark MXFP6, fp8 activations": (
        quark(GROUPS | {"dtype": "fp6_e2m3"}, PER_TENSOR),
        lambda w: quark_mx(w, 6, True),
        "mxfp6-e2m3afp8-static",
        "mxfp6-e2m3afp8-static",
    ),
    "Quark int8": (
        quark(INT8_ROW | {"ch_axis": 0}, INT8_ROW | DYNAMIC),
        lambda w: quark_int8(w, True),
        "w8a8",
        "w8a8",
    ),
    "Quark int8, one scale": (
        quark(INT8_TENSOR, INT8_TENSOR | DYNAMIC | {"symmetric": False}),
        lambda w: quark_int8(w, False),
        "w8a8",
        "w8a8",
    ),
    "Quark int8, static": (
        quark(INT8_TENSOR, INT8_TENSOR),
        lambda w: quark_int8(w, False, True),
        "w8a8-static",
        "w8a8-static",
    ),
    "Quark int8, rows, static": (
        quark(INT8_ROW, INT8_TENSOR),
        lambda w: without_zeros(quark_int8(w, True, True)),
        "w8a8-static",
        "w8a8-static",
    ),
    "Quark int8, weights alone": (quark(INT8_ROW, None), lambda w: quark_int8(w, True), "w8a16", "w8a16"),
    "Quark int4": (quark(INT4, None), quark_int4, "w4a16-g32", "w4a16-g32"),
    "Quark int4, no zero points": (
        quark(INT4, None),
        lambda w: without_zeros(quark_int4(w)),
        "w4a16-g32",
        "w4a16-g32",
    ),
    "Quark int4, in order": (
        quark(INT4, None, **ORDER),
        lambda w: quark_int4(w, pack_method="order"),
        "w4a16-g32",
        "w4a16-g32",
    ),
    "Quark int4, int8 activations": (quark(INT4, INT8_ROW | DYNAMIC), quark_int4, "w4a8-g32", "w4a8-g32"),
    "Quark uint4": (quark(UINT4, None), lambda w: quark_int4(w, True), "w4a16-g32-asym", "w4a16-g32-asym"),
    "Quark uint4, in order": (
        quark(UINT4, None, **ORDER),
        lambda w: quark_int4(w, True, "order"),
        "w4a16-g32-asym",
        "w4a16-g32-asym",
    ),
    "Quark MXFP4, weights alone": (
        quark(GROUPS | {"dtype": "fp4"}, None),
        lambda w: quark_mx(w, 4),
        "mxfp4a16",
        "mxfp4a16",
    ),
}


def write(source: Path, folder: Path, kind: str, left: tuple[str, ...] = ()) -> Tensors:
    section, store, _, _ = WRITTEN[kind]
    return write_checkpoint(source, folder, section, lambda name, w: None if name.startswith(left) else store(w))


@pytest.mark.parametrize("kind", WRITTEN)
def test_experts_and_linears_are_those_of_the_file(source: Path, tmp_path: Path, kind: str) -> None:
    truth = write(source, tmp_path / "model", kind)
    _, _, stored_scheme, scheme = WRITTEN[kind]
    experts = loaded(tmp_path / "model")
    assert str(experts.config.scheme) == scheme
    for name, weight in expert_weights(experts).items():
        error = float((weight - truth[name]).norm() / truth[name].norm())
        assert error < 1e-6, name
    inputs = experts.quantized().down.input_scales
    static = {"fp8-static", "w8a8-static", "mxfp4afp8-static", "mxfp6-e2m3afp8-static"}
    expected = {"nvfp4": 4.0, **dict.fromkeys(static, 0.03)}.get(scheme)  # the first divides
    assert (inputs is None) == (expected is None) and (inputs is None or torch.allclose(inputs, torch.tensor(expected)))
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        linears = quantized_linears(checkpoint, describe(checkpoint))
        assert str(linears[KEY].storage.scheme) == stored_scheme
        assert "lm_head" not in linears and not any(name.endswith("mlp.gate") for name in linears)


@pytest.mark.parametrize("kind", [kind for kind in WRITTEN if "e3m2" not in kind])  # which compressed-tensors lacks
def test_a_model_is_saved_as_compressed_tensors_has_it(source: Path, tmp_path: Path, kind: str) -> None:
    write(source, tmp_path / "model", kind)
    model = cpumoe.load_model(tmp_path / "model", dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    section = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert [str(scheme) for scheme in parse_quantization(section).schemes] == [WRITTEN[kind][2]]
    ids = torch.arange(1, 9).view(1, 8)
    with torch.no_grad():
        again = cpumoe.load_model(tmp_path / "saved", dtype=torch.float32)
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_modelopt_may_have_a_file_of_its_own(source: Path, tmp_path: Path) -> None:
    write(source, tmp_path / "model", "ModelOpt NVFP4")
    expected = expert_weights(loaded(tmp_path / "model"))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    settings = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    own = {"producer": {"name": "modelopt", "version": "0.41.0"}, "quantization": settings}
    (tmp_path / "model" / "hf_quant_config.json").write_text(json.dumps(own))
    found = expert_weights(loaded(tmp_path / "model"))
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


@pytest.mark.parametrize(
    ("kind", "announced", "names", "said"),
    [
        (
            "ModelOpt FP8",
            {"kv_cache_quant_algo": "FP8"},
            ("k_proj.k_scale", "v_proj.v_scale"),
            "kv_cache_quant_algo (FP8",
        ),
        ("AutoFP8, static", {"kv_cache_scheme": "static"}, ("kv_scale",), "kv_cache_scheme (static 8-bit float"),
        (
            "Quark FP8, static",
            quark_kv_cache(PER_TENSOR, PER_TENSOR),
            ("k_proj.output_scale", "v_proj.output_scale", "q_proj.output_scale"),
            "kv_cache_group (fp8_e4m3 per_tensor)",
        ),
    ],
)
def test_scales_of_a_quantised_kv_cache_are_known(
    source: Path, tmp_path: Path, kind: str, announced: Config, names: tuple[str, ...], said: str
) -> None:
    write(source, tmp_path / "model", kind)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] |= announced
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{name}": torch.tensor(0.5) for name in names}
    save_tensors(tmp_path / "model", tensors)
    checked(tmp_path / "model")
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        use = checkpoint.kv_cache_use(None) or ""
    assert use.startswith(said) and "the KV cache is held in the model's dtype" in use


@pytest.mark.parametrize(
    ("kind", "suffix", "said"),
    [
        ("Quark int8", "weight_zero_point", "holds 3, and config.json says that it is symmetric; 0 is accepted"),
        ("Quark int8, static", "input_zero_point", "holds 3, and config.json says that it is symmetric; 0 is accepted"),
        ("Quark int4", "weight_zero_point", "has the zero point 3 for output 0, group 0, and config.json says that"),
    ],
)
@pytest.mark.parametrize("module", [UP, KEY])
def test_zero_points_of_symmetric_integers_are_refused(
    source: Path, tmp_path: Path, kind: str, suffix: str, said: str, module: str
) -> None:
    write(source, tmp_path / "model", kind)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors[f"{module}.{suffix}"].view(-1)[0] = 3
    save_tensors(tmp_path / "model", tensors)
    with pytest.raises(CheckpointError, match=f"{module}.{suffix} {said}"):
        cpumoe.load_model(tmp_path / "model")


@pytest.mark.parametrize("kind", ["blocks", "AutoFP8, static", "ModelOpt NVFP4"])
def test_layers_that_were_left_in_float_are_told_by_their_tensors(source: Path, tmp_path: Path, kind: str) -> None:
    left = ("model.layers.0.mlp.experts", "model.layers.1.self_attn")
    write(source, tmp_path / "model", kind, left)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        schemes = [str(source.config.scheme) for source in experts_of(checkpoint, describe(checkpoint)).values()]
        linears = quantized_linears(checkpoint, describe(checkpoint))
    assert schemes == ["fp32", WRITTEN[kind][3]]
    assert KEY in linears and KEY.replace("0", "1") not in linears
    floats = load_file(source / "model.safetensors")
    assert all(torch.equal(w, floats[f"{n}.weight"]) for n, w in expert_weights(loaded(tmp_path / "model")).items())


@pytest.mark.parametrize(
    ("kind", "suffix", "said"),
    [
        ("blocks", "weight_scale_inv", f"missing: {UP}.weight_scale_inv"),
        ("blocks", "weight", f"missing: {UP}.weight"),
        ("AutoFP8, static", "weight_scale", f"missing: {UP}.weight_scale"),
        ("AutoFP8, static", "input_scale", f"missing: {UP}.input_scale"),
        ("transformers, static", "activation_scale", f"missing: {UP}.activation_scale"),
        ("ModelOpt NVFP4", "weight_scale", f"missing: {UP}.weight_scale"),
        ("ModelOpt NVFP4", "weight_scale_2", f"missing: {UP}.weight_scale_2"),
        ("ModelOpt NVFP4", "input_scale", f"missing: {UP}.input_scale"),
    ],
)
def test_a_missing_tensor_of_one_expert_is_named(
    source: Path, tmp_path: Path, kind: str, suffix: str, said: str
) -> None:
    write(source, tmp_path / "model", kind)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors[f"{UP}.{suffix}"]
    save_tensors(tmp_path / "model", tensors)
    with pytest.raises(CheckpointError) as refusal:
        checked(tmp_path / "model")
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "suffix", "change", "said"),
    [
        ("blocks", "weight_scale_inv", lambda t: t * 0, "holds 0"),
        ("blocks", "weight_scale_inv", lambda t: -t, "holds -"),
        ("blocks", "weight_scale_inv", lambda t: t * torch.nan, "holds nan"),
        ("blocks", "weight_scale_inv", lambda t: t.repeat(2, 1), "F32 [2, 1]"),
        ("blocks", "weight_scale_inv", lambda t: t.to(torch.float64), "F64 [1, 1]"),
        ("blocks", "weight", lambda t: t.float(), "F32 [128, 128]"),
        ("blocks", "weight", lambda t: t.float().fill_(torch.nan).to(t.dtype), "16384 such values"),
        ("AutoFP8, static", "input_scale", lambda t: t * 0, "holds 0"),
        ("AutoFP8, static", "weight_scale", lambda t: t * torch.inf, "holds inf"),
        ("ModelOpt NVFP4", "weight_scale_2", lambda t: t * 0, "holds 0"),
        ("ModelOpt NVFP4", "input_scale", lambda t: -t, "holds -0.25"),
        ("ModelOpt NVFP4", "weight_scale", lambda t: (-t.float()).to(t.dtype), "the codes 0 to 126"),
    ],
)
def test_damaged_tensors_are_named(
    source: Path, tmp_path: Path, kind: str, suffix: str, change: Callable[[Tensor], Tensor], said: str
) -> None:
    write(source, tmp_path / "model", kind)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors[f"{UP}.{suffix}"] = change(tensors[f"{UP}.{suffix}"])
    save_tensors(tmp_path / "model", tensors)
    with pytest.raises(CheckpointError) as refusal:
        loaded(tmp_path / "model", 1)
    assert f"{UP}.{suffix}" in str(refusal.value) and said in str(refusal.value)


@pytest.mark.parametrize(
    ("section", "changes", "kind", "said"),
    [
        (BLOCK, {"weight_block_size": [64, 64]}, UnsupportedScheme, r"weight_block_size \[64, 64\].*\[128, 128\] is"),
        (BLOCK, {"weight_block_size": 128}, UnsupportedScheme, "weight_block_size 128"),
        (BLOCK, {"activation_scheme": "static"}, UnsupportedScheme, "'static' with weight_block_size"),
        (BLOCK, {"activation_scheme": "sometimes"}, CheckpointError, "activation_scheme is 'sometimes'"),
        (BLOCK, {"fmt": "e5m2"}, UnsupportedScheme, "fmt 'e5m2' is not served; 'e4m3' is"),
        (BLOCK, {"expert_dtype": "fp4"}, UnsupportedScheme, "expert_dtype 'fp4'"),
        (BLOCK, {"modules_to_convert": ["embed"]}, UnsupportedScheme, "modules_to_convert"),
        (BLOCK, {"modules_to_not_convert": "lm_head"}, CheckpointError, "modules_to_not_convert is 'lm_head'"),
        (STATIC, {"ignored_layers": [1]}, CheckpointError, r"ignored_layers is \[1\]"),
        (MODELOPT, {"quant_algo": "W4A8_AWQ"}, UnsupportedScheme, "quant_algo 'W4A8_AWQ' is not served; NVFP4 and FP8"),
        (MODELOPT, {"quant_algo": ["NVFP4"]}, UnsupportedScheme, "quant_algo"),
        (MODELOPT, {"group_size": 32}, UnsupportedScheme, "group_size 32 is not served; 16 is"),
        (MODELOPT, {"kv_cache_quant_algo": "NVFP4"}, UnsupportedScheme, "kv_cache_quant_algo 'NVFP4' is not served"),
        (MODELOPT, {"kv_cache_scheme": {"num_bits": 4}}, UnsupportedScheme, "kv_cache_scheme .*4.* is not served"),
        (STATIC, {"kv_cache_scheme": "sometimes"}, CheckpointError, "kv_cache_scheme is 'sometimes'"),
        (MODELOPT, {"quantization": []}, CheckpointError, r"quantization is \[\]"),
        (MODELOPT, {"ignore": "lm_head"}, CheckpointError, "ignore is 'lm_head'"),
        *(
            (
                quark(weight, inputs),
                {},
                UnsupportedScheme,
                f"global_quant_config: weights {said}.* not served; weights in",
            )
            for weight, inputs, said in (
                (INT8_TENSOR | {"symmetric": False}, INT8_TENSOR, "asymmetric int8 per_tensor with activations int8"),
                (INT8_TENSOR, INT8_TENSOR | {"symmetric": False}, "int8 per_tensor with activations asymmetric int8"),
                (INT8_TENSOR, INT8_ROW, "int8 per_tensor with activations int8 per_channel"),
                (INT8_ROW | {"ch_axis": 1}, None, "int8 per_channel with activations in float"),
                (INT4 | {"dtype": "int8"}, None, "int8 per_group of 32 with"),
                (INT4 | {"dtype": "uint8"}, None, "uint8 per_group of 32 with"),
                (INT8_ROW | {"dtype": "int4"}, None, "int4 per_channel with"),
                (INT4 | {"dtype": "int3"}, None, "int3 per_group"),
                (INT4 | {"symmetric": False}, None, "asymmetric int4 per_group of 32 with acti"),
                (INT4 | {"group_size": 48}, None, "int4 per_group of 48 with acti"),
                (INT4 | {"scale_format": "e8m0"}, None, "int4 per_group of 32 with e8m0 scales with acti"),
                (INT4, INT8_TENSOR, "int4 per_group of 32 with activations int8 per_tensor"),
                (INT4, PER_TENSOR, "int4 per_group of 32 with activations fp8_e4m3 per_tensor"),
                (UINT4 | {"group_size": 128, "symmetric": True}, None, "uint4 per_group of 128 with acti"),
                (GROUPS | {"dtype": "fp4", "group_size": 16}, None, "fp4 per_group of 16 with e8m0 scales"),
                (PER_TENSOR, PER_TENSOR | {"symmetric": False}, "fp8_e4m3 per_tensor with activations asymmetric fp8"),
                (PER_TENSOR | DYNAMIC, None, "dynamic fp8_e4m3"),
                (GROUPS | {"dtype": "fp4"}, GROUPS | {"dtype": "fp4"}, "fp4 per_group of 32 with e8m0 scales with"),
            )
        ),
        (quark(UINT4, INT8_ROW | DYNAMIC), {}, UnsupportedScheme, "asymmetric int4 weights with int8 activations"),
        (quark(INT8_ROW, PER_ROW | DYNAMIC), {}, UnsupportedScheme, "int8 weights with fp8 activations"),
        (quark(INT4, None), {"export": None}, UnsupportedScheme, "pack_method None in export is not served; 'reorder'"),
        (quark(INT4, None), {"export": {"pack_method": "x"}}, UnsupportedScheme, "pack_method 'x' in export is not"),
        (quark(None, PER_TENSOR), {}, UnsupportedScheme, "weights in float with activations fp8_e4m3"),
        (
            quark(PER_ROW, GROUPS | {"dtype": "fp4"} | DYNAMIC),
            {},
            UnsupportedScheme,
            "fp8 weights with fp4 activations",
        ),
        (
            quark(PER_ROW, None),
            {"export": {"kv_cache_group": ["*k_proj"]}},
            UnsupportedScheme,
            "kv_cache_group '.k_proj': a KV cache in float is not served",
        ),
        (
            quark(PER_ROW, None),
            {"kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "uint4", "qscheme": "per_group"}}}},
            UnsupportedScheme,
            "a KV cache uint4 per_group is not served; fp8_e4m3 and int8 per_tensor are",
        ),
        (quark(PER_ROW, None), {"export": {"kv_cache_group": "*k_proj"}}, CheckpointError, "kv_cache_group is"),
        (
            quark(PER_ROW, None),
            {"layer_quant_config": {"*k_proj": {"weight": PER_ROW, "output_tensors": PER_TENSOR}}},
            UnsupportedScheme,
            "quantised output_tensors are not served",
        ),
        (quark(PER_ROW, None), {"algo_config": [{"name": "rotation"}]}, UnsupportedScheme, "algo_config 'rotation'"),
        (quark(PER_ROW, None), {"layer_type_quant_config": {"a": {}}}, UnsupportedScheme, "layer_type_quant_config"),
        (quark(PER_ROW, None), {"exclude": [1]}, CheckpointError, r"exclude is \[1\]"),
        (quark(PER_ROW, None), {"layer_quant_config": []}, CheckpointError, r"layer_quant_config is \[\]"),
        (
            quark(PER_ROW, None),
            {"global_quant_config": {"weight": [PER_TENSOR, {"dtype": "int4", "qscheme": "per_channel"}]}},
            UnsupportedScheme,
            "fp8_e4m3 per_tensor and int4 per_channel on top of each other",
        ),
    ],
)
def test_configurations_that_are_not_served_are_refused(
    section: Config, changes: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        parse_quantization(section | changes)


def test_without_the_files_the_configuration_decides() -> None:
    config = parse_quantization(BLOCK)
    assert config.storage_of(UP) is not None and str(config.schemes[0]) == "fp8-block"
    for name in ("lm_head", "model.layers.0.mlp.gate", "model.embed_tokens"):
        assert config.storage_of(name) is None


def test_patterns_of_quark_say_how_single_linears_are_stored() -> None:
    other = quark(GROUPS | {"dtype": "fp4"}, None)["global_quant_config"]
    rules = {"*self_attn*": other, "*.v_proj": {"weight": None, "input_tensors": None}, "*down_proj": {"weight": None}}
    config = parse_quantization(quark([PER_TENSOR], None, layer_quant_config=rules))  # newer files have lists
    storages = {name: config.storage_of(name) for name in (UP, KEY, "lm_head", "a.v_proj", "a.down_proj")}
    assert [storage and str(storage.scheme) for storage in storages.values()] == [
        *("fp8a16-tensor", "mxfp4a16", None, None, None)
    ]
    assert {str(scheme) for scheme in config.schemes} == {"fp8a16-tensor", "mxfp4a16"}
