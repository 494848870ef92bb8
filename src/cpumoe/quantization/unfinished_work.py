"""A folder for work that may be interrupted: one process at a time, and every file in it complete or absent."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpumoe.checkpoints.tensor_file import naming_file

_log = logging.getLogger("cpumoe")

# Files that only the work itself needs are in a folder of their own, which is removed when everything else is done.
NOTES = ".work"
_SETTINGS_FILE = "settings.json"
_LOCK_FILE = "lock"

# Settings whose values are hashes or long lists: messages give only their names.
_LONG_SETTINGS = ("source", "calibration")


@contextmanager
def work_folder(work: Path, settings: dict[str, Any]) -> Iterator[None]:
    """Makes the folder of unfinished work, or goes on with the one that is there; locked for this process alone."""
    notes = work / NOTES
    notes.mkdir(parents=True, exist_ok=True)
    with (notes / _LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuntimeError(f"another process is writing {work}; wait for it or name another folder") from None
        path = notes / _SETTINGS_FILE
        if path.exists():
            _refuse_other_settings(work, _read_settings(path), settings)
            _log.info("going on with the unfinished work in %s", work)
        else:
            write_durably(path, settings)
        for leftover in work.rglob("*.partial"):  # of a process that was killed
            leftover.unlink()
        yield


def clear_notes(folder: Path) -> None:
    """Removes the notes. The settings go last, because ``only_notes_left`` looks for them."""
    notes = folder / NOTES
    for path in sorted(notes.iterdir(), key=lambda path: path.name == _SETTINGS_FILE):
        path.unlink(missing_ok=True)
    notes.rmdir()


def only_notes_left(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether a run with these settings finished ``folder`` and was stopped while it removed its notes."""
    path = folder / NOTES / _SETTINGS_FILE
    return path.exists() and _read_settings(path) == settings


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RuntimeError(f"{path} is damaged; {removal(path.parent.parent)}")
    return found


def _refuse_other_settings(work: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises RuntimeError if the work was begun with other settings than those of this run."""
    names = [name for name in now | before if before.get(name) != now.get(name)]
    if not names:
        return
    if names == ["source"]:
        raise RuntimeError(f"{work} holds the work of a run whose source has changed since; {removal(work)}")
    differences = ", ".join(
        f"{name} ({before.get(name)} there, {now.get(name)} now)" for name in names if name not in _LONG_SETTINGS
    )
    others = ", ".join(name for name in names if name in _LONG_SETTINGS)
    changes = "; ".join(part for part in (differences, others) if part)
    raise RuntimeError(f"{work} holds the work of a run with other settings: {changes}; use those, or {removal(work)}")


def removal(work: Path) -> str:
    """The end of a message: the command that clears the way for a new start."""
    return f"to start anew, remove that work: rm -r {shlex.quote(str(work))}"


def notes_of(shard: Path) -> Path:
    """The file that keeps what was counted for a layer until the report is written."""
    return shard.parent / NOTES / f"{shard.stem}.json"


def write_durably(path: Path, content: object) -> None:
    """Writes JSON so that its name appears only after its whole content is on disk."""
    temporary = path.with_name(f"{path.name}.partial")
    with naming_file(temporary):
        temporary.write_text(json.dumps(content, indent=2) + "\n")
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def copy_durably(source: Path, path: Path) -> None:
    """Copies a file so that the name of the copy appears only after its whole content is on disk."""
    temporary = path.with_name(f"{path.name}.partial")
    with naming_file(temporary):
        shutil.copyfile(source, temporary)
    sync(temporary)
    temporary.rename(path)


def sync(path: Path) -> None:
    """Waits until a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming_file(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
