"""CPython and NumPy from Debian's packages, to build and test wheels with: several versions and architectures.

The packages are not installed but unpacked, each Python into a folder of its own with its own dynamic linker and C
library. This needs no privileges. Pythons for Arm run under qemu. A second run finds the folders and downloads nothing.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "wheels"

_PACKAGES = (
    *("python{0}-minimal", "libpython{0}-minimal", "libpython{0}-stdlib", "libpython{0}-dev", "python3-numpy"),
    *("libc6", "libgcc-s1", "libstdc++6", "libgfortran5", "libblas3", "liblapack3", "zlib1g", "libexpat1", "libffi8"),
)
_MORE_PACKAGES = {"x86_64": ("libquadmath0",), "aarch64": ()}
_DEBIAN_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Python:
    """A CPython of a Debian release, for one architecture."""

    version: str
    release: str
    architecture: str

    @property
    def folder(self) -> Path:
        return BUILD / f"python{self.version}-{self.architecture}"

    @property
    def triplet(self) -> str:
        return f"{self.architecture}-linux-gnu"

    @property
    def executable(self) -> Path:
        """A script that starts the interpreter; ``QEMU_CPU`` selects the CPU of a Python for Arm."""
        return self.folder / "usr" / "bin" / "python"

    @property
    def include(self) -> Path:
        return self.folder / "usr" / "include" / f"python{self.version}"

    def fetch(self) -> None:
        """Download and unpack the packages, unless this was done before."""
        if self.executable.exists():
            return
        print(f"downloading Python {self.version} for {self.architecture}", flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("lib", "lib64"):  # older releases have /lib, newer ones only /usr/lib
            (self.folder / "usr" / name).mkdir(parents=True)
            (self.folder / name).symlink_to(f"usr/{name}")
        downloads = self.folder / "downloads"
        apt = self._make_apt()
        _run([*apt, "update"], downloads)
        packages = [name.format(self.version) for name in (*_PACKAGES, *_MORE_PACKAGES[self.architecture])]
        _run([*apt, "download", *packages], downloads)
        for package in sorted(downloads.glob("*.deb")):
            contents = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
            _run(["tar", "-x", "--keep-directory-symlink", "-C", self.folder], stdin=contents.stdout)
            if contents.wait() != 0:
                raise SystemExit(f"{package} is damaged")
        shutil.rmtree(downloads)

        # Debian's pyconfig.h includes that of the architecture through the system's include path.
        shutil.copy(self.include.parent / self.triplet / self.include.name / "pyconfig.h", self.include)
        self._write_executable()

    def _make_apt(self) -> list[str]:
        """Return an apt-get command for this release and architecture, whatever the system's own are."""
        downloads = self.folder / "downloads"
        for name in ("state/lists/partial", "cache/archives/partial"):
            (downloads / name).mkdir(parents=True)
        (downloads / "state" / "status").touch()
        (downloads / "sources.list").write_text(f"deb {_find_mirror()} {self.release} main\n")
        settings = {
            "Dir::Etc::sourcelist": downloads / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State": downloads / "state",
            "Dir::State::status": downloads / "state" / "status",
            "Dir::Cache": downloads / "cache",
            "APT::Architecture": _DEBIAN_NAMES[self.architecture],
            "APT::Architectures": _DEBIAN_NAMES[self.architecture],
            "APT::Sandbox::User": "root",  # the folder need not be readable for apt's own user
        }
        return ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]

    def _write_executable(self) -> None:
        libraries = self.folder / "usr" / "lib" / self.triplet
        paths = ":".join(str(libraries / name) for name in ("", "blas", "lapack"))
        interpreter = self.executable.parent / f"python{self.version}"
        if self.architecture == "x86_64":
            command = f'{self.folder}/lib64/ld-linux-x86-64.so.2 --argv0 "$0" --library-path {paths}'
        else:
            command = f'qemu-aarch64-static -L {self.folder} -0 "$0" -E LD_LIBRARY_PATH={paths}'
        self.executable.write_text(f'#!/bin/sh\nexec {command} {interpreter} "$@"\n')
        self.executable.chmod(0o755)


_RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
PYTHONS = [Python(version, _RELEASES[version], name) for name in _DEBIAN_NAMES for version in _RELEASES]


def _find_mirror() -> str:
    """Return the address of the Debian mirror that this system's apt is configured with."""
    fields = ["Created-By: Packages", "Origin: Debian", "Label: Debian"]
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", *fields]
    addresses = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    if not addresses:
        raise SystemExit("apt has no package lists of Debian; run `apt-get update` as root")
    return addresses[0]


def _run(command: list[object], folder: Path = ROOT, **others: object) -> None:
    subprocess.run(list(map(str, command)), cwd=folder, check=True, **others)
