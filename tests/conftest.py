"""Fixtures shared by the tests."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# Workers of pytest-xdist compute on one thread each; set before PyTorch is imported, and for processes of tests too.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the tests of downloads start processes with a hub of their own
# What torch.compile has compiled is not used again on a CPU with other instructions, such as that of `make test-avx2`:
# PyTorch's cache does not know about these, and the process dies.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="cpumoe-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import pytest
import torch
from every_architecture import write_family

import cpumoe
from cpumoe import _core

SUPPORTED_ISAS = [entry.name for entry in cpumoe.instruction_sets() if entry.supported]


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but every n-th case of tests with ``@pytest.mark.every(n)`` as ``full``."""
    seen: dict[str, int] = {}
    for item in items:
        if (every := item.get_closest_marker("every")) is not None:
            name = item.nodeid.partition("[")[0]
            place = seen[name] = seen.get(name, -1) + 1
            if place % every.args[0] != 0:
                item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's tiny checkpoint, written once in a test run, whichever worker needs it first."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "families"
    root.mkdir(exist_ok=True)

    def folder(name: str) -> Path:
        path = root / name
        if not path.exists():
            written = write_family(Path(tempfile.mkdtemp(dir=root)), name)
            try:
                written.rename(path)
            except OSError:  # another worker was faster
                shutil.rmtree(written)
        return path

    return folder


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Every test starts from the same random numbers and leaves the default kernels and threads behind."""
    torch.manual_seed(0)
    yield
    _core.use_isa("")
    cpumoe.set_num_threads(0)
