"""How much memory is free, by files as kernels and containers have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cpumoe.free_memory import available_bytes, memory_bytes

GB = 10**9
UNLIMITED_V1 = 9223372036854771712


def machine(root: Path, available: int, cgroup: str | None, files: dict[str, object]) -> Path:
    """The files of a machine; ``files`` are below /sys/fs/cgroup."""
    everything = {"proc/meminfo": f"MemTotal: {64 * GB // 1024} kB\nMemAvailable:   {available // 1024} kB\n"}
    if cgroup is not None:
        everything["proc/self/cgroup"] = cgroup
        everything["proc/self/mountinfo"] = (
            "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
            "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
        )
    everything |= {f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()}
    for name, text in everything.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(group: str, limit: object, used: int, files: int = 0) -> dict[str, object]:
    stat = f"anon 1\nfile {files}\ninactive_file {files // 2}\nactive_file {files // 2}"
    return {f"{group}memory.max": limit, f"{group}memory.current": used, f"{group}memory.stat": stat}


def v1(group: str, limit: int, used: int, files: int = 0) -> dict[str, object]:
    at = f"memory/{group}memory"
    stat = f"cache {files}\ntotal_inactive_file {files}\ntotal_active_file 0"
    return {f"{at}.limit_in_bytes": limit, f"{at}.usage_in_bytes": used, f"{at}.stat": stat}


CASES = {
    "no groups": (None, {}, 32 * GB),
    "a container": ("0::/", v2("", 8 * GB, 3 * GB), 5 * GB),
    "page cache can be dropped": ("0::/", v2("", 8 * GB, 7 * GB, files=4 * GB), 5 * GB),
    "a container without a limit": ("0::/", v2("", "max", 3 * GB), 32 * GB),
    "a limit above the machine": ("0::/", v2("", 80 * GB, GB), 32 * GB),
    "a unit of systemd": ("0::/system.slice/x.service", v2("system.slice/x.service/", 4 * GB, GB), 3 * GB),
    "the slice around it": (
        "0::/system.slice/x.service",
        {**v2("system.slice/x.service/", "max", GB), **v2("system.slice/", 6 * GB, 5 * GB)},
        GB,
    ),
    "a path of the host in a container": ("0::/docker/abc", v2("", 8 * GB, 2 * GB), 6 * GB),
    "version 1": ("4:cpu,cpuacct:/x\n5:memory:/job", v1("job/", 8 * GB, 6 * GB, files=GB), 3 * GB),
    "version 1 in a container": ("5:memory:/docker/abc\n0::/", v1("", 8 * GB, 6 * GB), 2 * GB),
    "version 1 without a limit": ("5:memory:/job", v1("job/", UNLIMITED_V1, 6 * GB), 32 * GB),
    "nothing says what can be dropped": ("0::/", {"memory.max": 8 * GB, "memory.current": 3 * GB}, 5 * GB),
    "all used": ("0::/", v2("", 8 * GB, 9 * GB), 0),
}


@pytest.mark.parametrize(("cgroup", "files", "expected"), CASES.values(), ids=CASES)
def test_available_memory_within_control_groups(
    tmp_path: Path, cgroup: str | None, files: dict[str, object], expected: int
) -> None:
    assert available_bytes(machine(tmp_path, 32 * GB, cgroup, files)) == expected


def test_a_sandbox_without_the_estimate_of_the_kernel(tmp_path: Path) -> None:
    machine(tmp_path, 32 * GB, None, {})
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemFree: 1000 kB\nCached: 500 kB\n")
    assert available_bytes(tmp_path) == 1500 * 1024


def test_this_machine() -> None:
    assert 0 < available_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_bytes() <= memory_bytes()["MemTotal"]
