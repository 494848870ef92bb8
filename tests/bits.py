"""Compares the bits of cpumoe's outputs with the ledger: SHA-256 hashes in tests/data/bits.json.

    python tests/bits.py                    # compare all entries; exit 1 and their names if some differ
    python tests/bits.py --fast             # compare every operator and some models
    python tests/bits.py --only rms_norm    # compare cases by their names
    python tests/bits.py --write            # write what is computed now: a change of bits is a diff to be reviewed
    python tests/bits.py --against HEAD~1   # compare two revisions on this machine, PyTorch-dependent outputs too

An entry is one output on fixed inputs, whatever kernels and threads compute it. The tool computes it with the scalar
and the best kernels, with 1 and 3 threads, whole and in chunks, alone and in a batch, and expects equal bits. AMX's
bf16 tiles alone have entries of their own. Outputs that PyTorch computes in part depend on the CPU: ``--against``
compares them, the ledger does not have them.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

# Threads that wait sleep instead of spinning: on a busy machine, spinning makes a team of threads many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_TESTS = Path(__file__).parent
sys.path[:0] = [path for path in (str(_TESTS / "support"),) if path not in sys.path]

import bit_ledger  # noqa: E402
import bit_revisions  # noqa: E402
from bit_cases import AMX, Case, Collected, collect  # noqa: E402

LEDGER = _TESTS / "data" / "bits.json"

#: Module and function of each group of cases. Another revision may lack what a module imports.
_GROUPS = (
    ("bit_products", "product_cases"),
    ("bit_operators", "operator_cases"),
    ("bit_steps", "step_cases"),
    ("bit_ranks", "rank_cases"),
    ("bit_steps", "layered_cases"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = _parse(arguments)
    if options.against is not None:
        return _compare_revisions(options)
    start = time.perf_counter()
    cases, failed = _chosen_cases(options, stored_only=options.collect is None)
    found = collect(cases, threads=(3,) if options.fast else (1, 3), report=_report if options.verbose else None)
    found.failed |= failed
    if options.collect is not None:
        bit_revisions.save(options.collect, found)
        return 0
    is_run = _scope(cases, options)
    seconds = time.perf_counter() - start
    if options.write:
        return _write(options.file, found, is_run, seconds)
    comparison = bit_ledger.compare(bit_ledger.read(options.file), found, is_run)
    _print_differences(comparison.differences)
    print(_summary(comparison, seconds))
    return 1 if comparison.differences else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the bits of cpumoe's outputs with a ledger of hashes.")
    parser.add_argument("--write", action="store_true", help="write the hashes instead of comparing them")
    parser.add_argument("--fast", action="store_true", help="run every operator and some models only")
    parser.add_argument("--only", metavar="PATTERN", help="run the cases with this in their names (with wildcards)")
    parser.add_argument("--against", metavar="COMMIT", help="compare with another revision instead of the ledger")
    parser.add_argument("--verbose", action="store_true", help="print every case and its seconds")
    parser.add_argument("--file", metavar="PATH", type=Path, default=LEDGER, help="another ledger")
    parser.add_argument("--collect", metavar="PATH", type=Path, help=argparse.SUPPRESS)  # what --against starts
    options = parser.parse_args(arguments)
    if options.write and options.against is not None:
        parser.error("--write and --against exclude each other")
    return options


def _chosen_cases(options: argparse.Namespace, *, stored_only: bool) -> tuple[list[Case], dict[str, str]]:
    """Return the cases that the options choose, and the traceback of each group that cannot be imported."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of kernels that are not installed
    cases: list[Case] = []
    failed: dict[str, str] = {}
    for module, function in _GROUPS:
        try:
            cases += getattr(importlib.import_module(module), function)()
        except Exception:
            failed[f"all of {function}"] = traceback.format_exc()
    pattern = f"*{options.only or ''}*"
    chosen = [case for case in cases if fnmatch(case.name, pattern) and (case.is_fast or not options.fast)]
    return [case for case in chosen if case.is_stored or not stored_only], failed


def _scope(cases: list[Case], options: argparse.Namespace) -> Callable[[str], bool]:
    """Return whether the case of an entry was run; without a choice of cases that is every entry of the ledger."""
    if not options.fast and options.only is None:
        return lambda name: True
    beginnings = tuple(f"{case.name}/" for case in cases)
    return lambda name: name.startswith(beginnings)


def _write(path: Path, found: Collected, is_run: Callable[[str], bool], seconds: float) -> int:
    """Write the ledger, unless outputs that must be equal are not, or a case raised."""
    faults = bit_ledger.Comparison()
    bit_ledger.add_faults(faults, found)
    if faults.differences:
        _print_differences(faults.differences)
        print(f"nothing was written to {path}: correct these first")
        return 1
    stored = bit_ledger.read(path)
    entries = bit_ledger.merge(stored, found, is_run, has_amx=bool(found.entries[AMX]))
    bit_ledger.write(path, entries)
    changed = sum(
        stored[arithmetic].get(name) != value for arithmetic, own in entries.items() for name, value in own.items()
    )
    total = sum(map(len, entries.values()))
    print(f"{total} entries in {path}, of which {changed} are new or changed ({seconds:.0f} s)")
    return 0


def _compare_revisions(options: argparse.Namespace) -> int:
    chosen = ["--fast"] * options.fast + (["--only", options.only] if options.only else [])
    chosen += ["--verbose"] * options.verbose
    comparison, absent = bit_revisions.compare_with(options.against, chosen)
    for name, reason in absent.items():
        print(f"cannot be computed at {options.against}: {name}: {reason}")
    _print_differences(comparison.differences)
    print(
        f"{comparison.compared} entries compared, {len(comparison.differences)} differ; "
        f"{comparison.skipped} are computed by one revision only"
    )
    return 1 if comparison.differences else 0


def _print_differences(differences: dict[str, str]) -> None:
    for name, sentence in differences.items():
        print(f"{name}: {sentence}")


def _summary(comparison: bit_ledger.Comparison, seconds: float) -> str:
    import cpumoe

    skipped = f", {comparison.skipped} of AMX skipped" if comparison.skipped else ""
    return (
        f"{comparison.compared} entries compared with {cpumoe.isa()} and scalar kernels{skipped}, "
        f"{len(comparison.differences)} differ ({seconds:.0f} s)"
    )


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
