"""The native decoder of a model: one forward pass in one call of the core, where that is what its own code computes."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe import _core
from cpumoe.errors import RankError
from cpumoe.integrations.transformers.built_decoder import BuiltDecoder, build_decoder, entries_of, has_hooks
from cpumoe.integrations.transformers.recognition.check import find_variant, output_class
from cpumoe.integrations.transformers.recognition.head import calls_its_head, results_of
from cpumoe.integrations.transformers.recognition.probe import Found, probing
from cpumoe.integrations.transformers.recognition.recognize import head_path
from cpumoe.integrations.transformers.recognition.rotary import layer_type
from cpumoe.integrations.transformers.recognition.values import LayerVariant, Recognized, UnsupportedDecoder
from cpumoe.integrations.transformers.replacements.attention import is_known_attention
from cpumoe.integrations.transformers.step_caches import StepCaches
from cpumoe.integrations.transformers.step_call import OwnCode, call_for, positions_for
from cpumoe.integrations.transformers.watched_modules import Entry, kind_of, kind_of_owner
from cpumoe.ops.decoder_steps import Decoder
from cpumoe.steps import cache as paged_cache

_log = logging.getLogger("cpumoe")

#: Positions that the first rotary tables have; they grow with the sequences.
FIRST_POSITIONS = 4096

_LEFT_OUT = "hooks, other forwards or attention that is not causal are in the model"


@dataclass
class Attached:
    """The record of a base model with packed experts: ``_cpumoe`` of the base model and of the model around it.

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


def unexpected(error: Exception) -> str:
    return f"it could not be described ({type(error).__name__}: {error})"


def calls(module: nn.Module, function: Any) -> bool:
    """Return whether a module's forward is a partial of this function."""
    found = vars(module).get("forward")
    return isinstance(found, partial) and found.func is function


class NativeDecoder:
    """A base model's decoder in the core, built again when the model changes. Raises UnsupportedDecoder without one.

    ``forwards``: what the base model and the model around it are called through.
    """

    def __init__(self, record: Attached, base: Any, forwards: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
        self._record = record
        self._forwards = forwards
        self._forms: Found = {}  # of norms and routers
        self._variants: dict[str, LayerVariant] = {}  # by the kind of a layer
        self._heads: dict[str, bool] = {}  # by the kind of a model: whether it does no more than call its head
        with probing(self._forms):
            self.output = output_class(base)
        self._refused: tuple[Entry, ...] | None = None  # the model for which that holds; None: any
        self._told: set[str] = set()  # reasons for layer-by-layer calls that the log has
        self.records = False  # whether caches are held in int8
        self._arguments = [tuple(inspect.signature(type(base).forward).parameters)[1:]]  # and those of its owner
        self._lock = threading.Lock()
        self._built: BuiltDecoder | None = self._build(base, None, FIRST_POSITIONS)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is read from a file, builds its decoder of the model that it finds itself in."""
        return {**vars(self), "_built": None, "_refused": None, "_lock": None, "_forms": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def take_head(self, model: Any) -> type[Any] | None:
        """Lets steps go on to logits if a model's own code does no more than call its head.

        Gives the class of the model's results then.
        """
        self._arguments.append(tuple(inspect.signature(type(model).forward).parameters)[1:])
        if not self._calls_its_head(model):
            return None
        self._built = self._build(model.model, model, FIRST_POSITIONS)
        return type(results_of(model, self.output))

    def _calls_its_head(self, model: Any) -> bool:
        key = repr((kind_of_owner(model), kind_of_owner(model.model), type(model.get_output_embeddings())))
        if key not in self._heads:
            self._heads[key] = calls_its_head(model, self.output)
        return self._heads[key]

    def is_owned_by(self, model: Any) -> bool:
        """Return whether it was installed for this model around the base model: both have the same record."""
        return len(self._arguments) > 1 and attached_to(model) is self._record

    @property
    def reason(self) -> str | None:
        """Why it cannot run the model as it is now."""
        return self._record.reason

    @property
    def decoder(self) -> Decoder:
        """The decoder in the core."""
        return self._last.decoder

    @property
    def _last(self) -> BuiltDecoder:
        assert self._built is not None
        return self._built

    def _build(self, base: Any, owner: Any, positions: int) -> BuiltDecoder:
        """Build the decoder of a model as it is; ``owner`` has the head that steps may go on to."""
        with probing(self._forms):
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
        return has_hooks((base._forward_hooks, base._forward_pre_hooks)) or not calls(base, self._forwards[0])

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

        The arguments are those of :meth:`cpumoe.ops.decoder_steps.Decoder.step_rows`. Where groups of ranks have rows
        of their own, a rank takes part in the steps of others by computing no tokens.
        Raises UnsupportedDecoder if the model has become another one.
        """
        is_own = self._record is attached_to(model.model) and self.is_owned_by(model)
        if not is_own or not calls(model, self._forwards[1]):
            raise UnsupportedDecoder(_LEFT_OUT)
        built = self._ready(model.model, int(places.max()) if len(places) else 0, model)
        if built is None:
            raise UnsupportedDecoder(self.reason)
        if self._is_left(built, model.model, model) or has_hooks((model._forward_hooks, model._forward_pre_hooks)):
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
                reason = problem if isinstance(problem, UnsupportedDecoder) else unexpected(problem)
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
