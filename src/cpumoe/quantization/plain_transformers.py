"""What transformers does with a quantised checkpoint where cpumoe is not imported, as far as it is not what it should.

Observed with transformers 5.22 and compressed-tensors on a CPU, for every scheme that can be written;
tests/integrations/test_without_cpumoe.py runs them again. transformers merges the experts of a layer into one tensor
while it loads them, with their scales as the only other tensor that it knows. Other linears it reads in every format.
"""

from __future__ import annotations

from cpumoe.layers.scheme import INTEGERS, Scheme
from cpumoe.option_values import INT_QUANTIZED


def misreading_of_experts(scheme: Scheme, format: str) -> str | None:
    """Return what transformers without cpumoe does wrong with experts of a scheme; None if it reads them.

    ``format``: how integers are stored.
    """
    weights = scheme.weights
    if weights.scale == "e4m3":
        return f"leaves out the global scales of {scheme} experts: it loads wrong weights, without an error"
    if weights.element in INTEGERS and format == INT_QUANTIZED:
        return f"cannot load experts in the format {format}; pack-quantized ones it can"
    if not weights.symmetric:
        return f"cannot load {scheme} experts, which have zero points"
    if weights.group.rows is not None and weights.group.rows > 1:
        return f"cannot load {scheme} experts, whose scales are for blocks"
    if weights.element == "fp8" and weights.scale == "e8m0":
        return f"cannot load {scheme} experts"
    return None
