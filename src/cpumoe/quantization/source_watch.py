"""Watches that the files of a checkpoint do not change while it is being quantised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpumoe.checkpoints.checkpoint import INDEX_FILE, Checkpoint
from cpumoe.checkpoints.named_tensors import listed
from cpumoe.errors import CheckpointError
from cpumoe.quantization.unfinished_work import removal

# Files of weights are read through the checkpoint. All other files (tokenizer, templates, licences) are copied.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

#: For each file its name and the numbers that differ when it has changed, as in ``Checkpoint.fingerprint``.
Fingerprint = list[list[str | int]]


class SourceWatch:
    """The files of a checkpoint as they were when it was opened: weights, configuration, and the files to copy."""

    def __init__(self, checkpoint: Checkpoint, work: Path) -> None:
        self._checkpoint = checkpoint
        self._work = work
        folder = checkpoint.folder
        others = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix not in _WEIGHT_SUFFIXES)
        self._others = [path.name for path in others]
        self.fingerprint = self._now()

    @property
    def copied(self) -> list[Path]:
        """The files that are copied unchanged."""
        made_anew = ("config.json", INDEX_FILE)
        return [self._checkpoint.folder / name for name in self._others if name not in made_anew]

    def check(self) -> None:
        """Raises CheckpointError with the names of the files that have changed or vanished since then."""
        if names := changed_files(self.fingerprint, self._now()):
            raise CheckpointError(
                f"{self._checkpoint.folder}: {listed(names)} changed while the model was being quantised; "
                f"{removal(self._work)}"
            )

    def _now(self) -> Fingerprint:
        folder = self._checkpoint.folder
        try:
            weights = self._checkpoint.fingerprint()
        except FileNotFoundError as problem:
            raise CheckpointError(
                f"{problem.filename} went away while the model was being quantised; {removal(self._work)}"
            ) from None
        return weights + [entry for name in self._others if (entry := _entry(folder / name)) is not None]


@contextmanager
def open_watched(folder: Path, work: Path) -> Iterator[tuple[Checkpoint, SourceWatch]]:
    """Opens a checkpoint and watches it.

    It is opened twice, and the two fingerprints are compared. If they are equal, the open files are the ones in the
    fingerprint, even if another process is replacing files at that moment. ``work`` is the folder of unfinished work,
    which messages name.
    """
    with Checkpoint.open(folder) as first:
        before = SourceWatch(first, work).fingerprint
    with Checkpoint.open(folder) as checkpoint:
        watch = SourceWatch(checkpoint, work)
        if names := changed_files(before, watch.fingerprint):
            raise CheckpointError(f"{folder}: {listed(names)} changed while it was being opened; start again")
        yield checkpoint, watch


def changed_files(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Names of the files that differ, or that only one of the two fingerprints has."""
    one, other = ({str(name): stamp for name, *stamp in fingerprint} for fingerprint in (before, after))
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _entry(path: Path) -> list[str | int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return [path.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
