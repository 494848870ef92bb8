"""Keys and values of caches in int8, on request: ``kv_cache="int8"`` or ``CPUMOE_KV_CACHE=int8``.

They are for models whose steps are one call of the core. For others the request is an error: their caches are
transformers' own, in float.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cpumoe import settings
from cpumoe.integrations.transformers.adapter import explanation, native_of
from cpumoe.integrations.transformers.layout.model_classes import empty_model
from cpumoe.integrations.transformers.native_decoder import NativeDecoder, attached_to
from cpumoe.integrations.transformers.recognition.recognize import is_decoder, recognize
from cpumoe.integrations.transformers.recognition.values import Unrecognized
from cpumoe.ops.cache_records import check_kv_cache


def chosen_kv_cache(kv_cache: str | None) -> tuple[str, str | None]:
    """Return the setting that says how the KV cache is stored, the caller's or the environment's, and its value."""
    name, asked = "kv_cache", kv_cache
    if asked is None:
        name, asked = settings.KV_CACHE.name, settings.KV_CACHE.get()
    return name, check_kv_cache(asked, name)


def refuse_caches_early(model: PreTrainedModel) -> None:
    """Raise the error of :func:`hold_caches` before a float model is packed, as far as its configuration tells.

    Raises ValueError for bad values in the environment, and if it asks for int8 and the model has no native decoder.
    """
    is_native = settings.NATIVE_DECODER.is_on()
    name, asked = chosen_kv_cache(None)
    if asked is None:
        return
    reason = _reason_in_configuration(model) if is_native else f"{settings.NATIVE_DECODER.name}=0"
    if reason is not None:
        raise ValueError(
            f"{name}={asked!r} is for models whose steps are one call of the core; this one runs layer by layer: "
            f"{reason}. Nothing was packed; unset {name}"
        )


def _reason_in_configuration(model: PreTrainedModel) -> str | None:
    try:
        with torch.random.fork_rng(devices=[]):
            found = recognize(empty_model(model.config, type(model), dtype=model.dtype))
    except Exception:  # a class that is made in another way: the packed model will tell
        return None
    return found.reason if isinstance(found, Unrecognized) else None


def hold_caches(model: nn.Module, kv_cache: str | None) -> None:
    """Lets a model's steps hold keys and values as asked for: by the caller, else by the environment.

    Raises ValueError for a model whose steps are not one call.
    """
    name, asked = chosen_kv_cache(kv_cache)
    if asked is None:
        return
    natives = _natives(model)
    bases = [module for module in model.modules() if is_decoder(module, packed=True)]
    if not natives or len(natives) < len(bases):
        raise ValueError(f"{name}={asked!r} is for models whose steps are one call of the core; {explanation(model)}")
    for native in natives:
        native.hold_records()


def holds_records(model: Any) -> bool:
    """Whether a model's steps hold keys and values in int8."""
    records = [attached_to(module) for module in model.modules()]
    return any(record.native.records for record in records if record is not None and record.native is not None)


def _natives(model: nn.Module) -> list[NativeDecoder]:
    return [native for module in model.modules() if (native := native_of(module)) is not None]
