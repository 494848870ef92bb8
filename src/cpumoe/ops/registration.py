"""Registering operators: ``torch.ops.cpumoe.*``, with fakes so that torch.compile and torch.export trace them.

Through ``torch.library.Library``: the ``custom_op`` decorator costs several microseconds more per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

_library = torch.library.Library("cpumoe", "DEF")

P = ParamSpec("P")
R = TypeVar("R")


def register(schema: str, implementation: Callable[P, R], fake: Callable[..., Any]) -> Callable[P, R]:
    """Defines an operator for CPU tensors; ``fake`` gives the shapes and dtypes of its results.

    Returns a function that does what the operator does, without its detour of three to four microseconds where nobody
    would notice. The operator itself is for compilers and for other programs.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CPU")
    # Inference only: results never ask for gradients, instead of asking and then giving none.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"cpumoe::{name}", fake, lib=_library)
    operator = getattr(torch.ops.cpumoe, name).default

    def call(*arguments: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling() or options or _is_watched() or not _are_plain(arguments):
            result: R = operator(*arguments, **options)
            return result
        return implementation(*arguments)  # type: ignore[call-arg]  # there are no options

    return call


def register_into(
    schema: str, allocate: Callable[..., R], compute: Callable[Concatenate[R, P], None]
) -> Callable[P, R]:
    """Defines an operator whose results have shapes and dtypes that do not depend on values.

    ``allocate`` makes the results, of fake tensors too; ``compute`` gets them before the arguments and fills them.
    """

    def implementation(*arguments: Any) -> R:  # PyTorch passes all arguments by position
        out = allocate(*arguments)
        compute(out, *arguments)  # type: ignore[call-arg]
        return out

    return register(schema, cast("Callable[P, R]", implementation), allocate)


_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, int, float, bool, str, type(None)))


def _are_plain(arguments: tuple[Any, ...]) -> bool:
    """Whether all tensors are what they look like: no subclass, on the CPU, nothing still to be applied to them."""
    for argument in arguments:
        if type(argument) not in _PLAIN_TYPES:
            return False
    first = arguments[0]
    return bool(first.is_cpu and not first.is_neg())


def _is_watched() -> bool:
    """Whether something looks at, or takes the place of, operators that are called: a mode, a transform, a profiler."""
    return (
        _modes() > 0
        or _function_modes() > 0
        or _transforms() is not None
        or _tracing() is not None
        or torch.autograd.profiler._is_profiler_enabled
    )


_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state


def wants_gradient(*tensors: object) -> bool:
    """Whether a gradient would have to flow to one of the arguments; what is not a tensor needs none."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def refuse_gradient(**tensors: object) -> None:
    """Operators give no gradients; what would silently cut them says so instead, with the argument's name."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, but packed weights and their routing are for inference: there is no "
                "gradient through them; use torch.no_grad()"
            )


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous, its elements at multiples of their size, as the core wants them; a view into bytes may differ."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % tensor.element_size() == 0 else tensor.clone()


def like_first(first: Tensor, *_: object) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)
