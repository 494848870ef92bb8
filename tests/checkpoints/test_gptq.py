"""GPTQ checkpoints: the weights that the tools meant, to the bit; what is damaged or not served is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_weights import assert_loads, packed_weights, refusal
from tiny_architectures import write_float
from word_checkpoints import (
    Config,
    Rounded,
    Tensors,
    Written,
    first_of,
    gptq_section,
    gptq_tensors,
    rounded,
    write_gptq,
    write_words,
)

from cpumoe import CheckpointError, Scheme, UnsupportedScheme, cli
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.formats.gptq import GptqStorage, ZeroPoints
from cpumoe.checkpoints.inspection import Survey
from cpumoe.checkpoints.linear_sources import LinearSource
from cpumoe.checkpoints.model_tensors import quantized_linears
from cpumoe.integrations.transformers.facade import describe
from cpumoe.layers.quantized_experts import QuantizedWeight
from cpumoe.layers.reference import dequantize

GATE = "model.layers.1.mlp.experts.3.gate_proj"
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float(tmp_path_factory.mktemp("float"), "qwen3_moe", moe_intermediate_size=64)


@pytest.fixture(scope="module")
def symmetric(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_gptq(source, tmp_path_factory.mktemp("gptq") / "model")


# ---- right weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(
    ("bits", "group_size", "is_symmetric", "scheme"),
    [
        (4, 32, True, "w4a16-g32"),
        (4, 64, False, "w4a16-g64-asym"),
        (4, -1, True, "w4a16"),
        (4, -1, False, "w4a16-asym"),
        (8, 32, True, "w8a16-g32"),
        (8, -1, True, "w8a16"),
        (8, 32, False, "w8a16-g32-asym"),
        (8, -1, False, "w8a16-asym"),
    ],
)
def test_weights_are_those_of_the_file(
    source: Path, tmp_path: Path, bits: int, group_size: int, is_symmetric: bool, scheme: str, checkpoint_format: str
) -> None:
    written = write_gptq(source, tmp_path / "model", bits, group_size, is_symmetric, checkpoint_format)
    assert assert_loads(written.folder, written.weights) == {scheme}


@pytest.mark.parametrize("architecture", ["qwen2_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_other_families(architecture: str, tmp_path: Path) -> None:
    """Other names, shared experts, dense layers, latent attention, biases."""
    written = write_gptq(write_float(tmp_path / "float", architecture), tmp_path / "model", symmetric=False)
    assert assert_loads(written.folder, written.weights) == {"w4a16-g32-asym"}


def test_check_and_inspect(symmetric: Written, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(symmetric.folder)]) == 0
    assert cli.main(["inspect", str(symmetric.folder)]) == 0
    text = capsys.readouterr().out
    assert "w4a16-g32, gptq" in text and "it would load" in text


@st.composite
def weights(draw: st.DrawFn) -> tuple[Rounded, int, bool]:
    """A weight with any integers and zero points; bits; whether it is symmetric."""
    bits, is_symmetric = draw(st.sampled_from([(4, True), (4, False), (8, True), (8, False)]))
    rows, groups = 8 * draw(st.integers(1, 6)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    zeros = random.integers(0, 2**bits, (rows, groups))
    if is_symmetric:
        zeros = np.full_like(zeros, 2 ** (bits - 1))
    scales = random.uniform(-2, 2, (rows, groups)).astype(np.float16)
    return Rounded(random.integers(0, 2**bits, (rows, 32 * groups)), zeros, scales), bits, is_symmetric


@settings(max_examples=60, deadline=None)
@given(weights(), st.sampled_from(["gptq", "gptq_v2", "borrowed"]), st.integers(1, 3))
def test_any_integers_and_zero_points(drawn: tuple[Rounded, int, bool], zero_points: str, linears: int) -> None:
    """All 16 zero points in any order, the 0 too; what is read can be written again; both readers agree."""
    weight, bits, is_symmetric = drawn
    rows, columns = weight.codes.shape
    meaning = {
        "gptq": ZeroPoints.LESS_ONE,
        "gptq_v2": ZeroPoints.AS_THEY_ARE,
        "borrowed": ZeroPoints.LESS_ONE_IN_WORDS,
    }[zero_points]
    scheme = Scheme.parse(f"w{bits}a16-g32" + ("" if is_symmetric else "-asym"))
    storage = GptqStorage(scheme, "gptq", True, zero_points=meaning)
    stored = gptq_tensors(weight, bits, zero_points)
    for suffix, tensor in storage.tensors(rows, columns).items():
        assert tensor.shape == tuple(stored[suffix].shape), suffix
        if tensor.check is not None:
            tensor.check(suffix, stored[suffix])
    plain = storage.decode_plainly(stored)
    assert torch.equal(dequantize(plain), weight.dequantized())
    together = {suffix: torch.stack([tensor] * linears)[None] for suffix, tensor in stored.items()}
    decoded = storage.decode(together, rows, columns)
    assert torch.equal(dequantize(decoded)[0], torch.cat([weight.dequantized()] * linears))
    written = storage.encode(QuantizedWeight(plain.element, plain.values, plain.scales, plain.zero_points))
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[suffix], stored[suffix]) for suffix in stored)


def test_zero_points_of_0_are_read_as_the_tool_wrote_them(source: Path, tmp_path: Path) -> None:
    """The first version stores them less one. What becomes of 0 depends on the tool, which the file names."""

    def weight_of(tensor: torch.Tensor) -> Rounded:
        weight = rounded(tensor, 4, 32, False)
        weight.zeros[::3] = 0
        return weight

    def write(name: str, zero_points: str, fields: Config) -> Written:
        def store(_: str, tensor: torch.Tensor) -> tuple[Rounded, Tensors]:
            weight = weight_of(tensor)
            return weight, gptq_tensors(weight, 4, zero_points)

        return write_words(source, tmp_path / name, gptq_section(4, 32, False, **fields), store)

    for name, zero_points, fields in (
        ("AutoGPTQ", "gptq", {}),
        ("GPTQModel", "borrowed", {"meta": {"quantizer": ["gptqmodel:2.0.0"]}}),
        ("AutoRound", "borrowed", {"autoround_version": "0.9.5", "provider": "auto-round"}),
    ):
        written = write(name, zero_points, fields)
        assert_loads(written.folder, written.weights)
    wrong = write("another", "borrowed", {})
    assert any(not torch.equal(w, wrong.weights[n]) for n, w in packed_weights(wrong.folder)[0].items())


def test_biases_of_zeros_that_a_tool_has_added(symmetric: Written, tmp_path: Path) -> None:
    """AutoGPTQ gave them to all linears for a year."""

    def add(tensors: Tensors) -> None:
        tensors |= {f"{n}.bias": torch.zeros(len(w), dtype=torch.float16) for n, w in symmetric.weights.items()}

    written = symmetric.changed(tmp_path / "model", add)
    assert_loads(written.folder, written.weights)
    assert cli.main(["check", str(written.folder)]) == 0

    def damage(tensors: Tensors) -> None:
        tensors[f"{GATE}.bias"][5] = 0.25

    said = refusal(written.changed(tmp_path / "damaged", damage).folder)
    assert f"{GATE}.bias has 0.25 for output 5, and the model has no bias; 0 is accepted" in said
    short = written.changed(tmp_path / "short", lambda held: held.update({f"{GATE}.bias": torch.zeros(3)}))
    assert f"{GATE}.bias is F32 [3], BF16 or F16 or F32 [64] is accepted" in refusal(short.folder)

    def damage_linear(tensors: Tensors) -> None:
        tensors[f"{QUERY}.bias"][5] = 0.25

    with Checkpoint.open(written.changed(tmp_path / "linear", damage_linear).folder) as checkpoint:
        assert any(
            f"{QUERY}.bias has 0.25 for output 5" in text for text in Survey(checkpoint, describe).problems.wrong
        )
        source = LinearSource(
            checkpoint, QUERY, 64, 64, quantized_linears(checkpoint, describe(checkpoint))[QUERY].storage, False
        )
        with pytest.raises(CheckpointError, match=f"{QUERY}.bias has 0.25 for output 5"):
            source.load()


# ---- groups and their order ----------------------------------------------------------------------------------------


def test_files_without_an_order(source: Path, tmp_path: Path) -> None:
    written = write_gptq(source, tmp_path / "none", has_g_idx=False)
    assert_loads(written.folder, written.weights)
    ordered = written.changed(tmp_path / "ordered", config=lambda c: c.update(desc_act=True))
    assert f"{QUERY}.g_idx" in refusal(ordered.folder)


def test_an_order_that_is_none(symmetric: Written, tmp_path: Path) -> None:
    """As desc_act with static_groups leaves it."""
    ordered = symmetric.changed(tmp_path / "ordered", config=lambda c: c.update(desc_act=True, static_groups=True))
    assert_loads(ordered.folder, ordered.weights)


@pytest.mark.parametrize("sym", [True, False])
def test_activation_order(source: Path, tmp_path: Path, sym: bool) -> None:
    """Inputs of a group lie anywhere, in another order for each linear."""
    generator = np.random.default_rng(5)

    def store(_: str, tensor: torch.Tensor) -> tuple[Rounded, Tensors]:
        weight = rounded(tensor, 4, 32, sym)
        order = generator.permutation(tensor.shape[1])
        shuffled = Rounded(weight.codes[:, order], weight.zeros, weight.scales)
        shuffled.dequantized = lambda: weight.dequantized()[:, order]  # type: ignore[method-assign]
        tensors = gptq_tensors(shuffled, 4)
        return shuffled, tensors | {"g_idx": tensors["g_idx"][order]}

    written = write_words(source, tmp_path / "model", gptq_section(4, 32, sym, desc_act=True), store)
    assert_loads(written.folder, written.weights)


@pytest.mark.parametrize("module", [GATE, QUERY])
def test_a_damaged_order_is_refused(source: Path, tmp_path: Path, module: str) -> None:
    written = write_gptq(source, tmp_path / "plain", desc_act=True)

    def damaged(tensors: Tensors) -> None:
        tensors[f"{module}.g_idx"][3] = 1

    with pytest.raises(CheckpointError, match=f"{module}.g_idx has 31 inputs in group 0; 32 are accepted"):
        packed_weights(written.changed(tmp_path / "model", damaged).folder)


@pytest.mark.parametrize("module", [GATE, QUERY])
def test_activation_order_that_is_not_announced_is_refused_by_name(
    symmetric: Written, tmp_path: Path, module: str
) -> None:
    def permuted(tensors: Tensors) -> None:
        order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
        tensors[f"{module}.g_idx"] = tensors[f"{module}.g_idx"][order]

    said = refusal(symmetric.changed(tmp_path / "model", permuted).folder, UnsupportedScheme)
    assert f"{module}.g_idx has input" in said and "activation order, which config.json does not announce" in said


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (5, 2, "has input 5 in group 2; 0 to 1 are accepted"),
        (40, -1, "has input 40 in group -1; 0 to 1 are accepted"),
        (5, 1, "has 31 inputs in group 0; 32 are accepted"),
        (63, 2**31 - 1, "has input 63 in group 2147483647; 0 to 1 are accepted"),
    ],
)
@pytest.mark.parametrize("module", [GATE, QUERY])
def test_an_order_that_is_no_grouping(
    symmetric: Written, tmp_path: Path, module: str, at: int, value: int, message: str
) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[f"{module}.g_idx"][at] = value

    assert f"{module}.g_idx {message}" in refusal(symmetric.changed(tmp_path / "model", damage).folder)


# ---- what is damaged -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [GATE, QUERY])
def test_a_zero_point_where_there_should_be_none(symmetric: Written, tmp_path: Path, module: str) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[f"{module}.qzeros"][1, 2] += 3 << 8  # output 18

    said = refusal(symmetric.changed(tmp_path / "model", damage).folder)
    assert (
        f"{module}.qzeros has the zero point 11 for output 18, group 1, and config.json says that weights are" in said
    )
    assert "; 8 is accepted" in said


def test_a_version_that_is_not_that_of_the_file(symmetric: Written, tmp_path: Path) -> None:
    other = symmetric.changed(tmp_path / "model", config=lambda c: c.update(checkpoint_format="gptq_v2"))
    assert "has the zero point 7 for output 0, group 0" in refusal(other.folder)


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales", "g_idx"])
@pytest.mark.parametrize("module", [GATE, QUERY])
def test_tensors_that_are_missing_or_of_another_kind(
    symmetric: Written, tmp_path: Path, module: str, suffix: str
) -> None:
    name = f"{module}.{suffix}"
    changes: dict[str, Callable[[Tensors], object]] = {
        "missing": lambda held: held.pop(name),
        "short": lambda held: held.update({name: held[name][1:]}),
        "wide": lambda held: held.update({name: held[name].to(torch.int64 if suffix != "scales" else torch.float64)}),
        "flat": lambda held: held.update({name: held[name][None]}),
        "empty": lambda held: held.update({name: held[name][:0]}),
    }
    for way, change in changes.items():
        assert module in refusal(symmetric.changed(tmp_path / way, change).folder), way


@pytest.mark.parametrize("number", [0.0, torch.nan, torch.inf])
@pytest.mark.parametrize("module", [GATE, QUERY])
def test_scales_that_are_zero_or_no_numbers(symmetric: Written, tmp_path: Path, module: str, number: float) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[f"{module}.scales"][0, 1] = number

    folder = symmetric.changed(tmp_path / "model", damage).folder
    with pytest.raises(CheckpointError) as said:
        packed_weights(folder)
    assert f"{module}.scales holds {number:g} at [0, 1]; finite numbers other than 0 are accepted" in str(said.value)


def test_sizes_that_groups_do_not_divide(symmetric: Written, tmp_path: Path) -> None:
    other = symmetric.changed(tmp_path / "model", config=lambda c: c.update(group_size=96))
    refusal(other.folder, ValueError)


# ---- modules in float, and modules with settings of their own ------------------------------------------------------


def float_weight(source: Written, module: str) -> Callable[[Tensors], object]:
    """A change that puts a linear into the file in float instead of quantised."""

    def change(tensors: Tensors) -> None:
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{module}.{suffix}"]
        tensors[f"{module}.weight"] = source.weights[module]

    return change


def test_linears_in_float(symmetric: Written, tmp_path: Path) -> None:
    """Which ones, the files say: no list in the configuration is needed."""
    mixed = symmetric.changed(tmp_path / "model", float_weight(symmetric, QUERY))
    expected = {name: weight for name, weight in symmetric.weights.items() if name != QUERY}
    assert_loads(mixed.folder, expected)


def test_an_expert_in_float_among_others(symmetric: Written, tmp_path: Path) -> None:
    mixed = symmetric.changed(tmp_path / "model", float_weight(symmetric, GATE))
    assert "experts of one layer have different schemes" in refusal(mixed.folder)


@pytest.mark.parametrize("module", [GATE, QUERY])
def test_a_linear_that_is_there_twice(symmetric: Written, tmp_path: Path, module: str) -> None:
    def twice(tensors: Tensors) -> None:
        tensors[f"{module}.weight"] = symmetric.weights[module]

    assert f"unexpected: {module}.weight" in refusal(symmetric.changed(tmp_path / "model", twice).folder)


def test_dynamic_rules(source: Path, tmp_path: Path) -> None:
    def store(name: str, tensor: torch.Tensor) -> tuple[Rounded, Tensors] | None:
        if "o_proj" in name:
            return None
        bits = 8 if "layers.1." in name else 4
        weight = rounded(tensor, bits, 32 if bits == 4 else 64, True)
        return weight, gptq_tensors(weight, bits)

    rules: Config = {r"+:.*\.layers\.1\..*": {"bits": 8, "group_size": 64}, r"-:.*o_proj": {}}
    written = write_words(source, tmp_path / "model", gptq_section(4, 32, True, dynamic=rules), store)
    assert assert_loads(written.folder, written.weights) == {"w4a16-g32", "w8a16-g64"}
    without = written.changed(tmp_path / "without", config=lambda c: c.update(dynamic=None))
    assert "of another kind" in refusal(without.folder)


def test_a_module_that_a_rule_leaves_in_float_and_the_file_has_quantised(symmetric: Written, tmp_path: Path) -> None:
    rules: Config = {f"-:{QUERY}": {}}
    other = symmetric.changed(tmp_path / "model", config=lambda c: c.update(dynamic=rules))
    with Checkpoint.open(other.folder) as checkpoint:
        assert f"{QUERY}.qweight" in Survey(checkpoint, describe).problems.unexpected


# ---- configurations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"bits": 3}, UnsupportedScheme, "bits=3, group_size=32, symmetric is not served: 4 and 8 bits are"),
        ({"bits": "4"}, CheckpointError, "bits is '4' and group_size 32; numbers are accepted"),
        ({"bits": True}, CheckpointError, "bits is True"),
        ({"bits": None}, CheckpointError, "bits is None"),
        ({"group_size": 0}, CheckpointError, "group_size 0"),
        ({"group_size": 16}, UnsupportedScheme, "group_size=16; a multiple of 32"),
        ({"sym": "yes"}, CheckpointError, "sym is 'yes'; true or false is accepted"),
        ({"desc_act": 1}, CheckpointError, "desc_act is 1; true or false is accepted"),
        ({"checkpoint_format": "marlin"}, UnsupportedScheme, "'marlin' is not served; gptq and gptq_v2 are"),
        ({"checkpoint_format": 2}, CheckpointError, "checkpoint_format is 2; a text is accepted"),
        ({"format": "gptq_v2"}, CheckpointError, "checkpoint_format is 'gptq' and format is 'gptq_v2'"),
        ({"is_marlin_format": True}, UnsupportedScheme, "is_marlin_format True is not served"),
        ({"adapter": {"rank": 8}}, UnsupportedScheme, "adapter {'rank': 8} is not served"),
        ({"pack_dtype": "int16"}, UnsupportedScheme, "pack_dtype 'int16' is not served; int32 is"),
        ({"dynamic": ["a"]}, CheckpointError, "dynamic is ['a']; a JSON object of objects is accepted"),
        ({"dynamic": {"+:x": {"bits": 2}}}, UnsupportedScheme, "dynamic '+:x': bits=2"),
        ({"dynamic": {"-:(": {}}}, CheckpointError, "has the pattern 're:('"),
        ({"dynamic": {"-:(a+)+$": {}}}, None, ""),
    ],
)
def test_configurations_that_are_refused(fields: Config, kind: type[Exception] | None, message: str) -> None:
    section = gptq_section(4, 32, True) | fields
    if kind is None:
        assert parse_quantization(section).storage_of(QUERY) is not None
        return
    with pytest.raises(kind) as refused:
        parse_quantization(section)
    assert message in str(refused.value)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "dynamic", "meta", "pack_dtype"]
        ),
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=2)),
    )
)
def test_any_configuration_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    with suppress(CheckpointError, UnsupportedScheme):
        parse_quantization(gptq_section(4, 32, True) | fields)


def test_a_configuration_without_files() -> None:
    """What those ask who have a configuration and no files yet."""
    quantization = parse_quantization(gptq_section(4, 128, True, dynamic={"-:.*k_proj": {}}))
    assert str(quantization.schemes[0]) == "w4a16-g128"
    storage = quantization.storage_of(GATE)
    assert storage is not None and storage.format == "gptq"
    assert quantization.storage_of("lm_head") is None
    assert quantization.storage_of("model.layers.0.self_attn.k_proj") is None


def test_the_head_may_be_quantised(source: Path, symmetric: Written, tmp_path: Path) -> None:
    def quantise(tensors: Tensors) -> None:
        weight = rounded(tensors.pop("lm_head.weight"), 4, 32, True)
        expected["lm_head"] = weight.dequantized()
        tensors |= {f"lm_head.{suffix}": tensor for suffix, tensor in gptq_tensors(weight, 4).items()}

    expected = dict(symmetric.weights)
    written = symmetric.changed(tmp_path / "model", quantise, lambda c: c.update(lm_head=True))
    assert_loads(written.folder, expected)
    assert first_of(written.tensors(), r"lm_head\.qweight")
