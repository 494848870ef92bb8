"""The cgroups that a process runs in, and their CPU quota, as containers have one: ``docker run --cpus 2``.

The kernel gives the processes of a cgroup so much CPU time in every period (``cpu.max``; in version 1
``cpu.cfs_quota_us``) and then stops them until the next one, however many CPUs they may run on. More threads than that
are stopped in the middle of a step, and all others wait for them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many CPUs' time the cgroup of this process has: the least of it and its parents; None if unlimited.

    Args:
        root: where /proc and the mount points of cgroups are looked up.
    """
    quotas = (_QUOTAS[version](folder) for folder, version in folders_of("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def folders_of(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's cgroup and of its parents, each with the version of cgroups (1 or 2).

    Version 2 has all controllers in one folder. A controller may be in either.
    """
    try:
        # Names of cgroups and mount points may be any bytes.
        paths = _paths((root / "proc/self/cgroup").read_text(errors="surrogateescape"))
        mounts = (root / "proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:  # a kernel without cgroups
        return
    for name, version in (("", 2), (controller, 1)):
        if name not in paths:
            continue
        shown = _mounts(mounts, name)
        # In a container the path may be that on the host: then its own cgroup is the top of what it sees.
        found = [_with_parents(root, folder, top, paths[name]) for top, folder in shown]
        if not any(found):
            found = [[root / folder.lstrip("/")] for _, folder in shown]
        yield from ((place, version) for places in found for place in places)


def cpus_of(quota: float | None) -> int:
    """Return the number of threads that a quota has time for, from one to the CPUs there are; 0 without a quota."""
    return 0 if quota is None else max(1, min(math.floor(quota), os.cpu_count() or 1))


def _paths(text: str) -> dict[str, str]:
    """Return the cgroups of a process by controller; "" is version 2."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found |= dict.fromkeys(controllers.split(","), path)
    return found


def _mounts(text: str, controller: str) -> list[tuple[str, str]]:
    """Return the cgroup and the folder of every mount of a controller; "" is version 2."""
    found = []
    for line in text.splitlines():
        place, _, kind = line.partition(" - ")
        fields, kinds = place.split(), kind.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        is_version_1 = kinds[0] == "cgroup" and controller in kinds[2].split(",")
        if (kinds[0] == "cgroup2") if controller == "" else is_version_1:
            # The kernel writes a space and the like as \040.
            names = (re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field) for field in fields[3:5])
            found.append((next(names), next(names)))
    return found


def _with_parents(root: Path, folder: str, top: str, path: str) -> list[Path]:
    """Return the folders of a cgroup and its parents under a mount point that shows ``top`` and what is below it.

    There are none if the cgroup is not below ``top``.
    """
    mounted = root / folder.lstrip("/")
    inside = Path("/", path)
    try:
        below = inside.relative_to(Path("/", top))
    except ValueError:
        return []
    parts = below.parts
    return [mounted.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):  # the topmost cgroup has no such file
        return None
    return _ratio(quota, period)


def _quota_of_version_1(folder: Path) -> float | None:
    try:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:
        return None
    return _ratio(quota, period)


def _ratio(quota: str, period: str) -> float | None:
    """Return None for "max" of version 2, for -1 of version 1, and for what is no number."""
    if not (quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0):
        return None
    return int(quota) / int(period)


_QUOTAS = {1: _quota_of_version_1, 2: _quota}
