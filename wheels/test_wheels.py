"""Tests of the wheels in ``dist/``: tags, files, a clean installation, and bit-identical layers on x86-64 and Arm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from pythons import PYTHONS, ROOT, Python

DIST = ROOT / "dist"
LAYER_BITS = ROOT / "wheels" / "layer_bits.py"
NEWEST_GLIBC = 28  # manylinux_2_28
NAMES = {"3.11": "cp311-cp311", "3.13": "cp312-abi3"}

# The CPU that qemu emulates, and the instruction set that the core has to choose on it. pauth-impdef selects a fast
# hash for pointer authentication: with Arm's own, the signed pointers of Debian's libraries make a run take six times
# as long.
ARM_CPUS = {"max,pauth-impdef=on": "neon_i8mm", "cortex-a76": "neon_dot", "cortex-a72": "scalar"}


def wheel_of(python: Python) -> Path:
    (wheel,) = DIST.glob(f"*-{NAMES[python.version]}-*_{python.architecture}.whl")
    return wheel


def name_of(python: Python) -> str:
    return f"{NAMES[python.version]}-{python.architecture}"


def run(*command: object, folder: Path = ROOT, **environment: str) -> str:
    """Run a command and return its output; an error shows it too."""
    words = list(map(str, command))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(words, cwd=folder, env=os.environ | environment, text=True, **pipes)
    assert done.returncode == 0, f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def tracked_files(*folders: str) -> set[str]:
    return set(run("git", "ls-files", *folders).split())


def compute_layers(python: Python, folder: Path, **environment: str) -> dict[str, np.ndarray]:
    """Return what layer_bits.py computes with the core of a Python's wheel, and ``isa``."""
    with zipfile.ZipFile(wheel_of(python)) as archive:
        (core,) = (name for name in archive.namelist() if name.endswith(".so"))
        archive.extract(core, folder)
    run(python.executable, LAYER_BITS, folder / core, folder / "results.npz", **environment)
    return dict(np.load(folder / "results.npz"))


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Layers as the wheel for CPython 3.11 on x86-64 computes them."""
    results = compute_layers(PYTHONS[0], tmp_path_factory.mktemp("expected"))
    del results["isa"]
    return results


def test_dist_holds_one_wheel_per_python_and_the_sdist() -> None:
    (sdist,) = DIST.glob("*.tar.gz")
    assert set(DIST.iterdir()) == {sdist, *(wheel_of(python) for python in PYTHONS)}


def test_sdist_holds_every_source_file() -> None:
    (sdist,) = DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = tracked_files("src", "core", "CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md")
    assert sources <= names
    assert not {name for name in names if name.startswith(("tests/", "models/", "build/", ".")) or name.endswith(".so")}


@pytest.mark.parametrize("python", PYTHONS, ids=name_of)
def test_wheel_needs_no_newer_glibc(python: Python) -> None:
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel_of(python))
    policy = re.search(r'tag:\s+"manylinux_2_(\d+)_(\w+)"', shown)
    assert policy is not None, shown
    assert int(policy[1]) <= NEWEST_GLIBC
    assert policy[2] == python.architecture


@pytest.mark.parametrize("python", PYTHONS, ids=name_of)
def test_wheel_holds_the_package_and_nothing_else(python: Python) -> None:
    with zipfile.ZipFile(wheel_of(python)) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    suffix = "abi3" if python.version == "3.13" else f"cpython-311-{python.triplet}"
    package = {name.removeprefix("src/") for name in tracked_files("src")}
    assert names == package | {f"cpumoe/_core.{suffix}.so", "cpumoe/_core.pyi"}


@pytest.mark.parametrize("python", PYTHONS[:2], ids=name_of)
def test_layers_on_x86(python: Python, expected: dict[str, np.ndarray], tmp_path: Path) -> None:
    results = compute_layers(python, tmp_path, CPUMOE_ISA="scalar")
    assert results.pop("isa") == "scalar"
    check_layers(results, expected)


@pytest.mark.parametrize("cpu", ARM_CPUS)
@pytest.mark.parametrize("python", PYTHONS[2:], ids=name_of)
def test_layers_on_arm(python: Python, cpu: str, expected: dict[str, np.ndarray], tmp_path: Path) -> None:
    results = compute_layers(python, tmp_path, QEMU_CPU=cpu)
    assert results.pop("isa") == ARM_CPUS[cpu]
    check_layers(results, expected)


def check_layers(results: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert results.keys() == expected.keys()
    for name, values in expected.items():
        assert np.isfinite(values).all() and values.any(), name
        assert np.array_equal(results[name].view(np.int32), values.view(np.int32)), name


def test_demo_runs_in_a_clean_environment(tmp_path: Path) -> None:
    python = PYTHONS[0] if sys.version_info[:2] == (3, 11) else PYTHONS[1]
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    binaries = tmp_path / "venv" / "bin"
    wheel = f"{wheel_of(python)}[transformers]"
    run(binaries / "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt", wheel)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    location = run(binaries / "python", "-c", "import cpumoe; print(cpumoe.__file__)", folder=folder)
    assert Path(location.strip()).is_relative_to(tmp_path)
    assert run(binaries / "cpumoe", "demo", folder=folder).strip()
