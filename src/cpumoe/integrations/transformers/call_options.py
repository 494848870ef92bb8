"""Keyword arguments of a model call that reach attention: which of them ask for something there.

transformers hands the ``**kwargs`` of a model's forward on through every layer to the attention function. Not all of
them are for attention: ``generate(stop_strings=..., tokenizer=...)`` leaves the tokenizer among them (5.22), and a
caller may pass what a tokenizer returned, such as ``token_type_ids``. A name that no code on the way mentions cannot
change a result, so that it may be ignored. A name that some code mentions is left to who knows what it means.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

#: Packages whose files are no model's code.
_NOT_MODELS = ("torch", "builtins", "cpumoe")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # compilers do not look at code objects
def passes_by(module_class: type, name: str) -> bool:
    """Return whether the model's caller passed this option, and no attention takes it.

    That is so if the module's forward takes any keyword argument, and neither the files that define its class nor those
    of transformers' attention functions mention the name.
    """
    return _passes_by(module_class, name)


def _passes_by(module_class: type, name: str) -> bool:
    return (
        _takes_any_option(module_class.forward)  # type: ignore[attr-defined]
        and name not in names_in_files_of(module_class)
        and name not in names_of_attention_functions()
    )


@cache
def _takes_any_option(forward: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(forward).parameters.values())


@cache
def names_in_files_of(module_class: type) -> frozenset[str]:
    """Return the names that the files mention in which a class and its bases are defined."""
    files = dict.fromkeys(c.__module__ for c in module_class.__mro__ if c.__module__.split(".")[0] not in _NOT_MODELS)
    return frozenset(name for file in files if file in sys.modules for name in _names_in_file(sys.modules[file]))


def names_of_attention_functions() -> frozenset[str]:
    """Return the names that attention functions mention, those that others have registered too."""
    from transformers.modeling_utils import AttentionInterface

    return _names_of(tuple(AttentionInterface._global_mapping.values()))


@lru_cache(maxsize=8)
def _names_of(functions: tuple[Any, ...]) -> frozenset[str]:
    from transformers import modeling_flash_attention_utils

    others = [f for f in map(inspect.unwrap, functions) if not getattr(f, "__module__", "").startswith("cpumoe.")]
    names = set(names_in(others))
    files = {sys.modules[f.__module__] for f in others if getattr(f, "__module__", None) in sys.modules}
    for file in {modeling_flash_attention_utils, *files}:
        names.update(_names_in_file(file))
    return frozenset(names)


def _names_in_file(file: ModuleType) -> Iterator[str]:
    for value in vars(file).values():
        if getattr(value, "__module__", None) != file.__name__:
            continue  # imported
        yield from names_in(vars(value).values() if isinstance(value, type) else (value,))


def names_in(functions: Iterable[object]) -> Iterator[str]:
    """Yield the arguments of functions and the strings in their code, which include the keywords of their calls."""
    for function in functions:
        if isinstance(function, property):
            function = function.fget
        function = getattr(function, "__func__", function)  # of class methods and static ones
        if callable(function) and isinstance(plain := inspect.unwrap(function), FunctionType):
            yield from _names_in_code(plain.__code__)


def _names_in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in_code(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from (name for name in constant if isinstance(name, str))
