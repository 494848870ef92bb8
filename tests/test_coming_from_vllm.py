"""docs/coming-from-vllm.md names tests, schemes and files that exist, and every builder of vLLM's configurations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cpumoe
from cpumoe import Scheme
from cpumoe.layers.scheme import INTEGERS, SCHEMES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/coming-from-vllm.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]

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
