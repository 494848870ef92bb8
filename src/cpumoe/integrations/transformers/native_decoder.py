"""Decoders of a model in one call of the core, wherever that computes what the model's own code does.

The base model inside of a model gets another forward: from tokens or embeddings to hidden states, or on to logits,
without a PyTorch operator in between. What it does not serve (hidden states and attentions of all layers, masks that
are more than padding, caches of other kinds, gradients, hooks inside) goes through the model's own code as before.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe import _core, settings
from cpumoe.errors import RankError
from cpumoe.integrations.transformers.built_decoder import BuiltDecoder, build_decoder, entries_of, has_hooks
from cpumoe.integrations.transformers.recognition.check import find_variant, output_class
from cpumoe.integrations.transformers.recognition.head import calls_its_head, results_of
from cpumoe.integrations.transformers.recognition.probe import probing
from cpumoe.integrations.transformers.recognition.recognize import head_path, is_decoder
from cpumoe.integrations.transformers.recognition.rotary import layer_type
from cpumoe.integrations.transformers.recognition.values import LayerVariant, Recognized, UnsupportedDecoder
from cpumoe.integrations.transformers.replacements.attention import is_known_attention
from cpumoe.integrations.transformers.step_caches import StepCaches
from cpumoe.integrations.transformers.step_call import OwnCode, call_for, positions_for
from cpumoe.integrations.transformers.watched_modules import Entry, kind_of, kind_of_owner
from cpumoe.ops.decoder import Decoder
from cpumoe.steps import cache as paged_cache

_log = logging.getLogger("cpumoe")

#: Positions that the first rotary tables have; they grow with the sequences.
FIRST_POSITIONS = 4096

_LEFT_OUT = "hooks, other forwards or attention that is not causal are in the model"


@dataclass
class Attached:
    """What is known of a base model with packed experts: ``_cpumoe`` of the base model and of the model around it.

    Attributes:
        path: of the base model.
        recognized: the model as the native decoder was built from it; None if it has none now.
        native: runs steps in one call of the core; None if the model never had a native decoder.
        reason: why there is no native decoder now; None if there is one. Calls may run the model's own code in spite of
            it: see :meth:`NativeDecoder.reason_now`.
    """

    path: str
    recognized: Recognized | None = None
    native: NativeDecoder | None = None
    reason: str | None = None


def attached_to(module: nn.Module) -> Attached | None:
    """Return what is known of a base model, or of the one inside a model; None for other modules."""
    found = vars(module).get("_cpumoe")
    return found if isinstance(found, Attached) else None


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
            native = NativeDecoder(record, base)
        except UnsupportedDecoder as reason:
            record.reason = str(reason)
            _log.info("%s (%s) runs layer by layer: %s", name or "the model", type(base).__name__, reason)
            continue
        except RankError:  # another rank has gone, or does something else
            raise
        except Exception as error:  # whatever another release of transformers does differently
            record.reason = _unexpected(error)
            _log.warning("%s (%s) runs layer by layer: %s", name, type(base).__name__, record.reason)
            continue
        record.native = native
        base.forward = _with_signature(partial(forward, base), base)
        if getattr(model, "model", None) is base and (output := native.take_head(model)) is not None:
            model.forward = _with_signature(partial(forward_to_logits, model, output), model)


def _unexpected(error: Exception) -> str:
    return f"it could not be described ({type(error).__name__}: {error})"


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
    if native is None or not _calls(base, forward) or native.reason_now(base, None) is not None:
        return None
    return native


def native_with_head(model: Any) -> NativeDecoder | None:
    """Return the native decoder that takes a model's tokens to logits; None if its own code does."""
    if not _calls(model, forward_to_logits) or not _calls(model.model, forward):
        return None
    native = _native_in(model.model, owner=model)
    return None if native is None or native.reason_now(model.model, model) is not None else native


def _owner_in(model: nn.Module, base: nn.Module) -> nn.Module | None:
    """Return the module in a model that goes through a base model to logits; None without one."""
    return next(
        (m for m in model.modules() if _calls(m, forward_to_logits) and getattr(m, "model", None) is base), None
    )


def _calls(module: nn.Module, function: Any) -> bool:
    """Return whether a module's forward is one of the functions below."""
    found = vars(module).get("forward")
    return isinstance(found, partial) and found.func is function


