"""A recognised decoder as values: module paths and facts, without tensors.

A recognised decoder has the classes of :mod:`cpumoe.ops.decoder`, with a :class:`Source` wherever the decoder that is
built from it has a tensor. Such values can be compared, pickled and printed, and can be made of a model on the meta
device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe.ops.decoder import DecoderModel


class UnsupportedDecoder(Exception):
    """Raised by recognition for a model without native decoder. The text is the reason, a sentence for its user."""


@dataclass(frozen=True)
class LayerVariant:
    """What the names of a layer's parts do not tell, found by trying.

    Attributes:
        rotates: whether RoPE is applied to queries and keys.
        interleaved, separated: see :class:`cpumoe.ops.decoder.Rope`.
        norms_after_rope: see :class:`cpumoe.ops.decoder.Gqa`.
    """

    interleaved: bool = False
    norms_after_rope: bool = False
    rotates: bool = True
    separated: bool = False


@dataclass
class BuildContext:
    """What sources are resolved in: a base model, and the positions of its RoPE tables, int64 [P]."""

    base: Any
    positions: Tensor
    cache: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states."""
        dtype: torch.dtype = self.base.embed_tokens.weight.dtype
        return dtype

    def module(self, path: str) -> Any:
        return self.base.get_submodule(path)


class Source:
    """Where the built decoder takes a tensor from."""

    def tensor(self, context: BuildContext) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Stored(Source):
    """A parameter or buffer of a module.

    Attributes:
        as_fp32: it is converted to fp32.
        flat_from: dimensions from this one on become one.
    """

    module: str
    name: str
    shape: tuple[int, ...]
    as_fp32: bool = False
    flat_from: int | None = None

    def tensor(self, context: BuildContext) -> Tensor:
        found: Tensor = getattr(context.module(self.module), self.name).detach()
        found = found.float() if self.as_fp32 else found
        return (found if self.flat_from is None else found.flatten(self.flat_from)).contiguous()

    def __str__(self) -> str:
        return f"{self.module}.{self.name} {list(self.shape)}"


@dataclass(frozen=True)
class LinearWeight(Source):
    """The weight of a linear, float or packed, together with its bias. ``shape``: [out, in], of all ranks."""

    module: str
    shape: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.module} {list(self.shape)}"


@dataclass(frozen=True)
class Recognized:
    """A recognised model.

    Attributes:
        base: path of the base model.
        decoder: its layers; paths in it start at the base model.
        head: path of the output embeddings, from the model around the base model; None without any. Whether the model
            does no more than call them is tried at load.
    """

    base: str
    decoder: DecoderModel[Source]
    head: str | None = None


@dataclass(frozen=True)
class Unrecognized:
    """A model without native decoder.

    Attributes:
        module: path of the base model; empty if none was found.
        reason: a sentence for the user.
    """

    module: str
    reason: str

    def __str__(self) -> str:
        return self.reason


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def first_of(module: Any, names: tuple[str, ...]) -> nn.Module | None:
    """Return the first child module with one of these names; None without any."""
    return next((m for name in names if isinstance(m := getattr(module, name, None), nn.Module)), None)
