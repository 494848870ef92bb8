"""Memory maps of files that stay as they were written."""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path

import torch

from cpumoe import _core
from cpumoe.errors import printable


def map_file(fd: int, path: Path) -> mmap.mmap:
    """A private map of a whole file: nothing is read until it is used, and pages are shared with other processes.

    The system keeps no one from cutting a mapped file short, and ends the process that reads behind the new end. There
    is no cheap way out: a copy in memory would not be shared, a copy on write (reflink) has pages of its own and is not
    known to ext4, and a lease delays the other for some seconds only. So what is lost is said: a guard ends the process
    with a sentence that names the file.
    """
    mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    address = torch.frombuffer(mapped, dtype=torch.uint8, count=1).data_ptr()
    _core.guard_mapping(address, len(mapped), printable(path))
    # Called while the map is still there; at the end of the process it stays guarded to the last.
    weakref.finalize(mapped, _core.guard_mapping, address, 0, "").atexit = False
    return mapped
