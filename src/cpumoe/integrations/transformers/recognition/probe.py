"""Copies of modules that recognition may call: with random parameters, whatever was replaced in the model itself."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.watched_modules import settings_of

T = TypeVar("T")

#: What was found of modules, each result with the module.
Found = dict[Hashable, tuple[Any, nn.Module]]

#: That of the current block of :func:`probing`.
_found: ContextVar[Found | None] = ContextVar("found", default=None)

#: Attributes of a module that hold hooks.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)


def copy_of(module: Any) -> Any:
    """Return a copy of a module that shares its tensors and children, with its class's forward and without hooks.

    Hooks that transformers installs while the copy runs, to capture hidden states, must not land in the module.
    """
    copied = copy.copy(module)
    vars(copied).pop("forward", None)
    vars(copied).update({name: OrderedDict() for name in _HOOKS})
    return copied


@contextmanager
def probing(found: Found | None = None) -> Iterator[None]:
    """Call copies of modules in the same modes whatever the caller's are, and remember what is found of them.

    Blocks inside of a block remember together. ``found``: what was found in earlier blocks; this one adds to it. Random
    numbers of copies come from generators of their own.
    """
    around = _found.get()
    here: Found = ({} if around is None else around) if found is None else found
    if found is not None and around is not None:
        found.update(around)
    token = _found.set(here)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            yield
    finally:
        _found.reset(token)


def remembered(module: nn.Module, more: Hashable, find: Callable[[], T]) -> T:
    """Return the result of ``find`` for a module, called in :func:`probing` once for modules with the same code.

    ``more``: what else the result depends on.
    """
    with probing():
        found = _found.get()
        assert found is not None
        key = (_code_of(module), more)
        if key not in found:
            found[key] = find(), module  # which keeps the objects alive whose addresses are in the key
        result: T = found[key][0]
        return result


def _code_of(module: nn.Module) -> Hashable:
    """Return a value that modules have in common which compute the same of the same tensors."""
    return tuple((name, type(m).forward, settings_of(m), _other_attributes(m)) for name, m in module.named_modules())


def _other_attributes(module: nn.Module) -> Hashable:
    """Return the attributes of a module that are no settings: private numbers by value, objects by address."""
    plain = (bool, int, float, str, type(None))
    held = {name: value for name, value in vars(module).items() if name not in _OF_TORCH and name != "forward"}
    private = ((name, repr(value)) for name, value in held.items() if isinstance(value, plain) and name[0] == "_")
    objects = ((name, id(value)) for name, value in held.items() if not isinstance(value, plain))
    return *sorted(private), *sorted(objects)


_OF_TORCH = frozenset(vars(nn.Module()))


def random_copy(module: Any, dtype: torch.dtype | None = None, random: torch.Generator | None = None) -> Any:
    """Return a copy of a module in CPU memory with random parameters: trained ones may be all ones or on no device.

    ``dtype``: of parameters and floating-point buffers; None for the module's own. The copy does not train.
    """
    random = torch.Generator().manual_seed(0) if random is None else random
    copied = copy_of(module)
    copied.training = False
    copied._parameters = {
        name: None if tensor is None else nn.Parameter(_random(tensor, dtype, random), requires_grad=False)
        for name, tensor in module._parameters.items()
    }
    copied._buffers = {
        name: tensor if tensor is None else _random(tensor, dtype, random) if tensor.is_meta else _as(tensor, dtype)
        for name, tensor in module._buffers.items()
    }
    copied._modules = {
        name: None if child is None else random_copy(child, dtype, random) for name, child in module._modules.items()
    }
    return copied


def _random(tensor: Tensor, dtype: torch.dtype | None, random: torch.Generator) -> Tensor:
    return (torch.randn(tensor.shape, generator=random) * 0.5).to(tensor.dtype if dtype is None else dtype)


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype, copy=True) if dtype is not None and tensor.is_floating_point() else tensor.clone()
