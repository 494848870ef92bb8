"""Ledger of bits: builds another revision and compares what both compute on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from bit_cases import Collected
from bit_ledger import Comparison, add_faults

_ROOT = Path(__file__).parents[2]
_BUILD = _ROOT / "build" / "bits"
_CORE = ("core", "CMakeLists.txt")


def compare_with(commit: str, arguments: list[str]) -> tuple[Comparison, dict[str, str]]:
    """Build a commit and this checkout, run the cases of this checkout with both, and compare all hashes.

    Args:
        commit: any name of a commit.
        arguments: options of ``tests/bits.py`` that choose cases.

    Returns:
        The comparison, and the cases that cannot be computed with the other revision, with the reason of each.
    """
    name = _output("git", "rev-parse", "--verify", f"{commit}^{{commit}}")[:12]
    source = _worktree(name)
    ours = _package(_ROOT, _BUILD / "checkout")
    has_same_core = not subprocess.run(["git", "diff", "--quiet", name, "--", *_CORE], cwd=_ROOT).returncode
    extension = next(ours.glob("cpumoe/_core*.so")) if has_same_core else None
    theirs = _package(source, _BUILD / f"{name}-build", extension)
    print(f"running this checkout and {name}{' (the core is the same)' if has_same_core else ''}", flush=True)
    return _compare(_collected(ours, arguments), _collected(theirs, arguments))


def _compare(own: Collected, other: Collected) -> tuple[Comparison, dict[str, str]]:
    result, own_hashes, other_hashes = Comparison(), _all_hashes(own), _all_hashes(other)
    for name in sorted(own_hashes.keys() & other_hashes.keys()):
        result.compared += 1
        if own_hashes[name] != other_hashes[name]:
            result.differences[name] = f"was {other_hashes[name]}, is {own_hashes[name]}"
    result.skipped = len(own_hashes.keys() ^ other_hashes.keys())
    add_faults(result, own)
    absent = {name: problem.strip().splitlines()[-1] for name, problem in other.failed.items()}
    return result, absent


def _all_hashes(found: Collected) -> dict[str, str]:
    """Return hashes by name, those that the ledger does not store too."""
    by_arithmetic = {f"{n} [{a}]": value for a, entries in found.entries.items() for n, value in entries.items()}
    return by_arithmetic | {f"{name} [PyTorch]": value for name, value in found.unstored.items()}


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _worktree(name: str) -> Path:
    """Return the files of a commit, in a worktree that stays for the next comparison."""
    folder = _BUILD / name
    if not (folder / ".git").exists():
        _output("git", "worktree", "prune")
        _output("git", "worktree", "add", "--force", "--detach", str(folder), name)
    return folder


def _package(source: Path, folder: Path, extension: Path | None = None) -> Path:
    """Return a folder to import the package of ``source`` from; its extension is built unless one is given."""
    if extension is None:
        extension = _extension(source, folder)
    package = folder / "package"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for name in ("cpumoe", "cpumoe_command"):
        shutil.copytree(source / "src" / name, package / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(extension, package / "cpumoe" / extension.name)
    return package


def _extension(source: Path, folder: Path) -> Path:
    """Build the extension of ``source`` in ``folder``; what is there already is built on."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-G", "Ninja", "-DCPUMOE_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    # cmake, ninja and nanobind are in the environment of this interpreter (`.venv/build-tools` of the Makefile).
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    log = folder / "build.log"
    print(f"building {source} (log: {log})", flush=True)
    with log.open("w") as file:
        for command in (
            ["cmake", "-S", str(source), "-B", str(folder / "cmake"), *options],
            ["cmake", "--build", str(folder / "cmake"), "--target", "_core"],
        ):
            done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    return next((folder / "cmake").glob("_core*.so"))


def _collected(package: Path, arguments: list[str]) -> Collected:
    """Run the cases of this checkout with a package, in a process of its own."""
    file = package.parent / "collected.json"
    command = [sys.executable, str(_ROOT / "tests" / "bits.py"), "--collect", str(file), *arguments]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(package)}, check=True)
    return load(file)


def save(file: Path, collected: Collected) -> None:
    """Write hashes for :func:`load`."""
    file.write_text(json.dumps(asdict(collected)))


def load(file: Path) -> Collected:
    """Read hashes that :func:`save` has written."""
    return Collected(**json.loads(file.read_text()))
