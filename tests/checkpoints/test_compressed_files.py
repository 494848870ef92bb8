"""Compressed-tensors files whose tensors tell what their configuration does not, or tells in another way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from changed_checkpoints import CHECKPOINTS, Config, Tensors, changed_copy, float_copy
from loaded_weights import assert_loads, packed_weights, refusal
from safetensors.torch import load_file

pytest.importorskip("transformers")

import cpumoe
from cpumoe import CheckpointError, UnsupportedScheme
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
    assert "quantization_status is 'frozen', and 56 linears have weights in float beside their scales, such as" in said
    assert ".weight (BF16 [" in said and "save_compressed=True" in said and len(said) < 600


# ---- weight_shape --------------------------------------------------------------------------------------------------


def test_files_need_not_say_sizes(weights: Weights, tmp_path: Path) -> None:
    def without_shapes(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_shape")]:
            del tensors[name]

    assert_loads(changed_copy(tmp_path, PACKED, without_shapes), weights[PACKED])


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
