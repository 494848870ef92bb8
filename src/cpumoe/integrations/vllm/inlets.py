"""Parameters without contents, through which vLLM's loaders hand tensors over instead of copying them somewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Inlet(torch.nn.Parameter):
    """Takes tensors. ``weight_loader`` is what vLLM calls; what it copies into a parameter itself arrives as well."""

    weight_loader: Callable[..., Any]
    copied: Callable[[Tensor], None] | None

    def __new__(
        cls,
        weight_loader: Callable[..., Any],
        dtype: torch.dtype = torch.uint8,
        copied: Callable[[Tensor], None] | None = None,
    ) -> Inlet:
        """``dtype`` is what vLLM is told; it warns of tensors that have another. ``copied`` takes what is copied."""
        inlet = super().__new__(cls, torch.empty(0, dtype=dtype), requires_grad=False)
        inlet.weight_loader, inlet.copied = weight_loader, copied
        return inlet

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        if self.copied is None:
            raise RuntimeError("this parameter has no contents; its weight_loader takes tensors")
        self.copied(source)
        return self


def remove_inlets(module: torch.nn.Module) -> None:
    """Takes the inlets of a module away from it."""
    for name in [name for name, parameter in module.named_parameters(recurse=False) if isinstance(parameter, Inlet)]:
        delattr(module, name)
