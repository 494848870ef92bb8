"""``cpumoe inspect`` reports a problem exactly when loading raises, for checkpoints that are damaged in many ways.

Fuzzing (``test_fuzz_checkpoints.py``) changes single tensors and fields. Here they are changed in all layers at once,
where no layer has a neighbour that shows what is wrong, and configurations are changed so that they mean another model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from changed_checkpoints import CHECKPOINTS, NAMES, TENSOR_CHANGES, Config, Tensors, changed_copy, outcome
from safetensors.torch import load_file, save_file
from sampling import sampled_product

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.inspection import Survey
from cpumoe.integrations.transformers.facade import describe

PACKED, INT8 = "qwen3moe-w4a8-g32-packed", "qwen3moe-w8a8-int8"


def tensors_by_place(name: str) -> dict[str, list[str]]:
    """Names of the tensors of all layers and experts that have the same place in them."""
    places: dict[str, list[str]] = {}
    for tensor in sorted(load_file(CHECKPOINTS / name / "model.safetensors")):
        place = re.sub(r"experts\.\d+", "experts.N", re.sub(r"layers\.\d+", "layers.N", tensor))
        places.setdefault(place, []).append(tensor)
    return places


@pytest.mark.parametrize(("name", "way"), sampled_product(NAMES, ["missing", "of one row less"]))
def test_a_tensor_that_is_wrong_in_all_layers(name: str, way: str, tmp_path: Path) -> None:
    folder = changed_copy(tmp_path, name)
    for place, tensors in tensors_by_place(name).items():
        changed = load_file(CHECKPOINTS / name / "model.safetensors")
        for tensor in tensors:
            TENSOR_CHANGES[way](changed, tensor)
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        model, said = outcome(folder)
        assert model is None, place
        modules = [tensor.rpartition(".")[0] for tensor in tensors]  # transformers renames what it knows
        assert any(m in said or m.replace("block_sparse_moe", "mlp") in said for m in modules), (place, said)


def field(name: str, value: object) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        config[name] = value

    return change


def group(**values: object) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        config["quantization_config"]["config_groups"]["group_0"].update(values)

    return change


def ignore(*names: str) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        config["quantization_config"]["ignore"] = list(names)

    return change


CONFIG_CHANGES = {
    "one layer more": field("num_hidden_layers", 3),
    "one layer less": field("num_hidden_layers", 1),
    "one expert more": field("num_experts", 9),
    "one expert less": field("num_experts", 7),
    "other experts": field("moe_intermediate_size", 96),
    "other width": field("hidden_size", 256),
    "other heads": field("num_attention_heads", 8),
    "other keys": field("num_key_value_heads", 1),
    "other head size": field("head_dim", 64),
    "other vocabulary": field("vocab_size", 255),
    "biases": field("attention_bias", True),
    "a tied head": field("tie_word_embeddings", True),
    "no tied head": field("tie_word_embeddings", False),
    "dense layers": field("mlp_only_layers", [0]),
    "another method": lambda config: config["quantization_config"].update(quant_method="gptq"),
    "no quantisation": lambda config: config.pop("quantization_config"),
    "the other format": lambda config: group(
        format={"pack-quantized": "int-quantized", "int-quantized": "pack-quantized"}[
            config["quantization_config"]["config_groups"]["group_0"]["format"]
        ]
    )(config),
    "nothing quantised": group(targets=["nothing"]),
    "all quantised": ignore(),
    "the head quantised, tied": lambda config: (ignore()(config), config.update(tie_word_embeddings=True)),
    "a linear in float": ignore("lm_head", "re:.*mlp.gate$", "model.layers.0.self_attn.q_proj"),
    "experts in float": ignore("lm_head", "re:.*mlp.gate$", "re:.*layers.1.mlp.experts.*"),
    "one expert in float": ignore("lm_head", "re:.*mlp.gate$", "re:.*layers.1.mlp.experts.3.*"),
}


@pytest.mark.parametrize(
    ("change", "name", "without_head"), sampled_product(list(CONFIG_CHANGES), [PACKED, INT8], [False, True])
)
def test_a_configuration_of_another_model(name: str, change: str, without_head: bool, tmp_path: Path) -> None:
    def no_head(tensors: Tensors) -> None:
        if without_head:
            del tensors["lm_head.weight"]

    folder = changed_copy(tmp_path, name, no_head, CONFIG_CHANGES[change])
    _, said = outcome(folder)
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (missing|of another kind|unexpected): ", said)}
    if counts:  # both count the same tensors
        with Checkpoint.open(folder) as checkpoint:
            problems = Survey(checkpoint, describe).problems
        found = {"missing": problems.missing, "of another kind": problems.wrong, "unexpected": problems.unexpected}
        assert counts == {kind: len(names) for kind, names in found.items() if names}
