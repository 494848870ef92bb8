"""Calls a function after a module was imported, now or later."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

_waiting: dict[str, Callable[[ModuleType], None]] = {}


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with a module: at once if it was imported before, else when it is.

    A module has one action, the last that was given: an import of this package may have failed and be tried again.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting[name] = action


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are waited for as usual, and calls their action after they were executed."""

    def __init__(self) -> None:
        self._asking = threading.local()  # `module`: the one that the other finders are asked for

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting or getattr(self._asking, "module", None) == fullname:
            return None  # the latter where another finder asks all finders too
        self._asking.module = fullname
        try:
            spec = self._found_by_others(fullname, path, target)
        finally:
            self._asking.module = None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if (action := _waiting.pop(fullname, None)) is not None:
                    action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _found_by_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        # Editable installations have finders of their own, so all are asked.
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is not self and find_spec is not None:
                spec: importlib.machinery.ModuleSpec | None = find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None
