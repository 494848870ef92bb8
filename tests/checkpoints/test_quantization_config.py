"""``quantization_config``: what is served is understood, everything else is refused with what it is."""

from __future__ import annotations

import copy
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpumoe import CheckpointError, Scheme, UnsupportedScheme
from cpumoe.checkpoints.formats import QUANT_METHODS, parse_quantization
from cpumoe.checkpoints.formats.compressed_storages import IntegerStorage, storage_for, storage_in
from cpumoe.checkpoints.formats.compressed_tensors import write_config
from cpumoe.checkpoints.formats.name_patterns import NamePatterns

#: The ``quantization_config`` of checkpoints as llm-compressor, GPTQ, AWQ and OpenAI wrote them.
CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "quantization_configs.json").read_text())

SERVED = {
    "deepseekv3-w4a8-g32": ("w4a8-g32", "int-quantized"),
    "gptoss-w4a8-g32": ("w4a8-g32", "int-quantized"),
    "mixtral-w4a8-channel": ("w4a8", "int-quantized"),
    "qwen3moe-w4a8-channel": ("w4a8", "int-quantized"),
    "qwen3moe-w4a8-g32": ("w4a8-g32", "int-quantized"),
    "qwen3moe-w4a8-g32-packed": ("w4a8-g32", "pack-quantized"),
    "qwen3moe-w8a8-int8": ("w8a8", "int-quantized"),
    "qwen3moe-w4a16-g32": ("w4a16-g32", "pack-quantized"),
    "qwen3moe-w4a16-actgroup-g32": ("w4a16-g32", "pack-quantized"),
    "qwen3moe-w4a16-asym-g32": ("w4a16-g32-asym", "pack-quantized"),
    "qwen3moe-mxfp4a16": ("mxfp4a16", "mxfp4-pack-quantized"),
    "qwen3moe-fp8-dynamic": ("fp8", "float-quantized"),
    "qwen3moe-fp8-tensor": ("fp8-tensor", "float-quantized"),
    "qwen3moe256-fp8-block": ("fp8-block", "float-quantized"),
    "qwen3moe-nvfp4": ("nvfp4", "nvfp4-pack-quantized"),
}

#: Of another quant_method than compressed-tensors.
OTHERS = {"gptoss-mxfp4native": "mxfp4", "qwen3moe-awq-g32": "awq", "qwen3moe-gptq-g32": "gptq"}


def base() -> dict:
    return copy.deepcopy(CONFIGS["qwen3moe-w4a8-g32"])


def test_every_example_is_served():
    assert {*SERVED, *OTHERS} == set(CONFIGS)


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_have_a_row_of_their_own(name):
    assert type(parse_quantization(CONFIGS[name])) is QUANT_METHODS[OTHERS[name]]
    assert parse_quantization(CONFIGS[name]).schemes


