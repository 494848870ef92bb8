"""Decoders of a model in one call of the core, wherever that computes what the model's own code does.

The base model inside of a model gets another forward: from tokens or embeddings to hidden states, or on to logits,
without a PyTorch operator in between. What it does not serve (hidden states and attentions of all layers, masks that
are more than padding, caches of other kinds, gradients, hooks inside) goes through the model's own code as before.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe import _core, settings
from cpumoe.errors import RankError
from cpumoe.integrations.transformers.call_options import names_in, names_in_files_of, names_of_attention_functions
from cpumoe.integrations.transformers.preallocated_cache import CacheForm
from cpumoe.integrations.transformers.recognition.build import (
    describe_decoder,
    norm_of,
    refuse_other_parts,
    with_own_heads,
)
from cpumoe.integrations.transformers.recognition.check import find_choices, output_class
from cpumoe.integrations.transformers.recognition.mixers.kinds import cache_form
from cpumoe.integrations.transformers.recognition.mixers.variants import Choices
from cpumoe.integrations.transformers.recognition.parts import NotDescribed, describe_matrix
from cpumoe.integrations.transformers.recognition.rotary import layer_type, rotary_of
from cpumoe.integrations.transformers.replacements.attention import PASSED_OVER, is_known_attention
from cpumoe.integrations.transformers.replacements.replacement_check import copy_of
from cpumoe.integrations.transformers.step_caches import StepCaches
from cpumoe.integrations.transformers.watched_modules import (
    Entry,
    WatchedValues,
    copied_tensors,
    is_foreign,
    kind_of,
    kind_of_owner,
    watched_entries,
    watched_owner,
)
from cpumoe.layers.experts import Experts
from cpumoe.layers.linear import QuantizedLinear
from cpumoe.ops.decoder import Decoder, Gqa

_log = logging.getLogger("cpumoe")

#: Arguments of a base model that a step understands; others must not ask for anything.
_SERVED = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")

#: Of those that attention may ignore because they are in its mask, these keep packed sequences apart, which a step
#: does not.
_PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
_IGNORED = frozenset(PASSED_OVER) - _PACKED

#: Attributes of a configuration that ask for results which a step does not have.
_MORE_RESULTS = ("output_hidden_states", "output_attentions", "output_router_logits")

#: Positions that the first rotary tables have; they grow with the sequences.
FIRST_POSITIONS = 4096

_LEFT_OUT = "hooks, other forwards or attention that is not causal are in the model"

#: The module of transformers whose hooks stay where hidden states or attentions have been asked for once.
_CAPTURING = "transformers.utils.output_capturing"

_FEW_ROWS = 16  # up to here our product with a head in float is faster than PyTorch's


def run_natively(model: nn.Module) -> None:
    """Gives the decoders inside of a model their one-call form; where there is none, the reason is kept and logged.

    ``CPUMOE_STEPS=0`` in the environment leaves models as they are.
    """
    wanted = settings.NATIVE_DECODER.is_on()
    for name, base in model.named_modules():
        layers = getattr(base, "layers", None)
        if not isinstance(layers, nn.ModuleList) or not any(isinstance(m, Experts) for m in layers.modules()):
            continue
        if not wanted:
            base._cpumoe_reason = f"{settings.NATIVE_DECODER.name}=0"
            continue
        try:
            native = NativeDecoder(base)
        except NotDescribed as reason:
            base._cpumoe_reason = str(reason)
            _log.info("%s (%s) runs layer by layer: %s", name or "the model", type(base).__name__, reason)
            continue
        except RankError:  # another rank has gone, or does something else
            raise
        except Exception as error:  # whatever another release of transformers does differently
            base._cpumoe_reason = _unexpected(error)
            _log.warning("%s (%s) runs layer by layer: %s", name, type(base).__name__, base._cpumoe_reason)
            continue
        base.forward = _with_signature(partial(forward, base, native), base)
        if getattr(model, "model", None) is base and (output := native.take_head(model)) is not None:
            model.forward = _with_signature(partial(forward_to_logits, model, native, output), model)


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
        if (native := _installed(vars(base).get("forward"), forward)) is not None:
            owners = (m for m in model.modules() if _installed(vars(m).get("forward"), forward_to_logits) is native)
            reason = native.reason_now(base, next(owners, None))
            if reason is None:
                return "every step is one call of the core"
        else:
            reason = vars(base).get("_cpumoe_reason")
        if reason is not None:
            return f"a step goes through transformers, layer by layer: {reason}"
    return "a step goes through transformers, layer by layer: no decoder with packed experts was found in it"


def native_of(base: nn.Module) -> NativeDecoder | None:
    """What runs a base model in one call, if something does."""
    return _in_use(vars(base).get("forward"), forward)


def native_with_head(model: Any) -> NativeDecoder | None:
    """What takes a model's tokens to logits in one call, if something does."""
    return _in_use(vars(model).get("forward"), forward_to_logits)


