"""Runs a function in several processes at once, as ``torchrun`` would start them, and collects what each said.

The function is one of a module: ``RankProcesses(2, "layer_cases:run", folder)`` calls ``layer_cases.run(folder)`` in
two processes. What it returns, as JSON, is ``result`` here. Importing PyTorch takes seconds, so that it is done once,
in a process that is forked for every rank. :class:`Cases` runs many cases in one start and notes what became of each.
"""

from __future__ import annotations

import functools
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
_IMPORTED = (
    "torch.distributed.distributed_c10d",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "cpumoe.integrations.transformers.loading.model_loading",
    "cpumoe.parallel.experts",
)
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
        self._pids: list[int] = []
        self._codes: dict[int, int] = {}
        for rank, path in enumerate(self._outputs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, _RESULTS: self._folder.name}
            job = {
                "function": function,
                "arguments": arguments,
                "environment": own | meeting | dict(environment or {}),
                "output": str(path),
                "path": sys.path,
            }
            self._pids.append(_ask(job))

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(len(self._pids)):
            if self._code(rank) is None:
                self.signal(rank, signal.SIGKILL)
            while self._code(rank) is None:
                time.sleep(0.01)
        self._folder.cleanup()

    def _code(self, rank: int) -> int | None:
        """The exit code; None of a process that runs."""
        if rank not in self._codes and (code := _ask({"wait": self._pids[rank]})) is not None:
            self._codes[rank] = code
        return self._codes.get(rank)

    def output(self, rank: int) -> str:
        """What a rank has printed up to now."""
        path = self._outputs[rank]
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, rank: int, text: str, seconds: float = 60.0) -> None:
        """Waits until a rank has printed a text."""
        until = time.monotonic() + seconds
        while text not in self.output(rank):
            assert self._code(rank) is None, f"rank {rank} has ended:\n{self.output(rank)}"
            assert time.monotonic() < until, f"rank {rank} has not said {text!r}:\n{self.output(rank)}"
            time.sleep(0.01)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self._pids[rank], number)

    def wait(self, seconds: float = 120.0, *, without: tuple[int, ...] = ()) -> list[Ended]:
        """Waits until all ranks have ended, but for those ``without`` which it goes; fails after so many seconds."""
        ended = []
        until = time.monotonic() + seconds
        waited = [rank for rank in range(len(self._pids)) if rank not in without]
        times: dict[int, float] = {}
        while len(times) < len(waited):
            for rank in waited:
                if rank not in times and self._code(rank) is not None:
                    times[rank] = time.monotonic() - self._started
            said = "\n".join(f"---- rank {rank}\n{self.output(rank)[-3000:]}" for rank in waited if rank not in times)
            assert time.monotonic() < until, f"ranks run for more than {seconds} s:\n{said}"
            time.sleep(0.01)
        for rank in waited:
            path = Path(self._folder.name) / f"{rank}.json"
            result = json.loads(path.read_text()) if path.exists() else None
            ended.append(Ended(rank, self._codes[rank], self.output(rank), result, times[rank]))
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


# ---- the process that ranks are forked from ------------------------------------------------------------------------


@functools.cache
def _nursery() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__], env=_environment(""), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _ask(question: dict[str, Any]) -> Any:
    nursery = _nursery()
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write(json.dumps(question) + "\n")
    nursery.stdin.flush()
    return json.loads(nursery.stdout.readline())


def _next_job() -> dict[str, Any] | None:
    """In the nursery: answers until its input ends, which gives None; a rank's process comes out of it with its job."""
    for module in _IMPORTED:
        importlib.import_module(module)
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            pid, status = os.waitpid(question["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                return dict(question)
        print(json.dumps(answer), flush=True)
    return None


def _become_rank(job: dict[str, Any]) -> None:
    """Makes the forked process what a new one would be."""
    output, nothing = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, output, output)):
        os.dup2(descriptor, number)
    os.environ.update(job["environment"])
    sys.path[:] = job["path"]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_here(function: str, arguments: list[Any]) -> None:
    """In a rank's process."""
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*arguments)
    path = Path(os.environ[_RESULTS]) / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps(result))


if __name__ == "__main__":
    if len(sys.argv) > 1:  # a process of torchrun
        _run_here(sys.argv[1], json.loads(sys.argv[2]))
    elif (found := _next_job()) is not None:
        _become_rank(found)
        _run_here(found["function"], found["arguments"])
