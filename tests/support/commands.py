"""The command ``cpumoe``, called in this process: importing PyTorch and transformers takes seconds in another one."""

from __future__ import annotations

import contextlib
import io
import subprocess

from cpumoe.cli import main


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command; return what a process of its own would give."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
