"""How much memory is free: what the kernel says of the machine, and what the limits of cgroups leave."""

from __future__ import annotations

from pathlib import Path

from cpumoe.cgroup import folders_of

_ROOT = Path("/")

# Files of a cgroup by its version: its limit, what it uses, and what of that the kernel can drop.
_Files = tuple[str, str, tuple[str, ...]]
_FILES: dict[int, _Files] = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
}


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
    """Return the memory that this process can use without swapping and within the limits of its cgroups.

    ``root`` is where ``proc`` and ``sys`` are found.
    """
    sizes = memory_bytes(root)
    # Some sandboxes leave out the kernel's own estimate.
    estimate = sum(sizes.get(name, 0) for name in ("MemFree", "Buffers", "Cached"))
    return max(0, min([sizes.get("MemAvailable", estimate), *_left_by_cgroups(root)]))


def _left_by_cgroups(root: Path) -> list[int]:
    """Return what each limited cgroup of this process leaves: its own, and its parents."""
    found = (_left_by(folder, *_FILES[version]) for folder, version in folders_of("memory", root))
    return [left for left in found if left is not None]


def _left_by(group: Path, limit_file: str, used_file: str, reclaimable: tuple[str, ...]) -> int | None:
    try:
        limit, used = (int((group / name).read_text()) for name in (limit_file, used_file))
    except (OSError, ValueError):  # no such group, or one without a limit ("max")
        return None
    try:
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + sum(int(kinds.get(kind, 0)) for kind in reclaimable)
    except (OSError, ValueError):  # some sandboxes do not show it: nothing is known to be reclaimable
        return limit - used
