"""Writes the API reference (HTML) from docstrings: ``python docs/api.py FOLDER``; ``make docs`` does it.

pdoc looks names up in a module's dictionary, where those are missing that cpumoe imports when they are first used.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pdoc

import cpumoe

MODULES = ["cpumoe", "cpumoe.evaluation.perplexity", "cpumoe.evaluation.expert_load", "cpumoe.checkpoints.hub"]


def main(folder: Path) -> None:
    warnings.simplefilter("error")  # a public name that cannot be shown is a mistake
    for name in cpumoe.__all__:
        setattr(cpumoe, name, getattr(cpumoe, name))
    pdoc.render.configure(docformat="google", footer_text=f"cpumoe {cpumoe.__version__}")
    pdoc.pdoc(*MODULES, output_directory=folder)
    print(f"API reference: {folder / 'index.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