def _in_use(found: Any, function: Any) -> NativeDecoder | None:
    native = _installed(found, function)
    return native if native is not None and native.reason is None else None


def _installed(found: Any, function: Any) -> NativeDecoder | None:
    """Return the native decoder that a module's forward calls, also one that cannot run the model as it is now."""
    return found.args[1] if isinstance(found, partial) and found.func is function else None


def forward(base: Any, native: NativeDecoder, *arguments: Any, **options: Any) -> Any:
    """The forward of a base model, to hidden states behind the last norm."""
    found = native.run(base, arguments, options)
    if found is None:
        native.refuse_own_heads(arguments, options)
        refused = native.refused_model()
        own = type(base).forward(base, *arguments, **options)
        native.pass_over_own_changes(refused, base)
        return own
    result = native.output(last_hidden_state=found[0], past_key_values=found[1])
    return result if native.returns_dict(base, arguments, options) else result.to_tuple()


def forward_to_logits(model: Any, native: NativeDecoder, output: type[Any], *arguments: Any, **options: Any) -> Any:
    """The forward of a model that is a base model and a head."""
    found = native.run(model.model, arguments, options, head=model)
    if found is None:
        native.refuse_own_heads(arguments, options, head=model)
        refused = native.refused_model()
        own = type(model).forward(model, *arguments, **options)
        native.pass_over_own_changes(refused, model.model, model)
        return own
    result = output(logits=found[0], past_key_values=found[1])
    return result if native.returns_dict(model, arguments, options, head=model) else result.to_tuple()


@dataclass(frozen=True)
class _Built:
    """A decoder and what it was built from; never changed, so that threads may use it while another one is built.

    Attributes:
        positions: that its rotary tables have.
        has_head: whether steps can go on to logits.
        own_heads: layers whose caches have the heads of this rank alone. Latents are those of all heads.
        hooks: of the modules that a step does not call, two dicts for each.
        has_foreign_forward: whether one of these has another forward than its class or this package gave it.
        watched: entries for ``_core.has_changed``.
        values: of the small tensors that the decoder holds copies of.
        known_options: names that the code of the model mentions, without the head and with it.
    """

    decoder: Decoder
    positions: int
    has_head: bool
    caches: StepCaches
    dtype: torch.dtype
    hidden: int
    own_heads: tuple[int, ...]
    hooks: tuple[dict[int, Any], ...]
    has_foreign_forward: bool
    watched: tuple[Entry, ...]
    values: WatchedValues
    known_options: tuple[frozenset[str], frozenset[str]]

    def serves(self, last: int, with_head: bool) -> bool:
        """Return whether this is the decoder for positions up to ``last`` of a model that has not changed."""
        if last >= self.positions or (with_head and not self.has_head):
            return False
        return not _core.has_changed(self.watched) and not self.values.have_changed()

    def is_watched(self) -> bool:
        """Return whether other code's hooks or forwards are inside, which a step would leave out."""
        return self.has_foreign_forward or _has_hooks(self.hooks)


