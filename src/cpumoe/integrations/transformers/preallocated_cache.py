"""Layers of transformers' growing cache that have room for more tokens than they hold.

transformers' own copies all keys and values for every token. Here they are the first part of larger tensors, what is
new is written behind them, and the layer's tensors are views that are made when somebody asks for them. For everyone
else these are the layers that they were: cropped or filled by other code they stay what that code made of them, and get
new room when there is more to hold.

Keys and values may be held as records in int8. Others see floats then, which are made when somebody asks for them, and
what others leave becomes records when it gets room. Records that are held are never made anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from cpumoe.ops import cache_record_bytes, from_cache_records, to_cache_records

# New room is an eighth more than is held: it is copied seldom, and little memory lies idle.
_SHARE, _LEAST = 8, 64


@dataclass(frozen=True)
class CacheForm:
    """What a layer keeps of a token: keys [heads, depths[0]] and values [heads, depths[1]].

    ``joined``: they lie side by side in memory, keys first. ``records``: they are held in int8, and ``dtype`` is what
    others see.
    """

    heads: int
    depths: tuple[int, int]
    dtype: torch.dtype
    joined: bool = False
    records: bool = False

    @property
    def _held_depths(self) -> tuple[int, ...]:
        return (sum(self.depths),) if self.joined else self.depths

    @property
    def _widths(self) -> tuple[int, ...]:
        return tuple(cache_record_bytes(depth) if self.records else depth for depth in self._held_depths)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes."""
        return self.heads * sum(self._widths) * (1 if self.records else self.dtype.itemsize)

    def empty(self, *sizes: int) -> tuple[Tensor, Tensor]:
        """Tensors for keys and values, [*sizes, depth] or records, or twice one for both."""
        dtype = torch.int8 if self.records else self.dtype
        with torch.inference_mode(False):  # whoever appends later may do so in another mode
            held = [torch.empty((*sizes, width), dtype=dtype) for width in self._widths]
        return held[0], held[-1]

    def parts(self, held: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """The tensors of ``held``, each once."""
        return held[:1] if self.joined else held

    def numbers(self, held: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Keys (index 0) or values [..., depth] of what is held: a view, or what comes back of records."""
        numbers = held[index]
        if self.records:
            numbers = from_cache_records(numbers, self._held_depths[0 if self.joined else index], self.dtype)
        if self.joined:
            return numbers[..., : self.depths[0]] if index == 0 else numbers[..., self.depths[0] :]
        return numbers

    def write(self, held: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        """Makes ``held`` hold these keys and values [..., depth]."""
        given = (torch.cat((keys, values), -1),) if self.joined else (keys, values)
        self.copy(held, tuple(to_cache_records(numbers) for numbers in given) if self.records else given)

    def copy(self, held: tuple[Tensor, Tensor], given: tuple[Tensor, ...]) -> None:
        """Makes ``held`` hold what is given as it would be held."""
        for index in range(len(self._widths)):  # of a joined form both are one
            held[index].copy_(given[index])


class _Room:
    """Keys and values [B, heads, capacity, D], or their records, in one place of memory or in one each."""

    def __init__(self, owner: object, form: CacheForm, batch: int, capacity: int, first_place: int) -> None:
        self.owner = id(owner)  # the layer that may write here; a copy of it may not
        self.shown = 0  # up to this place others may hold views, which must not change
        self.form = form
        self.whole = form.empty(batch, form.heads, capacity)
        self.first_place = first_place  # of the first token in the room, counted from the sequences' beginning
        self.batch, self.capacity = batch, capacity

    def held(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """What is held of the places from ``first`` to ``last``."""
        tokens = slice(first - self.first_place, last - self.first_place)
        return self.whole[0][:, :, tokens], self.whole[1][:, :, tokens]

    def numbers(self, index: int, first: int, last: int) -> Tensor:
        """Keys (index 0) or values [B, heads, last - first, D] of these places."""
        if not self.form.records:
            self.shown = max(self.shown, last)
        return self.form.numbers(self.held(first, last), index)

    def selected(self, owner: object, rows: Tensor) -> _Room:
        """A room of the same size with these of the sequences."""
        room = _Room(owner, self.form, len(rows), self.capacity, self.first_place)
        self.form.copy(room.whole, tuple(held[rows] for held in self.whole))
        return room


class _Roomy:
    """What makes a layer of a cache a roomy one. Its tensors are in ``_room`` or, as others left them, plain."""

    _room: _Room | None
    _plain: dict[str, Tensor | None]
    is_initialized: bool

    def _held(self) -> tuple[int, int]:
        """The places of the tokens whose keys and values the layer has for others."""
        raise NotImplementedError

    def _tensor(self, index: int, name: str) -> Tensor | None:
        room = self._room
        if room is None:
            return self._plain[name]
        return room.numbers(index, *self._held())

    def _set(self, name: str, tensor: Tensor | None) -> None:
        if vars(self).get("_room") is not None:  # the other one stays what it was
            self._plain = {"keys": self.keys, "values": self.values}
        elif "_plain" not in vars(self):
            self._plain = {"keys": None, "values": None}
        self._room = None
        self._plain[name] = tensor

    def __copy__(self) -> Any:
        if self._room is not None:
            self._room.shown = self._held()[1]  # to the copy
        twin: Any = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    @property
    def keys(self) -> Tensor | None:
        return self._tensor(0, "keys")

    @keys.setter
    def keys(self, tensor: Tensor | None) -> None:
        self._set("keys", tensor)

    @property
    def values(self) -> Tensor | None:
        return self._tensor(1, "values")

    @values.setter
    def values(self, tensor: Tensor | None) -> None:
        self._set("values", tensor)

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values that a step reads."""
        first, last = self._held()
        if self._room is not None:
            return self._room.batch * (last - first) * self._room.form.token_bytes
        return sum(tensor.nbytes for tensor in (self.keys, self.values) if tensor is not None)

    def has_form(self, batch: int, form: CacheForm) -> bool:
        """Whether it is empty, or has keys and values of these sizes."""
        if not self.is_initialized:
            return True
        if (room := self._room) is not None:
            held = room.form
            return (room.batch, held.heads, held.depths, held.dtype) == (batch, form.heads, form.depths, form.dtype)
        return all(
            tensor is not None
            and (tensor.numel() == 0 or (tensor.shape[:2] == (batch, form.heads) and tensor.shape[3] == depth))
            and tensor.dtype == form.dtype
            and tensor.is_cpu
            for tensor, depth in zip((self.keys, self.values), form.depths, strict=True)
        )

    def _with_capacity(self, batch: int, form: CacheForm, new: int) -> _Room:
        """Room for all that the layer has and ``new`` tokens more."""
        first, last = self._held()
        held = last - first
        room = _Room(self, form, batch, held + new + max(_LEAST, held // _SHARE), first)
        if held and self._room is not None and self._room.form == form:
            form.copy(room.held(first, last), self._room.held(first, last))
        elif held and (keys := self.keys) is not None and (values := self.values) is not None:
            form.write(room.held(first, last), keys, values)
        return room

    def _select(self, rows: Tensor) -> bool:
        """Keeps these of the sequences, as they are held; False where nothing is held here."""
        if self._room is not None:
            self._room = self._room.selected(self, rows)
        return self._room is not None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if not self._select(beam_idx.cpu()):
            super().reorder_cache(beam_idx)  # type: ignore[misc]  # of the layer that this is made of

    def batch_repeat_interleave(self, repeats: int) -> None:
        room = self._room
        if room is None or not self._select(torch.arange(room.batch).repeat_interleave(repeats)):
            super().batch_repeat_interleave(repeats)  # type: ignore[misc]

    def batch_select_indices(self, indices: Tensor) -> None:
        room = self._room
        if room is None or not self._select(torch.arange(room.batch)[indices]):
            super().batch_select_indices(indices)  # type: ignore[misc]

    def reserve(self, batch: int, form: CacheForm, new: int) -> tuple[Tensor | int, ...]:
        """Tensors [B, heads, room, D] with room for ``new`` tokens after those held, and the place of their first."""
        room, last = self._room, self._held()[1]
        fits = room is not None and room.form == form and last + new <= room.first_place + room.capacity
        if room is None or not fits or room.owner != id(self) or last < room.shown:
            room = self._with_capacity(batch, form, new)
            self._plain = {"keys": None, "values": None}
            self._room = room
            if not self.is_initialized:
                self.dtype, self.device, self.is_initialized = form.dtype, torch.device("cpu"), True
        return *form.parts(room.whole), room.first_place

    def advance(self, new: int) -> None:
        """Counts ``new`` tokens that have been written behind those held."""
        raise NotImplementedError

    def _append(self, keys: Tensor, values: Tensor) -> None:
        count = keys.shape[2]
        form = CacheForm(keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype)
        if self._room is not None and replace(self._room.form, joined=False, records=False) == form:
            form = self._room.form
        self.reserve(keys.shape[0], form, count)
        room = self._room
        assert room is not None
        last = self._held()[1]
        form.write(room.held(last, last + count), keys, values)
        self.advance(count)


class RoomyLayer(_Roomy, DynamicLayer):  # type: ignore[misc]  # untyped base
    """A layer that keeps all tokens."""

    def _held(self) -> tuple[int, int]:
        return 0, self._length

    @property
    def _length(self) -> int:
        if self._room is None:
            keys = self._plain["keys"]
            return 0 if keys is None or keys.numel() == 0 else keys.shape[-2]
        return self._room_length

    def _with_capacity(self, batch: int, form: CacheForm, new: int) -> _Room:
        self._room_length = self._length
        return super()._with_capacity(batch, form, new)

    def advance(self, new: int) -> None:
        self._room_length += new

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """As the parent's: appends, and gives all keys and values."""
        if _wants_gradient(key_states, value_states):
            copied: tuple[Tensor, Tensor] = super().update(key_states, value_states)
            return copied
        self._append(key_states, value_states)
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        return keys, values

    def get_seq_length(self) -> int:
        return self._length if self.is_initialized else 0

    def crop(self, tokens_to_remove: int) -> None:
        if self._room is None or tokens_to_remove >= 0:
            super().crop(tokens_to_remove)
        else:
            self._room_length = max(0, self._room_length + tokens_to_remove)


class RoomySlidingLayer(_Roomy, DynamicSlidingWindowLayer):  # type: ignore[misc]  # untyped base
    """A layer that keeps what its window can still see, or with ``record_past`` all until it is cropped.

    ``cumulative_length`` counts all tokens that there were.
    """

    cumulative_length: int
    sliding_window: int

    def _held(self) -> tuple[int, int]:
        last = self.cumulative_length
        if self._room is None:
            keys = self._plain["keys"]
            return last - (0 if keys is None or keys.numel() == 0 else keys.shape[-2]), last
        return self._first_kept, last

    def _in_window(self) -> int:
        """The first place that the next token will see."""
        return max(0, self.cumulative_length - self.sliding_window + 1)

    def _with_capacity(self, batch: int, form: CacheForm, new: int) -> _Room:
        self._first_kept = self._held()[0]
        # What leaves the window is overwritten only when the room is full: then the rest moves to its beginning.
        return super()._with_capacity(batch, form, max(new, min(self.sliding_window, 1024)))

    def advance(self, new: int) -> None:
        self.cumulative_length += new
        if not self.record_past:
            self._first_kept = max(self._first_kept, self._in_window())

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """As the parent's: appends, and gives the keys and values that the new tokens may see."""
        if _wants_gradient(key_states, value_states):
            copied: tuple[Tensor, Tensor] = super().update(key_states, value_states)
            return copied
        first = max(self._held()[0], self._in_window())
        self._append(key_states, value_states)
        room = self._room
        assert room is not None
        return room.numbers(0, first, self.cumulative_length), room.numbers(1, first, self.cumulative_length)

    def crop(self, tokens_to_remove: int) -> None:
        forgets = self.cumulative_length >= self.sliding_window and not self.record_past
        if self._room is None or tokens_to_remove > 0 or forgets:  # the last two are refused
            super().crop(tokens_to_remove)
            return
        self.cumulative_length = max(self._first_kept, self.cumulative_length + tokens_to_remove)
        self._first_kept = max(self._first_kept, self._in_window())


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def make_roomy(cache: Any, index: int) -> bool:
    """Puts a layer with room for more in the place of one that grows; whether there is one now."""
    if not holds_layers(cache) or index >= len(cache.layers):
        return False
    layer = cache.layers[index]
    if (kind := type(layer)) in (RoomyLayer, RoomySlidingLayer):
        return True
    if kind not in _ROOMY:
        return False
    roomy: Any = object.__new__(_ROOMY[kind])
    facts = dict(vars(layer))
    roomy._plain, roomy._room = {"keys": facts.pop("keys"), "values": facts.pop("values")}, None
    vars(roomy).update(facts)
    cache.layers[index] = roomy
    return True


_ROOMY = {DynamicLayer: RoomyLayer, DynamicSlidingWindowLayer: RoomySlidingLayer}


def holds_layers(cache: Any) -> bool:
    """Whether a cache does no more than hand what it gets to its layers."""
    return getattr(type(cache), "update", None) is Cache.update and not cache.offloading
