"""Adapter of transformers models to the native decoder: other forwards for a base model and the model around it.

A base model gets a forward from tokens or embeddings to hidden states, the model around it one that goes on to logits,
without a PyTorch operator in between. Calls that the native decoder does not serve (hidden states and attentions of all
layers, masks that are more than padding, caches of other kinds, gradients, hooks inside) run the model's own code.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Any

from torch import nn

from cpumoe import settings
from cpumoe.errors import RankError
from cpumoe.integrations.transformers.native_decoder import Attached, NativeDecoder, attached_to, calls, unexpected
from cpumoe.integrations.transformers.recognition.recognize import is_decoder
from cpumoe.integrations.transformers.recognition.values import UnsupportedDecoder

_log = logging.getLogger("cpumoe")


def install_native_decoder(model: nn.Module) -> None:
    """Give the base models with packed experts in a model their native decoder; log the reason where there is none.

    ``CPUMOE_STEPS=0`` in the environment leaves models as they are.
    """
    found = [(name, base) for name, base in model.named_modules() if is_decoder(base, packed=True)]
    for number, (name, base) in enumerate(found):
        record = Attached(name)
        for module in (base, *([model] if number == 0 else [])):
            module._cpumoe = record
        if not settings.NATIVE_DECODER.is_on():
            record.reason = f"{settings.NATIVE_DECODER.name}=0"
            continue
        try:
            native = NativeDecoder(record, base, (forward, forward_to_logits))
        except UnsupportedDecoder as reason:
            record.reason = str(reason)
            _log.info("%s (%s) runs layer by layer: %s", name or "the model", type(base).__name__, reason)
            continue
        except RankError:  # another rank has gone, or does something else
            raise
        except Exception as error:  # whatever another release of transformers does differently
            record.reason = unexpected(error)
            _log.warning("%s (%s) runs layer by layer: %s", name, type(base).__name__, record.reason)
            continue
        record.native = native
        base.forward = _with_signature(partial(forward, base), base)
        if getattr(model, "model", None) is base and (output := native.take_head(model)) is not None:
            model.forward = _with_signature(partial(forward_to_logits, model, output), model)


def _with_signature(replacement: Any, module: nn.Module) -> Any:
    """Arguments are asked for by name, in transformers too."""
    own = inspect.signature(type(module).forward)
    replacement.__signature__ = own.replace(parameters=tuple(own.parameters.values())[1:])
    return replacement


def explanation(model: nn.Module) -> str:
    """Whether a model that has been loaded runs in one call for a step, and if not, why."""
    for base in model.modules():
        if (record := attached_to(base)) is None or not is_decoder(base, packed=True):
            continue
        reason = record.reason if record.native is None else record.native.reason_now(base, _owner_in(model, base))
        if reason is None:
            return "every step is one call of the core"
        return f"a step goes through transformers, layer by layer: {reason}"
    return "a step goes through transformers, layer by layer: no decoder with packed experts was found in it"


def native_of(base: nn.Module) -> NativeDecoder | None:
    """Return the native decoder that runs a base model; None if its own code does."""
    native = _native_in(base)
    if native is None or not calls(base, forward) or native.reason_now(base, None) is not None:
        return None
    return native


def native_with_head(model: Any) -> NativeDecoder | None:
    """Return the native decoder that takes a model's tokens to logits; None if its own code does."""
    if not calls(model, forward_to_logits) or not calls(model.model, forward):
        return None
    native = _native_in(model.model, owner=model)
    return None if native is None or native.reason_now(model.model, model) is not None else native


def _owner_in(model: nn.Module, base: nn.Module) -> nn.Module | None:
    """Return the module in a model that goes through a base model to logits; None without one."""
    return next((m for m in model.modules() if calls(m, forward_to_logits) and getattr(m, "model", None) is base), None)


def _native_in(base: nn.Module, *, owner: nn.Module | None = None) -> NativeDecoder | None:
    """Return the native decoder of a base model, with ``owner`` if it was installed for that model around it."""
    record = attached_to(base)
    native = None if record is None else record.native
    return None if native is None or (owner is not None and not native.is_owned_by(owner)) else native


def forward(base: Any, *arguments: Any, **options: Any) -> Any:
    """The forward of a base model, to hidden states after the last norm."""
    native = _native_in(base)
    if native is None:
        return type(base).forward(base, *arguments, **options)
    found = native.run(base, arguments, options)
    if found is None:
        return native.run_own_code(base, base, arguments, options)
    result = native.output(last_hidden_state=found[0], past_key_values=found[1])
    return result if native.returns_dict(base, arguments, options) else result.to_tuple()


def forward_to_logits(model: Any, output: type[Any], *arguments: Any, **options: Any) -> Any:
    """The forward of a model that is a base model and a head."""
    native = _native_in(model.model, owner=model)
    if native is None:  # the base model of another model was put in
        return type(model).forward(model, *arguments, **options)
    found = native.run(model.model, arguments, options, head=model)
    if found is None:
        return native.run_own_code(model, model.model, arguments, options, head=model)
    result = output(logits=found[0], past_key_values=found[1])
    return result if native.returns_dict(model, arguments, options, head=model) else result.to_tuple()
