"""The forward of a module in the place of its class's, for as long as the module is what it was compared as."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn

from cpumoe import _core
from cpumoe.integrations.transformers.watched_modules import Entry, is_foreign, settings_of, watched_entries


class ReplacedForward:
    """Calls ``function(module, facts, ...)`` where the module's class would call ``forward(module, ...)``.

    ``function`` reads the module's tensors when it is called. Everything else that it takes for granted was found once
    (``facts``): settings, parts and their forwards. If one of these has changed, or a part has hooks, the class's
    forward is called instead.

    Args:
        called: names of the modules in it that ``function`` calls, whose changes it therefore follows by itself.
    """

    def __init__(
        self, function: Callable[..., Any], module: nn.Module, facts: Any, called: frozenset[str] = frozenset()
    ) -> None:
        self.function, self.module, self.facts = function, module, facts
        self._called = called
        self._kind = self._kind_now()
        self._look()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.is_current():
            return self.function(self.module, self.facts, *arguments, **options)
        return type(self.module).forward(self.module, *arguments, **options)

    def is_current(self) -> bool:
        """Return whether the module is what ``facts`` were found of, without hooks in its parts."""
        if not torch.compiler.is_compiling() and (self._entries is None or _core.has_changed(self._entries)):
            self._look()
        return self._is_same and not any(self._hooks)

    def __getstate__(self) -> dict[str, Any]:
        """A copy looks at the module that it finds itself in."""
        return {**vars(self), "_entries": None, "_hooks": ()}

    def _look(self) -> None:
        parts = list(self._parts())
        self._is_same = self._kind_now() == self._kind
        self._hooks = tuple(
            hooks for m in parts if m is not self.module for hooks in (m._forward_hooks, m._forward_pre_hooks)
        )
        entries = [entry for module in parts for entry in watched_entries(module, with_tensors=False)]
        own = vars(self.module)
        self._entries: tuple[Entry, ...] | None = tuple(
            entry for entry in entries if not (entry[0] is own and entry[1] == "forward")
        )

    def _parts(self) -> Iterator[nn.Module]:
        """Yield the module and what is in it, except for the modules that are called."""
        for name, module in self.module.named_modules():
            ends = [name[:at] for at in (*(i for i, letter in enumerate(name) if letter == "."), len(name))]
            if not self._called.intersection(ends):
                yield module

    def _kind_now(self) -> Hashable:
        own, *parts = self._parts()
        forwards = (vars(part).get("forward") for part in parts)
        return (
            settings_of(own),
            tuple(settings_of(part) for part in parts),
            tuple(id(forward) if is_foreign(forward) else None for forward in forwards),
        )
