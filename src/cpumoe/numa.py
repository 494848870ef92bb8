"""Memory nodes: what the machine has, and how threads and packed weights are placed on them.

On a machine with several memory nodes every CPU reads the memory of its own node fastest. So every thread of the team
is kept on the CPUs of a node, and the column blocks of packed weights lie on the node whose threads multiply with them
(core/runtime/numa.h). There is one copy of the weights. Where there is one node, nothing is done.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cpumoe import _core, settings
from cpumoe.cpu import OWN_PLACEMENT

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("cpumoe")

_MOST_NUMBER = 1 << 16  # of a node or a CPU: Linux has fewer
_CPUS_OF_A_MASK = 1024  # of the core: cpu_set_t
_NODE_FOLDER = "devices/system/node"


@dataclass(frozen=True)
class Node:
    """A memory node.

    Attributes:
        number: by which the kernel knows it.
        cpus: of this node that the process may use, ascending.
        memory_bytes: 0 for a node without memory, or with none that the process may use.
        distances: to other nodes by number, as the firmware gives them: 10 is its own memory.
    """

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int
    distances: dict[int, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Place:
    """CPUs whose threads work on the same part of the weights, and the node that this part lies on."""

    cpus: tuple[int, ...]
    memory_node: int


@dataclass(frozen=True)
class Topology:
    """The nodes of a machine as a process may use them, ascending, and what was not understood of them."""

    nodes: tuple[Node, ...]
    remarks: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        """One for every node that has CPUs and memory, in the order of the nodes.

        CPUs of a node without memory belong to the place of the nearest node that has some, preferably one with CPUs of
        its own. Nodes without CPUs have no weights, unless there is no other memory.
        """
        with_memory = [node for node in self.nodes if node.memory_bytes > 0]
        full = [node for node in with_memory if node.cpus]
        cpus: dict[int, list[int]] = {}
        for node in self.nodes:
            if not node.cpus:
                continue
            targets = [node] if node in full else full or with_memory or [node]
            nearest = min(targets, key=lambda target, node=node: (_distance(node, target), target.number))  # type: ignore[misc]
            cpus.setdefault(nearest.number, []).extend(node.cpus)
        return tuple(Place(tuple(sorted(cpus[number])), number) for number in sorted(cpus))


def _distance(node: Node, other: Node) -> int:
    return node.distances.get(other.number, 10 if node.number == other.number else 255)


def plan_threads(topology: Topology, threads: int) -> tuple[int, ...]:
    """The place (an index into ``topology.places``) of every thread of a team: ascending, as many as it has CPUs."""
    return tuple(_core.node_shares([len(place.cpus) for place in topology.places], threads))


# ---- reading it from the kernel --------------------------------------------------------------------------------------


class _Nonsense(ValueError):
    pass


def parse_list(text: str) -> tuple[int, ...]:
    """The numbers of a list as the kernel writes it ("0-3,8"), ascending; raises ValueError for anything else."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if match is None:
            raise _Nonsense(f"{text.strip()[:40]!r} is not a list of numbers")
        first = int(match[1])
        last = int(match[2] or first)
        if not first <= last < _MOST_NUMBER:
            raise _Nonsense(f"{text.strip()[:40]!r} has the range {first} to {last}")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def read_topology(
    root: Path = Path("/sys"), cpus: Iterable[int] | None = None, memory_nodes: Iterable[int] | None = None
) -> Topology:
    """The nodes that the kernel shows under ``root``.

    Args:
        root: where sysfs is mounted.
        cpus: that the process may use; None takes its mask. A node that it cuts through keeps its share.
        memory_nodes: whose memory the process may use; None takes what the kernel says of this process.
    """
    mask = frozenset(os.sched_getaffinity(0) if cpus is None else cpus)
    allowed = _memory_of_this_process() if memory_nodes is None else frozenset(memory_nodes)
    folder = root / _NODE_FOLDER
    remarks: list[str] = []
    nodes = _read_nodes(folder, mask, allowed, remarks)
    missing = mask.difference(*(node.cpus for node in nodes))
    if nodes and missing:
        remarks.append(f"CPU {min(missing)} belongs to none of the nodes in {folder}; they are taken as one")
    if not nodes or missing:
        return Topology((Node(0, tuple(sorted(mask)), _all_memory()),), tuple(remarks))
    return Topology(nodes, tuple(remarks))


def _read_nodes(
    folder: Path, mask: frozenset[int], allowed: frozenset[int] | None, remarks: list[str]
) -> tuple[Node, ...]:
    try:
        online = parse_list((folder / "online").read_text())
    except FileNotFoundError:  # a kernel without nodes
        return ()
    except (OSError, ValueError) as problem:
        remarks.append(f"{folder / 'online'}: {_said(problem)}")
        return ()
    has_memory = None
    try:
        has_memory = frozenset(parse_list((folder / "has_memory").read_text()))
    except FileNotFoundError:
        pass  # older kernels: the sizes say it
    except (OSError, ValueError) as problem:
        remarks.append(f"{folder / 'has_memory'}: {_said(problem)}")
    found: list[Node] = []
    seen: set[int] = set()
    for number in online:
        place = folder / f"node{number}"
        try:
            cpus = parse_list((place / "cpulist").read_text())
            memory = _memory_total((place / "meminfo").read_text())
        except (OSError, ValueError) as problem:
            remarks.append(f"node {number} is ignored: {_said(problem)}")
            continue
        if seen.intersection(cpus):
            remarks.append(f"node {number} is ignored: CPU {min(seen.intersection(cpus))} belongs to another one too")
            continue
        seen.update(cpus)
        if (has_memory is not None and number not in has_memory) or (allowed is not None and number not in allowed):
            memory = 0
        distances = _distances(place / "distance", online, remarks)
        found.append(Node(number, tuple(sorted(mask.intersection(cpus))), memory, distances))
    return tuple(found)


