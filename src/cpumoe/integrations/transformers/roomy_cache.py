"""Layers of transformers' growing cache that have room for more tokens than they hold.

transformers' own copies all keys and values for every token. Here they are the first part of larger tensors, what is
new is written behind them, and the layer's tensors are views that are made when somebody asks for them. For everyone
else these are the layers that they were: cropped, reordered, repeated or filled by other code they stay what that code
made of them, and get new room when there is more to hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

# New room is an eighth more than is held: it is copied seldom, and little memory lies idle.
_SHARE, _LEAST = 8, 64


@dataclass(frozen=True)
class CacheForm:
    """What a layer keeps of a token: keys [heads, depths[0]] and values [heads, depths[1]].

    ``joined``: they lie side by side in memory, keys first.
    """

    heads: int
    depths: tuple[int, int]
    dtype: torch.dtype
    joined: bool = False

    def empty(self, *sizes: int) -> tuple[Tensor, Tensor]:
        """Tensors [*sizes, depth] for keys and values, or twice one for both."""
        with torch.inference_mode(False):  # whoever appends later may do so in another mode
            if self.joined:
                both = torch.empty((*sizes, sum(self.depths)), dtype=self.dtype)
                return both, both
            keys, values = (torch.empty((*sizes, depth), dtype=self.dtype) for depth in self.depths)
            return keys, values


class _Room:
    """Keys and values [B, heads, capacity, D] in one place of memory, or in one each."""

    def __init__(self, owner: object, form: CacheForm, batch: int, capacity: int, first_place: int) -> None:
        self.owner = id(owner)  # the layer that may write here; a copy of it may not
        self.shown = 0  # up to this place others may hold views, which must not change
        self.form = form
        self.whole = form.empty(batch, form.heads, capacity)
        keys, values = self.whole
        self.buffers = (keys[..., : form.depths[0]], keys[..., form.depths[0] :]) if form.joined else (keys, values)
        self.first_place = first_place  # of the first token in the buffers, counted from the sequences' beginning
        self.capacity = capacity


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
        first, last = self._held()
        room.shown = max(room.shown, last)
        return room.buffers[index][:, :, first - room.first_place : last - room.first_place]

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

    def has_form(self, batch: int, form: CacheForm) -> bool:
        """Whether it is empty, or has keys and values of these sizes."""
        if not self.is_initialized:
            return True
        tensors = (self.keys, self.values) if self._room is None else self._room.buffers
        return all(
            tensor is not None
            and (tensor.numel() == 0 or (tensor.shape[:2] == (batch, form.heads) and tensor.shape[3] == depth))
            and tensor.dtype == form.dtype
            and tensor.is_cpu
            for tensor, depth in zip(tensors, form.depths, strict=True)
        )

    def _with_capacity(self, batch: int, form: CacheForm, new: int) -> _Room:
        """Room for all that the layer has and ``new`` tokens more."""
        first, last = self._held()
        held = last - first
        room = _Room(self, form, batch, held + new + max(_LEAST, held // _SHARE), first)
        for buffer, tensor in zip(room.buffers, (self.keys, self.values), strict=True):
            if held and tensor is not None:
                buffer[:, :, :held] = tensor
        return room

    def reserve(self, batch: int, form: CacheForm, new: int) -> tuple[Tensor, Tensor, int]:
        """Tensors [B, heads, room, D] with room for ``new`` tokens behind those held, and the place of their first.

        Of a joined form they are one tensor.
        """
        room, last = self._room, self._held()[1]
        fits = room is not None and room.form == form and last + new <= room.first_place + room.capacity
        if room is None or not fits or room.owner != id(self) or last < room.shown:
            room = self._with_capacity(batch, form, new)
            self._plain = {"keys": None, "values": None}
            self._room = room
            if not self.is_initialized:
                self.dtype, self.device, self.is_initialized = form.dtype, torch.device("cpu"), True
        return *room.whole, room.first_place

    def advance(self, new: int) -> None:
        """Counts ``new`` tokens that have been written behind those held."""
        raise NotImplementedError

    def _append(self, keys: Tensor, values: Tensor) -> None:
        count = keys.shape[2]
        form = CacheForm(keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype)
        if self._room is not None and replace(self._room.form, joined=False) == form:
            form = self._room.form
        self.reserve(keys.shape[0], form, count)
        room = self._room
        assert room is not None
        at = self._held()[1] - room.first_place
        for buffer, new in zip(room.buffers, (keys, values), strict=True):
            buffer[:, :, at : at + count] = new
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
        inside = slice(first - room.first_place, self.cumulative_length - room.first_place)
        return room.buffers[0][:, :, inside], room.buffers[1][:, :, inside]

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
