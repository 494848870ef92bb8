"""The same bits on every instruction set and thread count, through the Python seam (core_test covers the kernels)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from conftest import SUPPORTED_ISAS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_layers import SCHEMES, WEIGHT_ONLY_FLOATS, fitting, linear_inputs, random_layer

import cpumoe
from cpumoe import _core
from cpumoe.evaluation.selftest import run_self_tests, using_isa
from cpumoe.layers.packed_weights import multiplies_floats


def agrees(got: torch.Tensor, expected: torch.Tensor, scheme: str, isa: str) -> bool:
    """The same bits; where an instruction set has a rounding of its own, nearly: quantised rows may round otherwise."""
    portable = {entry.name: entry.portable_floats for entry in cpumoe.instruction_sets()}
    if portable[isa] or not multiplies_floats(cpumoe.Scheme.parse(scheme)):
        return torch.equal(got, expected)
    error = (got.double() - expected.double()).norm()
    bound = 1e-5 if got.dtype == torch.float32 and scheme in WEIGHT_ONLY_FLOATS else 5e-2
    return bool(error <= bound * expected.double().norm())


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scheme=st.sampled_from(SCHEMES),
    tokens=st.integers(0, 150),
    experts=st.sampled_from([1, 2, 5, 20, 80]),
    topk=st.integers(1, 4),
    threads=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    activation=st.sampled_from(["silu", "gelu", "swiglu_oai"]),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_isa_or_threads(
    scheme: str,
    tokens: int,
    experts: int,
    topk: int,
    threads: int,
    dtype: torch.dtype,
    activation: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    size = fitting(scheme, 192)
    layer = random_layer(scheme, experts=experts, hidden=size, inner=size, activation=activation).experts("native")
    x = (torch.randn(tokens, size) * 2).to(dtype)
    ids = torch.randint(-1, experts, (tokens, topk))
    weights = torch.rand(tokens, topk)
    cpumoe.set_num_threads(1)
    with using_isa("scalar"):
        expected = layer(x, ids, weights)
    cpumoe.set_num_threads(threads)
    for isa in SUPPORTED_ISAS:
        with using_isa(isa):
            assert agrees(layer(x, ids, weights), expected, scheme, isa)
    cpumoe.set_num_threads(0)


@pytest.mark.every(2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_the_same_bits_everywhere(scheme: str) -> None:
    """Each on purpose, where the property test above draws some; core_test compares kernels for every shape."""
    tokens = 33
    layer = random_layer(scheme, experts=3, hidden=384, inner=fitting(scheme, 192), bias=True).experts("native")
    linear = cpumoe.QuantizedLinear.quantize(torch.randn(70, 384), scheme, torch.randn(70), **linear_inputs(scheme))
    x, ids, weights = torch.randn(tokens, 384), torch.randint(0, 3, (tokens, 2)), torch.rand(tokens, 2)
    with using_isa("scalar"):
        expected = layer(x, ids, weights), linear(x)
    for isa in SUPPORTED_ISAS:
        found = []
        for threads in (1, 3):
            cpumoe.set_num_threads(threads)
            with using_isa(isa):
                found.append((layer(x, ids, weights), linear(x)))
        for one, other, truth in zip(*found, expected, strict=True):
            assert torch.equal(one, other) and agrees(one, truth, scheme, isa), isa


def test_packed_bytes_do_not_depend_on_isa_or_threads() -> None:
    for scheme in SCHEMES:
        layer = random_layer(scheme, hidden=fitting(scheme, 192), inner=fitting(scheme, 192), bias=True)
        seen = set()
        for isa in SUPPORTED_ISAS:
            for threads in (1, 3):
                cpumoe.set_num_threads(threads)
                with using_isa(isa):
                    packed = layer.experts("native")
                seen.add(packed.gate_up_packed.numpy().tobytes() + packed.down_packed.numpy().tobytes())
        assert len(seen) == 1, scheme


def test_self_tests_pass() -> None:
    results = run_self_tests()
    assert [r.isa for r in results] == SUPPORTED_ISAS
    assert all(r.passed for r in results)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["scalar", SUPPORTED_ISAS[-1]])
def test_environment_chooses_the_kernels(name: str) -> None:
    done = run_python("import cpumoe; print(cpumoe.isa())", CPUMOE_ISA=name)
    assert done.stdout.strip() == name, done.stderr


def test_unknown_and_unsupported_names_are_errors() -> None:
    done = run_python("import cpumoe; cpumoe.isa()", CPUMOE_ISA="avx1024")
    assert done.returncode != 0 and "CPUMOE_ISA=avx1024 is not known; accepted are: scalar" in done.stderr
    missing = next(e for e in cpumoe.instruction_sets() if not e.supported)
    done = run_python("import cpumoe; cpumoe.isa()", CPUMOE_ISA=missing.name)
    assert done.returncode != 0 and f"CPUMOE_ISA={missing.name} cannot run here: {missing.reason}" in done.stderr
    with pytest.raises(ValueError, match="is not known"):
        _core.use_isa("nothing")


def test_default_is_the_best_supported() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "CPUMOE_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", "import cpumoe; print(cpumoe.isa())"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == SUPPORTED_ISAS[-1], done.stderr