def _distances(path: Path, online: tuple[int, ...], remarks: list[str]) -> dict[int, int]:
    """Distances by node; none, which makes all others equally far, where they make no sense."""
    try:
        values = path.read_text().split()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        remarks.append(f"{path}: {_said(problem)}")
        return {}
    if len(values) != len(online) or not all(re.fullmatch("[0-9]{1,3}", value) for value in values):
        remarks.append(f"{path}: {' '.join(values)[:40]!r} is not a distance for each of {len(online)} nodes")
        return {}
    return dict(zip(online, map(int, values), strict=True))


def _memory_total(meminfo: str) -> int:
    match = re.search(r"MemTotal:\s*([0-9]{1,15}) kB", meminfo)
    if match is None:
        raise _Nonsense("its meminfo has no MemTotal")
    return int(match[1]) * 1024


def _memory_of_this_process() -> frozenset[int] | None:
    """Nodes whose memory a cpuset leaves to this process; None if the kernel does not say."""
    try:
        match = re.search(r"^Mems_allowed_list:(.*)$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return None if match is None else frozenset(parse_list(match[1]))
    except (OSError, ValueError):
        return None


def _all_memory() -> int:
    try:
        return _memory_total(Path("/proc/meminfo").read_text())
    except (OSError, ValueError):
        return 0


def _said(problem: Exception) -> str:
    return problem.strerror or "it cannot be read" if isinstance(problem, OSError) else str(problem)


# ---- what is done with it --------------------------------------------------------------------------------------------


def obstacle(topology: Topology) -> str | None:
    """Why nothing is placed, as a sentence; None if threads and weights are."""
    is_on = settings.NUMA.is_on()
    if len(topology.places) < 2:
        return "one memory node; nothing to place"
    if not is_on:
        return f"nothing is placed, because {settings.NUMA.name}=0"
    own = next((name for name in OWN_PLACEMENT if name in os.environ), None)
    if own is not None:
        return f"nothing is placed, because {own} places threads already"
    last = max(cpu for place in topology.places for cpu in place.cpus)
    return f"nothing is placed, because there is a CPU {last}" if last >= _CPUS_OF_A_MASK else None


def use(topology: Topology) -> None:
    """Places threads, and weights that are packed from now on, on the nodes, unless there is an obstacle."""
    places = () if obstacle(topology) is not None else topology.places
    _core.set_nodes([(list(place.cpus), place.memory_node) for place in places])


_said_before: set[str] = set()


def place(blob: Tensor) -> None:
    """Puts the pages of packed weights, of which the header at least is there, on the nodes of their column blocks.

    What does not succeed costs speed only; it is said once.
    """
    pages, elsewhere, problem = _core.place_packed(blob)
    remark = None
    if problem:
        remark = f"whether packed weights lie on the nodes of their threads is not known: {os.strerror(problem)}"
    elif elsewhere:
        remark = f"{elsewhere} of {pages} pages of packed weights are not on the node of their threads; is it full?"
    if remark is not None and not _said_before:
        _said_before.add(remark)
        _log.info("%s", remark)


def list_text(numbers: Iterable[int]) -> str:
    """Ascending numbers as the kernel writes them: "0-3,8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def summary(topology: Topology, threads: int) -> str:
    """What is placed where, as a sentence."""
    why_not = obstacle(topology)
    if why_not is not None:
        return why_not
    return f"{threads} threads and the column blocks of packed weights are shared out over {len(topology.places)} nodes"


def describe_nodes(topology: Topology, threads: int) -> dict[int, str]:
    """For every node, by number: its CPUs, its memory, and what is placed there."""
    placed = obstacle(topology) is None
    plan = plan_threads(topology, threads)
    places = topology.places
    all_cpus = sum(len(place.cpus) for place in places)
    texts = {}
    for node in topology.nodes:
        parts = [f"CPUs {list_text(node.cpus)}" if node.cpus else "no CPUs"]
        parts.append(f"{node.memory_bytes * 1e-9:.1f} GB" if node.memory_bytes else "no memory")
        index = next((i for i, place in enumerate(places) if place.memory_node == node.number), None)
        if placed and index is not None:
            share = len(places[index].cpus) / all_cpus
            mine = [thread for thread, of in enumerate(plan) if of == index]
            parts.append(f"threads {list_text(mine)}" if mine else "no threads")
            parts.append(f"{share:.0%} of packed weights")
        elif placed and node.cpus:
            index = next(i for i, place in enumerate(places) if set(node.cpus) <= set(place.cpus))
            parts.append(f"reads from node {places[index].memory_node}")
        texts[node.number] = ", ".join(parts)
    return texts


use(read_topology())  # at once: weights are packed, and threads are used, by whoever comes first
