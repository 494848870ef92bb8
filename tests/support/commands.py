"""The command ``cpumoe``, called in this process: importing PyTorch and transformers takes seconds in another one."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

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


def run_with_address_space(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that may map ``size`` bytes, as on a machine with little memory."""
    program = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({size}, {size})); "
        "from cpumoe_command import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
