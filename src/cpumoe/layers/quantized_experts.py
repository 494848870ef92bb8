"""Integers and scales of a layer's experts, as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from cpumoe.layers.rounding import unpack_nibbles


@dataclass(frozen=True)
class QuantizedExperts:
    """Integers and scales of one layer, as checkpoints hold them.

    ``gate_up`` [E, rows, H] and ``down`` [E, H, I] are int8 values, or uint8 nibbles with half the last dimension.
    Scales are [E, out, groups]; biases [E, out] or None. ``interleaved``: rows of ``gate_up`` alternate gate and up.
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    interleaved: bool = False

    def copy(self) -> QuantizedExperts:
        """The same in memory of its own: a reader may use its buffers again for the next experts."""
        return self.each(Tensor.clone)

    def each(self, function: Callable[[Tensor], Tensor]) -> QuantizedExperts:
        """The same with a function applied to every tensor."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {n: function(v) for n, v in held.items() if isinstance(v, Tensor)}
        return replace(self, **changed)

    def plain(self) -> QuantizedExperts:
        """One value per byte, gate rows before up rows."""
        unpacked = replace(
            self,
            gate_up=unpack_nibbles(self.gate_up) if self.gate_up.dtype == torch.uint8 else self.gate_up,
            down=unpack_nibbles(self.down) if self.down.dtype == torch.uint8 else self.down,
        )
        if not self.interleaved:
            return unpacked

        def apart(t: Tensor) -> Tensor:
            return torch.cat((t[:, 0::2], t[:, 1::2]), 1)

        return replace(
            unpacked,
            gate_up=apart(unpacked.gate_up),
            gate_up_scale=apart(self.gate_up_scale),
            gate_up_bias=None if self.gate_up_bias is None else apart(self.gate_up_bias),
            interleaved=False,
        )
