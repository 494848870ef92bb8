"""Cases of the ledger of bits: runs each with several kernels and thread counts, and hashes its outputs."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

import cpumoe
from cpumoe import _core

#: Arithmetics that an output may have. AMX's bf16 tiles add in an order of their own; all other kernels agree.
PORTABLE, AMX = "portable", "amx"

#: Hexadecimal digits of a hash.
_DIGITS = 16


@dataclass(frozen=True)
class Setting:
    """The kernels and the number of threads that a case is run with."""

    isa: str
    threads: int

    def __str__(self) -> str:
        return f"{self.isa}, {self.threads} thread{'s' if self.threads > 1 else ''}"


@contextmanager
def using(setting: Setting) -> Iterator[None]:
    """Run the block with the kernels and threads of a setting, then return to the defaults."""
    _core.use_isa(setting.isa)
    cpumoe.set_num_threads(setting.threads)
    try:
        yield
    finally:
        _core.use_isa("")
        cpumoe.set_num_threads(0)


def all_settings(threads: tuple[int, ...] = (1, 2, 3)) -> list[Setting]:
    """Return the settings that must agree: scalar kernels, and the best ones of this machine with some threads."""
    best = cpumoe.isa()
    return list(dict.fromkeys([Setting("scalar", 1), *(Setting(best, count) for count in threads)]))


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """Return the shortened SHA-256 of dtypes, shapes and bytes. Raise ValueError for NaN or infinity."""
    digest = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach().contiguous()
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise ValueError("an output holds NaN or infinity; choose inputs that give numbers")
        digest.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:_DIGITS]


@dataclass
class Collected:
    """Hashes of all cases that were run.

    Attributes:
        entries: hash by arithmetic and name.
        unstored: hash by name of outputs that PyTorch computes in part, which depend on the CPU.
        unequal: names of outputs that must be equal and are not, with the runs of each hash.
        failed: traceback by name of case.
        seconds: by name of case.
    """

    entries: dict[str, dict[str, str]] = field(default_factory=lambda: {PORTABLE: {}, AMX: {}})
    unstored: dict[str, str] = field(default_factory=dict)
    unequal: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Recorder:
    """Takes the outputs of a case in all of its runs.

    Attributes:
        setting: the one of the run in progress.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._runs: dict[tuple[str, str], dict[str, list[str]]] = {}  # arithmetic, output -> hash -> runs
        self._unstored: dict[str, str] = {}
        self.setting = Setting("", 1)

    def add(self, output: str, *tensors: Tensor, variant: str = "") -> None:
        """Record an output; outputs of the same name must have equal bits in all variants and settings.

        A variant computes the same in another way: a prompt in chunks, a sequence alone. On AMX, bits of cases with
        float rows depend on the number of rows, so that variants are not recorded there.
        """
        self.add_hash(output, hash_tensors(tensors), variant=variant)

    def add_hash(self, output: str, found: str, *, variant: str = "", setting: Setting | None = None) -> None:
        """Record an output by its hash, as :meth:`add` does."""
        setting = setting or self.setting
        arithmetic = AMX if setting.isa == AMX and self._case.rounds_on_amx else PORTABLE
        if arithmetic == AMX and variant:
            return
        run = f"{variant}, {setting}" if variant else str(setting)
        self._runs.setdefault((arithmetic, output), {}).setdefault(found, []).append(run)

    def add_unstored(self, output: str, *tensors: Tensor) -> None:
        """Record an output that PyTorch computes in part; only the first run counts."""
        name = f"{self._case.name}/{output}"
        if name not in self._unstored:
            self._unstored[name] = hash_tensors(tensors)

    def finish(self, collected: Collected) -> None:
        """Move what was recorded to ``collected``: the hash of the first run of each output."""
        collected.unstored |= self._unstored
        for (arithmetic, output), hashes in self._runs.items():
            name = f"{self._case.name}/{output}"
            collected.entries[arithmetic][name] = next(iter(hashes))
            if len(hashes) > 1:
                groups = (f"{found} ({'; '.join(runs)})" for found, runs in hashes.items())
                collected.unequal[name if arithmetic == PORTABLE else f"{name} [{arithmetic}]"] = " != ".join(groups)


Compute = Callable[[Recorder], None]


@dataclass(frozen=True)
class Case:
    """Something to compute.

    Attributes:
        name: the beginning of the names of its entries.
        prepare: makes inputs and weights, and returns what computes the outputs.
        is_fast: whether ``--fast`` runs it.
        rounds_on_amx: whether AMX has bits of its own: for rows of floats.
        is_stored: False where PyTorch takes part in all outputs; such a case is run once, by ``--against`` only.
        runs_once: it chooses kernels and threads itself.
    """

    name: str
    prepare: Callable[[], Compute]
    is_fast: bool = False
    rounds_on_amx: bool = False
    is_stored: bool = True
    runs_once: bool = False


def collect(
    cases: Iterable[Case], *, threads: tuple[int, ...] = (1, 2, 3), report: Callable[[str], None] | None = None
) -> Collected:
    """Run cases one after another, each in all settings. A case that raises is listed as failed.

    Args:
        cases: what to run.
        threads: with which numbers of threads the best kernels are run.
        report: called with a line for each case.
    """
    collected, settings = Collected(), all_settings(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # PyTorch prepares small tensors only; a second team of threads would be in the way
    try:
        for case in cases:
            _collect(case, settings, collected)
            if report is not None:
                report(f"{collected.seconds[case.name]:7.2f} s  {case.name}")
    finally:
        torch.set_num_threads(before)
    return collected


def _collect(case: Case, settings: list[Setting], collected: Collected) -> None:
    """Run one case, and add its hashes or its traceback."""
    recorder, start = Recorder(case), time.perf_counter()
    try:
        compute = case.prepare()
        for setting in settings[-1:] if case.runs_once or not case.is_stored else settings:
            recorder.setting = setting
            with using(setting), torch.no_grad():
                compute(recorder)
    except Exception:
        collected.failed[case.name] = traceback.format_exc()
    recorder.finish(collected)
    collected.seconds[case.name] = time.perf_counter() - start
