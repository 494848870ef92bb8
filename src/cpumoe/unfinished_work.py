"""A folder in which work is done that may be interrupted: one process at a time, notes aside, files whole or absent."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_log = logging.getLogger("cpumoe")

# What is for the work alone is in a folder of its own, which goes when everything else is in its place.
NOTES = ".work"
_SETTINGS_FILE = "settings.json"
_LOCK_FILE = "lock"


@contextmanager
def work_folder(work: Path, settings: dict[str, Any]) -> Iterator[None]:
    """Makes or takes up the folder of unfinished work, for this process alone."""
    notes = work / NOTES
    notes.mkdir(parents=True, exist_ok=True)
    with (notes / _LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuntimeError(f"another process is writing {work}; wait for it or name another folder") from None
        path = notes / _SETTINGS_FILE
        if path.exists():
            if json.loads(path.read_text()) != settings:
                raise RuntimeError(f"{work} holds the work of a run with other settings or another source; remove it")
            _log.info("going on with the unfinished work in %s", work)
        else:
            write_durably(path, settings)
        for left in work.rglob("*.partial"):  # of a process that was killed
            left.unlink()
        yield


def notes_of(shard: Path) -> Path:
    """Where what was found while a layer was quantised is kept until the end."""
    return shard.parent / NOTES / f"{shard.stem}.json"


def write_durably(path: Path, content: object) -> None:
    """Writes JSON that is on disk, whole, before its name is."""
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file or the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
