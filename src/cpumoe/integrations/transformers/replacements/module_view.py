"""A module that looks a little different to its own code, without being changed."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any


class ConfigView:
    """A module's configuration with another attention."""

    def __init__(self, module: Any, attention: str) -> None:
        self._module = module
        self._attn_implementation = attention

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_module":  # asked for while it is being unpickled
            raise AttributeError(name)
        return getattr(self._module.config, name)


class ModuleView:
    """What a module's forward is given as ``self``: the module with another attention. Its methods see that too."""

    def __init__(self, module: Any, attention: str) -> None:
        self.module = module
        self.config = ConfigView(module, attention)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "module":
            raise AttributeError(name)
        method = getattr(type(self.module), name, None)
        if isinstance(method, FunctionType) and name not in vars(self.module):
            return MethodType(method, self)
        return getattr(self.module, name)

    def run(self, *arguments: Any, **options: Any) -> Any:
        """The module's own forward on this view of it."""
        return type(self.module).forward(self, *arguments, **options)
