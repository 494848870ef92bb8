"""The on-disk formats that are read, by the ``quant_method`` of their files. It imports nothing: the hook needs it."""

from __future__ import annotations

_METHODS = ("compressed-tensors", "mxfp4", "fp8", "modelopt", "quark", "gptq", "awq", "auto-round")

#: Every ``quant_method`` that is read, with the method that it is a name of. Older files have other names.
QUANT_METHODS = {method: method for method in _METHODS} | {
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
}
