"""AWQ checkpoints, and AutoRound's, which have the tensors of GPTQ or AWQ under a configuration of their own."""

from __future__ import annotations

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
    awq_tensors,
    gptq_tensors,
    rounded,
    write_awq,
    write_words,
)

from cpumoe import CheckpointError, Scheme, UnsupportedScheme, cli
from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.checkpoints.formats.awq import AwqStorage
from cpumoe.layers.reference import dequantize

UP = "model.layers.1.mlp.experts.3.up_proj"
KEY = "model.layers.0.self_attn.k_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float(tmp_path_factory.mktemp("float"), "qwen3_moe", moe_intermediate_size=64)


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_awq(source, tmp_path_factory.mktemp("awq") / "model")


# ---- AWQ -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group_size", "zero_point", "bits", "scheme"),
    [
        (32, True, 4, "w4a16-g32-asym"),
        (64, True, 4, "w4a16-g64-asym"),
        (-1, True, 4, "w4a16-asym"),
        (32, False, 4, "w4a16-g32"),
        (-1, False, 4, "w4a16"),
        (32, True, 8, "w8a16-g32-asym"),
        (-1, False, 8, "w8a16"),
    ],
)
def test_weights_are_those_of_the_file(
    source: Path, tmp_path: Path, group_size: int, zero_point: bool, bits: int, scheme: str
) -> None:
    model = write_awq(source, tmp_path / "model", group_size, zero_point, bits=bits)
    assert assert_loads(model.folder, model.weights) == {scheme}


@pytest.mark.parametrize("architecture", ["qwen2_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_other_families(architecture: str, tmp_path: Path) -> None:
    model = write_awq(write_float(tmp_path / "float", architecture), tmp_path / "model")
    assert_loads(model.folder, model.weights)


def test_check_and_inspect(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(written.folder)]) == 0
    assert cli.main(["inspect", str(written.folder)]) == 0
    text = capsys.readouterr().out
    assert "w4a16-g32-asym, awq" in text and "it would load" in text


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((4, 8)),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_any_integers_and_zero_points(
    bits: int, words: int, groups: int, experts: int, linears: int, seed: int
) -> None:
    """Several linears at a time, each with weights of its own; both readers agree; what is read can be written."""
    random, rows, columns = np.random.default_rng(seed), 32 // bits * words, 32 * groups
    storage = AwqStorage(Scheme.parse(f"w{bits}a16-g32-asym"), "awq")

    def weight() -> Rounded:
        scales = random.uniform(-2, 2, (rows, groups)).astype(np.float16)
        codes, zeros = (random.integers(0, 2**bits, (rows, n)) for n in (columns, groups))
        return Rounded(codes, zeros, scales)

    drawn = [[weight() for _ in range(linears)] for _ in range(experts)]
    stored = [[awq_tensors(weight, bits) for weight in row] for row in drawn]
    for suffix, tensor in storage.tensors(rows, columns).items():
        assert tensor.shape == tuple(stored[0][0][suffix].shape), suffix
    tensors = {
        suffix: torch.stack([torch.stack([part[suffix] for part in row]) for row in stored]) for suffix in stored[0][0]
    }
    expected = torch.stack([torch.cat([weight.dequantized() for weight in row]) for row in drawn])
    assert torch.equal(dequantize(storage.decode(tensors, rows, columns)), expected)
    plain = storage.decode_plainly(stored[0][0])
    assert torch.equal(dequantize(plain), drawn[0][0].dequantized())
    again = storage.encode(plain)
    assert again.keys() == stored[0][0].keys()
    assert all(torch.equal(again[suffix], tensor) for suffix, tensor in stored[0][0].items())


def test_what_is_read_does_not_depend_on_how_much_fits_into_the_cache(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (1, 3000, 1 << 30):
        monkeypatch.setattr("cpumoe.checkpoints.formats.awq._CACHED_BYTES", size)
        assert_loads(written.folder, written.weights)


@pytest.mark.parametrize("module", [UP, KEY])
def test_a_zero_point_where_there_should_be_none(source: Path, tmp_path: Path, module: str) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[f"{module}.qzeros"][1, 2] -= 5 << 4  # the second place is that of output 2 of eight

    model = write_awq(source, tmp_path / "whole", zero_point=False).changed(tmp_path / "model", damage)
    said = refusal(model.folder)
    assert f"{module}.qzeros has the zero point 3 for output 18, group 1" in said and "; 8 is accepted" in said


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("module", [UP, KEY])
def test_tensors_that_are_missing_or_of_another_kind(
    written: Written, tmp_path: Path, module: str, suffix: str
) -> None:
    name = f"{module}.{suffix}"
    for way, change in {
        "missing": lambda held: held.pop(name),
        "short": lambda held: held.update({name: held[name][1:]}),
        "narrow": lambda held: held.update({name: held[name][:, 1:]}),
        "wide": lambda held: held.update({name: held[name].to(torch.int64 if suffix != "scales" else torch.float64)}),
        "empty": lambda held: held.update({name: held[name][:0]}),
    }.items():
        assert module in refusal(written.changed(tmp_path / way, change).folder), way


def test_tensors_of_gptq_are_no_awq(written: Written, tmp_path: Path) -> None:
    other = written.changed(tmp_path / "model", config=lambda c: c.update(quant_method="gptq", sym=False, version=None))
    assert "of another kind" in refusal(other.folder)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"version": "gemv"}, UnsupportedScheme, "version 'gemv' is not served; 'gemm' is"),
        ({"zero_point": 1}, CheckpointError, "zero_point is 1; true or false is accepted"),
        ({"group_size": "32"}, CheckpointError, "group_size '32'"),
        ({"bits": None}, CheckpointError, "bits is None"),
    ],
)
def test_configurations_that_are_refused(fields: Config, kind: type[Exception], message: str) -> None:
    section = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    with pytest.raises(kind) as refused:
        parse_quantization(section | fields)
    assert message in str(refused.value)


