"""``cpumoe inspect``: what it says of good checkpoints is true, and what is wrong with others is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_checkpoints import CHECKPOINTS, NAMES, Config, Tensors, changed_copy, float_copy, write_holes
from commands import run_with_address_space
from tiny_architectures import together, write_float, write_quantized, write_tensors
from tiny_models import write_dense_model

import cpumoe
from cpumoe import cli
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.loading import experts_of, load_experts
from cpumoe.checkpoints.model_tensors import quantized_linears
from cpumoe.checkpoints.tensor_file import TensorFile
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers.scheme import Scheme
from cpumoe.tables import size_text

PACKED = "qwen3moe-w4a8-g32-packed"
INT8 = "qwen3moe-w8a8-int8"
DEEPSEEK = "deepseekv3-w4a8-g32"


@pytest.fixture
def inspected(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """Runs the command twice: its exit code, its text and its JSON."""

    def run(*arguments: object) -> tuple[int, str, dict[str, Any]]:
        code = cli.main(["inspect", *map(str, arguments)])
        text = capsys.readouterr().out
        assert cli.main(["inspect", *map(str, arguments), "--json"]) == code
        return code, text, json.loads(capsys.readouterr().out)

    return run


Inspected = Callable[..., tuple[int, str, dict[str, Any]]]


def part(facts: dict[str, Any], kind: str) -> dict[str, Any]:
    """The only part of a kind that is packed, or else the only one."""
    found = [p for p in facts["parts"] if p["kind"] == kind]
    packed = [p for p in found if p["scheme"] is not None]
    (one,) = packed or found
    return dict(one)


#: Weight-only schemes, and the form that compressed-tensors has for them.
WEIGHT_ONLY = {
    "w4a16": "pack-quantized",
    "w8a16-g32": "pack-quantized",
    "w4a16-g32-asym": "pack-quantized",
    "mxfp4a16": "mxfp4-pack-quantized",
    "nvfp4a16": "nvfp4-pack-quantized",
}


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_sizes_of_weight_only_checkpoints(architecture: str, scheme: str, tmp_path: Path, inspected: Inspected) -> None:
    source = write_float(tmp_path / "float", architecture)
    folder = write_quantized(source, tmp_path / "model", scheme, WEIGHT_ONLY[scheme])
    check_sizes(folder, inspected)
    assert part(inspected(folder)[2], "experts")["held"] == f"{scheme}, {WEIGHT_ONLY[scheme]}"


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_those_of_the_loaded_weights(name: str, inspected: Inspected) -> None:
    check_sizes(CHECKPOINTS / name, inspected)


def check_sizes(folder: Path, inspected: Inspected) -> None:
    code, _, facts = inspected(folder)
    assert code == 0 and facts["loads"] and not any(facts["problems"].values())
    with Checkpoint.open(folder) as checkpoint:
        experts = [load_experts(source) for source in experts_of(checkpoint, describe(checkpoint)).values()]
        linears = [source.load() for source in quantized_linears(checkpoint, describe(checkpoint)).values()]
        disk = sum(checkpoint.info(n).bytes for n in checkpoint.names)
    assert part(facts, "experts")["memory_bytes"] == sum(e.packed_bytes for e in experts)
    assert part(facts, "experts")["modules"] == len(experts) == facts["experts"]["layers"]
    of_linears = [p for p in facts["parts"] if p["scheme"] is not None and p["kind"] != "experts"]
    assert sum(p["memory_bytes"] for p in of_linears) == sum(linear.weight_packed.numel() for linear in linears)
    assert sum(p["modules"] for p in of_linears) == len(linears)
    assert facts["disk_bytes"] == disk
    config = experts[0].config
    assert {p["scheme"] for p in of_linears} == {part(facts, "experts")["scheme"]} == {str(config.scheme)}
    weights = len(experts) * config.experts * 3 * config.hidden_size * config.intermediate_size
    assert part(facts, "experts")["parameters"] == weights
    bits = 8 * sum(e.packed_bytes for e in experts) / weights
    assert facts["experts"]["memory_bits_per_weight"] == pytest.approx(bits, abs=1e-3)
    assert facts["experts"]["activation"] == str(config.activation)


def test_kinds_of_modules(inspected: Inspected) -> None:
    _, _, facts = inspected(CHECKPOINTS / DEEPSEEK)
    modules = {p["kind"]: p["modules"] for p in facts["parts"]}
    assert modules == {
        "experts": 1,
        "shared experts": 3,
        "router": 1,
        "attention": 10,
        "dense mlp": 3,
        "embeddings": 1,
        "lm_head": 1,
        "norms": 9,
    }
    assert facts["model_type"] == "deepseek_v3" and facts["layers"] == 2 and facts["hidden_size"] == 128
    assert facts["experts"]["count"] == 8 and facts["experts"]["per_token"] == 2
    assert part(facts, "router")["dtypes"] == ["BF16", "F32"]


@pytest.mark.parametrize("name", NAMES)
def test_text_and_json_have_the_same_facts(name: str, inspected: Inspected) -> None:
    _, text, facts = inspected(CHECKPOINTS / name)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for p in facts["parts"]:
        sizes = f"{size_text(p['disk_bytes'])} {size_text(p['memory_bytes'])}"
        assert f"{p['kind']} {p['held']} {p['modules']} {p['parameters']:,} {sizes}" in lines
    sizes = f"{size_text(facts['disk_bytes'])} {size_text(facts['memory_bytes'])}"
    assert f"total {facts['parameters']:,} {sizes}" in lines
    experts = facts["experts"]
    assert f"model {facts['model_type']}, {facts['layers']} layers, hidden size {facts['hidden_size']}" in lines
    assert f"{experts['count']} per layer in {experts['layers']} layers, {experts['per_token']} per token" in text
    assert f"{experts['disk_bits_per_weight']:.2f} bits per weight on disk" in text
    assert f"{experts['memory_bits_per_weight']:.2f} in memory" in text
    assert lines[-1] == "it would load, by its headers: values of weights and scales were not read (--deep reads them)"


def test_no_weights_are_read(inspected: Inspected, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = TensorFile.read_into

    def spy(self: TensorFile, name: str, *arguments: Any) -> None:
        read.append(name)
        real(self, name, *arguments)

    monkeypatch.setattr(TensorFile, "read_into", spy)
    assert inspected(CHECKPOINTS / PACKED)[0] == 0
    assert {name.rpartition(".")[2] for name in read} == {"weight_shape"}  # two numbers


def test_without_transformers_it_says_what_is_needed() -> None:
    program = "import sys; sys.modules['transformers'] = None; from cpumoe.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", str(CHECKPOINTS / PACKED)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2 and "pip install 'cpumoe[transformers]'" in done.stderr
    assert "Traceback" not in done.stderr


# ---- what would stop the load --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (PACKED, "model.layers.1.mlp.experts.5.up_proj.weight_scale"),
        (PACKED, "model.layers.0.mlp.experts.0.gate_proj.weight_packed"),
        (PACKED, "model.layers.0.self_attn.q_proj.weight_packed"),
        (INT8, "model.layers.1.self_attn.o_proj.weight"),
        (INT8, "model.layers.1.self_attn.o_proj.weight_scale"),
        (PACKED, "model.layers.1.self_attn.k_norm.weight"),
        (PACKED, "model.layers.1.mlp.gate.weight"),
        (PACKED, "model.embed_tokens.weight"),
        (PACKED, "model.norm.weight"),
        (PACKED, "lm_head.weight"),
        (DEEPSEEK, "model.layers.1.mlp.gate.weight"),
        (DEEPSEEK, "model.layers.0.mlp.up_proj.weight"),
        (DEEPSEEK, "model.layers.1.mlp.shared_experts.down_proj.weight_scale"),
        ("gptoss-w4a8-g32", "model.layers.1.mlp.experts.7.down_proj.bias"),
        ("gptoss-w4a8-g32", "model.layers.1.self_attn.k_proj.bias"),
        ("gptoss-w4a8-g32", "model.layers.0.self_attn.sinks"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str, tmp_path: Path, inspected: Inspected) -> None:
    code, text, facts = inspected(changed_copy(tmp_path, name, lambda tensors: tensors.pop(tensor)))
    assert code == 1 and not facts["loads"] and "it would not load" in text
    assert facts["problems"]["missing"] == [tensor] and f"    {tensor}\n" in f"{text}\n"
    assert facts["experts"] is not None and facts["parts"]  # the rest is told nevertheless


def test_all_tensors_of_a_missing_linear_are_named(tmp_path: Path, inspected: Inspected) -> None:
    names = [f"model.layers.1.self_attn.v_proj.weight_{suffix}" for suffix in ("packed", "scale")]

    def remove(tensors: Tensors) -> None:
        for name in (*names, "model.layers.1.self_attn.v_proj.weight_shape"):  # which may be absent
            del tensors[name]

    code, text, facts = inspected(changed_copy(tmp_path, PACKED, remove))
    assert code == 1 and sorted(facts["problems"]["missing"]) == names and all(name in text for name in names)


def _replace(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = value(tensors[name]).contiguous()

    return change


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        ("model.layers.0.mlp.experts.2.down_proj.weight_scale", lambda t: t[:, :1]),
        ("model.layers.0.mlp.experts.2.down_proj.weight_packed", lambda t: t.to(torch.int64)),
        ("model.layers.0.mlp.experts.2.down_proj.weight_shape", lambda t: t + 1),
        ("model.layers.1.self_attn.o_proj.weight_scale", lambda t: t[:-1]),
        ("model.layers.1.self_attn.o_proj.weight_packed", lambda t: t[:-1]),
        ("model.layers.1.self_attn.o_proj.weight_shape", lambda t: t + 1),
        ("model.layers.1.mlp.gate.weight", lambda t: t[:-1]),
        ("model.layers.1.input_layernorm.weight", lambda t: t[:-1]),
        ("model.layers.1.input_layernorm.weight", lambda t: t.to(torch.int8)),
        ("model.embed_tokens.weight", lambda t: t[:-1]),
        ("lm_head.weight", lambda t: t[:, :-1]),
    ],
)
def test_a_tensor_of_another_kind_is_named(
    tensor: str, value: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path, inspected: Inspected
) -> None:
    code, text, facts = inspected(changed_copy(tmp_path, PACKED, _replace(tensor, value)))
    assert code == 1 and tensor in text
    assert any(line.startswith(tensor) for line in facts["problems"]["wrong"]), facts["problems"]
    assert not facts["problems"]["missing"] and not facts["problems"]["unexpected"]


@pytest.mark.parametrize(
    ("tensor", "value", "said"),
    [
        ("model.layers.0.mlp.experts.2.down_proj.weight_scale", lambda t: t * 0, "holds 0"),
        ("model.layers.1.self_attn.o_proj.weight_scale", lambda t: t * torch.nan, "holds nan"),
        ("model.layers.1.self_attn.o_proj.weight_scale", lambda t: -t, "holds -"),
    ],
)
def test_values_that_stop_a_load_are_found_when_they_are_read(
    tensor: str, value: Callable[[torch.Tensor], torch.Tensor], said: str, tmp_path: Path, inspected: Inspected
) -> None:
    folder = changed_copy(tmp_path, PACKED, _replace(tensor, value))
    code, text, facts = inspected(folder)
    assert code == 0 and facts["loads"] and not facts["values_read"] and "values of weights and scales were not" in text
    code, text, facts = inspected(folder, "--deep")
    (problem,) = facts["problems"]["other"]
    assert code == 1 and not facts["loads"] and facts["values_read"] and f"{tensor} {said}" in problem
    with pytest.raises(cpumoe.CheckpointError) as refusal:
        cpumoe.load_model(folder)
    assert problem in str(refusal.value)


@pytest.mark.parametrize("linear", ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.3.up_proj"])
@pytest.mark.parametrize("actorder", ["group", None])
def test_an_index_of_groups_is_inspected_before_weights_are_read(
    linear: str, actorder: str | None, tmp_path: Path, inspected: Inspected
) -> None:
    """Whether the configuration announces it or not."""

    def damage(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            index = torch.arange(tensors[name].shape[1] * 8, dtype=torch.int32) // 32
            tensors[name.replace("weight_packed", "weight_g_idx")] = index
        tensors[f"{linear}.weight_g_idx"][5] = 77

    def announce(config: Config) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = actorder

    folder = changed_copy(tmp_path, PACKED, damage, announce)
    problem = f"{linear}.weight_g_idx has input 5 in group 77; 0 to "
    for words in ((), ("--deep",)):
        code, text, facts = inspected(folder, *words)
        assert code == 1 and not facts["loads"] and problem in text
    with pytest.raises(cpumoe.CheckpointError, match=problem):
        cpumoe.load_model(folder)


@pytest.mark.parametrize("name", [INT8, "gptoss-w4a8-g32"])
def test_good_values_are_read_too(name: str, inspected: Inspected) -> None:
    code, text, facts = inspected(CHECKPOINTS / name, "--deep")
    assert code == 0 and facts["loads"] and facts["values_read"] and text.endswith("\nit would load\n")


@pytest.mark.parametrize(
    "tensor",
    [
        "model.layers.0.mlp.experts.0.gate_proj.weight_zero_point",
        "model.layers.0.mlp.experts.8.gate_proj.weight_packed",
        "model.layers.0.self_attn.q_proj.weight_global_scale",
        "model.layers.0.mlp.gate.weight_scale",
        "model.layers.0.self_attn.q_norm.running_mean",
        "model.layers.2.input_layernorm.weight",
        "model.mystery.weight",
    ],
)
def test_an_unexpected_tensor_is_named(tensor: str, tmp_path: Path, inspected: Inspected) -> None:
    def add(tensors: Tensors) -> None:
        tensors[tensor] = torch.zeros(4, 4)

    code, text, facts = inspected(changed_copy(tmp_path, PACKED, add))
    assert code == 1 and tensor in facts["problems"]["unexpected"] and tensor in text


def test_modules_that_config_json_describes_otherwise(tmp_path: Path, inspected: Inspected) -> None:
    def ignore(config: Config) -> None:
        config["quantization_config"]["ignore"].append("model.layers.0.self_attn.q_proj")

    code, _, facts = inspected(changed_copy(tmp_path / "a", INT8, config=ignore))
    assert code == 1 and facts["problems"]["unexpected"] == ["model.layers.0.self_attn.q_proj.weight_scale"]
    assert facts["problems"]["wrong"][0].startswith("model.layers.0.self_attn.q_proj.weight is I8 [128, 128]")

    def in_float(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].float()

    def all_linears(config: Config) -> None:
        config["quantization_config"]["ignore"].remove("lm_head")

    code, _, facts = inspected(changed_copy(tmp_path / "b", INT8, in_float, all_linears))
    told = "lm_head.weight is F32 [256, 128], I8 [256, 128] is accepted"
    assert code == 1 and facts["problems"]["wrong"] == [told]


def test_long_lists_are_cut_in_the_text_only(tmp_path: Path, inspected: Inspected) -> None:
    def no_scales(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("weight_scale")]:
            del tensors[name]

    code, text, facts = inspected(changed_copy(tmp_path, PACKED, no_scales))
    assert code == 1 and len(facts["problems"]["missing"]) == 2 * (8 * 3 + 4)
    assert "missing (56)" in text and "and 36 more; --json lists all" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=2), "weights 2-bit int per group of 32"),
        (lambda q: q["config_groups"]["group_0"]["weights"].update(actorder="down"), "in activation order (down)"),
        (lambda q: q["config_groups"]["group_0"]["weights"].update(symmetric=False), "asymmetric 4-bit int per group"),
        (lambda q: q["config_groups"]["group_0"].update(format="nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        (lambda q: q.update(quant_method="quanto"), "quant_method 'quanto' is not served"),
        (lambda q: q.update(config_groups=7), "config_groups is 7; a JSON object is accepted"),
    ],
)
def test_a_scheme_that_is_not_served(
    change: Callable[[Config], object], message: str, tmp_path: Path, inspected: Inspected
) -> None:
    folder = changed_copy(tmp_path, PACKED, config=lambda config: change(config["quantization_config"]))
    code, text, facts = inspected(folder)
    assert code == 1 and len(facts["problems"]["other"]) == 1 and message in facts["problems"]["other"][0]
    assert message in text and "not served (BF16/I32/I64)" in text
    assert part(facts, "experts")["memory_bytes"] is None and part(facts, "experts")["disk_bytes"] > 0
    assert facts["memory_bytes"] is None and facts["experts"]["memory_bits_per_weight"] is None


@pytest.mark.parametrize("model_type", ["mystery_moe", None, ["qwen3_moe"]])
def test_an_unknown_architecture(model_type: object, tmp_path: Path, inspected: Inspected) -> None:
    def rename(config: Config) -> None:
        config["model_type"] = model_type

    code, text, facts = inspected(changed_copy(tmp_path, PACKED, config=rename))
    assert code == 1 and f"model_type {model_type!r} is not known to transformers" in text
    assert facts["experts"] is None and part(facts, "experts")["disk_bytes"] > 0  # what can be told is told
    assert part(facts, "attention")["disk_bytes"] > 0


def test_a_model_without_experts(tmp_path: Path, inspected: Inspected) -> None:
    code, text, facts = inspected(write_dense_model(tmp_path, "w4a8-g32"))
    assert code == 0, text
    assert facts["experts"] is None and part(facts, "attention")["scheme"] == "w4a8-g32"


def test_sizes_that_do_not_fit(tmp_path: Path, inspected: Inspected) -> None:
    def other_size(config: Config) -> None:
        config["moe_intermediate_size"] = 48

    code, _, facts = inspected(changed_copy(tmp_path, PACKED, config=other_size))
    assert code == 1
    assert "intermediate_size=48; a positive multiple of 32 is accepted" in facts["problems"]["other"][0]
    assert not facts["problems"]["unexpected"]  # what is not understood is not called wrong


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, inspected: Inspected) -> None:
    def add(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.1.")]:
            tensors[name.replace(".1.", ".2.", 1)] = tensors[name].clone()
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(128, 256)

    code, text, facts = inspected(changed_copy(tmp_path, DEEPSEEK, add))
    assert code == 0, text
    left_out = part(facts, "not loaded")
    assert left_out["memory_bytes"] == 0 and left_out["disk_bytes"] > 100_000
    assert facts["memory_bytes"] == inspected(CHECKPOINTS / DEEPSEEK)[2]["memory_bytes"]


@pytest.mark.parametrize("further", [1, 10**18])
def test_a_layer_of_the_model_is_not_left_out(further: int, tmp_path: Path, inspected: Inspected) -> None:
    def one_less(config: dict[str, object]) -> None:
        config |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": further}

    code, text, facts = inspected(changed_copy(tmp_path, DEEPSEEK, config=one_less))
    assert code == 1 and "model.layers.1.input_layernorm.weight" in facts["problems"]["unexpected"], text


@pytest.mark.parametrize("kind", ["absent", "empty", "no config", "pickle", "cut", "not JSON"])
def test_a_folder_that_is_no_checkpoint(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    if kind != "absent":
        folder.mkdir()
    if kind in ("pickle", "cut", "not JSON"):
        shutil.copy(CHECKPOINTS / PACKED / "config.json", folder)
    if kind in ("no config", "cut", "not JSON"):
        data = (CHECKPOINTS / PACKED / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:-100] if kind == "cut" else data)
    if kind == "pickle":
        (folder / "pytorch_model.bin").write_bytes(b"")
    if kind == "not JSON":
        (folder / "config.json").write_text("{")
    assert cli.main(["inspect", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("cpumoe inspect: ") and str(folder) in captured.err and not captured.out


def test_shards(tmp_path: Path, inspected: Inspected) -> None:
    from safetensors.torch import load_file

    folder = changed_copy(tmp_path, PACKED)
    write_tensors(folder, load_file(CHECKPOINTS / PACKED / "model.safetensors"), shards=3)
    code, text, facts = inspected(folder)
    assert code == 0 and facts["files"] == 3 and ", 3 files" in text


# ---- float checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["per expert", "fused"])
def test_float_checkpoints(layout: str, tmp_path: Path, inspected: Inspected) -> None:
    if layout == "fused":
        folder = float_copy(tmp_path, "gptoss-w4a8-g32", lambda tensors: together(tensors, "gpt_oss"))
    else:
        folder = float_copy(tmp_path, PACKED)
    code, text, facts = inspected(folder)
    assert code == 0 and part(facts, "experts")["held"] == "float (BF16)"
    assert facts["experts"]["disk_bits_per_weight"] >= 16 and "--scheme quantises its experts" in text
    offers = {offer["scheme"]: offer["memory_bytes"] for offer in facts["schemes"]}
    assert {"w8a8", "w4a8", "w4a8-g32"} <= set(offers) and "w4a8-g128" not in offers
    for scheme, size in offers.items():
        with Checkpoint.open(folder) as checkpoint:
            experts = [
                load_experts(source)
                for source in experts_of(checkpoint, describe(checkpoint), Scheme.parse(scheme)).values()
            ]
        assert size == sum(e.packed_bytes for e in experts)
        assert f"{scheme} {size_text(size)}" in " ".join(text.split())
        _, _, chosen = inspected(folder, "--scheme", scheme)
        assert part(chosen, "experts")["memory_bytes"] == size and chosen["schemes"] == []
        assert part(chosen, "experts")["held"] == f"{scheme}, from float (BF16)"


def test_schemes_that_do_not_fit(tmp_path: Path, inspected: Inspected, capsys: pytest.CaptureFixture[str]) -> None:
    folder = float_copy(tmp_path, PACKED)
    code, text, _ = inspected(folder, "--scheme", "w4a8-g128")
    assert code == 1 and "group_size=128 does not divide in_features=64; use 32, 64" in text
    with pytest.raises(SystemExit, match="2"):
        cli.main(["inspect", str(folder), "--scheme", "w3a8"])
    assert "argument --scheme: scheme 'w3a8' is not known" in capsys.readouterr().err
    assert cli.main(["inspect", str(CHECKPOINTS / PACKED), "--scheme", "w8a8"]) == 2
    assert "quantised already" in capsys.readouterr().err


def test_a_missing_tensor_of_a_float_checkpoint(tmp_path: Path, inspected: Inspected) -> None:
    def without(tensors: Tensors) -> Tensors:
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        return tensors

    code, _, facts = inspected(float_copy(tmp_path, PACKED, without))
    assert code == 1 and facts["problems"]["missing"] == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
    ]


def test_files_larger_than_memory_are_opened(tmp_path: Path) -> None:
    """A process that may not map so much looks at embeddings of 64 GiB, of which the disk has nothing."""
    rows, hidden = 2**28, 128
    folder = changed_copy(tmp_path, INT8, config=lambda config: config.update(vocab_size=rows))
    large = ("BF16", (rows, hidden), 2 * rows * hidden)
    end = write_holes(folder / "model.safetensors", {"model.embed_tokens.weight": large, "lm_head.weight": large})
    done = run_with_address_space(32 << 30, "inspect", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["disk_bytes"] == end > 128 << 30
