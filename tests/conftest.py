"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cpumoe
from cpumoe import _core

SUPPORTED_ISAS = [entry.name for entry in cpumoe.instruction_sets() if entry.supported]


@pytest.fixture(params=SUPPORTED_ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on every instruction set of this machine."""
    _core.use_isa(request.param)
    yield request.param
    _core.use_isa("")


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Every test starts from the same random numbers and leaves the default kernels and threads behind."""
    torch.manual_seed(0)
    yield
    _core.use_isa("")
    cpumoe.set_num_threads(0)
