"""Experts: the packed weights of one layer, and the call."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.errors import NoBackend
from cpumoe.layers import reference
from cpumoe.layers.activation import Activation
from cpumoe.layers.backends import Backend, NativeBackend, select_backend
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.packed_weights import scheme_of
from cpumoe.layers.quantized_experts import QuantizedExperts
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import GroupShape, Scheme


class Experts(nn.Module):
    """The experts of one mixture-of-experts layer.

    Made by :meth:`quantize` (float weights), :meth:`from_quantized` (integers and scales) or :meth:`from_packed`.
    The weights are buffers, so ``state_dict``, safetensors, ``torch.save`` and pickling carry them.
    """

    def __init__(self, config: MoEConfig, backend: Backend, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @classmethod
    def quantize(
        cls,
        gate_up: Tensor,
        down: Tensor,
        scheme: Scheme | str,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: Activation | str = "silu",
        interleaved: bool = False,
        backend: str | None = None,
    ) -> Experts:
        """Quantises float weights, round to nearest.

        Args:
            gate_up: [E, 2I, H], gate rows before up rows (or alternating, with ``interleaved``); [E, I, H] when the
                activation is not gated.
            down: [E, H, I].
            scheme: a Scheme or its name, such as ``"w4a8-g128"``.
            gate_up_bias, down_bias: [E, 2I] and [E, H], or None.
            backend: ``native``, ``aten`` or ``reference``; None takes the first that serves this layer.
        """
        scheme = Scheme.parse(scheme)
        gate_up_values, gate_up_scale = quantize_weight(gate_up, scheme, "gate_up")
        down_values, down_scale = quantize_weight(down, scheme, "down")
        return cls.from_quantized(
            gate_up_values,
            gate_up_scale,
            down_values,
            down_scale,
            scheme,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            activation=activation,
            interleaved=interleaved,
            backend=backend,
        )

    @classmethod
    def from_quantized(
        cls,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        scheme: Scheme | str,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: Activation | str = "silu",
        interleaved: bool = False,
        backend: str | None = None,
    ) -> Experts:
        """Takes integers and scales as checkpoints hold them.

        Args:
            gate_up: [E, 2I, H] int8 values, or uint8 nibbles [E, 2I, H/2] (low one first, stored plus 8).
            gate_up_scale: [E, 2I, H/g], or [E, 2I, 1] or [E, 2I] per channel; float32, bfloat16 or float16.
            down, down_scale: [E, H, I] and [E, H, I/g], likewise.

        The other arguments are those of :meth:`quantize`.
        """
        scheme, activation = Scheme.parse(scheme), Activation.of(activation)
        tensors = {"gate_up": gate_up, "gate_up_scale": gate_up_scale, "down": down, "down_scale": down_scale}
        for name, tensor in (tensors | {"gate_up_bias": gate_up_bias, "down_bias": down_bias}).items():
            if tensor is not None and tensor.device.type != "cpu":
                raise ValueError(f"{name} is on {tensor.device}; CPU tensors are accepted")
        for name, values in (("gate_up", gate_up), ("down", down)):
            if values.dim() != 3:
                raise ValueError(f"{name} is {list(values.shape)}; [experts, out, in] is accepted")
            if values.dtype not in (torch.int8, torch.uint8):
                raise ValueError(f"{name} is {values.dtype}; int8 values or uint8 nibbles are accepted")
        scales = {}
        for name in ("gate_up_scale", "down_scale"):
            scale = tensors[name].unsqueeze(-1) if tensors[name].dim() == 2 else tensors[name]
            scales[name] = scale.to(torch.float32) if scale.dtype == torch.float16 else scale
        per_byte = 2 if down.dtype == torch.uint8 else 1
        experts, hidden, inner = down.shape[0], down.shape[1], down.shape[2] * per_byte
        rows = activation.gate_up_rows(inner)
        width = hidden // 2 if gate_up.dtype == torch.uint8 else hidden
        if tuple(gate_up.shape) != (experts, rows, width):
            raise ValueError(
                f"gate_up is {list(gate_up.shape)}; with down {list(down.shape)} and activation {activation} "
                f"[{experts}, {rows}, {width}] is accepted"
            )
        config = MoEConfig(
            scheme,
            experts,
            hidden,
            inner,
            activation,
            has_bias=gate_up_bias is not None or down_bias is not None,
            scale_dtype=scales["gate_up_scale"].dtype,
        )
        group = scheme.weights.group
        _check_scale("gate_up_scale", scales["gate_up_scale"], experts, rows, hidden, group)
        _check_scale("down_scale", scales["down_scale"], experts, hidden, inner, group)
        _check_bias("gate_up_bias", gate_up_bias, experts, rows)
        _check_bias("down_bias", down_bias, experts, hidden)
        chosen = select_backend(config, backend)
        quantized = QuantizedExperts(
            gate_up,
            scales["gate_up_scale"],
            down,
            scales["down_scale"],
            gate_up_bias,
            down_bias,
            interleaved and bool(activation.gated),
        )
        return cls(config, chosen, chosen.prepare([quantized], config))

    @classmethod
    def from_chunks(
        cls, chunks: Iterable[QuantizedExperts], config: MoEConfig, *, backend: str | None = None
    ) -> Experts:
        """Takes experts a few at a time, in order, as a reader finds them on disk: see ``checkpoints/loading.py``."""
        chosen = select_backend(config, backend)
        return cls(config, chosen, chosen.prepare(chunks, config))

    @classmethod
    def from_packed(cls, gate_up_packed: Tensor, down_packed: Tensor, *, activation: Activation | str) -> Experts:
        """Takes the packed tensors of another Experts (from a file, another process, a memory map).

        They describe themselves but for the activation, which belongs to the model and not to the weights.
        """
        first, second = ops.read_spec(gate_up_packed), ops.read_spec(down_packed)
        activation = Activation.of(activation)
        for key in ("weights", "group_size", "experts"):
            if (one := getattr(first, key)) != (other := getattr(second, key)):
                raise ValueError(f"gate_up_packed has {key}={one}, down_packed {other}")
        rows = activation.gate_up_rows(second.in_features)
        if first.gated != activation.gated or second.gated:
            raise ValueError(f"gate_up_packed and down_packed do not fit the activation {activation}")
        if first.out_features != rows or first.in_features != second.out_features:
            raise ValueError(
                f"gate_up_packed is [{first.out_features}, {first.in_features}]; with down_packed "
                f"[{second.out_features}, {second.in_features}] and activation {activation} "
                f"[{rows}, {second.out_features}] is accepted"
            )
        scheme = scheme_of(first)
        config = MoEConfig(
            scheme,
            first.experts,
            first.in_features,
            second.in_features,
            activation,
            has_bias=first.has_bias or second.has_bias,
            scale_dtype=getattr(torch, first.scales),
        )
        backend = select_backend(config)
        if not isinstance(backend, NativeBackend):
            raise NoBackend(f"packed weights are for the native backend, not for {backend.name!r}")
        return cls(config, backend, {"gate_up_packed": gate_up_packed, "down_packed": down_packed})

    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        apply_router_weight_on_input: bool = False,
        fp32_out: bool = False,
    ) -> Tensor:
        """Computes the layer.

        Args:
            hidden_states: [tokens, H] float32, bfloat16 or float16.
            topk_ids: [tokens, K] int32 or int64; -1 contributes nothing.
            topk_weights: [tokens, K] float.
            apply_router_weight_on_input: multiply the token by its weight before the first product, not after the
                second.
            fp32_out: give the sums as they are, for ranks that add theirs before they are rounded.

        Returns:
            [tokens, H] in the dtype of ``hidden_states``, or fp32.
        """
        ops.refuse_gradient(hidden_states=hidden_states, topk_weights=topk_weights)
        return self.backend.forward(
            self._buffers,  # type: ignore[arg-type]  # all buffers are tensors here
            self.config,
            hidden_states,
            topk_ids,
            topk_weights,
            apply_router_weight_on_input,
            fp32_out,
        )

    def quantized(self, first: int = 0, count: int | None = None) -> QuantizedExperts:
        """Integers and scales of some experts (all by default), plain: one value per byte, gate rows before up rows."""
        return self.backend.quantized(self._buffers, self.config, first, count)  # type: ignore[arg-type]

    def reference(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        apply_router_weight_on_input: bool = False,
        quantize_activations: bool = True,
    ) -> Tensor:
        """What :meth:`forward` must give, in plain PyTorch, one expert at a time: slow, and independent of the kernels.

        ``quantize_activations=False`` leaves the activations as they are: the error of the weights alone.
        """

        def expert(index: int, inputs: Tensor) -> Tensor:
            part = self.quantized(index, 1)
            return reference.expert(
                inputs,
                reference.dequantize(part.gate_up[0], part.gate_up_scale[0]),
                reference.dequantize(part.down[0], part.down_scale[0]),
                None if part.gate_up_bias is None else part.gate_up_bias[0].to(torch.float32),
                None if part.down_bias is None else part.down_bias[0].to(torch.float32),
                self.config.activation,
                quantize=quantize_activations,
            )

        x = hidden_states.to(torch.float32)
        x = reference.quantize_activations(x) if quantize_activations else x
        out = reference.sum_of_experts(x, topk_ids, topk_weights, expert, apply_router_weight_on_input)
        return out.to(hidden_states.dtype)

    @property
    def packed_bytes(self) -> int:
        """Bytes that the weights occupy."""
        return sum(b.numel() * b.element_size() for b in self.buffers())

    def extra_repr(self) -> str:
        c = self.config
        return (
            f"{c.scheme}, experts={c.experts}, hidden_size={c.hidden_size}, "
            f"intermediate_size={c.intermediate_size}, activation={c.activation}, backend={self.backend.name}"
        )


def _check_scale(name: str, scale: Tensor, experts: int, out: int, inputs: int, group: GroupShape) -> None:
    expected = (experts, *group.scale_shape(out, inputs))
    if tuple(scale.shape) != expected:
        raise ValueError(f"{name} is {list(scale.shape)}; {list(expected)} is accepted")
    if not scale.is_floating_point():
        raise ValueError(f"{name} is {scale.dtype}; a floating point dtype is accepted")


def _check_bias(name: str, bias: Tensor | None, experts: int, out: int) -> None:
    if bias is not None and tuple(bias.shape) != (experts, out):
        raise ValueError(f"{name} is {list(bias.shape)}; [{experts}, {out}] is accepted")
