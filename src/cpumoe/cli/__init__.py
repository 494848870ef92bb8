"""The ``cpumoe`` command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from cpumoe import __version__, settings
from cpumoe.cli import (
    bench,
    chat,
    check,
    demo,
    doctor,
    eval,
    explain,
    generate,
    inspect,
    plan,
    quantize,
    serve,
    simulate,
)
from cpumoe.cli.arguments import add_threads, respect_quota, use_threads
from cpumoe.cli.parser import Parser, parse
from cpumoe.errors import NotEnoughMemory
from cpumoe_command import INTERRUPTED, interrupted

_COMMANDS = (demo, generate, chat, serve, quantize, inspect, plan, simulate, check, eval, explain, bench, doctor)
_COMPUTE_NOTHING = ("inspect", "plan", "explain")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Exit codes: 0 done, 1 the command found something wrong, 2 bad arguments, 130 ended by Ctrl-C.
    """
    arguments = parse(_parser(), argv)
    arguments.given = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="%(name)s: %(message)s")
    if getattr(arguments, "threads", None) is not None:
        use_threads(arguments.threads)
    elif arguments.command not in _COMPUTE_NOTHING:
        respect_quota()
    try:
        code: int = arguments.run(arguments)
    except BrokenPipeError:  # the reader of our output has ended (head, less)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit succeeds
        return 0
    except KeyboardInterrupt:  # only if Python code calls this function: the command itself leaves at once
        print(interrupted(arguments.command), file=sys.stderr)
        return INTERRUPTED
    except (ValueError, RuntimeError, OSError, NotEnoughMemory) as problem:
        if arguments.verbose or _debugging():
            traceback.print_exc()
        print(f"cpumoe {arguments.command}: {problem}", file=sys.stderr)
        return 2
    return code


def _debugging() -> bool:
    """Return whether ``CPUMOE_DEBUG`` asks for tracebacks; another value must not hide the error that is printed."""
    try:
        return settings.DEBUG.is_on()
    except ValueError as problem:
        print(f"cpumoe: {problem}", file=sys.stderr)
        return False


def _parser() -> Parser:
    parser = Parser(prog="cpumoe", description="Quantised mixture-of-experts models on CPUs.")
    parser.add_argument("--version", action="version", version=f"cpumoe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_command(commands)
    # -v is accepted before the command and after it. SUPPRESS: the default of a command's own parser must not replace
    # the value that was given before the command.
    for each, default in ((parser, False), *((command, argparse.SUPPRESS) for command in commands.choices.values())):
        text = "show what is chosen and why, and the traceback of what goes wrong"
        each.add_argument("-v", "--verbose", action="store_true", default=default, help=text)
    for name, command in commands.choices.items():
        if name not in _COMPUTE_NOTHING:
            add_threads(command)
    return parser
