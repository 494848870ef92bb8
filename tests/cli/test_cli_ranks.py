"""``generate`` and ``serve`` on several ranks, as torchrun starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rank_processes import shared_files
from sampling import first_of
from tiny_models import write_tiny_model

pytest.importorskip("transformers")
pytest.importorskip("starlette")

_TORCHRUN = "from torch.distributed.run import main; main()"
_PROMPT = "some words to go on from"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def _command(ranks: int, *arguments: str) -> list[str]:
    started = [sys.executable, "-m", "cpumoe", *arguments]
    if ranks > 1:
        launcher = [sys.executable, "-c", _TORCHRUN, "--standalone", f"--nproc-per-node={ranks}"]
        started = [*launcher, "-m", "cpumoe", *arguments]
    return started


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _run(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(ranks, *arguments), env=_environment(), capture_output=True, text=True, timeout=180, check=False
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "layout"),
    first_of([(2, "--dp 2 --ep --exchange all_to_all"), (4, "--ep"), (2, "--tp 2 --sp --ep")], 1),
)
def test_generate_gives_the_text_of_one_process(folder: Path, ranks: int, layout: str) -> None:
    common = ["generate", str(folder), _PROMPT, "--scheme", "w4a8-g32", "--max-new-tokens", "12", "--greedy", "--json"]
    alone, together = _run(1, *common), _run(ranks, *common, *layout.split())
    assert together.returncode == 0, together.stderr
    assert json.loads(together.stdout)["text"] == json.loads(alone.stdout)["text"]  # the first rank alone prints
    assert not shared_files()


@pytest.mark.full
def test_sampled_tokens_are_those_of_one_rank(folder: Path) -> None:
    """No rank may choose another token than the others, with and without a seed."""
    common = [
        "generate",
        str(folder),
        _PROMPT,
        "--scheme",
        "w8a8",
        "--max-new-tokens",
        "12",
        "--temperature",
        "1",
        "--ep",
    ]
    seeded = [_run(2, *common, "--seed", "5", "--json") for _ in range(2)]
    assert [run.returncode for run in seeded] == [0, 0], seeded[0].stderr
    assert len({json.loads(run.stdout)["text"] for run in seeded}) == 1
    assert _run(2, *common).returncode == 0


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    first_of(
        [
            (1, ["--tp", "2"], "has 2 ranks, and this is one process; torchrun --nproc-per-node 2"),
            (1, ["--ep"], "--ep has no effect with one rank"),
            (2, ["--tp", "2"], "in 2 slices, which are multiples of 32"),
            (2, ["--scheme", "float", "--ep"], "does not spread them over ranks"),
        ],
        1,
    ),
)
def test_refusals(folder: Path, ranks: int, arguments: list[str], message: str) -> None:
    scheme = [] if "--scheme" in arguments else ["--scheme", "w4a8-g32"]
    done = _run(ranks, "generate", str(folder), _PROMPT, *scheme, *arguments)
    assert done.returncode != 0
    assert message in done.stderr


# ---- serve ---------------------------------------------------------------------------------------------------------


class _Served:
    """A server that has begun; ``said`` are the lines that it printed."""

    def __init__(self, process: subprocess.Popen[str], said: list[str]) -> None:
        self.process = process
        self.said = said
        self._address = said[-1].rpartition(" at ")[2].strip()

    def complete(self, model: str, prompt: str, tokens: int = 16) -> str:
        body = json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}).encode()
        request = urllib.request.Request(f"{self._address}/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: Any = json.load(answer)
        text: str = found["choices"][0]["text"]
        return text

    def ranks(self) -> list[int]:
        """The processes of the ranks, below those of torchrun."""
        below = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False)
        return [int(line) for line in below.stdout.split()]


@contextmanager
def _serving(ranks: int, folder: Path, *arguments: str) -> Iterator[_Served]:
    common = ["serve", str(folder), "--scheme", "w4a8-g32", "--port", "0", *arguments]
    process = subprocess.Popen(
        _command(ranks, *common), env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("model: "):
                yield _Served(process, lines)
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def answers_alone(folder: Path) -> list[str]:
    return _answers(1, folder)


def _answers(ranks: int, folder: Path, *more: str) -> list[str]:
    """To many requests at once, and to one alone."""
    prompts = [f"{_PROMPT} {number}" for number in range(8)]
    with _serving(ranks, folder, *more) as served, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: served.complete(str(folder), prompt), prompts))
        time.sleep(1.5)  # ranks that have nothing to do stay
        return [*found, served.complete(str(folder), _PROMPT)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "layout"),
    first_of(
        [
            (2, "--ep --rebalance 5 --spare-experts 1"),
            (2, "--dp 2 --ep --rebalance 5 --spare-experts 1"),
            (4, "--tp 2 --dp 2 --ep --exchange all_to_all"),
        ],
        1,
    ),
)
def test_serve_answers_many_requests_at_once_as_one_process_does(
    folder: Path, answers_alone: list[str], ranks: int, layout: str
) -> None:
    assert _answers(ranks, folder, *layout.split()) == answers_alone
    assert not shared_files()


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "layout"), first_of([(2, "--ep"), (2, "--dp 2 --ep"), (4, "--tp 2 --dp 2 --ep")], 1))
def test_serve_ends_when_a_rank_is_lost(folder: Path, ranks: int, layout: str) -> None:
    with _serving(ranks, folder, *layout.split(), "--rank-timeout", "10") as served:
        served.complete(str(folder), _PROMPT)
        os.kill(max(served.ranks()), signal.SIGKILL)
        assert served.process.wait(30) != 0
    assert not shared_files()


@pytest.mark.full
def test_serve_says_what_groups_of_ranks_do(folder: Path) -> None:
    with _serving(2, folder, "--dp", "2", "--ep") as served:
        said = "".join(served.said)
    assert "that the model leaves on every rank; a request may have" in said
    assert "computed together by 2 groups of ranks, each with requests of its own, each step in one call" in said


@pytest.mark.full
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_prompts_are_not_shared_out(folder: Path, command: str) -> None:
    more = [_PROMPT] if command == "generate" else []
    done = _run(1, command, str(folder), *more, "--pcp", "2")
    assert done.returncode != 0
    assert "prompts are not shared out over ranks in whole models. --tp N" in done.stderr
