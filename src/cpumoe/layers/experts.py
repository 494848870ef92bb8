"""Experts: the packed weights of one layer, and the call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cpumoe import ops
from cpumoe.errors import NoBackend
from cpumoe.layers import reference
from cpumoe.layers.activation import Activation
from cpumoe.layers.activation_rounding import held_activations
from cpumoe.layers.backends import Backend, ExpertsCall, NativeBackend, select_backend
from cpumoe.layers.config import MoEConfig
from cpumoe.layers.experts_parts import part_of_experts
from cpumoe.layers.packed_weights import scheme_of, state_mismatches
from cpumoe.layers.parallel_layout import ExpertsPart
from cpumoe.layers.quantized_experts import QuantizedExperts, QuantizedWeight
from cpumoe.layers.regrouping import regrouped_scheme
from cpumoe.layers.rounding import quantize_weight
from cpumoe.layers.scheme import Scheme
from cpumoe.layers.weight_checks import check_parts, checked_weight, given_factors, given_input_scales, stored_scales
from cpumoe.ops.decoder import Activation as CoreActivation
from cpumoe.ops.decoder import PackedExperts


def activation_for_core(activation: Activation) -> CoreActivation:
    """Return an activation as the core takes it."""
    return CoreActivation(*activation.arguments)


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
        gate_up_input_scale: Tensor | float | None = None,
        down_input_scale: Tensor | float | None = None,
        gate_up_input_global_scale: Tensor | float | None = None,
        down_input_global_scale: Tensor | float | None = None,
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
            gate_up_input_scale, down_input_scale: for schemes with static activations, the scales of the inputs of
                both products: one number, [E], or [E, 2] of gate and up.
            gate_up_input_global_scale, down_input_global_scale: likewise for nvfp4, whose activations are divided by
                them: 448 * 6 over the largest magnitude that is expected.
            backend: ``native``, ``aten`` or ``reference``; None takes the first that serves this layer.
        """
        scheme, activation = Scheme.parse(scheme), Activation.of(activation)
        first, second = quantize_weight(gate_up, scheme, "gate_up"), quantize_weight(down, scheme, "down")
        inputs = _input_scales(
            *(gate_up_input_scale, down_input_scale, gate_up_input_global_scale, down_input_global_scale),
            *(down.shape[0], scheme, activation),
        )
        return cls._from_weights(
            replace(first, bias=gate_up_bias, input_scales=inputs[0]),
            replace(second, bias=down_bias, input_scales=inputs[1]),
            scheme,
            activation,
            interleaved,
            backend,
        )

    @classmethod
    def from_quantized(
        cls,
        gate_up: Tensor,
        gate_up_scale: Tensor | None,
        down: Tensor,
        down_scale: Tensor | None,
        scheme: Scheme | str,
        *,
        gate_up_zero_point: Tensor | None = None,
        down_zero_point: Tensor | None = None,
        gate_up_global_scale: Tensor | float | None = None,
        down_global_scale: Tensor | float | None = None,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        gate_up_input_scale: Tensor | float | None = None,
        down_input_scale: Tensor | float | None = None,
        gate_up_input_global_scale: Tensor | float | None = None,
        down_input_global_scale: Tensor | float | None = None,
        activation: Activation | str = "silu",
        interleaved: bool = False,
        backend: str | None = None,
    ) -> Experts:
        """Takes integers (or codes) and scales as checkpoints hold them.

        Args:
            gate_up: [E, 2I, H] int8 values, or uint8 nibbles [E, 2I, H/2] (low one first; integers are stored plus 8,
                fp4 as its codes); int8 codes for fp6; float8_e4m3fn for fp8; bfloat16, float16 or float32 as they are.
            gate_up_scale: [E, 2I, H/g], or [E, 2I, 1] or [E, 2I] per channel, [E, 1, 1] or [E] per tensor,
                [E, 2I/128, H/128] in blocks; float32, bfloat16 or float16; uint8 (E8M0) for the mx schemes,
                float8_e4m3fn for nvfp4; None where the weights are floats.
            down, down_scale: [E, H, I] and [E, H, I/g], likewise.
            gate_up_zero_point, down_zero_point: int8, -8 to 7 or for int8 weights any, like the scales; for asymmetric
                schemes.
            gate_up_global_scale, down_global_scale: one number, [E], or [E, 2] of gate and up, which divide the scales;
                for nvfp4.

        The other arguments are those of :meth:`quantize`.
        """
        scheme, activation = Scheme.parse(scheme), Activation.of(activation)
        element = scheme.weights.element
        gate_up_scale = stored_scales("gate_up", gate_up_scale, gate_up, scheme)
        down_scale = stored_scales("down", down_scale, down, scheme)
        inputs = _input_scales(
            *(gate_up_input_scale, down_input_scale, gate_up_input_global_scale, down_input_global_scale),
            *(down.shape[0] if down.dim() == 3 else 1, scheme, activation),  # other dimensions are refused below
        )
        first = QuantizedWeight(
            element, gate_up, gate_up_scale, gate_up_zero_point, bias=gate_up_bias, input_scales=inputs[0]
        )
        second = QuantizedWeight(element, down, down_scale, down_zero_point, bias=down_bias, input_scales=inputs[1])
        gated = bool(activation.gated)
        return cls._from_weights(
            replace(
                first, factors=given_factors("gate_up_", gate_up_global_scale, gate_up, scheme, gated, interleaved)
            ),
            replace(second, factors=given_factors("down_", down_global_scale, down, scheme)),
            scheme,
            activation,
            interleaved,
            backend,
        )

    @classmethod
    def _from_weights(
        cls,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        scheme: Scheme,
        activation: Activation,
        interleaved: bool,
        backend: str | None,
    ) -> Experts:
        gate_up, down = checked_weight("gate_up", gate_up, scheme), checked_weight("down", down, scheme)
        per_byte = 2 if down.values.dtype == torch.uint8 else 1
        experts, hidden, inner = down.values.shape[0], down.values.shape[1], down.values.shape[2] * per_byte
        rows = activation.gate_up_rows(inner)
        width = hidden // 2 if gate_up.values.dtype == torch.uint8 else hidden
        if tuple(gate_up.values.shape) != (experts, rows, width):
            raise ValueError(
                f"gate_up is {list(gate_up.values.shape)}; with down {list(down.values.shape)} and activation "
                f"{activation} [{experts}, {rows}, {width}] is accepted"
            )
        config = MoEConfig(
            scheme,
            experts,
            hidden,
            inner,
            activation,
            has_bias=gate_up.bias is not None or down.bias is not None,
            scale_dtype=gate_up.scales.dtype,
        )
        check_parts("gate_up", gate_up, scheme, (experts, rows, hidden))
        check_parts("down", down, scheme, (experts, hidden, inner))
        chosen = select_backend(config, backend)
        quantized = QuantizedExperts(gate_up, down, interleaved and bool(activation.gated))
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
        for key in ("weights", "group_size", "experts", "has_zero_points", "activations"):
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
            scale_dtype=ops.scale_dtype(first.scales),
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
        call = ExpertsCall(hidden_states, topk_ids, topk_weights, apply_router_weight_on_input, fp32_out)
        return self.backend.forward(self._buffers, self.config, call)  # type: ignore[arg-type]  # all buffers are tensors

    def for_core(self, dtype: torch.dtype) -> PackedExperts[Tensor]:
        """Returns these experts of the native backend as the core takes them, for tokens of ``dtype``."""
        assert isinstance(self.backend, NativeBackend)  # others have buffers of the same names
        return PackedExperts(
            gate_up=self._buffers.get("gate_up_packed"),
            down=self._buffers.get("down_packed"),
            activation=activation_for_core(self.config.activation),
        )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        if isinstance(self.backend, NativeBackend) and (
            problems := list(state_mismatches(self._buffers.items(), state_dict, prefix))
        ):
            arguments[-1].extend(problems)  # load_state_dict raises them, as it does for other shapes
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def quantized(self, first: int = 0, count: int | None = None) -> QuantizedExperts:
        """Integers and scales of some experts (all by default), plain: one value per byte, gate rows before up rows."""
        return self.backend.quantized(self._buffers, self.config, first, count)  # type: ignore[arg-type]

    def part(self, part: ExpertsPart) -> Experts:
        """What a rank holds of these experts, packed anew; a checkpoint is read in parts without the detour."""
        c = self.config
        if not part.experts:
            raise ValueError(f"{part}; one or more of {c.local_experts} are accepted")
        whole = self.quantized()
        regroups = part.slices > 1 and whole.down.input_order is not None
        scheme = regrouped_scheme(c.scheme) if regroups else c.scheme
        held = part_of_experts(whole, part, gated=bool(c.activation.gated))
        config = replace(
            c,
            scheme=scheme,
            intermediate_size=held.down.plain().values.shape[-1],
            held_experts=None if part.experts == tuple(range(c.experts)) else len(part.experts),
        )
        return Experts.from_chunks([held], config, backend=self.backend.name)

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
        out = reference.experts(
            hidden_states,
            topk_ids,
            topk_weights,
            lambda index: reference.dense_expert(self.quantized(index, 1)),
            self.config.activation,
            form=held_activations(self.config.scheme) if quantize_activations else None,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
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


def _input_scales(
    gate_up: Tensor | float | None,
    down: Tensor | float | None,
    gate_up_global: Tensor | float | None,
    down_global: Tensor | float | None,
    experts: int,
    scheme: Scheme,
    activation: Activation,
) -> tuple[Tensor | None, Tensor | None]:
    """Scales of the inputs of both products, [E, 1] or [E, 2], checked; None for schemes without."""
    return (
        given_input_scales("gate_up_", gate_up, gate_up_global, scheme, experts, bool(activation.gated)),
        given_input_scales("down_", down, down_global, scheme, experts),
    )
