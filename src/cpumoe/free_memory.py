"""How much memory is free: what the kernel says of the machine, and what the limits of control groups leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")

# Files of a control group of the memory controller: its limit, what it uses, and what of that the kernel can drop.
_Files = tuple[str, str, tuple[str, ...]]
_V2: _Files = ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))
_V1: _Files = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def memory_bytes(root: Path = _ROOT) -> dict[str, int]:
    """Return the machine's memory by the kernel's own names (``MemTotal``, ``MemAvailable``, ...)."""
    sizes: dict[str, int] = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB":
            sizes[name] = int(number) * 1024
    return sizes


def available_bytes(root: Path = _ROOT) -> int:
    """Return the memory that this process can use without swapping and within the limits of its control groups.

    ``root`` is where ``proc`` and ``sys`` are found.
    """
    sizes = memory_bytes(root)
    # Some sandboxes leave out the kernel's own estimate.
    estimate = sum(sizes.get(name, 0) for name in ("MemFree", "Buffers", "Cached"))
    return max(0, min([sizes.get("MemAvailable", estimate), *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    """Yield what each limited control group of this process leaves: its own, and those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, files = mounted, _V2
        elif "memory" in controllers.split(","):
            top, files = mounted / "memory", _V1
        else:
            continue
        group = top / path.lstrip("/")
        # In a container the path may be that of the host, where only the container's own group is mounted, as the top.
        for place in (group, *group.parents):
            if (left := _left_by(place, *files)) is not None:
                yield left
            if place == top:
                break


def _left_by(group: Path, limit_file: str, used_file: str, reclaimable: tuple[str, ...]) -> int | None:
    try:
        limit, used = (int((group / name).read_text()) for name in (limit_file, used_file))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or one without a limit ("max")
        return None
    return limit - used + sum(int(kinds.get(kind, 0)) for kind in reclaimable)