@pytest.mark.parametrize("name", SERVED)
def test_served_configurations_are_understood(name):
    scheme, form = SERVED[name]
    config = parse_quantization(CONFIGS[name])
    expected = storage_in(Scheme.parse(scheme), form)
    if "actgroup" in name:
        expected = replace(expected, activation_order=True)
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.3.down_proj", "anything"):
        assert config.storage_of(module) == expected
    assert config.schemes == (expected.scheme,)
    for ignored in CONFIGS[name]["ignore"]:
        assert config.storage_of(ignored) is None


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        ("weights", {"num_bits": 3}, "3-bit int"),
        ("weights", {"num_bits": 2}, "2-bit int"),
        ("weights", {"symmetric": False}, "asymmetric 4-bit"),
        ("weights", {"type": "float"}, "4-bit float"),
        ("weights", {"strategy": "block"}, "per block"),
        ("weights", {"strategy": "tensor", "symmetric": False}, "per tensor"),
        ("weights", {"dynamic": True}, "dynamic 4-bit"),
        ("weights", {"actorder": "sideways"}, "in activation order"),
        ("weights", {"group_size": 48}, "group_size=48"),
        ("weights", {"group_size": 10**9}, "g1000000000"),
        ("weights", {"num_bits": 8, "symmetric": False}, "asymmetric 8-bit"),
        ("weights", {"num_bits": 8, "type": "float"}, "8-bit float"),
        ("weights", {"type": "float", "strategy": "tensor_group", "group_size": 16}, "activations dynamic 8-bit int"),
        ("weights", {"group_size": 16}, "group_size=16"),
        ("input_activations", {"num_bits": 4}, "activations dynamic 4-bit int"),
        ("input_activations", {"dynamic": False}, "activations 8-bit int per token"),
        ("input_activations", {"dynamic": "local"}, "locally dynamic"),
        ("input_activations", {"strategy": "group", "group_size": 128}, "per group of 128"),
        ("input_activations", {"type": "float", "num_bits": 4}, "dynamic 4-bit float per token"),
        ("input_activations", {"type": "float", "symmetric": False}, "dynamic asymmetric 8-bit float"),
        ("input_activations", {"dynamic": False, "strategy": "tensor", "symmetric": False}, "asymmetric 8-bit int"),
    ],
)
def test_schemes_that_are_not_served_are_refused_with_what_they_are(part, changes, reason):
    config = base()
    config["config_groups"]["group_0"][part].update(changes)
    with pytest.raises(UnsupportedScheme) as refusal:
        parse_quantization(config)
    assert reason in str(refusal.value)


FP8 = {"type": "float", "num_bits": 8, "symmetric": True}
INT, FLOAT = {"type": "int", "symmetric": True}, {"type": "float", "num_bits": 4, "symmetric": True}
NVFP4, MXFP4 = FLOAT | {"strategy": "tensor_group", "group_size": 16}, FLOAT | {"strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("weights", "form", "scheme"),
    [
        ({"num_bits": 8, "group_size": 64}, "int-quantized", "w8a8-g64"),
        ({"num_bits": 8}, "pack-quantized", "w8a8-g32"),
    ],
)
def test_int8_weights_in_groups_with_int8_activations_are_served(weights, form, scheme):
    config = base()
    group = config["config_groups"]["group_0"]
    group["weights"].update(weights)
    group["format"] = form
    assert parse_quantization(config).storage_of("x") == IntegerStorage(Scheme.parse(scheme), form)


@pytest.mark.parametrize(
    ("weights", "form", "scheme"),
    [
        (INT | {"num_bits": 4, "strategy": "channel"}, "pack-quantized", "w4a16"),
        (INT | {"num_bits": 4, "strategy": "group", "group_size": 32}, "pack-quantized", "w4a16-g32"),
        (INT | {"num_bits": 8, "strategy": "channel"}, "pack-quantized", "w8a16"),
        (INT | {"num_bits": 8, "strategy": "group", "group_size": 128}, "pack-quantized", "w8a16-g128"),
        (INT | {"num_bits": 4, "strategy": "channel", "symmetric": False}, "pack-quantized", "w4a16-asym"),
        ({"num_bits": 4, "group_size": 64, "symmetric": False}, "pack-quantized", "w4a16-g64-asym"),
        (NVFP4, "nvfp4-pack-quantized", "nvfp4a16"),
        (MXFP4, "mxfp4-pack-quantized", "mxfp4a16"),
        (INT | {"num_bits": 4, "strategy": "channel", "group_size": -1}, "pack-quantized", "w4a16"),
        (FP8 | {"strategy": "channel", "group_size": -1}, "naive-quantized", "fp8a16"),
        (FP8 | {"group_size": -1}, "naive-quantized", "fp8a16"),
    ],
)
def test_weight_only_groups_are_served(weights, form, scheme):
    config = base()
    config["config_groups"]["group_0"] |= {"weights": weights, "format": form, "input_activations": None}
    storage = parse_quantization(config).storage_of("x")
    assert storage == storage_for(Scheme.parse(scheme)) and storage.format == form
    # the form of the whole, where the group has none
    del config["config_groups"]["group_0"]["format"]
    assert parse_quantization(config | {"format": form}).storage_of("x") == storage


