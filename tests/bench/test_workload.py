"""Random weights of benchmarks: every scheme, legal, near enough to one in size, and with the scales it needs."""

from __future__ import annotations

import pytest
import torch

from cpumoe import Experts, MoEConfig, Scheme, UnsupportedScheme
from cpumoe.bench.shapes import SHAPES, Shape
from cpumoe.bench.workload import fitting_scheme, random_experts, random_routing, random_weight
from cpumoe.layers import reference
from cpumoe.layers.activation_rounding import needs_input_scales
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.layers.scheme import SCHEMES
from cpumoe.layers.weight_checks import check_parts, check_values, checked_weight

TINY = Shape("tiny", 256, 128, 6, 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_weights_are_legal(scheme: str) -> None:
    parsed = Scheme.parse(scheme)
    weight = random_weight(3, 256, 128, parsed, 1)
    checked_weight("w", weight, parsed)
    check_parts("w", weight, parsed, (3, 256, 128))
    check_values("w", weight, parsed)
    assert (weight.input_scales is not None) == needs_input_scales(parsed)
    dense = reference.dequantize(weight)
    assert bool(torch.isfinite(dense).all()) and 1e-5 < float(dense.abs().mean()) < 0.1
    again, other = random_weight(3, 256, 128, parsed, 1), random_weight(3, 256, 128, parsed, 2)
    assert torch.equal(reference.dequantize(again), dense) and not torch.equal(reference.dequantize(other), dense)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_layers_compute(scheme: str) -> None:
    parsed = Scheme.parse(scheme)
    gate_up, down = random_weight(6, 256, 256, parsed, 1), random_weight(6, 256, 128, parsed, 2, 0.01)
    config = MoEConfig(parsed, 6, 256, 128, scale_dtype=gate_up.scales.dtype)
    experts = Experts.from_chunks([QuantizedExperts(gate_up, down)], config, backend="reference")
    ids, weights = random_routing(TINY, 5, 0)
    out = experts(torch.randn(5, 256), ids, weights)
    assert bool(torch.isfinite(out).all()) and float(out.norm()) > 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_layers_are_packed(scheme: str) -> None:
    """For the native kernels."""
    experts = random_experts(TINY, Scheme.parse(scheme))
    ids, weights = random_routing(TINY, 5, 0)
    x = torch.randn(5, 256)
    out, truth = experts(x, ids, weights), experts.reference(x, ids, weights)
    assert float((out - truth).norm() / truth.norm()) < 2e-2


def test_a_scheme_that_fits() -> None:
    wide, narrow = SHAPES["mixtral-8x7b"], SHAPES["gpt-oss-20b"]
    assert str(fitting_scheme(Scheme.parse("fp8-block"), wide)) == "fp8-block"
    assert str(fitting_scheme(Scheme.parse("w4a16-g128-asym"), narrow)) == "w4a16-g64-asym"
    assert str(fitting_scheme(Scheme.parse("mxfp6-e2m3"), narrow)) == "mxfp6-e2m3"
    assert str(fitting_scheme(Scheme.parse("bf16"), narrow)) == "bf16"
    with pytest.raises(UnsupportedScheme, match="fp8-block does not fit .*2880.*; sizes must be multiples of 128"):
        fitting_scheme(Scheme.parse("fp8-block"), narrow)
