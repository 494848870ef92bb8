"""CPU quotas of cgroups, as the kernel shows them in containers and outside."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import cpumoe
from cpumoe import _core, cpu
from cpumoe.cgroup import cpu_quota, cpus_of

V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
SPACED = "32 31 0:29 / /sys/fs/c\\040group rw,relatime - cgroup cgroup rw,cpu"


def machine(root: Path, cgroup: str, mountinfo: str, files: dict[str, str]) -> Path:
    for path, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


def v1(folder: str, quota: int) -> dict[str, str]:
    place = f"sys/fs/cgroup/cpu,cpuacct{folder}"
    return {f"{place}/cpu.cfs_quota_us": str(quota), f"{place}/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "files", "quota"),
    [
        ("0::/", V2, {"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),  # in a container with a namespace
        ("0::/", V2, {"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ("0::/", V2, {}, None),  # the topmost cgroup of a machine
        ("0::/a/b", V2, {"sys/fs/cgroup/a/b/cpu.max": "max 50000", "sys/fs/cgroup/a/cpu.max": "200000 50000"}, 4.0),
        ("0::/a/b", V2, {"sys/fs/cgroup/a/b/cpu.max": "100000 50000", "sys/fs/cgroup/a/cpu.max": "9 1"}, 2.0),
        ("0::/../x", V2, {"sys/fs/cgroup/cpu.max": "7 1"}, 7.0),  # outside of the namespace's cgroup
        ("4:cpu,cpuacct:/", V1.format(top="/"), v1("", -1), None),
        ("4:cpu,cpuacct:/a/b", V1.format(top="/"), v1("/a/b", 300000) | v1("/a", -1), 3.0),
        ("4:cpu,cpuacct:/docker/1", V1.format(top="/docker/1"), v1("", 50000), 0.5),  # the host's path
        ("4:cpu,cpuacct:/other", V1.format(top="/docker/1"), v1("", 200000), 2.0),
        (
            "1:cpu:/\n0::/",
            f"{V2}\n{SPACED}",
            {"sys/fs/c group/cpu.cfs_quota_us": "5", "sys/fs/c group/cpu.cfs_period_us": "2"},
            2.5,
        ),
        ("3:cpuset:/\n2:memory:/", V1.format(top="/"), v1("", 100000), None),
        (  # another cgroup's folder, mounted elsewhere too
            "0::/y",
            f"{V2}\n33 23 0:28 /x /mnt/x rw - cgroup2 cgroup2 rw",
            {"sys/fs/cgroup/y/cpu.max": "300000 100000", "mnt/x/cpu.max": "100000 100000"},
            3.0,
        ),
        ("0::/", V2, {"sys/fs/cgroup/cpu.max": "nonsense"}, None),
        ("0::/", "nonsense\n" + V2, {"sys/fs/cgroup/cpu.max": "3 0"}, None),
    ],
)
def test_quota(tmp_path: Path, cgroup: str, mountinfo: str, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(machine(tmp_path, cgroup, mountinfo, files)) == quota


def test_mount_points_of_any_bytes(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/", V2, {"sys/fs/cgroup/cpu.max": "200000 100000"})
    (root / "proc/self/mountinfo").write_bytes(b"33 23 0:9 / /mnt/caf\xe9 rw - ext4 /dev/x rw\n" + V2.encode())
    assert cpu_quota(root) == 2.0


def test_no_proc(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


def test_threads_of_a_quota() -> None:
    with patch("os.cpu_count", return_value=64):
        assert [cpus_of(quota) for quota in (None, 0.2, 1.0, 1.9, 2.0, 7.5)] == [0, 1, 1, 1, 2, 7]
        assert cpus_of(2.0**33) == 64  # a quota may be of more CPUs than there are


def test_a_quota_limits_the_default_and_nothing_that_was_asked_for() -> None:
    code = (
        "import os, torch, cpumoe\n"
        "from cpumoe import _core\n"
        "torch.set_num_threads(2)\n"
        "found = [cpumoe.get_num_threads()]\n"
        "_core.set_cpu_quota(1)\n"
        "found += [cpumoe.get_num_threads(), _core.available_cpus()]\n"
        "cpumoe.set_num_threads(3)\n"
        "found += [cpumoe.get_num_threads()]\n"
        "_core.set_cpu_quota(0)\n"
        "cpumoe.set_num_threads(0)\n"
        "print([*found, cpumoe.get_num_threads()])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    default = min(2, len(os.sched_getaffinity(0)))
    assert done.stdout.strip() == str([default, 1, 1, 3, default]), done.stderr


def test_more_threads_than_cpus_are_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in cpu.OWN_PLACEMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, "_warned", set())
    cpus = _core.available_cpus()

    def said(threads: int) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "cpumoe"):
            cpumoe.set_num_threads(threads)
        return [record.getMessage() for record in caplog.records]

    try:
        assert said(cpus) == [] == said(0)
        (line,) = said(cpus + 1)
        assert line.startswith(f"num_threads={cpus + 1}: this process may use {len(os.sched_getaffinity(0))} CPU")
        assert line.endswith(f"Use {cpus}")
        assert said(cpus + 1) == []  # it was said
        monkeypatch.setattr(cpu, "QUOTA", 0.5)
        _core.set_cpu_quota(1)
        if cpus > 1:
            (line,) = said(2)
            assert f"this process may use {cpus} CPUs, and its cgroup has a quota of 0.5; " in line
            assert line.endswith("Use 1")
        monkeypatch.setenv("OMP_PROC_BIND", "true")
        assert said(cpus + 1) == []
    finally:
        _core.set_cpu_quota(cpus_of(cpu_quota()))
        cpumoe.set_num_threads(0)


def test_the_command_and_the_variable_warn_too() -> None:
    program = "import sys; from cpumoe_command import main; sys.exit(main())"
    for arguments, variable, given in (
        (["--threads", "999"], {}, "--threads 999: this process may use "),
        ([], {"CPUMOE_NUM_THREADS": "999"}, "CPUMOE_NUM_THREADS=999: this process may use "),
    ):
        command = [sys.executable, "-c", program, "simulate", "--costs", "missing", *arguments]
        environment = {name: value for name, value in os.environ.items() if name not in cpu.OWN_PLACEMENT}
        done = subprocess.run(command, env=environment | variable, capture_output=True, text=True, check=False)
        assert done.stderr.count(given) == 1, done.stderr