@pytest.mark.parametrize(
    ("weights", "form", "reason"),
    [
        (
            NVFP4,
            "mxfp4-pack-quantized",
            "tensor_group of 16, .* 'mxfp4-pack-quantized'; nvfp4-pack-quantized is accepted",
        ),
        (MXFP4, "pack-quantized", "group of 32, .* 'pack-quantized'; mxfp4-pack-quantized is accepted"),
        (MXFP4, "int-quantized", "'int-quantized'; mxfp4-pack-quantized is accepted"),
        (
            INT | {"num_bits": 4, "group_size": 32},
            "nvfp4-pack-quantized",
            "int-quantized and pack-quantized and naive-quantized is accepted",
        ),
        (
            {"num_bits": 4, "symmetric": False},
            "int-quantized",
            "asymmetric .*'int-quantized'; pack-quantized and naive-quantized is accepted",
        ),
        (MXFP4 | {"group_size": 16}, "mxfp4-pack-quantized", "4-bit float per group of 16"),
        (NVFP4 | {"group_size": 32}, "nvfp4-pack-quantized", "4-bit float per tensor_group of 32"),
        (MXFP4 | {"symmetric": False}, "mxfp4-pack-quantized", "asymmetric 4-bit float"),
        (MXFP4 | {"num_bits": 6}, "mxfp4-pack-quantized", "6-bit float"),
        (MXFP4 | {"num_bits": 8}, "float-quantized", "8-bit float per group of 32.*; mxfp8-quantized is accepted"),
        (MXFP4 | {"num_bits": 6}, "mxfp8-quantized", "6-bit float per group of 32.*; mxfp6-pack-quantized is accepted"),
        (FP8 | {"strategy": "channel"}, "mxfp8-quantized", "float-quantized and naive-quantized is accepted"),
        (FP8 | {"strategy": "channel"}, "pack-quantized", "float-quantized and naive-quantized is accepted"),
        (FP8 | {"strategy": "group", "group_size": 128}, "float-quantized", "8-bit float per group of 128"),
        (FP8 | {"strategy": "channel", "symmetric": False}, "float-quantized", "asymmetric 8-bit float"),
        (FP8 | {"strategy": "block", "block_structure": [64, 64]}, "float-quantized", r"blocks of \[64, 64\]"),
        (FP8 | {"strategy": "block"}, "float-quantized", "blocks of None"),
        (FP8 | {"strategy": ["channel"]}, "float-quantized", "8-bit float"),
        (FP8 | {"strategy": "channel", "actorder": "group"}, "float-quantized", "no format has this"),
        (INT | {"num_bits": 4, "group_size": 32, "actorder": "group"}, "int-quantized", "pack-quantized is accepted"),
        (INT | {"num_bits": 4, "strategy": "channel", "actorder": "group"}, "pack-quantized", "in activation order"),
        (INT | {"num_bits": 8, "symmetric": False}, "int-quantized", "asymmetric 8-bit int.*'int-quantized'"),
    ],
)
def test_weight_only_groups_that_no_file_can_have_or_that_are_not_served_are_refused(weights, form, reason):
    config = base()
    config["config_groups"]["group_0"] |= {"weights": weights, "format": form, "input_activations": None}
    with pytest.raises((CheckpointError, UnsupportedScheme), match=reason):
        parse_quantization(config)


