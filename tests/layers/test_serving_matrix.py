"""Every cell of ``cpumoe explain``: each scheme, activation and routing method runs on each instruction set."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

import cpumoe
from cpumoe import ops
from cpumoe.cli import main
from cpumoe.evaluation.selftest import using_isa
from cpumoe.layers.activation import KINDS, Activation
from cpumoe.layers.activation_rounding import input_scale_arguments
from cpumoe.layers.backends import serving_matrix
from cpumoe.layers.routing_methods import RoutingMethod
from cpumoe.layers.scheme import SCHEMES, Scheme

EXPERTS, HIDDEN, INNER, TOKENS, TOPK = 4, 128, 128, 5, 2
METHODS = [method for method in RoutingMethod if method is not RoutingMethod.UNSPECIFIED]
PORTABLE = {entry.name: entry.portable_floats for entry in cpumoe.instruction_sets() if entry.supported}
ISAS = list(PORTABLE)


def relative(value: Tensor, truth: Tensor) -> float:
    return float((value - truth).norm() / truth.norm())


def test_the_matrix_has_every_cell_once() -> None:
    cells = list(serving_matrix())
    assert len(cells) == len(set(cells)) == len(SCHEMES) * len(METHODS) * len(KINDS) * len(ISAS)
    assert all(cell.backend == "native" for cell in cells)
    assert [str(Scheme.parse(name)) for name in SCHEMES] == list(SCHEMES)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_cell_of_a_scheme_runs(scheme: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((TOKENS, HIDDEN), generator=generator)
    logits = torch.randn((TOKENS, EXPERTS), generator=generator)
    input_scales = input_scale_arguments(Scheme.parse(scheme), 5.0, 5.0)
    for activation in KINDS:
        rows = Activation(activation).gate_up_rows(INNER)
        gate_up = torch.randn((EXPERTS, rows, HIDDEN), generator=generator) * 0.1
        down = torch.randn((EXPERTS, HIDDEN, INNER), generator=generator) * 0.1
        experts = cpumoe.Experts.quantize(gate_up, down, scheme, activation=activation, **input_scales)
        inputs = ops.read_spec(experts.get_buffer("gate_up_packed")).activations
        for method in METHODS:
            topk = 1 if method is RoutingMethod.LLAMA4 else TOPK
            if method is RoutingMethod.CUSTOM:
                weights, ids = torch.ones((TOKENS, topk)), torch.arange(TOKENS * topk).view(TOKENS, topk) % EXPERTS
            else:
                options = {"num_expert_group": 2, "topk_group": 1} if method is RoutingMethod.DEEPSEEK_V3 else {}
                weights, ids = cpumoe.select_experts(logits, topk, method, **options)
            out = experts(x, ids, weights)
            assert bool(torch.isfinite(out).all()) and float(out.norm()) > 0
            if method is not METHODS[0]:  # what the layer computes does not depend on how its experts were chosen
                continue
            with using_isa("scalar"):
                scalar = experts(x, ids, weights)
            bound = 1e-4 if experts.config.scheme.product_activations is None else 2e-2
            assert relative(scalar, experts.reference(x, ids, weights)) < bound
            for isa in ISAS:
                with using_isa(isa):
                    out = experts(x, ids, weights)
                if not PORTABLE[isa] and inputs not in ("int8", "int16"):  # AMX's bf16 tiles add in another order
                    assert relative(out, scalar) < 1e-6
                else:
                    assert torch.equal(out, scalar), isa


def test_the_command_shows_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in SCHEMES)
    assert main(["explain", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert {cell["scheme"] for cell in cells} == set(SCHEMES) and {cell["isa"] for cell in cells} == set(ISAS)


def test_options_of_a_layer_need_a_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--hidden", "256"]) != 0
    assert "--hidden" in capsys.readouterr().err
