"""Entries of modules from which a native decoder was built, to detect later changes before every step.

An entry is a tuple for ``_core.has_changed``: a dict of a module, a key, the value at the time, and for tensors their
address and version. Replaced modules and tensors (LoRA, ``set_input_embeddings``), tensors whose memory was replaced
(``.to(torch.bfloat16)``) or written in place (``load_state_dict``: the decoder may hold an fp32 copy), settings such as
``gate.top_k``, and a replaced ``forward`` (accelerate's hooks) all change an entry.

A write through ``tensor.data`` changes no version, and tensors made in inference mode have none. The decoder reads most
tensors in place and follows such writes by itself; for the small ones that it holds copies of there are
:class:`WatchedValues`.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

#: Dict, key, value (None: no such key, or None), and ``data_ptr()`` and ``_version`` of a tensor (None: not compared).
Entry = tuple[dict[str, Any], str, Any, int | None, int | None]

_PACKAGE = __name__.rpartition(".")[0]


def watched_entries(module: nn.Module, *, with_tensors: bool = True) -> Iterator[Entry]:
    """Yield the entries of a module itself: tensors, children, public settings, and its own ``forward``."""
    for tensors in (module._parameters, module._buffers) if with_tensors else ():
        for name, tensor in tensors.items():
            yield _tensor_entry(tensors, name, tensor)
    for name, child in module._modules.items():
        yield module._modules, name, child, None, None
    own = vars(module)
    yield from _watched_settings(own)
    yield own, "forward", own.get("forward"), None, None


def watched_owner(module: nn.Module) -> Iterator[Entry]:
    """Yield the entries of a module around what is watched: its children, settings and configuration.

    Its own ``forward`` is one of ours, which is compared elsewhere.
    """
    for name, child in module._modules.items():
        yield module._modules, name, child, None, None
    own = vars(module)
    yield from _watched_settings(own)
    if (config := own.get("config")) is not None:
        yield own, "config", config, None, None
        yield from (entry for entry in _watched_settings(vars(config)) if entry[1] not in _LOOKED_UP)


def _watched_settings(own: dict[str, Any]) -> Iterator[Entry]:
    for name, value in own.items():
        if _is_setting(name, value):
            yield own, name, value, None, None


def settings_of(module: nn.Module, index: int | None = None) -> Hashable:
    """Return a value that only modules of the same class with the same shapes and settings have."""
    return (
        type(module).__module__,
        type(module).__qualname__,
        tuple((key, None if tensor is None else tuple(tensor.shape)) for key, tensor in module._parameters.items()),
        _settings(vars(module), index),
    )


def kind_of(layer: nn.Module, index: int) -> Hashable:
    """Return a value that only layers with the same modules, shapes and settings have.

    Numbers that are the layer's own ``index`` are left out. A layer that has one such number by chance is a kind of its
    own, which is checked once more than needed.
    """
    return tuple((name, settings_of(module, index)) for name, module in layer.named_modules())


def kind_of_owner(module: nn.Module) -> Hashable:
    """Return the settings of a module and of its configuration."""
    config = vars(module).get("config")
    told = {} if config is None else vars(config)
    return _settings(vars(module)), _settings({name: told[name] for name in told if name not in _LOOKED_UP})


def _settings(own: dict[str, Any], index: int | None = None) -> Hashable:
    return tuple(sorted((name, _text(value)) for name, value in own.items() if _is_setting(name, value, index)))


def _text(value: Any) -> str:
    if inspect.isfunction(value) and "<" not in value.__qualname__:  # a lambda is only known by where it is
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


#: Settings that change between calls without a meaning for what is built.
_FREE = frozenset(("training", "gradient_checkpointing"))
#: Those of configurations, which a step looks up in every call.
_LOOKED_UP = frozenset(
    (
        "use_cache",
        "return_dict",
        "is_causal",
        "output_hidden_states",
        "output_attentions",
        "output_router_logits",
        "dtype",
        "torch_dtype",
    )
)


def _is_setting(name: str, value: Any, index: int | None = None) -> bool:
    if name.startswith("_") or name in _FREE or (type(value) is int and value == index):
        return False
    if isinstance(value, list | tuple):
        return all(_is_setting(name, one, index) for one in value)
    if isinstance(value, dict):
        return all(_is_setting(name, one, index) for one in value.values())
    return value is None or isinstance(value, bool | int | float | str) or inspect.isfunction(value)


def is_foreign(forward: Any) -> bool:
    """Return whether a module's own ``forward`` was set by code other than this package."""
    if forward is None:
        return False
    code = forward.func if isinstance(forward, partial) else getattr(forward, "function", None)
    return code is None or not getattr(code, "__module__", "").startswith(_PACKAGE)


def _tensor_entry(tensors: Any, name: str, tensor: Tensor | None) -> Entry:
    if tensor is None:
        return tensors, name, None, None, None
    return tensors, name, tensor, tensor.data_ptr(), None if tensor.is_inference() else tensor._version


class WatchedValues:
    """The values of small tensors at one time, to detect writes that change no version: some 150 ns for a tensor."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        # A buffer is a span of memory; tensors of another layout are rare.
        spans = [t.view(torch.uint8).numpy() for t in flat if t.is_contiguous()]
        self._spans = tuple(memoryview(span) for span in spans)  # type: ignore[arg-type]  # an array is a buffer
        self._bytes = tuple(bytes(span) for span in self._spans)
        self._others = tuple((t, t.clone()) for t in flat if not t.is_contiguous())

    def have_changed(self) -> bool:
        """Return whether a byte differs from what it was."""
        is_same = all(map(bytes.startswith, self._bytes, self._spans))  # memcmp without a copy
        return not is_same or any(not torch.equal(now, before) for now, before in self._others)


def copied_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of a module itself that a native decoder holds fp32 copies of: norms, biases, sinks."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.dim() <= 1 and tensor.dtype in (torch.bfloat16, torch.float16):
            yield tensor