@pytest.mark.parametrize(
    ("weights", "inputs", "form"),
    [
        (MXFP4, NVFP4 | {"dynamic": "local"}, "mxfp4-pack-quantized"),
        (NVFP4, FP8 | {"dynamic": True, "strategy": "token"}, "nvfp4-pack-quantized"),
        (NVFP4, MXFP4 | {"dynamic": True}, "nvfp4-pack-quantized"),
        (NVFP4, NVFP4 | {"dynamic": True}, "nvfp4-pack-quantized"),
        (MXFP4 | {"num_bits": 8}, MXFP4 | {"dynamic": True}, "mxfp8-quantized"),
        (
            FP8 | {"strategy": "channel"},
            FP8 | {"dynamic": True, "strategy": "group", "group_size": 128},
            "float-quantized",
        ),
        (FP8 | {"strategy": "channel"}, FP8 | {"dynamic": False, "strategy": "token"}, "float-quantized"),
    ],
)
def test_floats_with_activations_that_do_not_go_with_them_are_refused(weights, inputs, form):
    config = base()
    config["config_groups"]["group_0"] |= {"weights": weights, "format": form, "input_activations": inputs}
    with pytest.raises(UnsupportedScheme, match=r"activations .*-bit float per .* is not served"):
        parse_quantization(config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"quantization_status": "thawed"},
            "quantization_status 'thawed' is not known; .*frozen, compressed",
        ),
        ({"quantization_status": ["frozen"]}, "quantization_status"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
    ],
)
def test_changes_of_the_weights_that_are_not_served_are_refused(changes, reason):
    with pytest.raises(UnsupportedScheme, match=reason):
        parse_quantization(base() | changes)


@pytest.mark.parametrize("value", [False, 0, "", [], "int8"])
def test_activations_that_are_neither_described_nor_absent_are_refused(value):
    config = base()
    config["config_groups"]["group_0"]["input_activations"] = value
    with pytest.raises((CheckpointError, UnsupportedScheme), match="activations"):
        parse_quantization(config)


def test_quantised_outputs_are_refused():
    config = base()
    config["config_groups"]["group_0"]["output_activations"] = {"num_bits": 8}
    with pytest.raises(UnsupportedScheme, match="output activations"):
        parse_quantization(config)


@pytest.mark.parametrize("value", [None, {}])
def test_activations_that_are_absent_are_left_in_float(value):
    config = base()
    config["config_groups"]["group_0"] |= {"input_activations": value, "format": "pack-quantized"}
    assert parse_quantization(config).schemes == (Scheme.parse("w4a16-g32"),)


