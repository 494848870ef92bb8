"""The quantiser stopped at any operation on files, and started again: the same bytes as if nothing had happened.

Each example is a forked child in which the n-th operation on files ends the process as ``kill -9`` does (in the middle
of a write, if it is one), is answered by Ctrl-C, or finds the disk full. ``CPUMOE_FUZZ_EXAMPLES`` says how many
operations of each kind of run are tried, 0 standing for all of them.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

EXAMPLES = int(os.environ.get("CPUMOE_FUZZ_EXAMPLES", "2"))

KILLED, INTERRUPTED, FULL, DONE, EXISTS = 90, 91, 92, 93, 94  # exit codes of children
WRITING = ("open", "write", "fsync", "mkdir", "sendfile")  # what a full disk stops


class Stopper:
    """Counts operations that change files, and stops at one of them."""

    def __init__(self, at: int | None, how: int) -> None:
        self.count = 0
        self.at, self.how = at, how

    def before(self, operation: str, path=None, half=lambda: None) -> None:
        self.count += 1
        if self.count - 1 != self.at:
            return
        if self.how == FULL and operation in WRITING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if self.how == INTERRUPTED:
            raise KeyboardInterrupt
        half()
        os._exit(KILLED)

    def install(self) -> None:
        for name in ("rename", "replace", "mkdir", "unlink", "rmdir", "fsync", "sendfile"):
            setattr(os, name, self._counted(name, getattr(os, name)))
        opened = io.open

        def counted_open(file, mode="r", *arguments, **options):
            if not set(mode) & set("wax+"):
                return opened(file, mode, *arguments, **options)
            self.before("open", str(file))
            return CountedFile(opened(file, mode, *arguments, **options), self)

        io.open = builtins.open = counted_open

    def _counted(self, name, operation):
        def counted(*arguments, **options):
            self.before(name, str(arguments[0]) if name == "mkdir" else None)  # others take open files, or do not write
            return operation(*arguments, **options)

        return counted


class CountedFile:
    """A file whose writes count; one that is killed has written half of it."""

    def __init__(self, file, stopper: Stopper) -> None:
        self._file = file
        self._stopper = stopper

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *arguments):
        return self._file.__exit__(*arguments)

    def write(self, data):
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._stopper.before("write", half=half)
        return self._file.write(data)


def in_child(source: str, dst: Path, options: dict, at: int | None = None, how: int = KILLED) -> tuple[int, int]:
    """Quantises in a forked child; its exit code, and how many operations it counted if it came to an end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        stopper = Stopper(at, how)
        try:
            import cpumoe

            stopper.install()
            cpumoe.quantize_checkpoint(source, dst, "w4a8-g32", **options)
            code = DONE
        except KeyboardInterrupt:
            code = INTERRUPTED
        except FileExistsError:
            code = EXISTS
        except OSError as problem:
            named = problem.filename is not None and str(problem.filename).startswith(str(dst.parent))
            code = FULL if problem.errno == errno.ENOSPC and named else 98
        except BaseException as problem:
            sys.stderr.write(f"{problem!r}\n")
        finally:
            os.write(write, json.dumps(stopper.count).encode())
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), int(told or 0)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def drive(source: str, root: str, options: dict, examples: int) -> list[str]:
    """Tries the examples; what went wrong. For a process with one thread: forking is for such."""
    whole = Path(root) / "whole"
    code, total = in_child(source, whole, options)
    if code != DONE or total < 100:
        return [f"the undisturbed run ended with {code} after {total} operations"]
    expected = content(whole)
    problems = []
    for example, at in enumerate(chosen(total, examples)):
        dst = Path(root) / f"q{at}"
        first = (KILLED, INTERRUPTED, FULL)[example % 3]
        for how, when in ((first, at), (KILLED, at * 7 % total), (KILLED, None)):
            code, _ = in_child(source, dst, options, when, how)
            left = {k: v for k, v in content(dst).items() if not k.startswith(".work/")} if dst.exists() else expected
            if left != expected:
                problems.append(f"stopped at {at} and {when} of {total}: {dst} is not whole")
            # an operation that a full disk does not stop is one at which it was killed
            if code not in (KILLED, how, DONE, EXISTS) or (code == EXISTS and not dst.exists()):
                problems.append(f"stopped at {at} and {when} of {total} by {how}: it ended with {code}")
        if not dst.exists() or content(dst) != expected or dst.with_name(f"{dst.name}.partial").exists():
            problems.append(f"stopped at {at} of {total}: what the last run made is not the same, or something is left")
    return problems


def chosen(total: int, examples: int) -> list[int]:
    """Operations to stop at: half of them anywhere, and half near the end, where everything gets its name."""
    if examples == 0:
        return list(range(total))
    spread = [index * total // examples for index in range(examples)]
    last = [total - 1 - index * 3 for index in range(examples)]
    return sorted({*spread[::2], *last[::2]})


_DRIVER = """
import json, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent / "support")]
import torch
torch.set_num_threads(1)
import cpumoe
from test_fuzz_quantizer import drive
source, root, options, examples = json.loads(sys.argv[2])
if "calibration" in options:  # what it imports, once for all children
    from transformers import AutoConfig, AutoModelForCausalLM
    import cpumoe.integrations.transformers.calibration.calibration
    from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer
    load_tokenizer(Path(source))
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
assert len(list(Path("/proc/self/task").iterdir())) == 1
print(json.dumps(drive(source, root, options, examples)))
"""


@pytest.mark.full
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_run_stopped_anywhere_goes_on_to_the_same_bytes(tmp_path, calibrated):
    source = write_tiny_model(tmp_path / "float")
    options = {}
    if calibrated:
        (tmp_path / "text.txt").write_text("The experts that a token does not choose cost it nothing. " * 20)
        options = {"calibration": str(tmp_path / "text.txt"), "calibration_samples": 4, "calibration_length": 64}
    arguments = json.dumps([str(source), str(tmp_path), options, EXAMPLES])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, str(Path(__file__).parent), arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stderr
