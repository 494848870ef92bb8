"""Tests of the vLLM plug-in, which run in an environment of their own: ``make test-vllm``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

HERE = Path(__file__).parent

#: vLLM in one process, whose start takes seconds instead of half a minute.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1))}
#: Some of the checks below need two workers, each with a CPU.
CPUS = sorted(os.sched_getaffinity(0))
needs_two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The folder that make_checkpoints.py has written, with another version of transformers than vLLM's."""
    folder = os.environ.get("CPUMOE_VLLM_CHECKPOINTS")
    assert folder is not None, "CPUMOE_VLLM_CHECKPOINTS names the folder of make_checkpoints.py; make test-vllm sets it"
    return Path(folder)


@pytest.fixture(scope="session")
def cases(checkpoints: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((checkpoints / "cases.json").read_text())
    return loaded


#: In standard deviations of the logits. Other orders of additions elsewhere in a model move an activation by a step of
#: its quantiser now and then, and with it the logits by a little; a likeliest token that leads by less may lose.
_CLOSE = 0.1


def is_right(found: Any, answers: list[dict[str, Any]]) -> None:
    """All tokens, up to where the second likeliest was as good; and that must be the exception."""
    assert isinstance(found, list), found
    compared = 0
    for one, answer in zip(found, answers, strict=True):
        assert len(one["tokens"]) == len(answer["tokens"])
        for token, expected, margin in zip(one["tokens"], answer["tokens"], answer["margins"], strict=True):
            if token != expected:
                assert margin < _CLOSE, f"{one['tokens']} instead of {answer['tokens']} (margins {answer['margins']})"
                break
            compared += 1
    assert compared >= sum(len(answer["tokens"]) for answer in answers) // 2


def run(*arguments: object, environment: dict[str, str] | None = None, seconds: float = 600) -> str:
    """What a Python program prints, which must end well."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_models(
    cases: Path, out: Path, options: dict[str, Any], environment: dict[str, str], only: list[str] | None = None
) -> tuple[dict[str, Any], str]:
    """What models of ``cases`` answered in vLLM, by name, and what was printed."""
    names = [] if only is None else ["--only", *only]
    printed = run(HERE / "run_models.py", cases, out, "--options", json.dumps(options), *names, environment=environment)
    found: dict[str, Any] = json.loads(out.read_text())
    return found, printed
