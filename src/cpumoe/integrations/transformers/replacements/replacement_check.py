"""Whether what replaces a layer's forward computes what it replaces.

It is tried on a twin of the layer: its own class with the same sizes, random parameters in fp32 and small linears for
its outer projections. That takes little memory and time whatever the size of the model, and neither rounding nor
parameters that happen to be all ones can hide a difference.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.integrations.transformers.recognition.probe import random_copy
from cpumoe.integrations.transformers.replacements.replaced_forward import ReplacedForward
from cpumoe.ops import wants_gradient

_log = logging.getLogger("cpumoe")

#: Features of the hidden states of a twin.
FEATURES = 24

_TOLERANCE = 1e-4  # relative, of fp32 sums in another order

_answers: dict[Hashable, str] = {}


def replace_forwards(
    model: nn.Module,
    describe: Callable[[nn.Module], Hashable | None],
    forward: Callable[..., Any],
    difference: Callable[[nn.Module, Any], str],
    called: frozenset[str],
) -> None:
    """Gives the layers of a model that ``describe`` knows another forward, where it computes what theirs computes.

    Args:
        describe: the facts of a layer; None for a module of another kind.
        forward: is called with the layer, its facts and what the layer is called with.
        difference: what ``forward`` does differently from a layer's own code, empty if nothing.
        called: names of the modules in a layer that ``forward`` calls.
    """
    for name, module in model.named_modules():
        layer = describe(module)
        if layer is None or "forward" in vars(module):  # the second: somebody else has replaced it
            continue
        if reason := reason_against((type(module), layer), functools.partial(difference, module, layer)):
            _log.warning("%s (%s) keeps its own code: with one operator %s", name, type(module).__name__, reason)
        else:
            module.forward = ReplacedForward(forward, module, layer, called)


def wants_gradient_through(module: nn.Module, hidden_states: Tensor) -> bool:
    """Whether a gradient would have to flow through a layer. Its parameters are not looked at where none can."""
    return torch.is_grad_enabled() and wants_gradient(hidden_states, *module.parameters())


def empty_cache(index: int) -> Any:
    """A cache of transformers for layers with states, of which ``index`` is the last."""
    from transformers.cache_utils import Cache, LinearAttentionLayer

    return Cache(layers=[LinearAttentionLayer() for _ in range(index + 1)])


def reason_against(key: Hashable, compare: Callable[[], str]) -> str:
    """What ``compare`` found to be different, empty if nothing; each key (class and description) is compared once."""
    if key not in _answers:
        # transformers advises to install packages for GPUs when its own form runs.
        transformers_log = logging.getLogger("transformers")
        level = transformers_log.level
        transformers_log.setLevel(logging.ERROR)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                _answers[key] = compare()
        except Exception as error:  # whatever another release of transformers does differently
            _answers[key] = f"it could not be compared ({type(error).__name__}: {error})"
        finally:
            transformers_log.setLevel(level)
    return _answers[key]


def twin_of(module: nn.Module, projections: Mapping[str, tuple[int, int]], **attributes: object) -> Any:
    """A twin of ``module``; ``projections`` has (inputs, outputs) of each child that becomes a new linear.

    ``attributes`` are set on the twin.
    """
    twin = random_copy(module, torch.float32)
    for name, (inputs, outputs) in projections.items():
        linear = nn.Linear(inputs, outputs, dtype=torch.float32, device="cpu")
        linear.weight.normal_(std=inputs**-0.5)
        twin._modules[name] = linear
    for name, value in attributes.items():
        setattr(twin, name, value)
    return twin.eval()


def left_padding(tokens: int) -> Tensor:
    """A mask [2, tokens] whose first sequence begins with padding."""
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[0, : tokens // 2] = 0
    return mask


def is_near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    error, size = (one - other).double().norm(), other.double().norm()
    return bool(error <= _TOLERANCE * size)
