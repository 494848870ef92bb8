"""llama.cpp, measured beside cpumoe with a whole model: in its own virtual environment and in a process that stays."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from model_shape import ModelShape

# The functions of the library are called as this release declares them.
PACKAGES = ("llama-cpp-python==0.3.36", "gguf==0.19.0")
_HERE = Path(__file__).resolve().parent
ENVIRONMENT = _HERE.parent / "build" / "llama-cpp-environment"


def environment_python(folder: Path) -> Path:
    """The interpreter of an environment with llama.cpp, which is made first if it is not there: that takes minutes."""
    python = folder / "bin" / "python"
    has_packages = [str(python), "-c", "import gguf, llama_cpp"]
    if python.exists() and subprocess.run(has_packages, stderr=subprocess.DEVNULL).returncode == 0:
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    settings = {
        **os.environ,
        "CMAKE_ARGS": "-DGGML_NATIVE=ON",  # all instructions of this CPU
        "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0))),
    }
    # stdout is for the results. --no-binary: a wheel would be for some other CPU.
    install = [str(python), "-m", "pip", "install", "-q", "--no-binary", "llama-cpp-python", *PACKAGES]
    subprocess.run(install, check=True, env=settings, stdout=sys.stderr)
    return python


class LlamaCpp:
    """A :class:`model_timing.System`, and a context that ends the process."""

    name = "llama.cpp"

    def __init__(self, python: Path, file: Path, shape: ModelShape, threads: int, at_once: int) -> None:
        """``file``: the GGUF, which is written if it is not there. ``at_once``: tokens of a prompt computed at once."""
        if not file.exists():
            unfinished = file.with_suffix(".unfinished")
            writer = [str(python), str(_HERE / "llama_cpp_gguf.py"), str(unfinished), json.dumps(asdict(shape))]
            subprocess.run(writer, check=True, stdout=sys.stderr)
            unfinished.rename(file)
        worker = [str(python), str(_HERE / "llama_cpp_worker.py"), str(file), str(threads), str(at_once)]
        # It says much while it loads, which is shown only if it fails.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.about: dict[str, str] = self._ask("about")

    def _ask(self, call: str, **arguments: int) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either, and its log says why
            print(json.dumps({"call": call, **arguments}), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            raise RuntimeError(f"{self.name} has ended:\n" + "".join(self._log.readlines()[-20:]))
        return json.loads(answer)

    def prefill(self, tokens: int) -> float:
        return float(self._ask("prefill", tokens=tokens))

    def fill(self, depth: int, batch: int, room: int) -> None:
        self._ask("fill", depth=depth, batch=batch, room=room)

    def decode(self, steps: int) -> list[float]:
        seconds: list[float] = self._ask("decode", steps=steps)
        return seconds

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()
