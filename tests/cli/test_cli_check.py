"""``cpumoe check``: good checkpoints agree; what is wrong with a file, the packing or a kernel is found and named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_checkpoints import CHECKPOINTS, NAMES, Config, Tensors, changed_copy, float_copy
from conftest import SUPPORTED_ISAS
from tiny_architectures import together, write_float, write_quantized
from tiny_models import write_dense_model
from torch import Tensor

import cpumoe
from cpumoe import cli
from cpumoe.checkpoints import expert_sources, linear_sources, loading, verification
from cpumoe.checkpoints.formats.compressed_storages import Fp4Storage, IntegerStorage
from cpumoe.checkpoints.storage import LinearStorage
from cpumoe.layers.quantized_experts import QuantizedWeight

PACKED = "qwen3moe-w4a8-g32-packed"
INT8 = "qwen3moe-w8a8-int8"
CHANNEL = "mixtral-w4a8-channel"

Checked = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of tiny operations: on a busy machine the threads would wait for each other
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str]) -> Checked:
    """Runs the command twice: its exit code, its text and its JSON."""

    def run(*arguments: object) -> tuple[int, str, dict[str, Any]]:
        code = cli.main(["check", *map(str, arguments)])
        text = capsys.readouterr().out
        assert cli.main(["check", *map(str, arguments), "--json"]) == code
        facts = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        return code, text, facts

    return run


def modules(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {module["name"]: module for layer in facts["layers"] for module in layer["modules"]}


def scaled(name: str, value: float, index: tuple[int, ...] = (0, 0)) -> Callable[[Tensors], None]:
    """A change that sets one element of a tensor."""

    def change(tensors: Tensors) -> None:
        tensors[name][index] = value

    return change


@pytest.mark.parametrize("name", NAMES)
def test_good_checkpoints_agree(name: str, checked: Checked) -> None:
    code, text, facts = checked(CHECKPOINTS / name)
    assert code == 0 and facts["agrees"] and facts["first_difference"] is None and facts["warnings"] == 0
    kinds = [module["kind"] for module in modules(facts).values()]
    experts = {"deepseekv3-w4a8-g32": 1}.get(name, 2)
    assert kinds.count("experts") == experts and kinds.count("linear") == {1: 16, 2: 8}[experts]
    assert [layer["layer"] for layer in facts["layers"]] == ["model.layers.0", "model.layers.1"]
    for module in modules(facts).values():
        assert module["difference"] < (1e-2 if module["kind"] == "experts" else 1e-5)
    assert text.count(" ok ") == 2 and "2 of 2 layers agree with the reference" in text


@pytest.mark.parametrize("isa", SUPPORTED_ISAS)
def test_instruction_sets(isa: str, checked: Checked) -> None:
    before = cpumoe.isa()
    code, text, facts = checked(CHECKPOINTS / "gptoss-w4a8-g32", "--isa", isa, "--layers", "1")
    assert code == 0 and facts["isa"] == isa and f"{isa} kernels" in text
    assert cpumoe.isa() == before


def test_layers_and_tokens(checked: Checked) -> None:
    code, text, facts = checked(CHECKPOINTS / PACKED, "--layers", "1", "--tokens", "3")
    assert code == 0 and {name.split(".")[2] for name in modules(facts)} == {"1"} and "1 of 1 layers" in text


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "scheme",
    ["w4a8-g32", "w4a8", "w8a8", "w8a8-g32", "w4a16-g32", "w8a16", "w4a16-g32-asym", "mxfp4a16", "nvfp4a16"],
)
def test_float_checkpoints(scheme: str, tmp_path: Path, checked: Checked) -> None:
    per_expert = float_copy(tmp_path / "apart", PACKED)
    fused = float_copy(tmp_path / "fused", "gptoss-w4a8-g32", lambda tensors: together(tensors, "gpt_oss"))
    for folder in (per_expert, fused):
        code, text, facts = checked(folder, "--scheme", scheme)
        assert code == 0, text
        assert {module["scheme"] for module in modules(facts).values()} == {scheme}
        assert list(modules(facts)) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def test_a_quantised_head_and_a_model_without_experts(tmp_path: Path, checked: Checked) -> None:
    folder = write_dense_model(tmp_path, "w4a8-g32")
    code, text, facts = checked(folder)
    assert code == 0 and "lm_head" in modules(facts) and "\nlm_head" in f"\n{text}"
    assert {module["kind"] for module in modules(facts).values()} == {"linear"}
    assert "lm_head" not in modules(checked(folder, "--layers", "0,1")[2])


# ---- packed weights that are not those of the file, kernels that compute something else -----------------------------


def test_a_scale_that_changed_while_it_was_loaded(monkeypatch: pytest.MonkeyPatch, checked: Checked) -> None:
    real = IntegerStorage.decode

    def changed(self: IntegerStorage, *arguments: Any) -> QuantizedWeight:
        weight = real(self, *arguments)
        scales = weight.scales.clone()
        scales.view(-1)[5] *= 1.01
        return replace(weight, scales=scales)

    monkeypatch.setattr(IntegerStorage, "decode", changed)
    code, text, facts = checked(CHECKPOINTS / PACKED)
    assert code == 1 and facts["first_difference"] == "model.layers.0.mlp.experts"
    assert len(facts["differing"]) == 10 and "0 of 2 layers agree" in text
    found = modules(facts)
    told = "model.layers.0.self_attn.k_proj: 1 of 256 packed scales are not those of the file"
    assert found["model.layers.0.self_attn.k_proj"]["problems"][0] == told
    told = "model.layers.0.mlp.experts.0.gate_proj: 1 of 256 packed scales are not those of the file"
    assert told in found["model.layers.0.mlp.experts"]["problems"] and f"    {told}\n" in text
    assert text.endswith("the first that differs: model.layers.0.mlp.experts\n")


def test_weights_that_changed_in_memory_in_one_layer(monkeypatch: pytest.MonkeyPatch, checked: Checked) -> None:
    def damaged(source: expert_sources.ExpertSource, backend: str | None = None) -> cpumoe.Experts:
        experts = loading.load_experts(source, backend)
        if "layers.1." in source.prefix:
            experts.get_buffer("down_packed")[-1] ^= 1
        return experts

    monkeypatch.setattr(verification, "load_experts", damaged)
    code, text, facts = checked(CHECKPOINTS / CHANNEL)
    assert code == 1 and facts["differing"] == ["model.layers.1.mlp.experts"]
    assert [layer["agrees"] for layer in facts["layers"]] == [True, False]
    (problem, *_) = modules(facts)["model.layers.1.mlp.experts"]["problems"]
    assert problem.endswith("experts.7.down_proj: 1 of 8192 packed integers are not those of the file")
    assert "model.layers.0       ok" in text and "model.layers.1       DIFFERS" in text
    assert checked(CHECKPOINTS / CHANNEL, "--layers", "0")[0] == 0


def test_integers_that_are_decoded_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch, checked: Checked) -> None:
    real = IntegerStorage.decode

    def backwards(self: IntegerStorage, *arguments: Any) -> QuantizedWeight:
        weight = real(self, *arguments)
        return replace(weight, values=weight.values.flip(-1))

    monkeypatch.setattr(IntegerStorage, "decode", backwards)
    code, _, facts = checked(CHECKPOINTS / PACKED)
    assert code == 1 and len(facts["differing"]) == 10
    assert all("packed integers are not those of the file" in m["problems"][0] for m in modules(facts).values())


@pytest.mark.parametrize(
    ("scheme", "form", "part", "said"),
    [
        ("w4a16-g32-asym", "pack-quantized", "zero_points", "zero points"),
        ("w4a16-g32-asym", "pack-quantized", "scales", "scales"),
        ("mxfp4a16", "mxfp4-pack-quantized", "scales", "scales"),
        ("nvfp4a16", "nvfp4-pack-quantized", "factors", "factors"),
        ("nvfp4a16", "nvfp4-pack-quantized", "values", "integers|codes|values"),
    ],
)
def test_any_part_of_a_weight_that_changed_while_it_was_loaded(
    scheme: str, form: str, part: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: Checked
) -> None:
    folder = write_quantized(write_float(tmp_path / "float", "qwen3_moe"), tmp_path / "model", scheme, form)
    assert checked(folder)[0] == 0
    storage = Fp4Storage if "fp4" in scheme else IntegerStorage
    real = storage.decode

    def changed(self: LinearStorage, *arguments: Any) -> QuantizedWeight:
        weight = real(self, *arguments)
        tensor = getattr(weight, part).clone(memory_format=torch.contiguous_format)
        if part == "factors":
            tensor.view(-1)[3] *= 1.25
        else:  # another of the 16 values, or the next scale
            tensor.view(-1).view(torch.uint8)[3] ^= 1
        return replace(weight, **{part: tensor})

    monkeypatch.setattr(storage, "decode", changed)
    code, text, facts = checked(folder)
    assert code == 1 and len(facts["differing"]) == 10, text
    told = modules(facts)["model.layers.0.self_attn.k_proj"]["problems"][0]
    assert re.search(rf"packed ({said}) are not those of the file", told), told


def test_a_kernel_that_is_slightly_wrong(monkeypatch: pytest.MonkeyPatch, checked: Checked) -> None:
    real = cpumoe.QuantizedLinear.forward

    def wrong(self: cpumoe.QuantizedLinear, x: Tensor) -> Tensor:
        return real(self, x) * (1.003 if self.out_features == 64 else 1.0)

    monkeypatch.setattr(cpumoe.QuantizedLinear, "forward", wrong)
    code, text, facts = checked(CHECKPOINTS / PACKED)
    assert code == 1 and facts["first_difference"] == "model.layers.0.self_attn.k_proj"
    found = modules(facts)["model.layers.0.self_attn.k_proj"]
    assert found["difference"] == pytest.approx(3e-3, rel=0.1) and "3.0e-03 away from the reference" in text
    assert modules(facts)["model.layers.0.mlp.experts"]["problems"] == []
    assert checked(CHECKPOINTS / PACKED, "--tolerance", "0.01")[0] == 0


def test_a_kernel_that_gives_nan_for_single_tokens(monkeypatch: pytest.MonkeyPatch, checked: Checked) -> None:
    real = cpumoe.Experts.forward

    def wrong(self: cpumoe.Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = real(self, x, ids, weights)
        return out / 0 * 0 if len(x) == 1 else out

    monkeypatch.setattr(cpumoe.Experts, "forward", wrong)
    code, text, facts = checked(CHECKPOINTS / INT8)
    assert code == 1 and "the output of token 0 is not finite" in text
    assert facts["first_difference"] == "model.layers.0.mlp.experts"


# ---- damaged files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor", "module"),
    [
        (PACKED, "model.layers.1.mlp.experts.3.up_proj.weight_scale", "model.layers.1.mlp.experts"),
        (PACKED, "model.layers.1.self_attn.q_proj.weight_scale", "model.layers.1.self_attn.q_proj"),
        (CHANNEL, "model.layers.1.block_sparse_moe.experts.0.down_proj.weight_scale", "model.layers.1.mlp.experts"),
        ("gptoss-w4a8-g32", "model.layers.1.mlp.experts.2.down_proj.bias", "model.layers.1.mlp.experts"),
    ],
)
def test_flipped_bits_that_make_nan(name: str, tensor: str, module: str, tmp_path: Path, checked: Checked) -> None:
    def flip(tensors: Tensors) -> None:
        tensors[tensor].view(torch.int16).view(-1)[1] |= 0x7F81  # exponent of ones and a bit of the fraction

    code, text, facts = checked(changed_copy(tmp_path, name, flip))
    assert code == 1 and facts["differing"] == [module] and facts["first_difference"] == module
    problems = modules(facts)[module]["problems"]
    assert problems[0].startswith(f"{tensor}: 1 of ") and problems[0].endswith("values are NaN or infinite")
    assert problems[0] in text and "model.layers.0       ok" in text and "Traceback" not in text


def test_integers_that_do_not_fit(tmp_path: Path, checked: Checked) -> None:
    tensor = "model.layers.0.block_sparse_moe.experts.6.gate_proj.weight"
    code, text, facts = checked(changed_copy(tmp_path, CHANNEL, scaled(tensor, 100)))
    problems = modules(facts)["model.layers.0.mlp.experts"]["problems"]
    assert code == 1 and "experts.6.gate_proj: integers from -8 to 100; -8 to 7 are accepted" in problems[0]
    assert "model.layers.0.mlp.experts cannot be loaded" in problems[1] and "not run" in text


@pytest.mark.parametrize("module", ["mlp.experts.1.down_proj", "self_attn.o_proj"])
def test_a_shape_that_is_not_that_of_the_weight(module: str, tmp_path: Path, checked: Checked) -> None:
    name = f"model.layers.1.{module}"
    code, text, facts = checked(changed_copy(tmp_path, PACKED, scaled(f"{name}.weight_shape", 96, (1,))))
    assert code == 1 and facts["first_difference"] in name and f"{name}.weight_shape is" in text


def test_weights_that_look_wrong_are_warnings(tmp_path: Path, checked: Checked) -> None:
    def dead_experts(tensors: Tensors) -> None:
        prefix = "model.layers.0.block_sparse_moe.experts"
        tensors[f"{prefix}.1.down_proj.weight"].zero_()
        tensors[f"{prefix}.2.up_proj.weight"].copy_(torch.randint(0, 2, (64, 128)) * 15 - 8)

    code, text, facts = checked(changed_copy(tmp_path, CHANNEL, dead_experts))
    assert code == 0 and facts["warnings"] == 2 and "; 2 warnings" in text
    prefix = "model.layers.0.block_sparse_moe.experts"
    assert modules(facts)["model.layers.0.mlp.experts"]["warnings"] == [
        f"{prefix}.1.down_proj: all weights are zero",
        f"{prefix}.2.up_proj: saturated, 100% of the weights are at an end of the range",
    ]
    assert f"    warning: {prefix}.1.down_proj: all weights are zero" in text


def test_scales_that_are_zero(tmp_path: Path, checked: Checked) -> None:
    tensor = "model.layers.0.block_sparse_moe.experts.3.gate_proj.weight_scale"
    code, _, facts = checked(changed_copy(tmp_path, CHANNEL, lambda tensors: tensors[tensor][:5].zero_()))
    found = modules(facts)["model.layers.0.mlp.experts"]
    assert code == 1 and found["warnings"] == [f"{tensor}: 5 of 64 scales are zero"]
    assert f"{tensor} holds 0 at [0, 0] (5 such values); positive finite numbers are accepted" in found["problems"][0]


def test_long_lists_are_cut_in_the_text_only(tmp_path: Path, checked: Checked) -> None:
    def no_weights(tensors: Tensors) -> None:
        for name in [n for n in tensors if "layers.0.mlp.experts" in n and n.endswith("weight")]:
            tensors[name].zero_()

    code, text, facts = checked(changed_copy(tmp_path, INT8, no_weights))
    assert code == 0 and facts["warnings"] == 24
    assert "warning: model.layers.0.mlp.experts: 16 more; --json lists all" in text


def test_a_file_that_shrinks_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checked: Checked) -> None:
    folder = changed_copy(tmp_path, PACKED)
    real = linear_sources.LinearSource.load

    def cut(self: linear_sources.LinearSource) -> cpumoe.QuantizedLinear:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(file.seek(0, 2) // 2)
        return real(self)

    monkeypatch.setattr(linear_sources.LinearSource, "load", cut)
    assert cli.main(["check", str(folder)]) == 1


# ---- what cannot be checked ----------------------------------------------------------------------------------------


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command says when it ends with 2."""
    assert cli.main(["check", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("cpumoe check: ")
    return captured.err


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = CHECKPOINTS / PACKED
    assert "there is no such folder" in refusal(capsys, tmp_path / "nowhere")
    assert "--tokens 2; 3 or more" in refusal(capsys, good, "--tokens", 2)
    assert "--tolerance 0.0; a positive number" in refusal(capsys, good, "--tolerance", 0)
    assert "--layers 2: layers with quantised weights are 0, 1" in refusal(capsys, good, "--layers", "0,2")
    assert "quantised already" in refusal(capsys, good, "--scheme", "w8a8")
    assert "is a float checkpoint; say what" in refusal(capsys, float_copy(tmp_path, PACKED))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["check", str(good), "--layers", "a"])


def test_what_is_missing_or_not_served_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, tensor in enumerate(
        ("model.layers.1.mlp.experts.3.up_proj.weight_scale", "model.layers.0.self_attn.k_proj.weight_packed")
    ):
        folder = changed_copy(tmp_path / str(number), PACKED, lambda tensors, name=tensor: tensors.pop(name))
        assert f"1 missing: {tensor}" in refusal(capsys, folder)

    def not_served(config: Config) -> None:
        config["quantization_config"]["quant_method"] = "quanto"

    folder = changed_copy(tmp_path / "quanto", PACKED, config=not_served)
    assert "quant_method 'quanto' is not served" in refusal(capsys, folder)
