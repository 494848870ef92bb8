"""Whether the checkpoint that is being read is still the one that was opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpumoe.checkpoints.checkpoint import INDEX_FILE, Checkpoint, listed
from cpumoe.errors import CheckpointError
from cpumoe.quantization.unfinished_work import removal

# Weights are read by name, or not at all; what else is in a folder (tokenizer, templates, licences) is copied.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

#: For each file its name, and what tells whether it has changed: that of ``Checkpoint.fingerprint``.
Fingerprint = list[list[str | int]]


class SourceWatch:
    """The files of a checkpoint as they were when it was opened: weights, configuration, and all that is copied."""

    def __init__(self, checkpoint: Checkpoint, work: Path) -> None:
        self._checkpoint = checkpoint
        self._work = work
        folder = checkpoint.folder
        others = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix not in _WEIGHT_SUFFIXES)
        self._others = [path.name for path in others]
        self.fingerprint = self._now()

    @property
    def copied(self) -> list[Path]:
        """The files that go with the weights as they are."""
        made_anew = ("config.json", INDEX_FILE)
        return [self._checkpoint.folder / name for name in self._others if name not in made_anew]

    def check(self) -> None:
        """Raises CheckpointError with the names of the files that have changed or gone since."""
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
def watched(folder: Path, work: Path) -> Iterator[tuple[Checkpoint, SourceWatch]]:
    """Opens a checkpoint and watches it.

    It is opened twice: files that are the same before and after the second time are those that are open, also if
    another process is just then putting new ones in their places. ``work`` is where the unfinished work is, for
    messages.
    """
    with Checkpoint.open(folder) as first:
        before = SourceWatch(first, work).fingerprint
    with Checkpoint.open(folder) as checkpoint:
        watch = SourceWatch(checkpoint, work)
        if names := changed_files(before, watch.fingerprint):
            raise CheckpointError(f"{folder}: {listed(names)} changed while it was being opened; start again")
        yield checkpoint, watch


def changed_files(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Names of the files that differ, or that only one of the two has."""
    one, other = ({str(name): stamp for name, *stamp in fingerprint} for fingerprint in (before, after))
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _entry(path: Path) -> list[str | int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return [path.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
