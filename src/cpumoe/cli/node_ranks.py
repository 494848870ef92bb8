"""``--ranks numa``: one rank for every memory node of this machine."""

from __future__ import annotations

import argparse
import os
import sys

from cpumoe import numa


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", choices=["numa"], help="numa: start one rank for every memory node, with whole experts on each"
    )


def run_on_nodes(arguments: argparse.Namespace, stdin: str = "") -> int | None:
    """Does what ``--ranks`` asks for: runs this very command as ranks and returns their exit code.

    None if the command is to go on here: without the option, where there is one node, and in the ranks themselves.
    """
    if arguments.ranks is None:
        return None
    from cpumoe.parallel.launch import STARTED, launch_on_nodes

    if arguments.tp * arguments.dp * arguments.pcp != 1 or arguments.ep or arguments.sp:
        raise ValueError("--ranks numa with a layout (--tp, --dp, --pcp, --ep, --sp); the nodes are the layout")
    if os.environ.get(STARTED) == "1":
        arguments.tp, arguments.ep = int(os.environ["WORLD_SIZE"]), True
        return None
    if "RANK" in os.environ:
        raise ValueError("--ranks numa starts the ranks itself; leave torchrun out, or --ranks")
    topology = numa.read_topology()
    if len(topology.places) < 2:
        print("one memory node: --ranks numa changes nothing", file=sys.stderr)
        return None
    return launch_on_nodes(topology, [sys.executable, "-m", "cpumoe", *arguments.given], stdin.encode())
