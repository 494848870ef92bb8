"""Integers of 4 or 8 bits in int32 words, the first in the lowest bits, stored plus half of their range."""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe.layers.nibbles import pack_nibbles, unpack_nibbles

WORD_BITS = 32


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n], contiguous -> int8 [..., n * integers in a word]."""
    stored_bytes = words.view(torch.uint8)
    return unpack_nibbles(stored_bytes) if bits == 4 else signed_bytes(stored_bytes)


def signed_bytes(stored_bytes: Tensor) -> Tensor:
    """Integers of 8 bits stored plus 128 -> int8: that is themselves with the sign bit flipped."""
    return (stored_bytes ^ 0x80).view(torch.int8)


def pack_words(values: Tensor, bits: int) -> Tensor:
    """int8 [n, m * integers in a word] -> int32 [n, m] in fresh memory."""
    stored = pack_nibbles(values) if bits == 4 else values.contiguous().view(torch.uint8) ^ 0x80
    return copied(stored).view(torch.int32)


def copied(tensor: Tensor) -> Tensor:
    """The same in fresh memory. (``contiguous`` keeps odd strides of dimensions of size 1, where ``view`` fails.)"""
    return tensor.clone(memory_format=torch.contiguous_format)
