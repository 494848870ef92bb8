"""The beginning of the ``cpumoe`` command, before ``cpumoe`` itself is imported, and what Ctrl-C does.

This is a package of its own because importing any part of ``cpumoe`` imports PyTorch, which takes seconds. Ctrl-C must
do the same during these seconds as before and after them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # the exit code that shells expect of a program that Ctrl-C ended

_REMARKS = {"quantize": "; the same command goes on from where it was"}


def interrupted(command: str) -> str:
    """The line that is shown when Ctrl-C has ended a command."""
    return f"{f'cpumoe {command}'.strip()}: interrupted{_REMARKS.get(command, '')}"


def main() -> int:
    """The console script."""
    leave_on_interrupt()
    try:
        from cpumoe.cli import main
    except ValueError as problem:  # an environment variable has a value that is not accepted
        print(f"cpumoe: {problem}", file=sys.stderr)
        return 2
    return main()


def leave_on_interrupt() -> None:
    """From now on Ctrl-C prints one line and ends the process with exit code 130, whatever it is doing.

    An exception does not work everywhere: during an import, in a destructor or beside a thread pool it is swallowed or
    shown with a traceback. Nothing is lost by leaving at once, because files that cpumoe writes are complete or absent,
    even after a kill. If SIGINT is ignored, as in background jobs of a shell, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    # On a terminal the line begins with "^C", and maybe a progress bar, so a new line is needed.
    line = f"{os.linesep if os.isatty(2) else ''}{interrupted(command)}\n"
    try:
        os.write(2, line.encode(errors="replace"))  # print could deadlock: the interrupted code may hold stderr's lock
    finally:
        os._exit(INTERRUPTED)


class Interrupts:
    """Whether Ctrl-C was pressed: an exception that is raised inside of a destructor is swallowed, this is not."""

    def __init__(self) -> None:
        self.seen = False

    def __call__(self, *_: object) -> None:
        self.seen = True
        raise KeyboardInterrupt


@contextmanager
def interrupts_raised() -> Iterator[Interrupts]:
    """Inside the block Ctrl-C raises KeyboardInterrupt, for code that continues after it."""
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    if before is not _leave or threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