def test_older_names_of_fields() -> None:
    older = parse_quantization({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"})
    assert [str(scheme) for scheme in older.schemes] == ["w4a16-g128-asym"]


# ---- AutoRound -----------------------------------------------------------------------------------------------------


def auto_round(packing: str | None, bits: int = 4, group_size: int = 32, sym: bool = True, **fields: Any) -> Config:
    section = {"bits": bits, "data_type": "int", "group_size": group_size, "sym": sym, "quant_method": "auto-round"}
    return section | ({} if packing is None else {"packing_format": packing}) | fields


@pytest.mark.parametrize(
    ("section", "zero_points"),
    [
        (auto_round("auto_round:auto_gptq"), "borrowed"),
        (auto_round("auto_round:gptq", sym=False), "borrowed"),
        (auto_round(None, quant_method="auto_round"), "borrowed"),
        (auto_round(None, sym=False, quant_method="intel/auto-round", backend="auto_round:gptq:exllamav2"), "borrowed"),
        (auto_round(None, sym=False, backend="auto_round:exllamav2"), "gptq_v2"),
        (auto_round("auto_round:gptqmodel", sym=False, backend="auto"), "gptq_v2"),
        (auto_round("auto_round:auto_gptq", bits=8, group_size=-1), "borrowed"),
        (auto_round("auto_round:auto_awq", sym=False), "awq"),
        (auto_round("auto_round:awq"), "awq"),
    ],
)
def test_auto_round(source: Path, tmp_path: Path, section: Config, zero_points: str) -> None:
    def store(_: str, tensor: torch.Tensor) -> tuple[Rounded, Tensors]:
        weight = rounded(tensor, section["bits"], section["group_size"], section["sym"])
        weight.scales[::2] *= -1  # its symmetric weights may have them
        if not section["sym"]:
            weight.zeros[::5] = 0
        if zero_points == "awq":
            return weight, awq_tensors(weight)
        return weight, gptq_tensors(weight, section["bits"], zero_points, has_g_idx=False)

    model = write_words(source, tmp_path / "model", section, store)
    assert_loads(model.folder, model.weights)
    assert cli.main(["check", str(model.folder)]) == 0


def test_settings_of_single_modules(source: Path, tmp_path: Path) -> None:
    def bits_of(name: str) -> int:
        return 8 if name == KEY else 16 if "v_proj" in name else 4

    def store(name: str, tensor: torch.Tensor) -> tuple[Rounded, Tensors] | None:
        if bits_of(name) == 16:
            return None
        weight = rounded(tensor, bits_of(name), 32, True)
        return weight, gptq_tensors(weight, bits_of(name), "borrowed", has_g_idx=False)

    single = {KEY: {"bits": 8}, r".*\.v_proj$": {"bits": 16, "data_type": "float"}, "lm_head": {"bits": 16}}
    section = auto_round("auto_round:auto_gptq", extra_config=single)
    model = write_words(source, tmp_path / "model", section, store)
    assert assert_loads(model.folder, model.weights) == {"w4a16-g32", "w8a16-g32"}
    plain = model.changed(tmp_path / "plain", config=lambda c: c.pop("extra_config"))
    assert KEY in refusal(plain.folder)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"packing_format": "auto_round:fp8_static"}, UnsupportedScheme, "packing_format 'auto_round:fp8_static' is"),
        ({"packing_format": "auto_round:llm_compressor"}, UnsupportedScheme, "is not served; auto_round:auto_gptq"),
        ({"act_bits": 8}, UnsupportedScheme, "act_bits 8 is not served; activations in float are"),
        ({"data_type": "mx_fp"}, UnsupportedScheme, "data_type 'mx_fp' is not served; 'int' is"),
        ({"bits": 2}, UnsupportedScheme, "bits=2"),
        ({"bits": 16}, CheckpointError, "bits is 16; a number below 16 is accepted"),
        ({"rotation_config": {"type": "hadamard"}}, UnsupportedScheme, "rotation_config"),
        ({"extra_config": {"a": {"bits": 3}}}, UnsupportedScheme, "extra_config 'a': bits=3"),
        ({"extra_config": {"a": 3}}, CheckpointError, "extra_config is {'a': 3}; a JSON object of objects"),
        ({"extra_config": {"a(": {"bits": 16}}}, CheckpointError, "has the pattern"),
    ],
)
def test_configurations_of_auto_round_that_are_refused(fields: Config, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as refused:
        parse_quantization(auto_round("auto_round:auto_gptq") | fields)
    assert message in str(refused.value)


def test_an_act_bits_of_16_is_none() -> None:
    assert parse_quantization(auto_round("auto_round:auto_gptq", act_bits=16)).schemes


def test_the_zero_points_of_another_packing_are_noticed(source: Path, tmp_path: Path) -> None:
    def store(_: str, tensor: torch.Tensor) -> tuple[Rounded, Tensors]:
        weight = rounded(tensor, 4, 32, True)
        return weight, gptq_tensors(weight, 4, "gptq_v2", has_g_idx=False)

    model = write_words(source, tmp_path / "model", auto_round("auto_round:auto_gptq"), store)
    assert "has the zero point 9 for output 0, group 0" in refusal(model.folder)
    right = model.changed(tmp_path / "right", config=lambda c: c.update(packing_format="auto_round:gptqmodel"))
    assert packed_weights(right.folder)[0].keys() == model.weights.keys()
