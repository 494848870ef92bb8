"""Values and defaults of options, in a module that imports nothing.

The command line shows them in its help, which must not wait for PyTorch. The code that implements an option takes them
from here.
"""

from __future__ import annotations

#: Value of ``--activations``: run weights with int8 activations where a checkpoint leaves activations in float.
INT8_ACTIVATIONS = "int8"
#: Value of ``--kv-cache``: hold keys and values in int8.
INT8_CACHE = "int8"

#: On-disk formats of integer weights in compressed-tensors files.
INT_QUANTIZED, PACK_QUANTIZED = "int-quantized", "pack-quantized"
INTEGER_FORMATS = (INT_QUANTIZED, PACK_QUANTIZED)

#: Layouts that ``simulate`` compares: a slice of everything on each rank; whole experts, and tokens of its own; the
#: same with copies of hot experts.
LAYOUTS = ("tp", "ep", "ep-balanced")

# Both sides of a check quantise the inputs alike and differ in the order of their fp32 sums: 1e-6 was seen, and 1e-4
# for the token of zeros, whose sums cancel. Between the two products of an expert they quantise again, where a value
# may fall on the other side of an edge: 5e-3 of a token was seen.
#: Relative differences of a token that ``check`` accepts.
LINEAR_TOLERANCE = 1e-3
EXPERTS_TOLERANCE = 2e-2

#: Tokens that ``eval`` sees at a time.
DEFAULT_WINDOW = 1024

#: Seconds after which a rank that gives nothing is given up.
DEFAULT_TIMEOUT = 60.0
