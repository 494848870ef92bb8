"""``cpumoe doctor``: what this machine has, what cpumoe uses of it, and whether the kernels work on it."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import cpumoe
from cpumoe import _core, cpu, numa
from cpumoe.cli.parser import Commands
from cpumoe.errors import printable
from cpumoe.free_memory import available_bytes, memory_bytes
from cpumoe.tables import aligned


def add_command(commands: Commands) -> None:
    parser = commands.add_parser("doctor", help="what this machine has and uses; checks every kernel")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _memory() -> dict[str, float]:
    """Total and available memory in GB."""
    sizes = {"total_gb": memory_bytes().get("MemTotal", 0), "available_gb": available_bytes()}
    return {name: round(size * 1e-9, 1) for name, size in sizes.items()}


def _huge_pages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists():
        return "unknown"
    setting = path.read_text().split("[")[1].split("]")[0]
    meaning = {
        "always": "used for packed weights",
        "madvise": "used for packed weights, which ask for them",
        "never": "off: packed weights are read up to a fifth slower",
    }
    return f"{setting} ({meaning.get(setting, 'unknown')})"


def facts() -> dict[str, Any]:
    """Everything that ``doctor`` shows."""
    import numpy
    import torch

    from cpumoe.evaluation.selftest import run_self_tests

    topology, threads = numa.read_topology(), cpumoe.get_num_threads()
    return {
        "cpu": _core.cpu_name(),
        "architecture": platform.machine(),
        "isa": cpumoe.isa(),
        "instruction_sets": [
            {"name": s.name, "supported": s.supported, "reason": s.reason} for s in cpumoe.instruction_sets()
        ],
        "threads": {
            "used": threads,
            "available_cpus": _core.available_cpus(),
            "cpu_quota": cpu.QUOTA,
            "pool": "PyTorch's OpenMP threads" if _core.thread_source() == "openmp" else "own threads",
        },
        "memory": _memory(),
        "huge_pages": _huge_pages(),
        "numa_nodes": len(topology.nodes),
        "numa": {
            "placement": numa.summary(topology, threads),
            "nodes": {str(number): text for number, text in numa.describe_nodes(topology, threads).items()},
            "remarks": list(topology.remarks),
        },
        "onednn_guard": cpumoe.guard_onednn(),
        "versions": {
            "cpumoe": cpumoe.__version__,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "numpy": numpy.__version__,
        },
        "self_tests": [
            {"isa": test.isa, "passed": test.passed, "failed_schemes": list(test.failed)} for test in run_self_tests()
        ],
    }


def _node_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Every memory node, if there are several, and what was not understood."""
    nodes = found["numa"]["nodes"] if found["numa_nodes"] > 1 else {}
    rows = [(f"  node {number}", text) for number, text in nodes.items()]
    return rows + [("  not understood", printable(remark)) for remark in found["numa"]["remarks"]]


def _print(found: dict[str, Any]) -> None:
    rows = [("CPU", f"{found['cpu']} ({found['architecture']})"), ("instruction sets", "")]
    tests = {test["isa"]: test for test in found["self_tests"]}
    for entry in found["instruction_sets"]:
        if entry["supported"]:
            test = tests[entry["name"]]
            state = "works" if test["passed"] else f"WRONG RESULTS for {', '.join(test['failed_schemes'])}"
            used = ", in use" if entry["name"] == found["isa"] else ""
            rows.append((f"  {entry['name']}", f"{state}{used}"))
        else:
            rows.append((f"  {entry['name']}", f"no: {entry['reason']}"))
    threads, memory = found["threads"], found["memory"]
    quota = "" if threads["cpu_quota"] is None else f" (the cgroup's quota is {threads['cpu_quota']:g})"
    rows += [
        ("threads", f"{threads['used']} of {threads['available_cpus']} CPUs{quota}, {threads['pool']}"),
        ("memory", f"{memory['available_gb']} GB available of {memory['total_gb']} GB"),
        ("huge pages", found["huge_pages"]),
        ("NUMA nodes", found["numa"]["placement"]),
        *_node_rows(found),
        ("oneDNN guard", found["onednn_guard"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
    ]
    print("\n".join(aligned(rows)))


def run(arguments: argparse.Namespace) -> int:
    found = facts()
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    return 0 if all(test["passed"] for test in found["self_tests"]) else 1
