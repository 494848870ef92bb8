"""Entries of modules from which a native decoder was built, to detect later changes before every step.

An entry is a tuple for ``_core.has_changed``: a dict of a module, a key, the value at the time, and for tensors their
address and version. Replaced modules and tensors (LoRA, ``set_input_embeddings``), tensors whose memory was replaced
(``.to(torch.bfloat16)``) or written in place (``load_state_dict``: the decoder may hold an fp32 copy), settings such as
``gate.top_k``, and a replaced ``forward`` (accelerate's hooks) all change an entry.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

#: Dict, key, value (None: no such key, or None), and ``data_ptr()`` and ``_version`` of a tensor (None: not compared).
Entry = tuple[dict[str, Any], str, Any, int | None, int | None]

_PACKAGE = __name__.rpartition(".")[0]


def watched_entries(module: nn.Module) -> Iterator[Entry]:
    """Yield the entries of a module itself: tensors, children, public numbers and flags, and its own ``forward``."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            yield _tensor_entry(tensors, name, tensor)
    yield from watched_modules(module)
    own = vars(module)
    for name, value in own.items():
        if isinstance(value, bool | int | float | None) and not name.startswith("_") and name != "training":
            yield own, name, value, None, None
    yield own, "forward", own.get("forward"), None, None


def watched_modules(module: nn.Module) -> Iterator[Entry]:
    """Yield the entries of a module's children."""
    for name, child in module._modules.items():
        yield module._modules, name, child, None, None


def kind_of(layer: nn.Module, index: int) -> Hashable:
    """Return a value that only layers with the same modules, shapes and settings have.

    Numbers that are the layer's own ``index`` are left out. A layer that has one such number by chance is a kind of its
    own, which is checked once more than needed.
    """
    return tuple(
        (
            name,
            type(module),
            tuple((key, None if tensor is None else tensor.shape) for key, tensor in module._parameters.items()),
            tuple(sorted((key, repr(value)) for key, value in vars(module).items() if _is_setting(key, value, index))),
        )
        for name, module in layer.named_modules()
    )


def _is_setting(name: str, value: Any, index: int) -> bool:
    if name.startswith("_") or name == "training" or (type(value) is int and value == index):
        return False
    if isinstance(value, list | tuple):
        return all(_is_setting(name, one, index) for one in value)
    return value is None or isinstance(value, bool | int | float | str) or inspect.isfunction(value)


def is_foreign(forward: Any) -> bool:
    """Return whether a module's own ``forward`` was set by code other than this package."""
    if forward is None:
        return False
    is_ours = isinstance(forward, partial) and getattr(forward.func, "__module__", "").startswith(_PACKAGE)
    return not is_ours


def _tensor_entry(tensors: Any, name: str, tensor: Tensor | None) -> Entry:
    if tensor is None:
        return tensors, name, None, None, None
    return tensors, name, tensor, tensor.data_ptr(), None if tensor.is_inference() else tensor._version
