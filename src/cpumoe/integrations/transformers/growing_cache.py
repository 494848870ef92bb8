"""A cache of keys and values that grows in its place.

transformers' growing cache copies all that it holds for every token. Here the tensors of a layer are the first part of
larger ones, and what is new is written behind them. The layer's tensors stay what they were to everyone else: a layer
that was cropped, reordered or filled by other code has other tensors than were put there, and gets new room.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

# New room is an eighth more than is held: it is copied seldom, and little memory lies idle.
_SHARE, _LEAST = 8, 64


class Room:
    """Tensors [B, heads, capacity, D], and the parts of them that a layer was given last."""

    def __init__(self, layer: Any, new: int) -> None:
        held = layer.keys.shape[2]
        capacity = held + new + max(_LEAST, held // _SHARE)
        self.buffers = tuple(_enlarged(tensor, capacity) for tensor in (layer.keys, layer.values))
        self.given = (layer.keys, layer.values)

    def append(self, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        held = self.given[0].shape[2]
        last = held + new[0].shape[2]
        for buffer, rows in zip(self.buffers, new, strict=True):
            buffer[:, :, held:last] = rows
        keys, values = (buffer[:, :, :last] for buffer in self.buffers)
        self.given = (keys, values)
        return keys, values


def _enlarged(tensor: Tensor, capacity: int) -> Tensor:
    batch, heads, held, width = tensor.shape
    buffer = torch.empty((batch, heads, capacity, width), dtype=tensor.dtype, device=tensor.device)
    buffer[:, :, :held] = tensor
    return buffer


class GrowingCache:
    """A cache as an attention sees it, whose growing layers grow in their place."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "held":
            raise AttributeError(name)
        return getattr(self.held, name)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *arguments: Any, **options: Any) -> Any:
        """What the cache's own method does: appends, and gives all keys and values of the layer."""
        layers = self.held.layers
        layer: Any = layers[layer_idx] if layer_idx < len(layers) else None
        if not _grows(layer) or getattr(self.held, "offloading", False) or not _fits(layer, keys, values):
            return self.held.update(keys, values, layer_idx, *arguments, **options)
        room = vars(layer).get("_cpumoe_room")
        is_own = room is not None and layer.keys is room.given[0] and layer.values is room.given[1]
        if not is_own or layer.keys.shape[2] + keys.shape[2] > room.buffers[0].shape[2]:
            room = layer._cpumoe_room = Room(layer, keys.shape[2])
        layer.keys, layer.values = room.append((keys, values))
        return layer.keys, layer.values


def _grows(layer: Any) -> bool:
    """Whether a layer does no more than append, and has something to append to."""
    return getattr(type(layer), "update", None) is _appending() and layer.is_initialized and layer.keys.dim() == 4


@cache
def _appending() -> Any:
    from transformers.cache_utils import DynamicLayer

    return DynamicLayer.update


def _fits(layer: Any, keys: Tensor, values: Tensor) -> bool:
    """Whether appending is a copy: same dtype and sizes, and no gradient that would have to find its way back."""
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        return False
    return all(
        held.dtype == new.dtype and held.shape[0] == new.shape[0] and held.shape[1::2] == new.shape[1::2]
        for held, new in ((layer.keys, keys), (layer.values, values))
    )
