"""``python -m cpumoe``: Python imports the package before its ``__main__``, and the package imports this file first."""

from __future__ import annotations

import sys

from cpumoe_command import leave_on_interrupt

_arguments = getattr(sys, "argv", [])
# While Python looks for the file of a module, "-m" stands where the file's name will be.
if _arguments[:1] == ["-m"] and sys.orig_argv[-len(_arguments)].removeprefix("-m") == "cpumoe":
    leave_on_interrupt()
