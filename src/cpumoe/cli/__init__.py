"""The ``cpumoe`` command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from cpumoe import __version__
from cpumoe.cli import bench, chat, check, demo, doctor, eval, explain, generate, inspect, quantize, serve

_COMMANDS = (demo, generate, chat, serve, quantize, inspect, check, eval, explain, bench, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 the command found something wrong, 2 bad arguments."""
    parser = argparse.ArgumentParser(prog="cpumoe", description="Quantised mixture-of-experts models on CPUs.")
    parser.add_argument("--version", action="version", version=f"cpumoe {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what is chosen and why")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_command(commands)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="%(name)s: %(message)s")
    try:
        code: int = arguments.run(arguments)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit succeeds
        return 0
    except (ValueError, RuntimeError, OSError) as problem:
        print(f"cpumoe {arguments.command}: {problem}", file=sys.stderr)
        return 2
    return code
