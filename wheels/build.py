"""Build the sdist, and from it the wheels for x86-64 and AArch64, into ``dist/``.

Each architecture has a wheel for CPython 3.11 and one with the stable ABI for 3.12 and later. Both contain the same
objects of the core, which take minutes to compile: they share a build folder, where only the binding is compiled twice.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

from pythons import BUILD, PYTHONS, ROOT, Python
from scikit_build_core.build import build_sdist

_SOURCE = BUILD / "source"
_DIST = ROOT / "dist"

_BUILD_WHEEL = """
import json, sys
from scikit_build_core.build import build_wheel
build_wheel(sys.argv[1], json.loads(sys.argv[2]))
"""


def unpack(sdist: Path) -> None:
    """Unpack an sdist. Files that have not changed keep their time stamps: ninja does not compile them again."""
    fresh = BUILD / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(fresh, filter="data")
    (top,) = fresh.iterdir()
    new = {path.relative_to(top) for path in top.rglob("*") if path.is_file()}
    old = {path.relative_to(_SOURCE) for path in _SOURCE.rglob("*") if path.is_file()}
    for name in old - new:
        (_SOURCE / name).unlink()
    for name in new:
        if name not in old or not filecmp.cmp(top / name, _SOURCE / name, shallow=False):
            (_SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(top / name, _SOURCE / name)
    shutil.rmtree(fresh)


def build_wheel(python: Python) -> Path:
    """Build the wheel for a Python into ``dist/`` and return it. Its tag names the oldest glibc that it runs with.

    The interpreter that runs the build is one for x86-64, of the same version; a Python for Arm provides the headers.
    """
    folder = BUILD / f"build-{python.architecture}"
    made = BUILD / f"wheel-{python.version}-{python.architecture}"
    shutil.rmtree(made, ignore_errors=True)
    (folder / "CMakeCache.txt").unlink(missing_ok=True)  # names the Python of the previous build; objects are kept
    interpreter = Python(python.version, python.release, "x86_64").executable
    settings = {
        "build-dir": str(folder),
        "cmake.define.CPUMOE_OLD_GLIBC": "ON",
        "cmake.define.Python_INCLUDE_DIR": str(python.include),
    }
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": sysconfig.get_path("purelib"),
    }
    if python.architecture != "x86_64":
        settings |= {
            "cmake.define.CMAKE_SYSTEM_NAME": "Linux",
            "cmake.define.CMAKE_SYSTEM_PROCESSOR": python.architecture,
            "cmake.define.CMAKE_CXX_COMPILER": f"{python.triplet}-g++",
            "cmake.define.CPUMOE_STUB": str(BUILD / "build-x86_64" / "_core.pyi"),
        }
        environment |= {
            "_PYTHON_HOST_PLATFORM": f"linux-{python.architecture}",
            "SETUPTOOLS_EXT_SUFFIX": f".cpython-{python.version.replace('.', '')}-{python.triplet}.so",
        }
    log = BUILD / f"{made.name}.log"
    _run([interpreter, "-c", _BUILD_WHEEL, made, json.dumps(settings)], _SOURCE, environment, log)
    (wheel,) = made.glob("*.whl")
    repaired = made / "repaired"
    _run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", repaired, wheel], ROOT, environment, log)
    (wheel,) = repaired.glob("*.whl")
    return Path(shutil.copy(wheel, _DIST))


def _run(command: list[str | Path], folder: Path, environment: dict[str, str], log: Path) -> None:
    """Run a command; its output is appended to a log file, and printed if the command fails."""
    with log.open("a") as output:
        status = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output).returncode
    if status != 0:
        raise SystemExit(f"{log.read_text()}\n{command[0]} ended with {status}; its output above is in {log}")


def main() -> None:
    begin = time.monotonic()

    def report(file: Path) -> None:
        print(f"{time.monotonic() - begin:4.0f} s  {file.stat().st_size / 1e6:5.1f} MB  {file.name}", flush=True)

    shutil.rmtree(_DIST, ignore_errors=True)
    _DIST.mkdir()
    for log in BUILD.glob("*.log"):
        log.unlink()
    os.chdir(ROOT)
    sdist = _DIST / build_sdist(str(_DIST))
    report(sdist)
    unpack(sdist)
    for python in PYTHONS:
        python.fetch()
    for python in PYTHONS:
        report(build_wheel(python))


if __name__ == "__main__":
    main()
