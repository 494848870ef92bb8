"""The machine: instruction sets, threads, and the oneDNN guard."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpumoe import _core, settings
from cpumoe.cgroup import cpu_quota, cpus_of

if TYPE_CHECKING:
    import torch

# Nothing of cpumoe has imported torch yet. If someone else had, the guard may come too late for them.
_TORCH_CAME_FIRST = "torch" in sys.modules

_log = logging.getLogger("cpumoe")

#: Variables with which a user places threads.
OWN_PLACEMENT = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

#: How many CPUs' time the cgroup of this process has; None: as much as it likes.
QUOTA = cpu_quota()
_core.set_cpu_quota(cpus_of(QUOTA))

_warned: set[str] = set()  # numbers of threads, as they were given

_GUARD = "ONEDNN_MAX_CPU_ISA"
_GUARD_VALUE = "AVX512_CORE_BF16"
# Values of ONEDNN_MAX_CPU_ISA with which oneDNN has no bf16 products.
_ISAS_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}


@dataclass(frozen=True)
class InstructionSet:
    """One set of kernels: whether this machine runs it and, if not, why.

    Attributes:
        portable_floats: whether products of float activations have the bits of all other instruction sets that have
            this property. Products of integer activations always have.
    """

    name: str
    supported: bool
    reason: str
    portable_floats: bool = True


def instruction_sets() -> list[InstructionSet]:
    """All instruction sets that cpumoe has kernels for, best last."""
    return [InstructionSet(*row) for row in _core.instruction_sets()]


def has_portable_floats() -> bool:
    """Return :attr:`InstructionSet.portable_floats` of the kernels in use."""
    return next(entry.portable_floats for entry in instruction_sets() if entry.name == isa())


def isa() -> str:
    """Name of the kernels in use: ``CPUMOE_ISA``, else the best this machine runs."""
    return _core.isa()


def get_num_threads() -> int:
    """Threads that the next call uses.

    ``set_num_threads``, else ``CPUMOE_NUM_THREADS``, else ``torch.get_num_threads()`` but no more than the CPUs this
    thread may run on, and no more than the CPU quota of its cgroup.
    """
    import torch  # noqa: F401  # the core sees the number in PyTorch's OpenMP runtime once that is loaded

    return _core.thread_count()


def set_num_threads(threads: int) -> None:
    """Sets the number of threads for all further calls; 0 goes back to the default.

    Logs a warning if these are more than the CPUs that the process may use.
    """
    _core.set_thread_count(threads)
    warn_of_threads(f"num_threads={threads}", threads)


def warn_of_environment() -> None:
    """Log a warning if ``CPUMOE_NUM_THREADS`` asks for more threads than the process has CPUs."""
    text = settings.NUM_THREADS.get() or ""
    if text.isascii() and text.isdecimal() and len(text) < 10:  # the core refuses everything else
        warn_of_threads(f"{settings.NUM_THREADS.name}={text}", int(text))


def warn_of_threads(given: str, threads: int) -> None:
    """Log a warning if these are more threads than the process has CPUs; ``given`` is how the user asked for them.

    The same request is warned of once.
    """
    # Where OpenMP binds threads, the mask of this thread says nothing about the others.
    if threads <= (cpus := _core.available_cpus()) or any(name in os.environ for name in OWN_PLACEMENT):
        return
    if given in _warned:
        return
    _warned.add(given)
    mask = len(os.sched_getaffinity(0))
    why = f"this process may use {mask} CPU{'' if mask == 1 else 's'}"
    if QUOTA is not None and cpus < mask:
        why += f", and its cgroup has a quota of {QUOTA:g}"
    _log.warning(
        "%s",
        f"{given}: {why}; with more threads every step waits for threads that have no CPU, which is many times slower. "
        f"Use {cpus}",
    )


def float_dtype() -> tuple[torch.dtype, str]:
    """The dtype in which the float parts of a model are fast and safe on this CPU, and why.

    bf16 where the CPU multiplies it (half the memory traffic of fp32), else fp32: PyTorch emulates bf16 products on
    other CPUs, slower than fp32 ones.
    """
    import torch

    flags = _cpu_flags()
    native = next((flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags), None)
    if native is None:
        return torch.float32, "this CPU has no bf16 products"
    limit = os.environ.get(_GUARD, "").upper()
    if limit in _ISAS_WITHOUT_BF16:
        return torch.float32, f"oneDNN may not use bf16 products ({_GUARD}={limit})"
    if os.environ.get(_GUARD, _GUARD_VALUE) != _GUARD_VALUE and _core.amx_palette_hidden():
        return torch.float32, f"oneDNN may use AMX ({_GUARD}={os.environ[_GUARD]}), whose tile sizes are hidden here"
    return torch.bfloat16, f"this CPU has {native}"


def _cpu_flags() -> set[str]:
    """Features that the kernel reports for this CPU (none where there is no /proc/cpuinfo)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    found = (line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features")))
    return set(next(found, []))


def guard_onednn() -> str:
    """Keeps oneDNN from dying on machines that hide AMX's tile sizes; returns what was found, as a sentence.

    Some virtual machines offer AMX but return zeros in the CPUID leaf that oneDNN reads tile sizes from; any bf16
    product of PyTorch then ends in SIGILL. Telling oneDNN to leave AMX alone avoids it, if that is done before its
    first use. Called when cpumoe is imported. (cpumoe's own AMX kernels do not depend on that leaf.)
    """
    if not _core.amx_palette_hidden():
        return "not needed: oneDNN sees this CPU as it is"
    present = os.environ.get(_GUARD)
    if present == _GUARD_VALUE and _state.set_by_us:
        late = "; torch was imported before cpumoe: import cpumoe first" if _TORCH_CAME_FIRST else ""
        return f"set by cpumoe: {_GUARD}={_GUARD_VALUE}, because this machine hides AMX's tile sizes{late}"
    if present is not None:
        return f"needed, and {_GUARD}={present} was set already"
    os.environ[_GUARD] = _GUARD_VALUE
    _state.set_by_us = True
    return guard_onednn()


@dataclass
class _GuardState:
    set_by_us: bool = False


_state = _GuardState()

guard_onednn()  # now, before PyTorch runs its first product
