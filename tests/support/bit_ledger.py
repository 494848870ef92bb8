"""Ledger of bits: the file of hashes, reading, merging and comparing it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bit_cases import AMX, PORTABLE, Collected

Entries = dict[str, dict[str, str]]  # hash by arithmetic and name


def read(path: Path) -> Entries:
    """Return the entries of a ledger; none if there is no file."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return {arithmetic: found.get(arithmetic, {}) for arithmetic in (PORTABLE, AMX)}


def write(path: Path, entries: Entries) -> None:
    """Write a ledger, one line for each entry, sorted by name."""
    path.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


def merge(stored: Entries, found: Collected, is_run: Callable[[str], bool], *, has_amx: bool) -> Entries:
    """Return a ledger with the hashes found.

    Args:
        stored: the ledger so far.
        found: what was computed.
        is_run: whether an entry's case was run. Entries of cases that were not run stay as they are.
        has_amx: whether this machine computes entries of AMX; if not, those of the ledger stay, unless the portable
            entry of the same name has gone.
    """
    portable = {name: value for name, value in stored[PORTABLE].items() if not is_run(name)}
    portable |= found.entries[PORTABLE]
    amx = {name: value for name, value in stored[AMX].items() if not (has_amx and is_run(name)) and name in portable}
    return {PORTABLE: portable, AMX: amx | found.entries[AMX]}


@dataclass
class Comparison:
    """Entries that differ, by name, with a sentence for each; and how many were compared or could not be.

    Attributes:
        skipped: entries of AMX on a machine without it, or that no machine with AMX has written yet.
    """

    differences: dict[str, str] = field(default_factory=dict)
    compared: int = 0
    skipped: int = 0


def compare(stored: Entries, found: Collected, is_run: Callable[[str], bool]) -> Comparison:
    """Compare the hashes found with those of a ledger, for the cases that were run."""
    result = Comparison()
    for arithmetic in (PORTABLE, AMX):
        own, theirs = found.entries[arithmetic], {n: v for n, v in stored[arithmetic].items() if is_run(n)}
        for name in sorted(own.keys() | theirs.keys()):
            label = name if arithmetic == PORTABLE else f"{name} [{arithmetic}]"
            if name in own and name in theirs:
                result.compared += 1
                if own[name] != theirs[name]:
                    result.differences[label] = f"the ledger has {theirs[name]}, found {own[name]}"
            elif arithmetic == AMX:
                result.skipped += 1
            elif name in own:
                result.differences[label] = f"not in the ledger, found {own[name]}; --write adds it"
            else:
                result.differences[label] = f"the ledger has {theirs[name]}, but no case computes it; --write drops it"
    add_faults(result, found)
    return result


def add_faults(result: Comparison, found: Collected) -> None:
    """Add outputs that must be equal and are not, and cases that raised."""
    for name, runs in found.unequal.items():
        result.differences[f"{name} (equal bits expected)"] = runs
    for name, problem in found.failed.items():
        result.differences[f"{name} (raised)"] = problem.strip().splitlines()[-1]