def _has_hooks(hooks: Iterable[dict[int, Any]]) -> bool:
    """Return whether there are hooks; transformers' own are for calls that ask for more results."""
    return any(
        any(getattr(hook, "__module__", None) != _CAPTURING for hook in found.values()) for found in hooks if found
    )


class NativeDecoder:
    """A base model's decoder in the core. Raises NotDescribed if there is none."""

    def __init__(self, base: Any) -> None:
        refuse_other_parts(base)
        self._choices: dict[str, Choices] = {}  # by the kind of a layer
        self._heads: dict[str, bool] = {}  # by the kind of a model: whether it does no more than call its head
        self.output = output_class(base)
        self.reason: str | None = None  # why it cannot run the model as it is now
        self._refused: tuple[Entry, ...] | None = None  # the model for which that holds; None: any
        self.records = False  # whether caches are held in int8
        self._arguments = [tuple(inspect.signature(type(base).forward).parameters)[1:]]  # and those of the model
        self._lock = threading.Lock()
        self._built: _Built | None = self._build(base, None, FIRST_POSITIONS)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is read from a file, builds its decoder of the model that it finds itself in."""
        return {**vars(self), "_built": None, "_refused": None, "_lock": None}

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
        return type(self._results(model))

    def _calls_its_head(self, model: Any) -> bool:
        """Return whether a model's logits are what its head gives, with made-up hidden states of its base model."""
        key = repr((kind_of_owner(model), kind_of_owner(model.model)))
        if key not in self._heads:
            head = model.get_output_embeddings()
            try:
                describe_matrix(head, "head")
                with torch.no_grad():
                    expected = head(_made_up_hidden(model.model.embed_tokens))
                self._heads[key] = torch.equal(self._results(model).logits, expected)
            except Exception:  # it is called in another way, or is no linear
                self._heads[key] = False
        return self._heads[key]

    def _results(self, model: Any) -> Any:
        """Return what a model's own code makes of made-up hidden states of its base model."""
        copied = copy_of(model)
        copied._modules = {**model._modules, "model": _MadeUp(self.output, model.model)}
        copied.config = copy.copy(model.config)
        copied.config.return_dict = True
        with torch.no_grad():
            return type(model).forward(copied, input_ids=torch.zeros((1, 1), dtype=torch.long), logits_to_keep=1)

    @property
    def decoder(self) -> Decoder:
        """What computes steps; of a model that has been copied, not before the first of them."""
        return self._last.decoder

    @property
    def _last(self) -> _Built:
        assert self._built is not None
        return self._built

    def _build(self, base: Any, owner: Any, positions: int) -> _Built:
        """Build the decoder of a model as it is; ``owner`` has the head that steps may go on to."""
        head = owner.get_output_embeddings() if owner is not None and self._calls_its_head(owner) else None
        others = (norm_of(base), base.embed_tokens, rotary_of(base), head)
        modules = [*base.layers.modules(), *(m for m in others if m is not None)]
        owners = [m for m in (base, owner) if m is not None]
        watched = (  # first: what another thread changes from here on is noticed in the next call
            *(entry for m in modules for entry in watched_entries(m)),
            *(entry for m in owners for entry in watched_owner(m)),
        )
        rotary = rotary_of(base)
        angles = () if rotary is None else (b for b in rotary.buffers() if b.dim() <= 1)  # of which there are tables
        values = WatchedValues((*(tensor for m in modules for tensor in copied_tensors(m)), *angles))
        _refuse_fewer_layers(base)
        model = describe_decoder(base, self._choices_of(base), torch.arange(positions))
        if head is not None:
            model = replace(model, head=describe_matrix(head, "head"))
        if (group := model.group) is not None:
            model = with_own_heads(model, group.rank, group.ranks)
        own_heads = tuple(
            index for index, layer in enumerate(model.layers) if isinstance(layer.mixer, Gqa) and layer.mixer.ranks > 1
        )
        dtype, hidden = model.embedding.dtype, model.embedding.shape[1]
        forms = [cache_form(*pair, dtype, self.records) for pair in zip(base.layers, model.layers, strict=True)]
        if not any(isinstance(form, CacheForm) for form in forms):
            raise NotDescribed("none of its layers has attention, whose cache would count the tokens")
        classes: set[type] = {type(module) for module in base.layers.modules()}
        known = frozenset().union(_names_in_forward(base), *(names_in_files_of(each) for each in classes))
        return _Built(
            Decoder(model),
            positions,
            head is not None,
            StepCaches(forms, dtype),
            dtype,
            hidden,
            own_heads,
            tuple(hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)),
            any(is_foreign(vars(m).get("forward")) for m in modules),
            watched,
            values,
            (known, known if owner is None else known | _names_in_forward(owner)),
        )

    def _choices_of(self, base: Any) -> tuple[Choices, ...]:
        """Return the choices of each layer. Layers of the same type, parts and settings are tried once."""
        out, of_base = [], kind_of_owner(base)
        for index, layer in enumerate(base.layers):
            key = repr((of_base, layer_type(base, index), kind_of(layer, index)))
            if key not in self._choices:
                self._choices[key] = find_choices(base, index)
            out.append(self._choices[key])
        return tuple(out)

    def describe_anew(self, model: Any) -> None:
        """Follows what has been put into ``model``, which has the head, without waiting for the next longer call."""
        with self._lock:
            self._built = self._build(model.model, model, self._last.positions)
            self._accept(model.model)

    def hold_records(self) -> None:
        """Holds keys and values of caches in int8 from here on."""
        with self._lock:
            self.records = True
            self._built = replace(self._last, caches=self._last.caches.in_records())

    def run(
        self, base: Any, arguments: tuple[Any, ...], options: dict[str, Any], head: Any = None
    ) -> tuple[Tensor, Any] | None:
        """The results of a call and the cache; None for a call that is left to the model's own code.

        Results are hidden states [B, T, H] or, with a model that has the ``head``, logits [B, tokens to keep, V].
        """
        if torch.is_grad_enabled() or base.training or torch.compiler.is_compiling():
            return None
        built = self._ready(base, 0, head)
        if built is None or self._is_left(built, base, head):
            return None
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != built.dtype:
            return None
        given = self._named(arguments, options, head)
        keep = given.get("logits_to_keep", 0) if head is not None else 0
        for name, option in given.items():
            if name in _SERVED or name in _IGNORED or name == "return_dict":
                continue
            if name == "logits_to_keep" and head is not None:
                continue
            if option is False and name == "is_causal":
                return None
            if option is None or option is False:
                continue
            known = built.known_options[head is not None]
            if name in _PACKED or name in known or name in names_of_attention_functions():
                return None
        if any(given.get(name, getattr(base.config, name, False)) for name in _MORE_RESULTS):
            return None
        tokens, embeds, cache = given.get("input_ids"), given.get("inputs_embeds"), given.get("past_key_values")
        if (tokens is None) == (embeds is None):
            return None
        x: Any = tokens if embeds is None else embeds
        if not x.is_cpu or x.dim() != (2 if embeds is None else 3) or x.numel() == 0:
            return None
        if x.dtype != (torch.int64 if embeds is None else built.dtype):
            return None
        use_cache = given.get("use_cache")
        if use_cache is None:
            use_cache = getattr(base.config, "use_cache", True)
        if cache is None:
            from transformers import DynamicCache

            cache = DynamicCache(config=base.config)
        if head is not None and not self._keeps(head, x, keep):
            return None
        out = self._step(built, base, x, cache, given.get("attention_mask"), given.get("position_ids"), keep, head)
        if out is None:
            return None
        return out, cache if use_cache or given.get("past_key_values") is not None else None

    def _is_left(self, built: _Built, base: Any, head: Any) -> bool:
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
        return _has_hooks((base._forward_hooks, base._forward_pre_hooks)) or native_of(base) is not self

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

    def refuse_own_heads(self, arguments: tuple[Any, ...], options: dict[str, Any], head: Any = None) -> None:
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

    def _keeps(self, head: Any, x: Tensor, keep: Any) -> bool:
        """Whether logits of so many tokens are for the step: of many, a head in float is faster in PyTorch."""
        if not isinstance(keep, int) or keep < 0:
            return False
        kept = min(keep, x.shape[1]) if keep else x.shape[1]
        return isinstance(head.get_output_embeddings(), QuantizedLinear) or x.shape[0] * kept <= _FEW_ROWS

    def _step(
        self,
        built: _Built,
        base: Any,
        x: Tensor,
        cache: Any,
        mask: Tensor | None,
        positions: Tensor | None,
        keep: int,
        head: Any,
    ) -> Tensor | None:
        batch, count = x.shape[:2]
        past = built.caches.past(cache, batch)
        if past is None:
            return None
        padding = None
        if mask is not None:
            if mask.dim() != 2 or mask.shape != (batch, past + count):
                return None
            if not bool(mask.all()) and (padding := _left_padding(mask)) is None:
                return None
        last = past + count - 1
        if positions is not None:
            if positions.dim() == 3 and bool((positions == positions[:1]).all()):
                positions = positions[0]  # of text all axes have the same
            if positions.dim() != 2 or positions.shape[1] != count or positions.shape[0] not in (1, batch):
                return None
            if mask is None and bool((positions.diff() != 1).any()):
                return None  # packed sequences: transformers keeps them apart
            positions = positions.to(torch.int64)
            if mask is not None and padding is not None:  # positions of padding may be anything, -1 for one
                positions = positions.where(mask[:, past:].bool(), 0)
            positions = positions.contiguous()
            last = int(positions.max())
        if last >= built.positions:
            longer = self._ready(base, last, head)
            if longer is None:
                return None
            built = longer
        room = built.caches.reserve(cache, batch, count)
        if room is None:
            return None
        x = x.contiguous()
        out = built.decoder.step(
            x, room, past, positions=positions, padding=padding, keep=keep, logits=head is not None
        )
        built.caches.advance(cache, count)
        return out

    def new_pages(self, pages: int, page_tokens: int, sequences: int) -> list[tuple[Tensor, ...]]:
        """What :meth:`step_rows` keeps of tokens, for each layer.

        Keys and values in pages, [pages, kv_heads, page_tokens, dim], or latents; in int8 they are records. Of layers
        with states those of each sequence, [sequences, ..].
        """
        return self._last.caches.new_pages(pages, page_tokens, sequences)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values that a token takes in all layers."""
        return self._last.caches.token_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of states that a sequence takes in all layers, however long it is."""
        return self._last.caches.state_bytes

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
        Raises NotDescribed if the model has become another one.
        """
        built = self._ready(model.model, int(places.max()) if len(places) else 0, model)
        if built is None:
            raise NotDescribed(self.reason)
        hooks = (model._forward_hooks, model._forward_pre_hooks)
        if self._is_left(built, model.model, model) or _has_hooks(hooks) or native_with_head(model) is not self:
            raise NotDescribed(_LEFT_OUT)
        return built.decoder.step_rows(tokens, sequences, places, pages, page_tokens, caches, wanted)

    def _ready(self, base: Any, last: int, head: Any) -> _Built | None:
        """Return the decoder for positions up to ``last``, built again if the model has changed.

        Returns None if the native decoder cannot run the model any more, or does not have the ``head`` that is wanted.
        """
        built = self._built
        if self.reason is not None or built is None or not built.serves(last, head is not None):
            built = self._rebuilt(base, last, head)
        return None if built is None or (head is not None and not built.has_head) else built

    def _rebuilt(self, base: Any, last: int, head: Any) -> _Built | None:
        with self._lock:
            if self.reason is not None and self._refused is not None and not _core.has_changed(self._refused):
                return None
            built = self._built
            if built is not None and built.serves(last, head is not None):
                self._accept(base)  # another thread has built it, or the model is what it was
                return built
            entries = _entries_of(base, head)  # first: what is changed from here on is a reason to try again
            positions = FIRST_POSITIONS if built is None else built.positions
            while positions <= last:
                positions *= 2
            try:
                self._built = self._build(base, head, positions)
            except RankError:
                raise
            except Exception as problem:  # a part that was put into the model may be anything
                reason = problem if isinstance(problem, NotDescribed) else _unexpected(problem)
                if self.records:
                    raise ValueError(
                        f"keys and values in int8 are for steps in one call of the core; {reason}"
                    ) from None
                _log.warning("%s runs layer by layer from here on: %s", type(base).__name__, reason)
                self.reason = base._cpumoe_reason = str(reason)
                self._refused = entries
                return None
            self._accept(base)
            return self._built

    def _accept(self, base: Any) -> None:
        """Note that the decoder runs the model as it is."""
        if self.reason is not None:
            _log.info("%s has its native decoder again", type(base).__name__)
        self.reason = self._refused = None
        vars(base).pop("_cpumoe_reason", None)

    def refused_model(self) -> tuple[Entry, ...] | None:
        """Return the entries of the model for which no decoder could be built, None if it has changed since then."""
        refused = None if torch.compiler.is_compiling() else self._refused
        return None if refused is None or _core.has_changed(refused) else refused

    def pass_over_own_changes(self, refused: tuple[Entry, ...] | None, base: Any, owner: Any = None) -> None:
        """Follow what the model's own code has changed in a call, such as a counter: no reason to try again."""
        if refused is not None and self._refused is refused and _core.has_changed(refused):
            self._refused = _entries_of(base, owner)

    def reason_now(self, base: Any, owner: Any) -> str | None:
        """Return why the model's own code runs the steps, None if the decoder does; ``owner`` has the head, if any."""
        try:
            built = self._ready(base, 0, owner)
        except ValueError as problem:  # it holds keys and values in int8
            return str(problem)
        if self.reason is None and self._is_left(built or self._last, base, owner):
            return _LEFT_OUT
        return self.reason


