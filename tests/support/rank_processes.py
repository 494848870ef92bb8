"""Runs a function in several processes at once, as ``torchrun`` would start them, and collects what each said.

The function is one of a module: ``RankProcesses(2, "layer_cases:run", folder)`` calls ``layer_cases.run(folder)`` in
two processes. What it returns, as JSON, is ``result`` here. Starting Python and PyTorch takes seconds, so that one
start runs many cases: :class:`Cases` runs them one after another and notes what became of each.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RESULTS = "RANK_RESULTS"  # the folder, in the environment
_TORCHRUN = "from torch.distributed.run import main; main()"


@dataclass(frozen=True)
class Ended:
    """One rank's process.

    Attributes:
        code: its exit code, or minus the signal that has ended it.
        output: what it printed, errors too.
        result: what its function returned; None if it raised, or was ended.
        seconds: how long after the start it ended.
    """

    rank: int
    code: int
    output: str
    result: Any
    seconds: float


class RankProcesses:
    """The running processes; a context manager that leaves none behind."""

    def __init__(
        self, count: int, function: str, *arguments: Any, environment: Mapping[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._started = time.monotonic()
        port = str(_free_port())
        self._outputs = [Path(self._folder.name) / f"{rank}.out" for rank in range(count)]
        self._processes = []
        for rank, path in enumerate(self._outputs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with path.open("wb") as output:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, function, json.dumps(arguments)],
                        env=_environment(self._folder.name) | own | meeting | dict(environment or {}),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._folder.cleanup()

    def output(self, rank: int) -> str:
        """What a rank has printed up to now."""
        return self._outputs[rank].read_text(errors="replace")

    def wait_for(self, rank: int, text: str, seconds: float = 60.0) -> None:
        """Waits until a rank has printed a text."""
        until = time.monotonic() + seconds
        while text not in self.output(rank):
            assert self._processes[rank].poll() is None, f"rank {rank} has ended:\n{self.output(rank)}"
            assert time.monotonic() < until, f"rank {rank} has not said {text!r}:\n{self.output(rank)}"
            time.sleep(0.01)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self._processes[rank].pid, number)

    def wait(self, seconds: float = 120.0, *, without: tuple[int, ...] = ()) -> list[Ended]:
        """Waits until all ranks have ended, but for those ``without`` which it goes; fails after so many seconds."""
        ended = []
        until = time.monotonic() + seconds
        waited = [rank for rank in range(len(self._processes)) if rank not in without]
        times: dict[int, float] = {}
        while len(times) < len(waited):
            for rank in waited:
                if rank not in times and self._processes[rank].poll() is not None:
                    times[rank] = time.monotonic() - self._started
            said = "\n".join(f"---- rank {rank}\n{self.output(rank)[-3000:]}" for rank in waited if rank not in times)
            assert time.monotonic() < until, f"ranks run for more than {seconds} s:\n{said}"
            time.sleep(0.01)
        for rank in waited:
            path = Path(self._folder.name) / f"{rank}.json"
            result = json.loads(path.read_text()) if path.exists() else None
            ended.append(Ended(rank, self._processes[rank].returncode, self.output(rank), result, times[rank]))
        return ended


def run_ranks(
    count: int, function: str, *arguments: Any, seconds: float = 120.0, environment: Mapping[str, str] | None = None
) -> list[Any]:
    """What the function returned on every rank; all must end well."""
    with RankProcesses(count, function, *arguments, environment=environment) as processes:
        ended = processes.wait(seconds)
    for one in ended:
        assert one.code == 0, f"rank {one.rank} ended with {one.code}:\n{one.output}"
    return [one.result for one in ended]


def run_torchrun(count: int, function: str, *arguments: Any, seconds: float = 120.0) -> tuple[list[Any], str, int]:
    """The same through ``torchrun``: what each rank returned or None, what was printed, and the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _TORCHRUN, "--standalone", f"--nproc-per-node={count}"]
        done = subprocess.run(
            [*command, __file__, function, json.dumps(arguments)],
            env=_environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        paths = [Path(folder) / f"{rank}.json" for rank in range(count)]
        results = [json.loads(path.read_text()) if path.exists() else None for path in paths]
    return results, done.stdout, done.returncode


class Cases:
    """Runs cases on a rank; ``outcomes`` has None for those that went well, else what was wrong.

    Other ranks run the same cases in the same order. A failure leaves them at different places, so that nothing is run
    behind it.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, str | None] = {}
        self._stopped_by: str | None = None

    def run(self, name: str, body: Callable[..., None], *arguments: Any) -> None:
        if self._stopped_by is not None:
            self.outcomes[name] = f"not run behind {self._stopped_by}"
            return
        try:
            body(*arguments)
            self.outcomes[name] = None
        except Exception:
            self.outcomes[name] = traceback.format_exc()
            self._stopped_by = name


def refuse_failures(outcomes: list[dict[str, str | None]]) -> None:
    """Fails with all that went wrong in the cases of all ranks."""
    assert outcomes[0], "no case was run"
    wrong = [
        f"---- {name}, rank {rank}:\n{problem}"
        for rank, cases in enumerate(outcomes)
        for name, problem in cases.items()
        if problem is not None
    ]
    assert not wrong, f"{len(wrong)} cases failed\n" + "\n".join(wrong[:6])
    assert len({tuple(cases) for cases in outcomes}) == 1, "ranks have run different cases"


def shared_files() -> set[str]:
    """Files of ours in shared memory; there must be none."""
    return {path.name for path in Path("/dev/shm").glob("cpumoe-*")}


def _environment(results: str) -> dict[str, str]:
    """Ours with one thread, and the folders that tests import from."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    paths = os.pathsep.join(path for path in sys.path if path)
    return kept | {"OMP_NUM_THREADS": "1", "CPUMOE_NUM_THREADS": "1", "PYTHONPATH": paths, _RESULTS: results}


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _run_here() -> None:
    """In a rank's process."""
    module, _, name = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    path = Path(os.environ[_RESULTS]) / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps(result))


if __name__ == "__main__":
    _run_here()
