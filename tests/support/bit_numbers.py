"""Inputs of the ledger of bits: numbers and functions that are bit-identical on every machine.

``torch.randn`` and libm have implementations for each CPU. Numbers here are integers from SHAKE-128 times a power of
two, and elementary functions are computed in fp64 and rounded once to fp32.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Times the sum of four integers of 16 bits: between 0 and 4.
_UNIT = 2.0**-16


def numbers(
    name: str, *shape: int, scale: float = 1.0, offset: float = 0.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return bell-shaped numbers, the same for the same name and shape on every machine.

    Args:
        name: the seed.
        shape: of the result.
        scale: a power of two; the numbers lie between -2 and 2 times this, with a standard deviation of 0.58 times it.
        offset: added in fp32.
        dtype: the numbers are rounded to this last.
    """
    values = _sums(name, int(np.prod(shape))) * np.float32(_UNIT * scale)  # exact
    return torch.from_numpy((values + np.float32(offset)).reshape(shape)).to(dtype)


@lru_cache(maxsize=512)
def _sums(name: str, count: int) -> np.ndarray[Any, Any]:
    """Return sums of four integers from -32767 to 32768, as fp32."""
    raw = np.frombuffer(hashlib.shake_128(name.encode()).digest(8 * count), dtype="<u2").reshape(count, 4)
    first, second, third, fourth = (raw[:, column].astype(np.int32) for column in range(4))
    return (first + second + third + fourth - 2 * 65535).astype(np.float32)


def integers(name: str, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return integers from ``low`` to ``high - 1``, the same for the same name and shape on every machine."""
    count = int(np.prod(shape))
    raw = np.frombuffer(hashlib.shake_128(name.encode()).digest(8 * count), dtype="<u8")
    values = low + (raw % np.uint64(high - low)).astype(np.int64)
    return torch.from_numpy(values.reshape(shape)).to(dtype)


_ROUNDED_ONCE = {
    *(torch.cos, torch.Tensor.cos, torch.sin, torch.Tensor.sin),
    *(torch.exp, torch.Tensor.exp, torch.log, torch.Tensor.log),
    *(torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.Tensor.__rpow__),
}


class RoundedOnce(TorchFunctionMode):
    """Compute cos, sin, exp, log, pow and polar of fp32 tensors in fp64, and round the results once.

    PyTorch's fp32 versions differ in the last bit from CPU to CPU, and so do the RoPE tables that a model makes of them
    when it is loaded. An error of one ulp in fp64 changes the rounding to fp32 about once in 2^29 numbers.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch, in fp64 if it is one of those above and its arguments are fp32 tensors."""
        options = options or {}
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        is_single = bool(tensors) and all(tensor.dtype == torch.float32 for tensor in tensors)
        if is_single and function in _ROUNDED_ONCE and not options:
            wide = (argument.double() if isinstance(argument, Tensor) else argument for argument in arguments)
            return function(*wide).float()
        if is_single and function is torch.polar and not options:
            magnitude, angle = (argument.double() for argument in arguments)
            return torch.complex((magnitude * angle.cos()).float(), (magnitude * angle.sin()).float())
        return function(*arguments, **options)
