"""The ``cpumoe`` command up to the point where ``cpumoe`` itself is imported, and what Ctrl-C does to it.

This is not inside ``cpumoe`` because importing anything of that package imports PyTorch, which takes seconds: Ctrl-C
must mean the same during these seconds as before and after them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # what a shell expects of a program that Ctrl-C ended

_REMARKS = {"quantize": "; the same command goes on from where it was"}


def interrupted(command: str) -> str:
    """The line that is shown when Ctrl-C has ended a command."""
    return f"{f'cpumoe {command}'.strip()}: interrupted{_REMARKS.get(command, '')}"


def main() -> int:
    """The console script."""
    leave_on_interrupt()
    try:
        from cpumoe.cli import main
    except ValueError as problem:  # an environment variable with a value that is not known
        print(f"cpumoe: {problem}", file=sys.stderr)
        return 2
    return main()


def leave_on_interrupt() -> None:
    """From here on Ctrl-C shows one line and ends the process with 130, whatever it is doing.

    An exception would not do: in the middle of an import, in a destructor or beside a thread pool it is swallowed or
    shown with a traceback. Nothing is lost by leaving at once: what cpumoe writes is whole or absent, even after a
    kill. Where SIGINT is ignored (background jobs of a shell) it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    # On a terminal "^C", and maybe a progress bar, stand at the beginning of the line.
    line = f"{os.linesep if os.isatty(2) else ''}{interrupted(command)}\n"
    try:
        os.write(2, line.encode(errors="replace"))  # not print: the interrupted code may be inside of stderr's lock
    finally:
        os._exit(INTERRUPTED)


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Inside the block Ctrl-C raises KeyboardInterrupt, for code that goes on after it."""
    before = signal.getsignal(signal.SIGINT)
    if before is not _leave or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
