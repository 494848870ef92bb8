"""For ``python -m cpumoe``: Python imports the package before ``__main__``, and the package imports this file first."""

from __future__ import annotations

import sys

from cpumoe_command import leave_on_interrupt

_arguments = getattr(sys, "argv", [])
# While Python still looks for the file of the module, argv[0] is "-m" instead of the file's name.
if _arguments[:1] == ["-m"] and sys.orig_argv[-len(_arguments)].removeprefix("-m") == "cpumoe":
    leave_on_interrupt()