def _native_in(base: nn.Module, *, owner: nn.Module | None = None) -> NativeDecoder | None:
    """Return the native decoder of a base model, with ``owner`` if it was installed for that model around it."""
    record = attached_to(base)
    native = None if record is None else record.native
    return None if native is None or (owner is not None and not native.is_owned_by(owner)) else native


def forward(base: Any, *arguments: Any, **options: Any) -> Any:
    """The forward of a base model, to hidden states behind the last norm."""
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


class NativeDecoder:
    """A base model's decoder in the core. Raises UnsupportedDecoder if there is none."""

    def __init__(self, record: Attached, base: Any) -> None:
        self._record = record
        self._variants: dict[str, LayerVariant] = {}  # by the kind of a layer
        self._heads: dict[str, bool] = {}  # by the kind of a model: whether it does no more than call its head
        with probing():
            self.output = output_class(base)
        self._refused: tuple[Entry, ...] | None = None  # the model for which that holds; None: any
        self._told: set[str] = set()  # reasons for layer-by-layer calls that the log has
        self.records = False  # whether caches are held in int8
        self._arguments = [tuple(inspect.signature(type(base).forward).parameters)[1:]]  # and those of its owner
        self._owner: weakref.ref[Any] | None = None  # the model with the head; unknown in a copy before its first call
        self._lock = threading.Lock()
        self._built: BuiltDecoder | None = self._build(base, None, FIRST_POSITIONS)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is read from a file, builds its decoder of the model that it finds itself in."""
        return {**vars(self), "_built": None, "_refused": None, "_lock": None, "_owner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def take_head(self, model: Any) -> type[Any] | None:
        """Lets steps go on to logits if a model's own code does no more than call its head.

        Gives the class of the model's results then.
        """
        self._arguments.append(tuple(inspect.signature(type(model).forward).parameters)[1:])
        if not self._calls_its_head(model):
            return None
        self._owner = weakref.ref(model)
        self._built = self._build(model.model, model, FIRST_POSITIONS)
        return type(results_of(model, self.output))

    def _calls_its_head(self, model: Any) -> bool:
        key = repr((kind_of_owner(model), kind_of_owner(model.model)))
        if key not in self._heads:
            self._heads[key] = calls_its_head(model, self.output)
        return self._heads[key]

    def is_owned_by(self, model: Any) -> bool:
        """Return whether it was installed for this model around the base model."""
        if self._owner is None and len(self._arguments) > 1:
            self._owner = weakref.ref(model)  # the copy of its owner, which was copied with it
        return self._owner is not None and self._owner() is model

    @property
    def reason(self) -> str | None:
        """Why it cannot run the model as it is now."""
        return self._record.reason

    @property
    def decoder(self) -> Decoder:
        """What computes steps."""
        return self._last.decoder

    @property
    def _last(self) -> BuiltDecoder:
        assert self._built is not None
        return self._built

    def _build(self, base: Any, owner: Any, positions: int) -> BuiltDecoder:
        """Build the decoder of a model as it is; ``owner`` has the head that steps may go on to."""
        with probing():
            head = owner.get_output_embeddings() if owner is not None and self._calls_its_head(owner) else None
            built = build_decoder(base, owner, head, self._variants_of, positions, is_int8=self.records)
        path = None if head is None else head_path(owner, base)
        self._record.recognized = Recognized(self._record.path, built.recognized, path)
        return built

    def _variants_of(self, base: Any) -> tuple[LayerVariant, ...]:
        """Return the variant of each layer. Layers of the same type, parts and settings are tried once."""
        out, of_base = [], kind_of_owner(base)
        for index, layer in enumerate(base.layers):
            key = repr((of_base, layer_type(base, index), kind_of(layer, index)))
            if key not in self._variants:
                self._variants[key] = find_variant(base, index)
            out.append(self._variants[key])
        return tuple(out)

    def build_again(self, model: Any) -> None:
        """Follows what has been put into ``model``, which has the head, without waiting for the next longer call."""
        with self._lock:
            self._built = self._build(model.model, model, self._last.positions)
            self._accept(model.model)

    def hold_records(self) -> None:
        """Holds keys and values of caches in int8 from here on."""
        with self._lock:
            self.records = True
            self._built = replace(self._last, caches=StepCaches(self.decoder, is_int8=True))

    def run(
        self, base: Any, arguments: tuple[Any, ...], options: dict[str, Any], head: Any = None
    ) -> tuple[Tensor, Any] | None:
        """The results of a call and the cache; None for a call that is left to the model's own code.

        Results are hidden states [B, T, H] or, with a model that has the ``head``, logits [B, tokens to keep, V].
        """
        if torch.compiler.is_compiling():
            return None
        try:
            return self._run(base, self._named(arguments, options, head), head)
        except OwnCode as reason:
            if (text := str(reason)) not in self._told:
                self._told.add(text)
                _log.info("a call of %s runs its own code: %s", type(head or base).__name__, text)
            return None

    def _run(self, base: Any, given: dict[str, Any], head: Any) -> tuple[Tensor, Any]:
        if torch.is_grad_enabled() or base.training:
            raise OwnCode("gradients are enabled, or the model is in training mode")
        built = self._ready(base, 0, head)
        if built is None:
            raise OwnCode(self.reason or "the model with the head has no native decoder")
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != built.dtype:
            raise OwnCode(f"autocast to {torch.get_autocast_dtype('cpu')}")
        if self._is_left(built, base, head):
            raise OwnCode(_LEFT_OUT)
        call = call_for(given, base.config, head, built.dtype, built.known_options[head is not None])
        batch, count = call.x.shape[:2]
        past = built.caches.past(call.cache, batch)
        if past is None:
            raise OwnCode("its past_key_values are of another kind than the decoder writes")
        where = positions_for(call, past)
        if where.last >= built.positions and (built := self._ready(base, where.last, head)) is None:
            raise OwnCode(self.reason or _LEFT_OUT)
        room = built.caches.reserve(call.cache, batch, count)
        if room is None:
            raise OwnCode("its past_key_values hold states of another form")
        out = built.decoder.step(
            call.x.contiguous(),
            room,
            past,
            positions=where.positions,
            padding=where.padding,
            keep=call.keep,
            logits=head is not None,
        )
        built.caches.advance(call.cache, count)
        return out, call.cache if call.returns_cache else None

    def _is_left(self, built: BuiltDecoder, base: Any, head: Any) -> bool:
        """Return whether steps are left to the model's own code, because of hooks, other forwards or its attention.

        ``head``: the model whose base model is not called; None for calls of the base model.
        """
        config = base.config
        if built.is_watched() or not getattr(config, "is_causal", True):
            return True
        if not is_known_attention(getattr(config, "_attn_implementation", None)):
            return True
        if head is None:
            return False
        return has_hooks((base._forward_hooks, base._forward_pre_hooks)) or not _calls(base, forward)

    def run_own_code(
        self, module: Any, base: Any, arguments: tuple[Any, ...], options: dict[str, Any], head: Any = None
    ) -> Any:
        """Return what the own code of ``module`` gives, which is the base model or has the ``head`` around it."""
        self._refuse_own_heads(arguments, options, head)
        refused = None if torch.compiler.is_compiling() else self._refused
        if refused is not None and _core.has_changed(refused):
            refused = None
        result = type(module).forward(module, *arguments, **options)
        # What the model's own code has changed in a call, such as a counter, is no reason to build the decoder again.
        if refused is not None and self._refused is refused and _core.has_changed(refused):
            self._refused = entries_of(base, head)
        return result

    def returns_dict(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any], head: Any = None) -> bool:
        """Return whether a call of ``module`` gives an object with names, and not a tuple."""
        default = getattr(module.config, "return_dict", True)
        asked = self._named(arguments, options, head).get("return_dict", default)
        if asked is None and head is not None:
            asked = default
        return asked is not False

    def _named(self, arguments: tuple[Any, ...], options: dict[str, Any], head: Any) -> dict[str, Any]:
        if not arguments:
            return options
        return dict(zip(self._arguments[head is not None], arguments, strict=False)) | options

    def _refuse_own_heads(self, arguments: tuple[Any, ...], options: dict[str, Any], head: Any) -> None:
        """Refuses to leave a call to the model's own code whose cache has the keys and values of one rank's heads."""
        cache = self._named(arguments, options, head).get("past_key_values")
        built = self._built
        if built is None or not any(built.caches.has_heads_of(cache, index) for index in built.own_heads):
            return
        raise ValueError(
            "past_key_values hold the heads of this rank alone, and this call goes through all of them, layer by layer "
            "(it asks for hidden states, attentions, gradients or another mask than padding); make it without "
            "past_key_values, from the first token on, or load the model on one rank"
        )

    def new_pages(self, pages: int, page_tokens: int, sequences: int) -> list[tuple[Tensor, ...]]:
        """What :meth:`step_rows` keeps of tokens, for each layer.

        Keys and values in pages, [pages, kv_heads, page_tokens, dim], or latents; in int8 they are records. Of layers
        with states those of each sequence, [sequences, ..].
        """
        return paged_cache.new_pages(self.decoder.cache_layouts, pages, page_tokens, sequences, is_int8=self.records)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values that a token takes in all layers."""
        return paged_cache.token_bytes(self.decoder.cache_layouts, is_int8=self.records)

    @property
    def state_bytes(self) -> int:
        """Bytes of states that a sequence takes in all layers, however long it is."""
        return paged_cache.state_bytes(self.decoder.cache_layouts)

    def step_rows(
        self,
        model: Any,
        tokens: Tensor,
        sequences: Tensor,
        places: Tensor,
        pages: Tensor,
        page_tokens: int,
        caches: Sequence[tuple[Tensor, ...]],
        wanted: Tensor,
    ) -> Tensor:
        """Logits [W, vocabulary] of some of the tokens of any sequences.

        The arguments are those of :meth:`cpumoe.ops.decoder.Decoder.step_rows`. Where groups of ranks have rows of
        their own, a rank takes part in the steps of others by computing no tokens.
        Raises UnsupportedDecoder if the model has become another one.
        """
        built = self._ready(model.model, int(places.max()) if len(places) else 0, model)
        if built is None:
            raise UnsupportedDecoder(self.reason)
        hooks = (model._forward_hooks, model._forward_pre_hooks)
        is_own = _calls(model, forward_to_logits) and _native_in(model.model, owner=model) is self
        if not is_own or self._is_left(built, model.model, model) or has_hooks(hooks):
            raise UnsupportedDecoder(_LEFT_OUT)
        return built.decoder.step_rows(tokens, sequences, places, pages, page_tokens, caches, wanted)

    def _ready(self, base: Any, last: int, head: Any) -> BuiltDecoder | None:
        """Return the decoder for positions up to ``last``, built again if the model has changed.

        Returns None if the native decoder cannot run the model any more, or does not have the ``head`` that is wanted.
        """
        built = self._built
        if self.reason is not None or built is None or not built.serves(last, head is not None):
            built = self._rebuilt(base, last, head)
        return None if built is None or (head is not None and not built.has_head) else built

    def _rebuilt(self, base: Any, last: int, head: Any) -> BuiltDecoder | None:
        with self._lock:
            if self.reason is not None and self._refused is not None and not _core.has_changed(self._refused):
                return None
            built = self._built
            if built is not None and built.serves(last, head is not None):
                self._accept(base)  # another thread has built it, or the model is what it was
                return built
            entries = entries_of(base, head)  # first: what is changed from here on is a reason to try again
            positions = FIRST_POSITIONS if built is None else built.positions
            while positions <= last:
                positions *= 2
            try:
                self._built = self._build(base, head, positions)
            except RankError:
                raise
            except Exception as problem:  # a part that was put into the model may be anything
                reason = problem if isinstance(problem, UnsupportedDecoder) else _unexpected(problem)
                if self.records:
                    raise ValueError(
                        f"keys and values in int8 are for steps in one call of the core; {reason}"
                    ) from None
                _log.warning("%s runs layer by layer from here on: %s", type(base).__name__, reason)
                self._record.reason, self._record.recognized = str(reason), None
                self._refused = entries
                return None
            self._accept(base)
            return self._built

    def _accept(self, base: Any) -> None:
        """Note that the decoder runs the model as it is."""
        if self.reason is not None:
            _log.info("%s has its native decoder again", type(base).__name__)
        self._record.reason = self._refused = None

    def reason_now(self, base: Any, owner: Any) -> str | None:
        """Return why the model's own code runs the steps, None if the decoder does; ``owner`` has the head, if any."""
        if owner is not None and not self.is_owned_by(owner):
            return "its base model is that of another model"
        try:
            built = self._ready(base, 0, owner)
        except ValueError as problem:  # it holds keys and values in int8
            return str(problem)
        if self.reason is None and self._is_left(built or self._last, base, owner):
            return _LEFT_OUT
        return self.reason
