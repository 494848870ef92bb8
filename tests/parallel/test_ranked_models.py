"""Whole models that are spread over real processes, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_cases import FOR_FOUR, MODELS, write_models
from rank_processes import refuse_failures, run_ranks, run_torchrun, shared_files
from sampling import first_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    write_models(models)
    return models


@pytest.mark.parametrize(("ranks", "names"), first_of([(2, FOR_FOUR), (2, list(MODELS)), (4, FOR_FOUR)], 1))
def test_models(ranks: int, names: list[str], folder: Path) -> None:
    refuse_failures(run_ranks(ranks, "model_cases:every_model", str(folder), names, seconds=400))
    assert not shared_files()


@pytest.mark.full
def test_own_sequences(folder: Path) -> None:
    refuse_failures(run_ranks(4, "model_cases:own_sequences", str(folder)))


@pytest.mark.full
def test_models_through_torch_distributed(folder: Path) -> None:
    names = ["qwen3_moe", "qwen3_moe, stored in int4"]
    environment = {"CPUMOE_SHARED_MEMORY": "0"}
    refuse_failures(run_ranks(2, "model_cases:every_model", str(folder), names, environment=environment))


@pytest.mark.full
def test_more_of_a_model_through_torchrun(folder: Path, tmp_path: Path) -> None:
    results, output, code = run_torchrun(2, "model_cases:more_of_models", str(folder), str(tmp_path))
    assert code == 0, output
    refuse_failures(results)
