"""``python -m cpumoe_command.on_node CPUS NODE PARENT COMMAND ...``: becomes a command that stays on one memory node.

It runs before anything is loaded, so that all memory of the command comes from that node.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_BIND = 2  # MPOL_BIND: memory of other nodes is not taken; files in the page cache make room first
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    cpus, node, parent, command = arguments[0], int(arguments[1]), int(arguments[2]), arguments[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before it could have been noticed
        sys.exit(1)
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is not None:
        # Where it is refused (a container without CAP_SYS_NICE), the CPUs still take memory of their own node first.
        words = node // 64 + 1
        mask = (ctypes.c_uint64 * words)()
        mask[node // 64] = 1 << node % 64
        libc.syscall(ctypes.c_long(number), _BIND, mask, ctypes.c_ulong(64 * words + 1))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