def _entries_of(base: Any, owner: Any) -> tuple[Entry, ...]:
    """Return the entries of all modules of a base model, and of the model with the head around it."""
    modules = [m for m in base.modules() if m is not base]
    owners = [base]
    if owner is not None:
        owners.append(owner)
        modules += [m for child in owner.children() if child is not base for m in child.modules()]
    return (
        *(entry for m in modules for entry in watched_entries(m)),
        *(entry for m in owners for entry in watched_owner(m)),
    )


def _refuse_fewer_layers(base: Any) -> None:
    """Raise NotDescribed if the configuration has fewer layers than the model, whose own code leaves out the last."""
    count = getattr(base.config, "num_hidden_layers", None)
    if isinstance(count, int) and count < len(base.layers):
        raise NotDescribed(f"its configuration has num_hidden_layers={count}, and it has {len(base.layers)} layers")


def _names_in_forward(module: nn.Module) -> frozenset[str]:
    """Return the names that the forwards of a module's classes mention."""
    return frozenset(names_in(vars(each).get("forward") for each in type(module).__mro__))


class _MadeUp(nn.Module):
    """Stands for a base model inside of the one with the head: gives made-up hidden states."""

    def __init__(self, output: type[Any], base: Any) -> None:
        super().__init__()
        self._output, self._base = output, (base,)  # not a child

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output(last_hidden_state=_made_up_hidden(self._base[0].embed_tokens))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in vars(type(self)):
            return super().__getattr__(name)
        return getattr(self._base[0], name)


def _made_up_hidden(embedding: Any) -> Tensor:
    weight = embedding.weight
    made: Tensor = torch.randn((1, 1, weight.shape[1]), generator=torch.Generator().manual_seed(5))
    return made.to(weight.dtype)


def _left_padding(mask: Tensor) -> Tensor | None:
    """The places of padding before each sequence, int64 [B]; None if the mask is more than that."""
    real = mask.to(torch.bool)
    padding = real.shape[1] - real.sum(1)
    expected = torch.arange(real.shape[1]) >= padding.unsqueeze(1)
    return padding if torch.equal(real, expected) else None
