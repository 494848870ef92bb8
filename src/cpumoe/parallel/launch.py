"""Starting one rank for every memory node of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cpumoe import cpu
from cpumoe.numa import Topology, plan_threads
from cpumoe.parallel.ranks import GLOO_INTERFACE, LOOPBACK

#: Set in ranks that were started here.
STARTED = "CPUMOE_RANK_OF_NODE"

_ADDRESS = "127.0.0.1"
_LOOK_SECONDS = 0.05
# How long the others may go on when one rank has ended, well or not: they end with it, or are told that it has failed.
_GRACE_SECONDS, _GRACE_SECONDS_OF_FAILURE = 60.0, 15.0
_SECONDS_TO_KILL = 10.0


def launch_on_nodes(topology: Topology, command: Sequence[str], stdin: bytes = b"") -> int:
    """Runs a command once for every node, as ranks of one process group, and returns its exit code.

    Every process has the CPUs and the memory of its node alone, and what ``torchrun`` would put into its environment.
    Signals that would end this process go to all of them; none outlives it.

    Args:
        topology: of which every place gets a rank.
        command: a program and its arguments.
        stdin: what each of them finds on its standard input.

    Returns:
        0 if all gave 0; else the first rank's code, or that of the first other one that gave something else.
    """
    threads = plan_threads(topology, cpu.get_num_threads())
    store = _loopback_store()
    ranks: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(_end_all, ranks)
        stack.enter_context(_signals_go_to(ranks))
        for rank, place in enumerate(topology.places):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(topology.places)),
                "LOCAL_WORLD_SIZE": str(len(topology.places)),
                "MASTER_ADDR": _ADDRESS,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store of this process, not one of the first rank
                GLOO_INTERFACE: LOOPBACK,  # also where the user's setting is for ranks on several hosts
                STARTED: "1",
            }
            environment.setdefault("OMP_NUM_THREADS", str(max(1, threads.count(rank))))
            text = stack.enter_context(tempfile.TemporaryFile())
            text.write(stdin)
            text.seek(0)
            cpus = ",".join(map(str, place.cpus))
            on_node = ["-m", "cpumoe_command.on_node", cpus, str(place.memory_node), str(os.getpid())]
            # In a group of its own: Ctrl-C on a terminal comes once, from here.
            ranks.append(
                subprocess.Popen([sys.executable, *on_node, *command], env=environment, stdin=text, process_group=0)
            )
        return _wait(ranks)


def _loopback_store() -> TCPStore:
    """Return a store that listens on a free port of the loopback interface.

    Left to itself, a store listens on all interfaces, and whoever connects may read and write it: the ranks unpickle
    what they find there.
    """
    with socket.create_server((_ADDRESS, 0), backlog=socket.SOMAXCONN) as listening:
        port = listening.getsockname()[1]
        # The store owns the descriptor that it is given.
        return TCPStore(
            _ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno())
        )


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    deadline = float("inf")
    while time.monotonic() < deadline:
        ended = [code for rank in ranks if (code := rank.poll()) is not None]
        if len(ended) == len(ranks):
            break
        if ended:
            grace = _GRACE_SECONDS_OF_FAILURE if any(ended) else _GRACE_SECONDS
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(_LOOK_SECONDS)
    _end_all(ranks)
    codes = [128 - rank.returncode if rank.returncode < 0 else rank.returncode for rank in ranks]
    return next((code for code in codes if code != 0), 0)


def _end_all(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ends those that still run, by force if they do not heed the first signal."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [rank for rank in ranks if rank.poll() is None]
        for rank in running:
            rank.send_signal(number)
        deadline = time.monotonic() + _SECONDS_TO_KILL
        for rank in running:
            try:
                rank.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


@contextmanager
def _signals_go_to(ranks: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(number: int, _: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