@pytest.mark.parametrize("actorder", ["weight", "static", "Weight", False, None])
def test_orders_that_leave_no_trace_in_the_file_are_served(actorder):
    config = base()
    config["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    assert parse_quantization(config).schemes == (Scheme.parse("w4a8-g32"),)


@pytest.mark.parametrize("actorder", ["group", "dynamic", "GROUP", True])
def test_activation_order_has_several_names(actorder):
    config = base()
    config["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    assert parse_quantization(config).storage_of("x").has_input_order


def test_what_is_wrong_with_integers_in_blocks_is_their_group():
    config = base()
    config["config_groups"]["group_0"]["weights"] |= {"strategy": "block", "group_size": None}
    accepted = "integers of 4 or 8 bits per channel, group or tensor"
    with pytest.raises(UnsupportedScheme, match=f"4-bit int per block.*: {accepted}"):
        parse_quantization(config)


@pytest.mark.parametrize("status", ["initialized", "calibration", "frozen", "compressed", "decompressed", None])
def test_every_status_of_the_writers_is_read(status):
    assert parse_quantization(base() | {"quantization_status": status}).schemes == (Scheme.parse("w4a8-g32"),)


def test_a_dense_sparsity_section_is_no_sparsity():
    parse_quantization(base() | {"sparsity_config": {"format": "dense", "ignore": []}})


def test_modules_are_ignored_by_name_and_by_pattern():
    config = parse_quantization(base() | {"ignore": ["lm_head", "re:.*[.]gate$", "model.layers.0.q"]})
    ignored = ("lm_head", "model.layers.7.mlp.gate", "model.layers.0.q")
    assert all(config.storage_of(name) is None for name in ignored)
    # a name is the whole name, and a pattern matches from the beginning
    kept = ("model.lm_head", "lm_head.x", "model.layers.7.mlp.gate_proj", "model.layers.0.q_proj", "model.layers.0")
    assert all(config.storage_of(name) is not None for name in kept)


def test_a_group_that_names_a_module_comes_before_the_one_of_all_linears():
    config = base()
    attention = copy.deepcopy(config["config_groups"]["group_0"])
    attention["targets"] = ["re:.*self_attn.*", "model.embed"]
    attention["weights"] |= {"num_bits": 8, "strategy": "channel", "group_size": None}
    attention["format"] = "pack-quantized"
    for order in (["group_0", "group_1"], ["group_1", "group_0"]):
        groups = {"group_0": config["config_groups"]["group_0"], "group_1": attention}
        parsed = parse_quantization(config | {"config_groups": {name: groups[name] for name in order}})
        eight = IntegerStorage(Scheme.parse("w8a8"), "pack-quantized")
        assert parsed.storage_of("model.layers.0.self_attn.q_proj") == eight
        assert parsed.storage_of("model.embed") == eight
        assert parsed.storage_of("model.layers.0.mlp.x") == IntegerStorage(Scheme.parse("w4a8-g32"), "int-quantized")


@pytest.mark.parametrize("targets", [["Linear"], ["re:.*mlp.*"]])
def test_two_schemes_for_one_module(targets):
    config = base()
    first, second = (copy.deepcopy(config["config_groups"]["group_0"]) | {"targets": targets} for _ in range(2))
    name = "model.layers.0.mlp.experts.0.up_proj"
    twice = parse_quantization(config | {"config_groups": {"group_0": first, "group_1": second}})
    assert twice.storage_of(name) == IntegerStorage(Scheme.parse("w4a8-g32"), "int-quantized")
    second["weights"] |= {"num_bits": 8, "strategy": "channel", "group_size": None}
    parsed = parse_quantization(config | {"config_groups": {"group_0": first, "group_1": second}})
    with pytest.raises(CheckpointError) as said:
        parsed.storage_of(name)
    assert f"several schemes for {name}: w4a8-g32 (int-quantized) and w8a8 (int-quantized); one is" in str(said.value)


def test_modules_that_no_group_names_are_float():
    config = base()
    config["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]
    parsed = parse_quantization(config)
    assert parsed.storage_of("model.layers.0.self_attn.q_proj") is None
    assert parsed.storage_of("model.layers.0.mlp.experts.0.up_proj") is not None


def test_a_group_may_leave_its_form_to_the_whole():
    config = base()
    del config["config_groups"]["group_0"]["format"]
    assert parse_quantization(config | {"format": "pack-quantized"}).storage_of("x").format == "pack-quantized"
    with pytest.raises(UnsupportedScheme, match="format 'dense'"):
        parse_quantization(config | {"format": "dense"})


def test_a_strategy_may_be_left_to_the_group_size():
    config = base()
    weights = config["config_groups"]["group_0"]["weights"]
    weights["strategy"] = None
    assert parse_quantization(config).schemes == (Scheme.parse("w4a8-g32"),)
    weights["group_size"] = -1
    assert parse_quantization(config).schemes == (Scheme.parse("w4a8"),)


# ---- hostile values ------------------------------------------------------------------------------------------------

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple = ()) -> list[tuple]:
    """Paths to everything inside a JSON object."""
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += places(inner, (*path, index))
    return found


def replaced(config: dict, path: tuple, value: object) -> object:
    if not path:
        return value
    config = copy.deepcopy(config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


@settings(deadline=None, max_examples=600)
@given(path=st.sampled_from(places(base())), value=ANY_JSON)
def test_no_value_anywhere_does_more_than_a_refusal(path, value):
    try:
        config = parse_quantization(replaced(base(), path, value))
        config.storage_of("model.layers.0.mlp.experts.0.up_proj")
    except (CheckpointError, UnsupportedScheme) as refusal:
        assert str(refusal)


@settings(deadline=None, max_examples=100)
@given(config=ANY_JSON)
def test_no_json_at_all_does_more_than_a_refusal(config):
    with pytest.raises((CheckpointError, UnsupportedScheme)):
        parse_quantization(config)


@pytest.mark.parametrize(
    "pattern", ["re:(", "re:*", "re:[z-a]", "re:a{99999999999999999999}", "re:" + "(" * 20_000, "re:(?P<n>a)(?P<n>b)"]
)
@pytest.mark.parametrize("place", ["ignore", "targets"])
def test_patterns_that_are_none_are_refused_with_the_pattern(pattern, place):
    config = base()
    if place == "ignore":
        config["ignore"] = [pattern]
    else:
        config["config_groups"]["group_0"]["targets"] = [pattern]
    with pytest.raises(CheckpointError, match="quantization_config has the pattern"):
        parse_quantization(config).storage_of("model.layers.0")


LINEAR_NAMES = [
    f"model.layers.{layer}.mlp.experts.{expert}.{name}"
    for layer in range(40)
    for expert in range(64)
    for name in ("gate_proj", "up_proj", "down_proj")
]


@pytest.mark.parametrize(
    ("place", "pattern"),
    [
        ("ignore", r"(?:.|.)+(?<!j)$"),
        ("ignore", r"^(?:.*?.*?)+(?<=q)$"),
        ("targets", r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\1\2\3\4\5\6\7\8(?<!j)$"),
        ("targets", r"(?:(?:a{100}){100}){100}"),
        ("ignore", r"((((((a{9,99}){9,99}){9,99}){9,99}){9,99}){9,99})"),
        ("ignore", "x" * 5000),
        ("targets", "(?:proj){e<=2}"),
    ],
)
def test_patterns_that_take_too_long_are_refused_with_the_pattern(place, pattern):
    config = base()
    if place == "ignore":
        config["ignore"] = [f"re:{pattern}"]
    else:
        config["config_groups"]["group_0"]["targets"] = [f"re:{pattern}"]
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="quantization_config has the pattern") as refusal:
        parsed = parse_quantization(config)
        for name in LINEAR_NAMES:
            parsed.storage_of(name)
    assert time.monotonic() - start < 20
    assert repr(f"re:{pattern}"[:100])[:-1] in str(refusal.value) and "a simpler one, or the names" in str(
        refusal.value
    )


def test_many_slow_patterns_are_refused_together(monkeypatch):
    """Each is quick enough for one name, and all of them for all names are not."""
    monkeypatch.setattr("cpumoe.checkpoints.formats.name_patterns._SECONDS", 0.5)
    slow = r"re:(.*)(.*)(.*)(.*)\1\2\3\4(?<!j)$"
    config = parse_quantization(base() | {"ignore": ["re:.*lm_head", slow, "re:.*router"]})
    with pytest.raises(CheckpointError, match="it takes too long .over 0.5 s for the names of this model") as refusal:
        for name in LINEAR_NAMES:
            config.storage_of(name)
    assert repr(slow) in str(refusal.value)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(x+x+)+y", "(.*)*(.*)*#", r"(\w+[.]?)+[!?]"])
def test_patterns_that_others_hang_on_are_answered(pattern):
    config = parse_quantization(base() | {"ignore": [f"re:{pattern}"]})
    assert config.storage_of("model." + "a" * 60) is not None


@settings(deadline=None, max_examples=300)
@given(
    pattern=st.lists(
        st.sampled_from([*"abl.|^$", ".*", "[.]", r"\d", "+", "?", "(?:", "(", ")", "(?!", "{1,3}", "[a-l]", "layers"])
    ).map("".join),
    name=st.sampled_from(["model.layers.0.mlp.gate", "lm_head", "a.b", "ab", ""]),
)
def test_patterns_mean_what_they_mean_to_python(pattern, name):
    try:
        expected = re.match(pattern, name) is not None
    except re.error:
        with pytest.raises(CheckpointError):
            NamePatterns([f"re:{pattern}"])
        return
    assert NamePatterns([f"re:{pattern}"]).match(name) == expected


@pytest.mark.parametrize("value", [None, {}, [], "group_0"])
def test_a_configuration_without_groups_is_refused(value):
    with pytest.raises(CheckpointError, match="config_groups"):
        parse_quantization(base() | {"config_groups": value})


# ---- writing -------------------------------------------------------------------------------------------------------

STORAGES = [
    {"Linear": IntegerStorage(Scheme.parse("w4a8-g32"), "pack-quantized")},
    {"Linear": IntegerStorage(Scheme.parse("w4a8"), "int-quantized")},
    {
        "Linear": IntegerStorage(Scheme.parse("w8a8"), "int-quantized"),
        "re:.*experts[.].*": IntegerStorage(Scheme.parse("w4a8-g128"), "pack-quantized"),
    },
    {"Linear": storage_for(Scheme.parse("w8a8-g32"), "int-quantized")},
    *({"Linear": storage_for(Scheme.parse(name))} for name in ("w4a16", "w8a16-g64", "w4a16-asym", "w4a16-g128-asym")),
    {"Linear": storage_for(Scheme.parse("w8a16")), "re:.*experts[.].*": storage_for(Scheme.parse("nvfp4a16"))},
    {"Linear": storage_for(Scheme.parse("w4a8-g32")), "re:.*experts[.].*": storage_for(Scheme.parse("mxfp4a16"))},
]


@pytest.mark.parametrize("storages", STORAGES)
def test_what_is_written_is_understood(storages):
    section = json.loads(json.dumps(write_config(storages, ["lm_head", "re:.*gate$"])))
    config = parse_quantization(section)
    assert config.storage_of("model.layers.0.self_attn.q_proj") == storages["Linear"]
    assert config.storage_of("model.layers.0.mlp.experts.0.up_proj") == list(storages.values())[-1]
    assert config.storage_of("lm_head") is None and config.storage_of("model.layers.0.mlp.gate") is None


@pytest.mark.parametrize("storages", STORAGES)
def test_what_is_written_is_understood_by_compressed_tensors(storages):
    from compressed_tensors.quantization import QuantizationConfig as Theirs

    theirs = Theirs.model_validate(write_config(storages, ["lm_head"]))
    assert theirs.ignore == ["lm_head"] and theirs.quantization_status == "compressed"
    groups = {target: group for group in theirs.config_groups.values() for target in group.targets}
    assert set(groups) == set(storages)
    for target, storage in storages.items():
        weights, inputs = groups[target].weights, groups[target].input_activations
        assert groups[target].format == storage.format
        assert (weights.num_bits, weights.group_size) == (storage.scheme.weights.bits, storage.scheme.group_size)
        strategy = "channel" if storage.scheme.group_size is None else "group"
        assert weights.strategy == ("tensor_group" if storage.scheme.weights.scale == "e4m3" else strategy)
        assert weights.symmetric == storage.scheme.weights.symmetric
        assert weights.type == ("float" if storage.scheme.weights.element == "fp4" else "int")
        if storage.scheme.activations is None:
            assert inputs is None
        else:
            assert (inputs.num_bits, inputs.strategy, inputs.dynamic) == (8, "token", True)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16-g32", "w4a16-asym", "w4a16-g32-asym"])
def test_weight_only_integers_are_not_written_a_byte_each(scheme):
    with pytest.raises(UnsupportedScheme, match=f"{scheme} in the format int-quantized.*pack-quantized is accepted"):
        storage_for(Scheme.parse(scheme), "int-quantized")
