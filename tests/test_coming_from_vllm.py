"""docs/coming-from-vllm.md names tests, schemes and files that exist, every builder of vLLM's, and what files mean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import cpumoe
from cpumoe import Scheme, UnsupportedScheme
from cpumoe.checkpoints.formats import parse_quantization
from cpumoe.layers.scheme import INTEGERS, SCHEMES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/coming-from-vllm.md").read_text()
TABLE, CONFIGURATIONS = PAGE.split("## Checkpoints by configuration")
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ")][1:]
FORMS = [line.strip("| ").split(" | ") for line in CONFIGURATIONS.splitlines() if line.startswith("| ")][1:]

BUILDERS = [
    "fp8_w8a8",
    "fp8_w8a16",
    "int8_w8a8",
    "int8_w8a16",
    "int4_w4a16",
    "int4_w4afp8",
    "gptq_marlin",
    "awq_marlin",
    "mxfp4_w4a16",
    "mxfp4_mxfp8",
    "mxfp4_w4a8",
    "ocp_mx",
    "nvfp4",
    "nvfp4_w4a16",
    "biased",
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_a_row_names_tests_and_files_that_exist(row: str) -> None:
    tests = re.findall(r"`(tests/[^`]+)`", row.split(" | ")[-1])
    assert tests and all((ROOT / path).is_file() for path in tests)
    for path in re.findall(r"`(checkpoints/[^`]+[.]py)`", row):
        assert (Path(cpumoe.__file__).parent / path).is_file()


def test_every_builder_has_a_row() -> None:
    text = "\n".join(ROWS)
    assert all(f"`{name}_moe_quant_config`" in text for name in BUILDERS) and "`FUSED_MOE_UNQUANTIZED_CONFIG`" in text


def test_the_schemes_that_rows_name_are_served() -> None:
    named = {name for row in ROWS for name in re.findall(r'`"([^"`]+)"`', row)}
    for name in named:
        assert str(Scheme.parse(name)) == name
    floats = {name for name in SCHEMES if "+" not in name and Scheme.parse(name).weights.element not in INTEGERS}
    assert floats <= named


def _compressed(text: str) -> dict[str, Any]:
    """``int4 group 128`` or ``fp8 tensor, static``: a part of a group of compressed-tensors."""
    kind, _, how = text.partition(", ")
    element, shape, *size = kind.split(" ")
    number = {"mx": 32, "group": int(size[0]) if size else None}.get(shape)
    section = {"num_bits": int(element[-1]), "type": "int" if element.startswith("int") else "float", "symmetric": True}
    section |= {"strategy": "group" if number else shape, "group_size": number, "dynamic": how == "dynamic"}
    return section | ({"block_structure": [128, 128]} if shape == "block" else {})


def _quark(text: str) -> dict[str, Any] | None:
    if text == "float":
        return None
    kind, _, how = text.partition(", ")
    dtype, qscheme = kind.split(" ")
    section = {"dtype": dtype, "qscheme": qscheme, "is_dynamic": how == "dynamic"}
    section |= {"symmetric": not dtype.startswith("uint")}
    groups = {"group_size": 32, "scale_format": None if "int" in dtype else "e8m0", "ch_axis": -1}
    return section | (groups if qscheme == "per_group" else {})


def _section(weights: str, activations: str) -> dict[str, Any]:
    tool, _, form = weights.partition(" ")
    if tool == "AWQ":
        bits, _, _, size = form.split(" ")
        return {"quant_method": "awq", "bits": int(bits), "group_size": int(size), "zero_point": True}
    if tool == "Quark":
        linear = {"weight": _quark(form), "input_tensors": _quark(activations)}
        return {
            "quant_method": "quark",
            "export": {"pack_method": "reorder"},
            "global_quant_config": linear,
            "exclude": [],
        }
    formats = {"int": "pack-quantized", "fp8": "float-quantized", "fp4": "mxfp4-pack-quantized"}
    group = {
        "format": formats.get(form[:3], "mxfp6-pack-quantized"),
        "targets": ["Linear"],
        "weights": _compressed(form),
        "input_activations": _compressed(activations),
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(("weights", "activations", "said"), FORMS)
def test_a_configuration_is_read_as_the_page_says(weights: str, activations: str, said: str) -> None:
    section = _section(weights, activations)
    if said.startswith("rejected: "):
        with pytest.raises(UnsupportedScheme, match=re.escape(said.removeprefix("rejected: "))):
            parse_quantization(section)
    else:
        assert [str(scheme) for scheme in parse_quantization(section).schemes] == [said.strip("`")]
