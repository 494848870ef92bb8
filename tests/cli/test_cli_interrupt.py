"""Ctrl-C at any moment, as a shell sees it: one line, exit code 130, no traceback."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

pytest.importorskip("transformers")
from sampling import first_of

import cpumoe_command
from cpumoe.cli import main

PATIENCE = 120.0  # seconds; other work may be running on the machine
SCRIPT = ["-c", "import sys; from cpumoe_command import main; sys.exit(main())"]  # what the console script runs
MODULE = ["-m", "cpumoe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


class Running:
    """A process, what it has mapped, and what it says."""

    def __init__(self, arguments: list[str], stdin: int = subprocess.DEVNULL, stderr: int = subprocess.PIPE) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # A shell that runs these tests in the background may have told its jobs to ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None, self.process.communicate()
            time.sleep(0.002)

    def has_mapped(self, library: str) -> bool:
        try:
            return library in Path(f"/proc/{self.process.pid}/maps").read_text()
        except OSError:  # it is just being started
            return False

    def stop(self, number: int = signal.SIGINT) -> tuple[int, bytes, bytes]:
        """Sends a signal: exit code, and what was said on stdout and stderr."""
        try:
            self.process.send_signal(number)
            out, err = self.process.communicate(timeout=PATIENCE)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


# In the order in which they are loaded. Before the first of them is Python's own start, a few milliseconds.
@pytest.mark.parametrize("library", ["_core.cpython", "libtorch_cpu", "libtorch_python", "_multiarray_umath"])
@pytest.mark.parametrize("way", [SCRIPT, MODULE], ids=["script", "python -m"])
@pytest.mark.every(2)
def test_while_pytorch_is_imported(way: list[str], library: str, folder: Path) -> None:
    running = Running([*way, "generate", str(folder), "The", "--scheme", "float"])
    running.until(lambda: running.has_mapped(library))
    assert running.stop() == (130, b"", b"cpumoe generate: interrupted\n")


@pytest.mark.parametrize("delay", first_of([0.3, 0.0, 1.0, 2.0], 1))
def test_while_a_model_is_loaded(delay: float, folder: Path) -> None:
    arguments = ["generate", str(folder), "The", "--scheme", "w4a8-g32", "--max-new-tokens", "2000", "--no-stream"]
    running = Running([*SCRIPT, *arguments])
    running.until(lambda: running.has_mapped("libtorch_python"))
    time.sleep(delay)
    code, out, err = running.stop()
    # On a fast machine the answer has begun, and is shown as far as it has come.
    assert code == 130 and err.startswith(b"cpumoe generate: interrupted") and err.count(b"\n") == 1
    assert out == b"" or b"prompt tokens" in err


@pytest.mark.full
def test_while_an_answer_is_written(folder: Path) -> None:
    arguments = ["generate", str(folder), "The experts", "--scheme", "float", "--max-new-tokens", "2000"]
    running = Running([*SCRIPT, *arguments])
    assert running.process.stdout is not None
    first = running.process.stdout.read(1)
    code, out, err = running.stop()
    assert code == 130 and first and out.endswith(b"\n")
    assert err.startswith(b"cpumoe generate: interrupted; 2 prompt tokens, ") and err.count(b"\n") == 1

    running = Running([*SCRIPT, *arguments, "--json"])
    running.until(lambda: running.has_mapped("libtorch_python"))
    time.sleep(4)
    code, out, err = running.stop()
    assert code == 130 and err == b"cpumoe generate: interrupted\n"
    assert out == b"" or json.loads(out)["finish"] == "interrupt"


@pytest.mark.full
def test_quantize_goes_on_with_the_same_command(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, quantised = tmp_path / "text.txt", tmp_path / "quantised"
    text.write_text("A router reads the token and names the experts; they answer. " * 4000)
    arguments = ["quantize", str(folder), str(quantised), "--scheme", "w4a8-g32", "--calibration", str(text)]
    running = Running([*SCRIPT, *arguments])
    work = tmp_path / "quantised.partial"
    running.until(lambda: (work / "model-00001-of-00003.safetensors").exists())
    code, out, err = running.stop()
    assert (code, out) == (130, b"")
    assert err == b"cpumoe quantize: interrupted; the same command goes on from where it was\n"
    assert work.exists() and not quantised.exists()
    assert main(arguments) == 0 and quantised.exists() and not work.exists()


@pytest.mark.full
def test_while_a_text_is_read_and_measured(folder: Path) -> None:
    running = Running([*SCRIPT, "eval", str(folder), "--text", "-", "--scheme", "float"], stdin=subprocess.PIPE)
    running.until(lambda: running.has_mapped("libtorch_python"))
    time.sleep(1)  # it waits for its standard input
    assert running.stop() == (130, b"", b"cpumoe eval: interrupted\n")

    running = Running([*SCRIPT, "eval", str(folder), "--text", "-", "--scheme", "float"], stdin=subprocess.PIPE)
    assert running.process.stdin is not None
    running.process.stdin.write(b"The experts that a token does not choose cost it nothing. " * 20_000)
    running.process.stdin.close()
    running.process.stdin = None
    running.until(lambda: running.has_mapped("tokenizers"))
    time.sleep(4)
    assert running.stop() == (130, b"", b"cpumoe eval: interrupted\n")


@pytest.mark.full
def test_while_layers_are_measured() -> None:
    running = Running([*SCRIPT, "bench", "--tokens", "1", "--seconds", "60"])
    running.until(lambda: running.has_mapped("libtorch_python"))
    time.sleep(4)
    assert running.stop() == (130, b"", b"cpumoe bench: interrupted\n")


def test_on_a_terminal_the_line_stands_alone() -> None:
    """The terminal has shown ``^C`` by then, and maybe a progress bar."""
    master, slave = pty.openpty()
    running = Running([*SCRIPT, "doctor"], stderr=slave)
    os.close(slave)
    running.until(lambda: running.has_mapped("libtorch_cpu"))
    assert running.stop()[:2] == (130, b"")
    with os.fdopen(master, "rb", buffering=0) as terminal:
        assert terminal.read(1000) == b"\r\ncpumoe doctor: interrupted\r\n"


def test_sigterm_ends_a_command_at_once(folder: Path) -> None:
    running = Running([*SCRIPT, "generate", str(folder), "The", "--scheme", "float", "--max-new-tokens", "2000"])
    assert running.process.stdout is not None
    running.process.stdout.read(1)
    code, _, err = running.stop(signal.SIGTERM)
    assert code == -signal.SIGTERM and err == b""  # 143 in a shell


def test_called_from_python(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's process is ended who calls main() himself."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cpumoe.cli.generate.load_chosen_model", interrupt)
    before = signal.getsignal(signal.SIGINT)
    assert main(["generate", str(folder), "The", "--scheme", "float"]) == cpumoe_command.INTERRUPTED
    assert capsys.readouterr().err == "cpumoe generate: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_background_jobs_are_not_interrupted() -> None:
    program = (
        "import signal, cpumoe_command\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "cpumoe_command.leave_on_interrupt()\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
        "with cpumoe_command.interrupts_raised(): signal.raise_signal(signal.SIGINT)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_interrupt_that_a_destructor_swallows_is_still_seen() -> None:
    program = """
import os, signal
import cpumoe_command

class Interrupting:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # Python runs the handler between two of these
            pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background have it ignored
cpumoe_command.leave_on_interrupt()
with cpumoe_command.interrupts_raised() as interrupts:
    thing = Interrupting()
    del thing
    print("still running", interrupts.seen)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "still running True\n", done.stderr
    assert "KeyboardInterrupt" in done.stderr  # as Python reports exceptions that it ignores
