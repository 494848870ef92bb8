"""The oneDNN guard: set where it is needed and nobody else did, told in words."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from cpumoe import cpu


@pytest.fixture
def hidden_palette(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that offers AMX but hides its tile sizes."""
    monkeypatch.setattr(cpu, "_core", SimpleNamespace(amx_palette_hidden=lambda: True))
    monkeypatch.setattr(cpu, "_state", cpu._GuardState())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "restored afterwards")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")


def test_the_guard_is_set_once_and_said(hidden_palette: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_TORCH_CAME_FIRST", False)
    for _ in range(2):
        assert cpu.guard_onednn().startswith("set by cpumoe: ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    monkeypatch.setattr(cpu, "_TORCH_CAME_FIRST", True)
    assert "import cpumoe first" in cpu.guard_onednn()


def test_what_the_user_set_is_left_alone(hidden_palette: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert cpu.guard_onednn() == "needed, and ONEDNN_MAX_CPU_ISA=AVX2 was set already"
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_machines_without_the_defect_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_core", SimpleNamespace(amx_palette_hidden=lambda: False))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert cpu.guard_onednn().startswith("not needed")
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


@pytest.mark.parametrize("limit", ["AVX2", "avx512_core"])
def test_float_dtype_follows_the_limit_of_onednn(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_cpu_flags", lambda: {"avx512_bf16"})
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert cpu.float_dtype() == (torch.bfloat16, "this CPU has avx512_bf16")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert cpu.float_dtype() == (
        torch.float32,
        f"oneDNN may not use bf16 products (ONEDNN_MAX_CPU_ISA={limit.upper()})",
    )
