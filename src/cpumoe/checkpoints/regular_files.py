"""Opening the files of a checkpoint: regular files of its own folder, and nothing else.

A named pipe or a device in the place of a file would make the reader wait for ever, and a link or a path in an index
would make it read what is not part of the checkpoint.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from cpumoe.errors import CheckpointError

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

#: How the names of files end that are read from a checkpoint's folder, by this package or by transformers.
_READ_BY_NAME = (".json", ".safetensors", ".jinja", ".model", ".txt")


def open_regular(path: Path, kind: str) -> int:
    """A file descriptor of ``path`` for reading; it never waits. ``kind`` is what the file should be, for messages.

    Raises FileNotFoundError for what does not exist, CheckpointError for anything but a regular file.
    """
    try:
        _refuse_special(path, path.stat().st_mode, kind)  # opening a device may do something already
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, CheckpointError):
        raise
    except (OSError, ValueError) as problem:  # ValueError: a name that no file can have
        raise CheckpointError(f"{path} cannot be read as {kind}: {problem}") from None
    try:
        _refuse_special(path, os.fstat(fd).st_mode, kind)  # it may have become another since
    except CheckpointError:
        os.close(fd)
        raise
    return fd


def _refuse_special(path: Path, mode: int, kind: str) -> None:
    if not stat.S_ISREG(mode):
        found = next((name for test, name in _KINDS if test(mode)), "no file")
        raise CheckpointError(f"{path} cannot be read as {kind}: it is {found}; a regular file is accepted")


def refuse_outside(folder: Path, path: Path) -> None:
    """Refuses a file that is not one of ``folder`` itself, or that a symbolic link leads out of it.

    The Hugging Face hub keeps the files of ``models--NAME/snapshots/REVISION`` as links into ``models--NAME/blobs``.
    """
    if path.parent != folder or path.name == "..":
        raise CheckpointError(f"{path} is not a file of the folder {folder}; files of the folder itself are accepted")
    try:
        home, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as problem:  # a link to itself
        raise CheckpointError(f"{path} cannot be read: {problem}") from None
    if home in target.parents:
        return
    repository = next((p.parent for p in (home, *home.parents) if p.name == "snapshots"), None)
    if repository is not None and repository.name.startswith("models--") and repository / "blobs" in target.parents:
        return
    raise CheckpointError(
        f"{path} is a link to {target}, outside of the folder {folder}; copy the file to its place: "
        f"cp --remove-destination {target} {path}"
    )


def refuse_special_files(folder: Path) -> None:
    """Looks at all files of a checkpoint's folder that might be read by name, tokenizers' included."""
    for entry in sorted(folder.iterdir()):
        if entry.name.endswith(_READ_BY_NAME) and entry.exists():
            refuse_outside(folder, entry)
            _refuse_special(entry, entry.stat().st_mode, "a file of the checkpoint")
