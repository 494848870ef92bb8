"""Environment variables: the name, the accepted values and the default of each, and the one place that reads them.

``CPUMOE_ISA`` and ``CPUMOE_NUM_THREADS`` are checked by the core, which reads them too. ``CPUMOE_VLLM`` is read by
``cpumoe_command.vllm_plugin``, before cpumoe is imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Switch:
    """A variable that is 0 or 1.

    Attributes:
        off: what 0 means, for the message about other values.
    """

    name: str
    off: str
    default: bool = True

    def is_on(self) -> bool:
        """Return the value. Raise ValueError if it is neither 0 nor 1."""
        value = os.environ.get(self.name, str(int(self.default)))
        if value not in ("0", "1"):
            raise ValueError(f"{self.name}={value!r}; 0 ({self.off}) and 1 are accepted")
        return value == "1"


@dataclass(frozen=True)
class Text:
    """A variable whose values are checked where they are used."""

    name: str

    def get(self) -> str | None:
        """Return the value, None if the variable is not set."""
        return os.environ.get(self.name)


MEMORY_CHECK = Switch("CPUMOE_MEMORY_CHECK", "models are loaded whatever memory is free")
NATIVE_DECODER = Switch("CPUMOE_STEPS", "models run layer by layer through transformers")
NUMA = Switch("CPUMOE_NUMA", "threads and weights are not placed")
SHARED_MEMORY = Switch("CPUMOE_SHARED_MEMORY", "messages go through torch.distributed")
TRANSFORMERS = Switch("CPUMOE_TRANSFORMERS", "transformers is left as it is")
DEBUG = Switch("CPUMOE_DEBUG", "no tracebacks", default=False)

ACTIVATIONS = Text("CPUMOE_ACTIVATIONS")
BACKEND = Text("CPUMOE_BACKEND")
KV_CACHE = Text("CPUMOE_KV_CACHE")
NUM_THREADS = Text("CPUMOE_NUM_THREADS")
SCHEME = Text("CPUMOE_SCHEME")
