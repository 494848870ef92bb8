"""Compressed-tensors files whose tensors tell what their configuration does not, or tells in another way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_checkpoints import CHECKPOINTS, Config, Tensors, changed_copy, float_copy
from loaded_weights import assert_loads, packed_weights, refusal
from safetensors.torch import load_file

pytest.importorskip("transformers")

import cpumoe
from cpumoe import CheckpointError, UnsupportedScheme, cli
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.layers.nibbles import pack_nibbles, unpack_nibbles

PACKED, BYTES, CHANNEL = "qwen3moe-w4a8-g32-packed", "qwen3moe-w8a8-int8", "mixtral-w4a8-channel"
QUERY, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.3.up_proj"
GROUP = 32


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, torch.Tensor]]:
    return {name: packed_weights(CHECKPOINTS / name)[0] for name in (PACKED, BYTES, CHANNEL)}


Weights = dict[str, dict[str, torch.Tensor]]


def section(**values: object) -> Callable[[Config], None]:
    return lambda config: config["quantization_config"].update(values)


def in_group(part: str, **values: object) -> Callable[[Config], None]:
    return lambda config: config["quantization_config"]["config_groups"]["group_0"][part].update(values)


# ---- quantization_status -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [PACKED, BYTES])
def test_compressed_files_of_any_status_are_read(name: str, weights: Weights, tmp_path: Path) -> None:
    assert_loads(changed_copy(tmp_path, name, config=section(quantization_status="frozen")), weights[name])


def test_calibrated_floats_are_refused_in_one_sentence(tmp_path: Path) -> None:
    float_copy(tmp_path / "float", BYTES)
    floats = load_file(tmp_path / "float" / "model.safetensors")

    def uncompressed(tensors: Tensors) -> None:
        tensors.update({name: tensor for name, tensor in floats.items() if f"{name}_scale" in tensors})

    folder = changed_copy(tmp_path / "model", BYTES, uncompressed, section(quantization_status="frozen"))
    said = refusal(folder, UnsupportedScheme)
    assert said.startswith(f"{folder}: quantization_status is 'frozen'") and said.count(str(folder)) == 1
    assert "quantization_status is 'frozen', and 56 linears have weights in float beside their scales, such as" in said
    assert ".weight (BF16 [" in said and "save_compressed=True" in said and len(said) < 600


def test_refusals_of_the_configuration_name_the_folder_once(tmp_path: Path) -> None:
    folder = changed_copy(tmp_path, PACKED, config=section(quantization_status="thawed"))
    with pytest.raises(UnsupportedScheme) as refused:
        cpumoe.load_model(folder)
    said = str(refused.value)
    assert said.startswith(f"{folder}: quantization_config in config.json: quantization_status 'thawed'")
    assert said.count(str(folder)) == 1


# ---- kv_cache_scheme -------------------------------------------------------------------------------------------------

FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
INT8_CACHE = FP8_CACHE | {"type": "int"}


def with_scales(scale: torch.Tensor, *names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for layer in range(2):
            tensors.update({f"model.layers.{layer}.self_attn.{name}": scale.clone() for name in names})

    return change


@pytest.mark.parametrize(
    ("scheme", "scale", "names", "said"),
    [
        (FP8_CACHE, torch.tensor([0.5]).bfloat16(), ("k_scale", "v_scale"), "8-bit float per tensor"),
        (INT8_CACHE, torch.tensor(0.5), ("k_scale", "v_scale", "q_scale"), "8-bit int per tensor"),
        (FP8_CACHE, torch.tensor([0.5]), ("k_proj.output_scale", "v_proj.output_scale"), "8-bit float per tensor"),
        (FP8_CACHE | {"strategy": "attn_head"}, torch.ones(2, 1, 1), ("k_scale", "v_scale"), "8-bit float per head"),
        (INT8_CACHE | {"symmetric": False}, torch.ones(1), ("k_scale", "k_zero_point"), "asymmetric 8-bit int"),
        (FP8_CACHE | {"dynamic": True}, torch.ones(1), (), "dynamic 8-bit float per tensor"),
    ],
)
def test_a_quantised_kv_cache_loads_and_says_what_becomes_of_it(
    scheme: Config,
    scale: torch.Tensor,
    names: tuple[str, ...],
    said: str,
    weights: Weights,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = changed_copy(tmp_path, PACKED, with_scales(scale, *names), section(kv_cache_scheme=scheme))
    sentence = f"kv_cache_scheme ({said}"
    cpumoe.load_model(folder)
    (line,) = [record.getMessage() for record in caplog.records if "kv_cache" in record.getMessage()]
    assert sentence in line and "): the KV cache is held in the model's dtype" in line
    assert (f"its {2 * len(names)} calibrated scales and zero points are not used" in line) == bool(names)
    assert cli.main(["inspect", str(folder)]) == 0
    assert sentence in capsys.readouterr().out
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kv_cache"] in line
    assert any(part["kind"] == "not loaded" for part in facts["parts"]) == bool(names)
    assert_loads(folder, weights[PACKED])


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (torch.tensor([0.0]), "k_scale holds 0; positive finite numbers are accepted"),
        (torch.tensor([float("nan")]), "k_scale holds nan"),
        (torch.tensor([-1.0]), "k_scale holds -1"),
        (torch.ones(2), "k_scale is F32 [2], BF16 or F16 or F32 [1] is accepted"),
        (torch.ones(1, dtype=torch.int8), "k_scale is I8 [1]"),
    ],
)
def test_damaged_scales_of_a_kv_cache_are_refused_by_name(scale: torch.Tensor, said: str, tmp_path: Path) -> None:
    folder = changed_copy(tmp_path, PACKED, with_scales(scale, "k_scale"), section(kv_cache_scheme=FP8_CACHE))
    assert f"model.layers.0.self_attn.{said}" in refusal(folder)


def test_a_zero_point_of_a_symmetric_kv_cache_is_refused(tmp_path: Path) -> None:
    change = with_scales(torch.tensor([3], dtype=torch.int8), "v_zero_point")
    folder = changed_copy(tmp_path, PACKED, change, section(kv_cache_scheme=FP8_CACHE))
    assert "v_zero_point is 3, and kv_cache_scheme is symmetric; 0 is accepted" in refusal(folder)


def test_scales_of_a_kv_cache_that_is_not_announced_are_unexpected(tmp_path: Path) -> None:
    folder = changed_copy(tmp_path, PACKED, with_scales(torch.ones(1), "k_scale"))
    assert "2 unexpected: model.layers.0.self_attn.k_scale" in refusal(folder)


@pytest.mark.parametrize(
    "change", [{"num_bits": 4}, {"strategy": "group", "group_size": 16}, {"type": "fp"}, {"dynamic": "local"}]
)
def test_an_unknown_kv_cache_is_refused_by_name(change: Config, tmp_path: Path) -> None:
    folder = changed_copy(tmp_path, PACKED, config=section(kv_cache_scheme=FP8_CACHE | change))
    assert f"kv_cache_scheme {FP8_CACHE | change} is not served; 8-bit int" in refusal(folder, UnsupportedScheme)


@pytest.mark.parametrize("groups", [{"config_groups": {}}, {}])
def test_the_kv_cache_alone_may_be_quantised(tmp_path: Path, groups: dict[str, Any]) -> None:
    cache = {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_CACHE, **groups}
    float_copy(tmp_path, PACKED)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": cache}))
    assert packed_weights(tmp_path)[1] == {"bf16"}


# ---- weight_shape --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", ".self_attn.", ".experts.", ".experts.3.", "layers.0.self_attn.q_proj."])
def test_files_need_not_say_sizes(part: str, weights: Weights, tmp_path: Path) -> None:
    def without_shapes(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_shape") and part in name]:
            del tensors[name]

    folder = changed_copy(tmp_path / "model", PACKED, without_shapes)
    assert_loads(folder, weights[PACKED])
    cpumoe.load_model(folder).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert len(saved["config_groups"]) == 1


# ---- weight_g_idx --------------------------------------------------------------------------------------------------


def with_index(index: torch.Tensor | None, *modules: str) -> Callable[[Tensors], None]:
    """Adds an index of groups to some linears, or to all; None: of the own order of the inputs."""

    def change(tensors: Tensors) -> None:
        for module in modules or [name.removesuffix(".weight_scale") for name in tensors if name.endswith("_scale")]:
            packed = tensors.get(f"{module}.weight_packed")
            inputs = tensors[f"{module}.weight"].shape[1] if packed is None else packed.shape[1] * 8
            size = inputs // tensors[f"{module}.weight_scale"].shape[1]
            own = torch.arange(inputs, dtype=torch.int32) // size
            tensors[f"{module}.weight_g_idx"] = own if index is None else index.expand(inputs).clone()

    return change


@pytest.mark.parametrize("name", [PACKED, BYTES, CHANNEL])
@pytest.mark.parametrize("modules", [(), (UP,)])
@pytest.mark.parametrize("index", [None, torch.tensor([-1], dtype=torch.int32)])
def test_an_index_in_the_own_order_changes_nothing(
    index: torch.Tensor | None, modules: tuple[str, ...], name: str, weights: Weights, tmp_path: Path
) -> None:
    if name == CHANNEL and modules:
        modules = (next(module for module in weights[name] if ".experts.3." in module),)
    folder = changed_copy(tmp_path, name, with_index(index, *modules), in_group("weights", actorder=False))
    assert_loads(folder, weights[name])
    with Checkpoint.open(folder) as checkpoint:  # and costs nothing when the weights are used
        assert checkpoint.quantization is not None
        storages = [checkpoint.storage_of(module) for module in weights[name]]
    assert not any(storage is None or storage.has_input_order for storage in storages)


def shuffled(*prefixes: str) -> Callable[[Tensors], None]:
    """Brings the inputs of some linears into another order, and says so in an index of groups alone."""

    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(".weight_packed") and n.startswith(prefixes)]:
            module = name.removesuffix(".weight_packed")
            values = unpack_nibbles(tensors[name].view(torch.uint8))
            order = torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(values.shape[1]))
            tensors[name] = pack_nibbles(values[:, order]).view(torch.int32)
            tensors[f"{module}.weight_g_idx"] = (order // GROUP).to(torch.int32)

    return change


@pytest.mark.parametrize(
    ("prefixes", "actorder"),
    [(("",), "group"), (("",), None), (("model.layers.1.mlp.experts",), None), ((QUERY,), None)],
)
def test_an_index_in_another_order_is_used(
    prefixes: tuple[str, ...], actorder: str | None, weights: Weights, tmp_path: Path
) -> None:
    """Whether the configuration announces it or not."""
    folder = changed_copy(tmp_path, PACKED, shuffled(*prefixes), in_group("weights", actorder=actorder))

    def expected(name: str, weight: torch.Tensor) -> torch.Tensor:
        if not name.startswith(prefixes):
            return weight
        return weight[:, torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))]

    assert_loads(folder, {name: expected(name, weight) for name, weight in weights[PACKED].items()})


def test_an_order_that_the_files_alone_tell_is_announced_when_saved(tmp_path: Path) -> None:
    folder = changed_copy(tmp_path / "model", PACKED, shuffled("model.layers.1.mlp.experts"))
    cpumoe.load_model(folder).save_pretrained(tmp_path / "saved")
    groups = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert sorted(group["weights"].get("actorder") or "" for group in groups.values()) == ["", "group"]
    assert_loads(tmp_path / "saved", packed_weights(folder)[0])


@pytest.mark.parametrize("actorder", ["group", None])
@pytest.mark.parametrize("module", [QUERY, UP])
def test_an_index_that_is_no_grouping_is_refused_by_name(module: str, actorder: str | None, tmp_path: Path) -> None:
    def damaged(tensors: Tensors) -> None:
        with_index(None)(tensors)
        tensors[f"{module}.weight_g_idx"][3] = 1

    with pytest.raises(CheckpointError, match=f"{module}.weight_g_idx has 31 inputs in group 0; 32 are accepted"):
        packed_weights(changed_copy(tmp_path, PACKED, damaged, in_group("weights", actorder=actorder)))


def test_an_index_that_some_experts_of_a_layer_lack_is_refused_by_name(tmp_path: Path) -> None:
    def without(tensors: Tensors) -> None:
        shuffled("model.layers.1.mlp.experts")(tensors)
        del tensors[f"{UP}.weight_g_idx"]

    assert f"1 missing: {UP}.weight_g_idx" in refusal(changed_copy(tmp_path, PACKED, without))


def test_activations_may_be_described_by_nothing(weights: Weights, tmp_path: Path) -> None:
    def absent(config: Config) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {}

    assert assert_loads(changed_copy(tmp_path, PACKED, config=absent), weights[PACKED]) == {"w4a16-g32"}
